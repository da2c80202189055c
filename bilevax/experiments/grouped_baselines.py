"""What one would try on grouped data before a learnt prior; in NumPy and float64, apart from the library.

A baseline takes a training panel and returns the coefficients of every group, (m, d), for rows that begin
with a one. `own`, `shared`, `around pooled` and `EM` see a group's rows through sums of squares where the
loss is squared, and through Newton steps where it is logistic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit

ALPHAS = np.logspace(-1, 3, 9)
_FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows by group: group i has rows offsets[i] to offsets[i + 1]; the first column of X is ones."""

    X: np.ndarray
    y: np.ndarray
    offsets: np.ndarray

    @property
    def group(self) -> np.ndarray:
        """The group of every row."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of one group."""
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.X[span], self.y[span]


def squared_baselines(rows: Rows, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """The baselines of the squared loss, by name; each is run when it is called."""
    sums = Sums.of(rows, _fold(rows, seed))
    return {
        "pooled": lambda: _repeated(sums.pooled(), sums.groups),
        "pooled, group intercepts": lambda: group_intercepts(rows),
        "own α": lambda: sums.own(),
        "shared α": lambda: sums.shared(np.zeros(sums.size), _but_intercept(sums.size)),
        "shared α around pooled": lambda: sums.shared(sums.pooled(), np.eye(sums.size)),
        "EM": lambda: sums.posterior(*sums.expectation_maximisation()),
    }


def logistic_baselines(rows: Rows, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """The baselines of the logistic loss."""
    size = rows.X.shape[1]
    return {
        "pooled": lambda: _repeated(pooled_logistic(rows), len(rows.offsets) - 1),
        "own α": lambda: cross_validated(rows, seed, np.zeros(size), _but_intercept(size), own=True),
        "shared α": lambda: cross_validated(rows, seed, np.zeros(size), _but_intercept(size)),
        "shared α around pooled": lambda: cross_validated(rows, seed, pooled_logistic(rows), np.eye(size)),
        "Laplace-EM": lambda: laplace_em(rows)[0],
    }


# --- squared loss ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sums:
    """Σ x xᵀ, Σ x y and Σ y² of every group and fold: (m, K, d, d), (m, K, d), (m, K)."""

    A: np.ndarray
    b: np.ndarray
    c: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Rows, fold: np.ndarray) -> Sums:
        """The sums of rows that are divided into folds."""
        m, d = len(rows.offsets) - 1, rows.X.shape[1]
        A, b = np.zeros((m, _FOLDS, d, d)), np.zeros((m, _FOLDS, d))
        c, counts = np.zeros((m, _FOLDS)), np.zeros((m, _FOLDS))
        for i in range(m):
            X, y = rows.of(i)
            own = fold[rows.offsets[i] : rows.offsets[i + 1]]
            for k in range(_FOLDS):
                Z, t = X[own == k], y[own == k]
                A[i, k], b[i, k], c[i, k], counts[i, k] = Z.T @ Z, Z.T @ t, t @ t, len(t)
        return cls(A, b, c, counts)

    @property
    def groups(self) -> int:
        """m."""
        return len(self.A)

    @property
    def size(self) -> int:
        """d."""
        return self.b.shape[-1]

    def pooled(self) -> np.ndarray:
        """One model for all rows."""
        A = self.A.sum((0, 1))
        return np.linalg.solve(A + 1e-9 * np.trace(A) * np.eye(self.size), self.b.sum((0, 1)))

    def ridge(self, alpha: Any, centre: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        """Ridge regressions of all groups around a centre."""
        A, b = self.A.sum(1), self.b.sum(1)
        scaled = np.reshape(alpha, (-1, 1, 1)) * penalty + 1e-9 * np.eye(self.size)
        return centre + np.linalg.solve(A + scaled, (b - A @ centre)[..., None])[..., 0]

    def errors(self, alpha: float, centre: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        """The cross-validated sum of squares of every group."""
        A, b = (one.sum(1, keepdims=True) - one for one in (self.A, self.b))
        system = A + alpha * penalty + 1e-6 * np.eye(self.size)
        beta = centre + np.linalg.solve(system, (b - A @ centre)[..., None])[..., 0]
        inside = np.einsum("mkd,mkde,mke->mk", beta, self.A, beta) - 2 * (beta * self.b).sum(-1) + self.c
        return inside.sum(1)

    def own(self) -> np.ndarray:
        """Every group alone, with the α that is best in its own folds."""
        centre, penalty = np.zeros(self.size), _but_intercept(self.size)
        scores = np.stack([self.errors(alpha, centre, penalty) for alpha in ALPHAS])
        return self.ridge(ALPHAS[np.argmin(scores, 0)], centre, penalty)

    def shared(self, centre: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        """All groups with the α that is best in the folds of all."""
        scores = [self.errors(alpha, centre, penalty).sum() for alpha in ALPHAS]
        return self.ridge(ALPHAS[int(np.argmin(scores))], centre, penalty)

    def expectation_maximisation(
        self, most: int = 500, tolerance: float = 1e-6
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean, covariance and noise variance of the random-effects model, by EM.

        It ends when no entry of the covariance changes by more than the tolerance, relative to the largest.
        """
        A, b, c, n = self.A.sum(1), self.b.sum(1), self.c.sum(), self.counts.sum()
        mean, covariance, noise = self.pooled(), 0.1 * np.eye(self.size), 1.0
        for _ in range(most):
            precision = np.linalg.inv(covariance)
            V = np.linalg.inv(A / noise + precision)
            beta = np.einsum("mde,me->md", V, b / noise + precision @ mean)
            mean, off = beta.mean(0), beta - beta.mean(0)
            before, covariance = covariance, (V.sum(0) + off.T @ off) / self.groups
            fitted = np.einsum("md,mde,me->", beta, A, beta) - 2 * (beta * b).sum() + (A * V).sum()
            noise = float(c + fitted) / n
            if np.abs(covariance - before).max() <= tolerance * np.abs(covariance).max():
                break
        return mean, covariance, noise

    def posterior(self, mean: np.ndarray, covariance: np.ndarray, noise: float) -> np.ndarray:
        """The posterior means of all groups."""
        return self.ridge(1.0, mean, noise * np.linalg.inv(covariance))


def group_intercepts(rows: Rows) -> np.ndarray:
    """One slope per feature for all groups, and an intercept for each."""
    lengths = np.diff(rows.offsets)
    both = np.concatenate([rows.X[:, 1:], rows.y[:, None]], 1)
    means = np.add.reduceat(both, rows.offsets[:-1], 0) / lengths[:, None]
    left = both - np.repeat(means, lengths, 0)
    slopes = np.linalg.lstsq(left[:, :-1], left[:, -1], rcond=None)[0]
    return np.concatenate(
        [(means[:, -1] - means[:, :-1] @ slopes)[:, None], _repeated(slopes, len(means))], 1
    )


# --- logistic loss ---------------------------------------------------------------


def newton(
    X: np.ndarray,
    y: np.ndarray,
    centre: np.ndarray,
    precision: np.ndarray,
    start: np.ndarray,
    steps: int = 30,
) -> tuple[np.ndarray, np.ndarray]:
    """Penalised logistic regression, and its Hessian: min Σ ℓ + ½ (β − centre)ᵀ precision (β − centre)."""

    def value(beta: np.ndarray) -> float:
        eta, off = X @ beta, beta - centre
        return float(np.logaddexp(0, eta).sum() - y @ eta + 0.5 * off @ precision @ off)

    beta, now, hessian = start, value(start), precision
    for _ in range(steps):
        chance = expit(X @ beta)
        gradient = X.T @ (chance - y) + precision @ (beta - centre)
        hessian = (X.T * (chance * (1 - chance))) @ X + precision
        step = np.linalg.solve(hessian, gradient)
        length = 1.0
        while (then := value(beta - length * step)) > now + 1e-10 and length > 1e-4:
            length /= 2
        beta, now = beta - length * step, min(then, now)
        if np.abs(step).max() < 1e-5:
            break
    return beta, hessian


def pooled_logistic(rows: Rows) -> np.ndarray:
    """One logistic regression for all rows."""
    size = rows.X.shape[1]
    return newton(rows.X, rows.y, np.zeros(size), 1e-6 * np.eye(size), np.zeros(size))[0]


def cross_validated(
    rows: Rows, seed: int, centre: np.ndarray, penalty: np.ndarray, *, own: bool = False
) -> np.ndarray:
    """Logistic regressions of all groups, with the α that is best in the folds of all, or of each group."""
    fold, m = _fold(rows, seed), len(rows.offsets) - 1
    alphas, least = np.logspace(-1, 2.5, 6), 1e-3 * np.eye(len(centre))
    scores = np.zeros((len(alphas), m))
    for i in range(m):
        X, y = rows.of(i)
        mine = fold[rows.offsets[i] : rows.offsets[i + 1]]
        for k in range(_FOLDS):
            held = mine == k
            beta = centre
            for place in reversed(range(len(alphas))):
                beta, _ = newton(X[~held], y[~held], centre, alphas[place] * penalty + least, beta)
                eta = X[held] @ beta
                scores[place, i] += np.logaddexp(0, eta).sum() - y[held] @ eta
    best = np.argmin(scores, 0) if own else np.full(m, int(np.argmin(scores.sum(1))))
    fits = [newton(*rows.of(i), centre, alphas[best[i]] * penalty + least, centre)[0] for i in range(m)]
    return np.stack(fits)


def laplace_em(
    rows: Rows, most: int = 100, tolerance: float = 1e-3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Posterior modes of all groups, mean and covariance of the prior, by EM with Laplace's approximation."""
    m, size = len(rows.offsets) - 1, rows.X.shape[1]
    mean, covariance = pooled_logistic(rows), 0.1 * np.eye(size)
    beta = _repeated(mean, m)
    for _ in range(most):
        precision = np.linalg.inv(covariance)
        fits = [newton(*rows.of(i), mean, precision, beta[i]) for i in range(m)]
        beta = np.stack([fit[0] for fit in fits])
        spread = np.linalg.inv(np.stack([fit[1] for fit in fits])).sum(0)
        mean, off, before = beta.mean(0), beta - beta.mean(0), covariance
        covariance = (spread + off.T @ off) / m
        if np.abs(covariance - before).max() <= tolerance * np.abs(covariance).max():
            break
    return beta, mean, covariance


# --- other libraries -------------------------------------------------------------


def boosting(train: Rows, test: Rows, seed: int, *, logistic: bool = False) -> np.ndarray:
    """Predictions of gradient boosting, which gets the features and the mean target of the row's group.

    scikit-learn's categories are limited to 255, so that groups are encoded: a training row by the mean of
    the other folds of its group, drawn towards that of all rows as if by ten more rows.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    fold, m = _fold(train, seed), len(train.offsets) - 1
    part = train.group * _FOLDS + fold
    sums = np.bincount(part, train.y, m * _FOLDS).reshape(m, _FOLDS)
    counts = np.bincount(part, minlength=m * _FOLDS).reshape(m, _FOLDS)
    level = train.y.mean()

    def encoded(total: np.ndarray, count: np.ndarray) -> np.ndarray:
        return ((total + 10 * level) / (count + 10))[:, None]

    others, of_others = (one.sum(1, keepdims=True) - one for one in (sums, counts))
    own = encoded(others.ravel()[part], of_others.ravel()[part])
    whole = encoded(sums.sum(1), counts.sum(1))[test.group]
    X, X_test = np.concatenate([train.X[:, 1:], own], 1), np.concatenate([test.X[:, 1:], whole], 1)
    y = train.y.astype(int) if logistic else train.y
    with threadpool_limits(1):  # on a busy machine its threads wait for each other for most of the time
        if not logistic:
            return HistGradientBoostingRegressor(random_state=seed).fit(X, y).predict(X_test)
        chance = HistGradientBoostingClassifier(random_state=seed).fit(X, y).predict_proba(X_test)[:, 1]
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    return np.log(chance) - np.log1p(-chance)


def mixed_model(rows: Rows) -> np.ndarray | None:
    """statsmodels' MixedLM with all coefficients random; None if it is not installed."""
    try:
        from statsmodels.regression.mixed_linear_model import (  # pyright: ignore[reportMissingImports]
            MixedLM,
        )
    except ImportError:
        return None
    found: Any = MixedLM(rows.y, rows.X, groups=rows.group, exog_re=rows.X).fit(reml=False)
    effects = [np.asarray(found.random_effects[i]) for i in range(len(rows.offsets) - 1)]
    return found.fe_params + np.stack(effects)


def _fold(rows: Rows, seed: int) -> np.ndarray:
    """The fold of every row, evenly within its group."""
    group = rows.group
    order = np.lexsort((np.random.default_rng(seed).random(len(group)), group))
    out = np.empty(len(group), int)
    out[order] = (np.arange(len(group)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))) % _FOLDS
    return out


def _but_intercept(size: int) -> np.ndarray:
    return np.diag(np.arange(size) > 0).astype(float)


def _repeated(one: np.ndarray, count: int) -> np.ndarray:
    return np.tile(one, (count, 1))
