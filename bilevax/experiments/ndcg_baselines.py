"""Recommenders without a neural network, with settings chosen on development data: popularity, EASE, ALS.

EASE is one matrix inverse, implicit ALS a few sweeps of small least-squares problems.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import numpy as np
from jax import Array
from scipy import sparse

from bilevax.applications.ranking import Held, Ratings, evaluate

Scores = np.ndarray  # (users, items)
T = TypeVar("T")

RIDGES = (200.0, 400.0, 800.0, 1600.0, 3200.0, 6400.0)
ALS_CHOICES = tuple(itertools.product((16, 64), (1.0, 3.0, 10.0), (3.0, 30.0, 100.0)))


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A closed form, and the settings that it may have.

    Attributes:
      fit: from the training pairs and one choice to the scores of all users and items.
      choices: the settings by name.
    """

    fit: Callable[..., Scores]
    choices: tuple[dict[str, float], ...]

    def few(self, count: int | None) -> Baseline:
        """The same with only some choices; None keeps all."""
        return dataclasses.replace(self, choices=some(self.choices, count))


def some(settings: Sequence[T], count: int | None) -> tuple[T, ...]:
    """So many of the settings, from the first to the last at even distances; the middle one alone; or all.

    Example:
      >>> some("abcdefghi", 3), some("abcdefghi", 1), some("ab", None)
      (('a', 'e', 'i'), ('e',), ('a', 'b'))
    """
    if count is None or count >= len(settings):
        return tuple(settings)
    ends = (len(settings) - 1) / 2 if count == 1 else 0, len(settings) - 1
    return tuple(settings[round(place)] for place in np.linspace(*ends, count))


@dataclasses.dataclass(frozen=True)
class BaselineResult:
    """The best settings by development data, and the test metrics of every user with them."""

    settings: dict[str, float]
    dev: float
    test: dict[str, np.ndarray]


class ScoreTable:
    """A model whose parameters are its scores, (users, items): what `evaluate` needs."""

    def score(self, x: Any, user: Array, items: Array) -> Any:
        return x[user][items]

    def score_all(self, x: Any, users: Array) -> Any:
        return x[users]


def judge(
    baseline: Baseline, train: Ratings, dev: Held, test: Held, watch: str, cutoffs: Sequence[int]
) -> BaselineResult:
    """Fits every choice to the training pairs; the best on development data is evaluated on test data."""
    best: tuple[float, dict[str, float], Scores] | None = None
    cutoff = int(watch.partition("@")[2])
    for choice in baseline.choices:
        scores = np.asarray(baseline.fit(train, **choice), np.float32)
        value = float(np.nanmean(score_metrics(scores, dev, (cutoff,))[watch]))
        if best is None or value > best[0]:
            best = value, choice, scores
    assert best is not None
    value, choice, scores = best
    found = {name: np.asarray(column) for name, column in score_metrics(scores, test, tuple(cutoffs)).items()}
    return BaselineResult(choice, value, found)


@eqx.filter_jit
def score_metrics(scores: Any, held: Held, cutoffs: tuple[int, ...]) -> dict[str, Array]:
    """The metrics of a table of scores, by user; compiled once for all tables of a shape."""
    return evaluate(_TABLE, scores, held, cutoffs)


_TABLE = ScoreTable()


def popularity(train: Ratings) -> Scores:
    """The number of pairs of every item, the same for all users."""
    counts = np.bincount(np.asarray(train.items), minlength=train.item_count)
    return np.broadcast_to(counts, (train.users, train.item_count))


def ease(train: Ratings, ridge: float) -> Scores:
    """EASE on a matrix of ones where there is a pair: B = argmin ‖X − XB‖² + ridge ‖B‖² with diag B = 0.

    Reference:
      Steck, *Embarrassingly Shallow Autoencoders for Sparse Data*, WWW 2019.

    Example:
      >>> ratings = Ratings([0, 2, 4, 6], [0, 1, 0, 1, 1, 2], [5.0, 4.0, 5.0, 3.0, 1.0, 2.0], item_count=3)
      >>> bool(ease(ratings, ridge=1.0)[2, 0] > 0)  # who has item 1 often has item 0
      True
    """
    return _shallow(pair_matrix(train), ridge)


def gain_ease(train: Ratings, ridge: float) -> Scores:
    """EASE with the gains 2^r − 1 in place of ones, scaled to a mean square of 1 over the pairs."""
    gains = 2.0 ** np.asarray(train.values, np.float64) - 1
    return _shallow(pair_matrix(train, gains / np.sqrt(np.mean(gains**2))), ridge)


def _shallow(matrix: sparse.csr_matrix, ridge: float) -> Scores:
    gram = (matrix.T @ matrix).toarray()
    gram[np.diag_indices_from(gram)] += ridge
    inverse = np.linalg.inv(gram)
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0.0)
    return np.asarray(matrix @ weights.astype(np.float32))


def als(train: Ratings, rank: int, alpha: float, ridge: float, sweeps: int = 10, seed: int = 0) -> Scores:
    """Implicit ALS: factors of a matrix of ones and zeros, where pairs weigh 1 + α and all else 1.

    Reference:
      Hu, Koren and Volinsky, *Collaborative Filtering for Implicit Feedback Datasets*, ICDM 2008.

    Example:
      >>> ratings = Ratings([0, 2, 4, 6], [0, 1, 0, 1, 1, 2], [5.0, 4.0, 5.0, 3.0, 1.0, 2.0], item_count=3)
      >>> als(ratings, rank=2, alpha=3.0, ridge=1.0).shape
      (3, 3)
    """
    matrix = pair_matrix(train)
    turned = sparse.csr_matrix(matrix.T)
    random = np.random.default_rng(seed)
    item = 0.1 * random.normal(size=(train.item_count, rank)).astype(np.float32)
    user = np.zeros((train.users, rank), np.float32)
    for _ in range(sweeps):
        user = _half(matrix, item, alpha, ridge)
        item = _half(turned, user, alpha, ridge)
    return user @ item.T


def _half(matrix: sparse.csr_matrix, fixed: np.ndarray, alpha: float, ridge: float) -> np.ndarray:
    """The factors of all rows, with those of the columns fixed."""
    rank = fixed.shape[1]
    common = fixed.T @ fixed + ridge * np.eye(rank, dtype=fixed.dtype)
    normal = np.empty((len(matrix.indptr) - 1, rank, rank), fixed.dtype)
    for row, (start, stop) in enumerate(itertools.pairwise(matrix.indptr)):
        own = fixed[matrix.indices[start:stop]]
        normal[row] = common + alpha * (own.T @ own)
    targets = (1 + alpha) * np.asarray(matrix @ fixed)
    return np.linalg.solve(normal, targets[..., None])[..., 0].astype(np.float32)


def pair_matrix(ratings: Ratings, values: np.ndarray | None = None) -> sparse.csr_matrix:
    """(users, items): values where there is a pair, by default ones."""
    entries = np.ones(ratings.pairs) if values is None else values
    shape = (ratings.users, ratings.item_count)
    parts = (entries.astype(np.float32), np.asarray(ratings.items), np.asarray(ratings.offsets))
    return sparse.csr_matrix(parts, shape=shape)


BASELINES: dict[str, Baseline] = {
    "popularity": Baseline(popularity, ({},)),
    "EASE": Baseline(ease, tuple({"ridge": ridge} for ridge in RIDGES)),
    "EASE, gains": Baseline(gain_ease, tuple({"ridge": ridge} for ridge in RIDGES)),
    "ALS": Baseline(
        als, tuple({"rank": rank, "alpha": alpha, "ridge": ridge} for rank, alpha, ridge in ALS_CHOICES)
    ),
}
