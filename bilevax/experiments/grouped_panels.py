"""The panels of `bilevax reproduce grouped`: ratings by user, generated groups, and those of statsmodels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds

from bilevax.data import Interactions

FEWEST = 5  # ratings that a user must have
OF_STATSMODELS = ("grunfeld", "fertility")
_SIZE = 9  # features of generated groups, and the one


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows by group: group i has rows offsets[i] to offsets[i + 1]; the first column of X is ones."""

    X: np.ndarray
    y: np.ndarray
    offsets: np.ndarray

    @classmethod
    def by(cls, X: np.ndarray, y: np.ndarray, group: np.ndarray) -> Rows:
        """Rows that are sorted by group."""
        return cls(X, y, np.concatenate([[0], np.cumsum(np.bincount(group))]))

    @property
    def groups(self) -> int:
        """m."""
        return len(self.offsets) - 1

    @property
    def group(self) -> np.ndarray:
        """The group of every row."""
        return np.repeat(np.arange(self.groups), np.diff(self.offsets))

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of one group."""
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.X[span], self.y[span]

    def chosen(self, rows: np.ndarray) -> Rows:
        """Some rows, marked by True, of the groups that have any."""
        kept = np.add.reduceat(rows.astype(int), self.offsets[:-1])
        return Rows(self.X[rows], self.y[rows], np.concatenate([[0], np.cumsum(kept[kept > 0])]))


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows to fit and rows to test, of the same groups, and what is known of every group."""

    train: Rows
    test: Rows
    known: np.ndarray


def movielens(table: Interactions, users: int | None, factors: int, seed: int, *, logistic: bool) -> Split:
    """Users as groups: a fifth of their ratings is for testing, features are factors of the training ratings.

    Known of a user are the logarithm of the number of training ratings, the time of the first and the time
    between first and last.
    """
    random = np.random.default_rng(seed)
    counts = np.bincount(table.user, minlength=table.users)
    chosen = random.permutation(np.flatnonzero(counts >= FEWEST))[:users]
    code = np.full(table.users, -1)
    code[np.sort(chosen)] = np.arange(len(chosen))
    keep = code[table.user] >= 0
    user, item, rating = code[table.user[keep]], table.item[keep], table.rating[keep].astype(float)
    order = np.lexsort((random.random(len(user)), user))
    user, item, rating, when = user[order], item[order], rating[order], table.time[keep][order].astype(float)
    lengths = np.bincount(user)
    place = np.arange(len(user)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    test = place < np.maximum(lengths // 5, 1)[user]
    level = rating[~test].mean()
    shape = (len(lengths), table.items)
    matrix = sparse.csr_matrix((rating[~test] - level, (user[~test], item[~test])), shape)
    found: Any = svds(matrix, factors, v0=random.normal(size=min(shape)))
    features = found[2].T[item]
    features /= features[~test].std(0)
    target = (rating >= 4).astype(float) if logistic else rating
    X = np.concatenate([np.ones((len(user), 1)), features], 1)
    starts = np.concatenate([[0], np.cumsum(np.bincount(user[~test]))[:-1]])
    first, last = (one.reduceat(when[~test], starts) for one in (np.minimum, np.maximum))
    known = np.column_stack([np.log(np.bincount(user[~test])), first, np.log1p(last - first)])
    return Split(
        Rows.by(X[~test], target[~test], user[~test]), Rows.by(X[test], target[test], user[test]), known
    )


def generated(groups: int, seed: int) -> Split:
    """Groups of 5 to 50 rows whose coefficients are correlated normal variables, with normal noise."""
    random = np.random.default_rng(seed)
    mean, mix = random.normal(size=_SIZE), 0.3 * random.normal(size=(_SIZE, _SIZE))
    beta = mean + random.normal(size=(groups, _SIZE)) @ mix.T

    def part(lengths: np.ndarray) -> Rows:
        group = np.repeat(np.arange(groups), lengths)
        X = np.concatenate([np.ones((len(group), 1)), random.normal(size=(len(group), _SIZE - 1))], 1)
        return Rows.by(X, (X * beta[group]).sum(1) + random.normal(size=len(group)), group)

    lengths = random.integers(5, 51, groups)
    return Split(part(lengths), part(np.full(groups, 20)), np.zeros((groups, 0)))


def skewed(groups: int, seed: int, *, known: int = 0) -> Split:
    """Groups of 5 to 50 rows with noise of which no normal model is true.

    Its size depends on a feature, by a slope of the group's own, and it has a long tail upwards: quantiles
    are linear in the features, with other coefficients for every quantile. A part of the coefficients is a
    linear function of what is `known` of a group, if anything is.
    """
    random = np.random.default_rng(seed)
    size = 5
    mean, mix = random.normal(size=size), 0.3 * random.normal(size=(size, size))
    table = random.normal(size=(groups, known))
    by_known = 0.5 * random.normal(size=(known, size))
    beta = mean + table @ by_known + random.normal(size=(groups, size)) @ mix.T
    spread = np.exp(0.4 * random.normal(size=(groups, 2)) + (table[:, :1] * 0.3 if known else 0.0))

    def part(lengths: np.ndarray) -> Rows:
        group = np.repeat(np.arange(groups), lengths)
        X = np.concatenate([np.ones((len(group), 1)), random.normal(size=(len(group), size - 1))], 1)
        X[:, 1] = np.abs(X[:, 1])  # so that sizes are positive
        noise = (random.exponential(size=len(group)) - np.log(2)) * (spread[group] * X[:, :2]).sum(1)
        return Rows.by(X, (X * beta[group]).sum(1) + noise, group)

    lengths = random.integers(5, 51, groups)
    return Split(part(lengths), part(np.full(groups, 20)), table)


def known_normal(groups: int, seed: int) -> Split:
    """Groups of 5 to 50 rows with normal coefficients and noise; half of what differs is known of a group."""
    random = np.random.default_rng(seed)
    mean, mix = random.normal(size=_SIZE), 0.2 * random.normal(size=(_SIZE, _SIZE))
    table = random.normal(size=(groups, 4))
    beta = mean + table @ (0.3 * random.normal(size=(4, _SIZE))) + random.normal(size=(groups, _SIZE)) @ mix.T

    def part(lengths: np.ndarray) -> Rows:
        group = np.repeat(np.arange(groups), lengths)
        X = np.concatenate([np.ones((len(group), 1)), random.normal(size=(len(group), _SIZE - 1))], 1)
        return Rows.by(X, (X * beta[group]).sum(1) + random.normal(size=len(group)), group)

    lengths = random.integers(5, 51, groups)
    return Split(part(lengths), part(np.full(groups, 20)), table)


def statsmodels_panel(name: str, seed: int) -> Split | None:
    """A panel that comes with statsmodels; None if that is missing.

    "grunfeld": investments of 11 firms in 20 years, on their value and capital, half of the years to test.
    "fertility": births per woman in some 200 countries and 52 years, on polynomials of the year, of which 8
    years of every country are known.
    """
    try:
        from statsmodels import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    table: Any = getattr(datasets, name).load_pandas().data
    if name == "grunfeld":
        group = np.unique(table["firm"].to_numpy().astype(str), return_inverse=True)[1]
        # Firms differ in size by a factor of a hundred: logarithms.
        X = np.log(table[["value", "capital"]].to_numpy().astype(float))
        y, known = np.log(table["invest"].to_numpy().astype(float)), 10
    else:
        years = np.array([one for one in table.columns if str(one).isdigit()])
        births = table[years].to_numpy().astype(float)
        births = births[np.isfinite(births).sum(1) >= 16]
        group, year = np.nonzero(np.isfinite(births))
        X = np.polynomial.legendre.legvander(np.linspace(-1, 1, len(years)), 4)[year, 1:]
        y, known = births[group, year], 8
    random = np.random.default_rng(seed)
    order = np.lexsort((random.random(len(y)), group))
    X, y, group = X[order], y[order], group[order]
    lengths = np.bincount(group)
    place = np.arange(len(y)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    test = place >= known
    X = np.concatenate([np.ones((len(y), 1)), (X - X[~test].mean(0)) / X[~test].std(0)], 1)
    train_rows, test_rows = Rows.by(X[~test], y[~test], group[~test]), Rows.by(X[test], y[test], group[test])
    return Split(train_rows, test_rows, np.zeros((len(lengths), 0)))
