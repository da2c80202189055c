"""A check that clean rows are on the scale of the noisy rows.

A common mistake is to scale X and to forget X_clean. The check must not fire on honest data: sparse or
constant features, heavy tails, few clean rows, or clean rows of one group only. There are three criteria. The
first two have a bound on the probability that rows of one distribution meet them.

1. Most features differ in size by a factor of `_RATIO`. The size of a feature is the median of |x| over its
   non-zero entries. The k clean sizes must also rank high (or low) among those in X: the mean of k uniform
   ranks is below t with a probability of at most (k t)^k / k!.
2. In one feature at least half of the k clean rows lie more than `_FAR` standard deviations outside the range
   of X. Of k rows, h lie outside the range of n others with a probability of at most
   C(k, h) (h + 1) / C(n + h, h).
3. In most features the median of the clean rows is more than `_SHIFTED` standard deviations from the mean of
   X, or `_SHIFTED_FROM_ZERO` where X has been standardised to means of 0 and deviations of 1, which features
   hardly have by themselves; and more than 5/√k. (A median is at most one deviation from its mean.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse
from scipy.special import gammaln

_RATIO = 10.0
_FAR = 10.0
_CHANCE = 1e-5
_SHIFTED, _SHIFTED_FROM_ZERO = 3.0, 1.5
_STANDARD = 1e-3  # how far means and deviations of standardised features are from 0 and 1
_ROWS = 2000  # at most this many rows of each are compared
_ADVICE = (
    "Transform X and X_clean in the same way; in a Pipeline, use transform_input=['X_clean'] (see "
    "docs/noisy_labels.md)"
)


def check_scales(X: Any, X_clean: Any) -> None:
    """Raises ValueError if X_clean is on another scale than X.

    Args:
      X: finite rows (n, d), dense or scipy-sparse.
      X_clean: finite rows (k, d), dense or scipy-sparse.

    Example:
      >>> X = np.random.default_rng(0).normal(size=(100, 3))
      >>> check_scales(X, X[:10])
      >>> check_scales(X, 1000 + X[:10])
      Traceback (most recent call last):
      ...
      ValueError: X_clean must be on the scale of X, but ...
    """
    some, some_clean = _some_rows(X), _some_rows(X_clean)
    _check_sizes(some, some_clean)
    _check_ranges(some, some_clean)
    if not sparse.issparse(X):  # sparse features are not centred
        _check_means(
            np.asarray(X, float), X_clean.toarray() if sparse.issparse(X_clean) else np.asarray(X_clean)
        )


def _check_means(X: np.ndarray, X_clean: Any) -> None:
    means, spread, clean = X.mean(0), X.std(0), np.median(np.asarray(X_clean, float), 0)
    varies = spread > 1e-9 * np.abs(X).max(0)
    if not varies.any():
        return
    means, spread, clean = means[varies], spread[varies], clean[varies]
    standard = (np.abs(means) < _STANDARD).all() and (np.abs(spread - 1) < _STANDARD).all()
    apart = np.abs(clean - means) / spread
    limit = max(_SHIFTED_FROM_ZERO if standard else _SHIFTED, 5 / math.sqrt(X_clean.shape[0]))
    if 2 * (apart > limit).sum() <= len(apart):
        return
    worst = int(np.argmax(apart))
    raise ValueError(
        f"X_clean must be on the scale of X, but in {(apart > limit).sum()} of {len(apart)} features it lies "
        f"more than {limit:.2g} standard deviations away: feature {np.flatnonzero(varies)[worst]} has a mean "
        f"of {means[worst]:.3g} in X and a median of {clean[worst]:.3g} in X_clean. {_ADVICE}"
    )


def _check_sizes(X: Any, X_clean: Any) -> None:
    comparable, different = 0, []
    for feature, (sizes, clean_sizes) in enumerate(zip(_sizes(X), _sizes(X_clean), strict=True)):
        most = _most_rank(len(clean_sizes))
        if len(sizes) + 1 < 1 / most:
            continue
        comparable += 1
        typical, clean = float(np.median(sizes)), float(np.median(clean_sizes))
        apart = max(typical, clean) >= _RATIO * min(typical, clean)
        if apart and _mean_rank(sizes, clean_sizes, above=clean > typical) <= most:
            different.append((feature, typical, clean))
    if 2 * len(different) <= comparable:
        return
    feature, typical, clean = max(different, key=lambda one: abs(math.log(one[1] / one[2])))
    raise ValueError(
        f"X_clean must be on the scale of X, but in {len(different)} of {comparable} features that can be "
        f"compared, typical sizes differ by a factor of {_RATIO:g} or more: feature {feature} has "
        f"{typical:.3g} in X and {clean:.3g} in X_clean. {_ADVICE}"
    )


def _check_ranges(X: Any, X_clean: Any) -> None:
    features, count, clean_count = X.shape[1], X.shape[0], X_clean.shape[0]
    # In other columns at least half of the clean rows are zero, and zero lies in the range of X.
    columns = np.flatnonzero((2 * _entries(X_clean) >= clean_count) | (_entries(X) == count))
    rows, clean = (_dense(one, columns) for one in (X, X_clean))
    low, high, spread = rows.min(0), rows.max(0), rows.std(0)
    varies = spread > 1e-9 * np.maximum(np.abs(low), np.abs(high))
    outside = np.maximum(low - clean, clean - high) / np.where(varies, spread, np.inf)
    far = (outside > _FAR).sum(0)
    log_chance = _log_choose(clean_count, far) + np.log(far + 1) - _log_choose(count + far, far)
    wrong = (2 * far >= clean_count) & (log_chance <= math.log(_CHANCE / features))
    if not wrong.any():
        return
    worst = int(np.argmax(np.where(wrong, np.median(outside, 0), -np.inf)))
    raise ValueError(
        f"X_clean must be on the scale of X, but in {int(wrong.sum())} of {features} features most clean "
        f"rows lie far outside the range of X: feature {columns[worst]} has {low[worst]:.3g} to "
        f"{high[worst]:.3g} in X and {np.median(clean[:, worst]):.3g} in X_clean. {_ADVICE}"
    )


def _entries(X: Any) -> np.ndarray:
    """The number of non-zero entries of every column."""
    return np.asarray((X != 0).sum(0)).ravel()


def _some_rows(X: Any) -> Any:
    """Evenly spaced rows."""
    X = sparse.csr_matrix(X) if sparse.issparse(X) else np.asarray(X, float)
    count = X.shape[0]
    return X if count <= _ROWS else X[np.linspace(0, count - 1, _ROWS).astype(int)]


def _dense(X: Any, columns: np.ndarray) -> np.ndarray:
    return X[:, columns].toarray() if sparse.issparse(X) else X[:, columns]


def _sizes(X: Any) -> Iterator[np.ndarray]:
    """The values |x| > 0 of every column."""
    if sparse.issparse(X):
        by_column: Any = sparse.csc_matrix(X)
        columns = iter(np.split(by_column.data, by_column.indptr[1:-1]))
    else:
        columns = iter(X.T)
    for column in columns:
        yield np.abs(column[column != 0])


def _most_rank(count: int) -> float:
    """t with (k t)^k / k! = `_CHANCE`."""
    if count == 0:
        return 1e-300  # nothing can be compared
    return math.exp((math.log(_CHANCE) + math.lgamma(count + 1)) / count) / count


def _mean_rank(sizes: np.ndarray, clean_sizes: np.ndarray, *, above: bool) -> float:
    """The mean rank of the clean sizes, from the top or from the bottom, as a share."""
    if above:
        sizes, clean_sizes = -sizes, -clean_sizes
    ranks = np.searchsorted(np.sort(sizes), clean_sizes, side="right") + 1
    return float(ranks.mean()) / (len(sizes) + 1)


def _log_choose(count: Any, chosen: Any) -> Any:
    return gammaln(count + 1) - gammaln(chosen + 1) - gammaln(count - chosen + 1)
