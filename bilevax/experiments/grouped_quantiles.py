"""What one would try for quantiles of grouped data, with or without what is known of groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from scipy.stats import norm

from bilevax.experiments.grouped_baselines import FOLDS, Sums, boosting, fold_of, repeated
from bilevax.experiments.grouped_batches import Batch, quantile_regression
from bilevax.experiments.grouped_panels import Rows, Split

_ALPHAS = np.logspace(-2, 2, 5)
_LEAST = 1e-4


def pinball(residual: np.ndarray, quantile: float) -> np.ndarray:
    """The pinball loss of target − prediction."""
    return np.maximum(quantile * residual, (quantile - 1) * residual)


def quantile_baselines(split: Split, quantile: float, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """Baselines by name, as functions that return predictions of the test rows."""
    train, test, known = split.train, split.test, split.known
    size = train.X.shape[1]

    def by_coefficients(fit: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        return lambda: (test.X * fit()[test.group]).sum(1)

    but_intercept = np.diag(np.arange(size) > 0).astype(float)
    around_zero = functools.cache(
        lambda: CrossValidated.of(train, quantile, seed, np.zeros(size), but_intercept)
    )
    out = {
        "pooled": by_coefficients(lambda: repeated(pooled(train, quantile), train.groups)),
        "pooled, group intercepts": by_coefficients(lambda: group_intercepts(train, quantile)),
        "own α": by_coefficients(lambda: around_zero().own()),
        "shared α": by_coefficients(lambda: around_zero().shared()),  # without the seconds of the folds
        "shared α around pooled": by_coefficients(
            lambda: CrossValidated.of(train, quantile, seed, pooled(train, quantile), np.eye(size)).shared()
        ),
        "EM, normal quantile": lambda: em_quantile(train, test, quantile, None),
        "EM, quantile of errors": lambda: em_errors(train, test, quantile, seed, None),
    }
    if known.shape[1]:
        out |= {
            "pooled, interactions with metadata": lambda: pooled_interactions(split, quantile),
            "EM on metadata, normal quantile": lambda: em_quantile(train, test, quantile, known),
            "EM on metadata, quantile of errors": lambda: em_errors(train, test, quantile, seed, known),
        }
    return out


def boosted_quantiles(split: Split, quantile: float, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """Gradient boosting, without what is known of groups and with it."""
    train, test, known = split.train, split.test, split.known
    out = {"boosting, groups encoded": lambda: boosting(train, test, seed, quantile=quantile)}
    if known.shape[1]:
        out["boosting with metadata"] = lambda: boosting(train, test, seed, quantile=quantile, known=known)
    return out


def pooled(rows: Rows, quantile: float) -> np.ndarray:
    """One quantile regression for all rows."""
    one, size = Batch(Rows(rows.X, rows.y, np.array([0, len(rows.y)]))), rows.X.shape[1]
    start = np.linalg.lstsq(rows.X, rows.y, rcond=None)[0][None]
    return quantile_regression(one, one.real * 1.0, quantile, np.zeros(size), _LEAST * np.eye(size), start)[0]


def group_intercepts(rows: Rows, quantile: float, rounds: int = 5) -> np.ndarray:
    """Common slopes and an intercept for each group: in turn, the slopes, and quantiles of what is left."""
    levels, slopes = np.zeros(rows.groups), np.zeros(rows.X.shape[1])
    for _ in range(rounds):
        slopes = pooled(Rows(rows.X, rows.y - levels[rows.group], rows.offsets), quantile)
        left = rows.y - rows.X @ slopes
        levels = np.array(
            [np.quantile(left[a:b], quantile) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
        )
    out = repeated(slopes, rows.groups)
    out[:, 0] += levels
    return out


@dataclasses.dataclass(frozen=True)
class CrossValidated:
    """Quantile regressions of all groups around a centre, with the loss of every α in the folds of each."""

    batch: Batch
    quantile: float
    centre: np.ndarray
    penalty: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(
        cls, rows: Rows, quantile: float, seed: int, centre: np.ndarray, penalty: np.ndarray
    ) -> CrossValidated:
        """Tries every α in every fold."""
        batch, fold, least = Batch(rows), fold_of(rows, seed), _LEAST * np.eye(len(centre))
        scores = np.zeros((len(_ALPHAS), rows.groups))
        for k in range(FOLDS):
            kept, held = (batch.tiled(one.astype(float)) for one in (fold != k, fold == k))
            beta = repeated(centre, rows.groups)
            for place in reversed(range(len(_ALPHAS))):
                precision = _ALPHAS[place] * penalty + least
                beta = quantile_regression(batch, kept, quantile, centre, precision, beta, 30, 1e-3)
                loss = pinball(batch.y - batch.eta(beta), quantile)
                scores[place] += batch.totals((held * loss).sum(1))
        return cls(batch, quantile, centre, penalty, scores)

    def own(self) -> np.ndarray:
        """Every group with the α that is best in its own folds."""
        return self._fit(np.argmin(self.scores, 0))

    def shared(self) -> np.ndarray:
        """All groups with the α that is best in the folds of all."""
        return self._fit(np.full(self.batch.groups, int(np.argmin(self.scores.sum(1)))))

    def _fit(self, best: np.ndarray) -> np.ndarray:
        batch, centre = self.batch, self.centre
        precision = _ALPHAS[best][:, None, None] * self.penalty + _LEAST * np.eye(len(centre))
        start = repeated(centre, batch.groups)
        return quantile_regression(batch, batch.real * 1.0, self.quantile, centre, precision, start)


def pooled_interactions(split: Split, quantile: float) -> np.ndarray:
    """One quantile regression with metadata and its products with the features as more features."""
    table = (split.known - split.known.mean(0)) / split.known.std(0)

    def wide(rows: Rows) -> Rows:
        products = rows.X[:, :, None] * table[rows.group][:, None, :]
        return Rows(np.concatenate([rows.X, products.reshape(len(rows.y), -1)], 1), rows.y, rows.offsets)

    return wide(split.test).X @ pooled(wide(split.train), quantile)


def em_quantile(train: Rows, test: Rows, quantile: float, known: np.ndarray | None) -> np.ndarray:
    """The quantile of the normal distribution that EM's model predicts."""
    sums = Sums.whole(train)
    mean, covariance, noise = sums.expectation_maximisation(_standard(known))
    beta = sums.posterior(mean, covariance, noise)
    V = np.linalg.inv(sums.A.sum(1) / noise + np.linalg.inv(covariance))
    rows = test.X
    spread = np.sqrt(noise + np.einsum("nd,nde,ne->n", rows, V[test.group], rows))
    return (rows * beta[test.group]).sum(1) + norm.ppf(quantile) * spread


def em_errors(train: Rows, test: Rows, quantile: float, seed: int, known: np.ndarray | None) -> np.ndarray:
    """EM's means, moved by the quantile of its errors on rows that it was not fitted to."""
    fold = fold_of(train, seed)
    sums, table = Sums.of(train, fold), _standard(known)
    whole = sums.expectation_maximisation(table)
    errors = []
    for k in range(FOLDS):
        others = [k2 for k2 in range(FOLDS) if k2 != k]
        part = Sums(sums.A[:, others], sums.b[:, others], sums.c[:, others], sums.counts[:, others])
        held = fold == k
        errors.append(train.y[held] - (train.X * part.posterior(*whole)[train.group]).sum(1)[held])
    beta = sums.posterior(*whole)
    return (test.X * beta[test.group]).sum(1) + np.quantile(np.concatenate(errors), quantile)


def _standard(known: np.ndarray | None) -> np.ndarray | None:
    return None if known is None else (known - known.mean(0)) / known.std(0)
