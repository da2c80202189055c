"""What one would try on grouped data before a learnt prior; in NumPy and float64, apart from the library.

A baseline takes a training panel and returns the coefficients of every group, (m, d), for rows that begin
with a one. `own`, `shared`, `around pooled` and `EM` see a group's rows through sums of squares where the
loss is squared, and through Newton steps where it is logistic.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit

from bilevax.experiments.grouped_batches import Batch, logistic
from bilevax.experiments.grouped_panels import Rows

ALPHAS = np.logspace(-1, 3, 9)
LOGISTIC_ALPHAS = np.logspace(-1, 2.5, 6)
_LEAST = 1e-3  # the least strength of a logistic regression, the intercept's too
FOLDS = 5
CATEGORIES = 255  # the most that scikit-learn's boosting takes


def squared_baselines(rows: Rows, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """The baselines of the squared loss, by name; each is run when it is called."""
    sums = Sums.by_fold(rows, seed)
    zero, slopes, every = np.zeros(sums.size), _but_intercept(sums.size), np.eye(sums.size)
    around_zero = functools.cache(lambda: sums.scores(zero, slopes))

    def around_pooled() -> np.ndarray:
        centre = sums.pooled()
        return sums.ridge(sums.best_alpha(centre, every), centre, every)

    def em(tolerance: float) -> np.ndarray:
        own = Sums.whole(rows)  # in its seconds, as ours are in those of a fit
        return own.posterior(*own.expectation_maximisation(tolerance=tolerance))

    return {
        "pooled": lambda: repeated(sums.pooled(), sums.groups),
        "pooled, group intercepts": lambda: group_intercepts(rows),
        "own α": lambda: sums.ridge(ALPHAS[np.argmin(around_zero(), 0)], zero, slopes),
        # Its seconds do not have those of the folds.
        "shared α": lambda: sums.ridge(ALPHAS[np.argmin(around_zero().sum(1))], zero, slopes),
        "shared α around pooled": around_pooled,
        "EM, four digits": lambda: em(1e-4),
        "EM": lambda: em(1e-6),
    }


def logistic_baselines(rows: Rows, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """The baselines of the logistic loss."""
    size = rows.X.shape[1]
    around_zero = functools.cache(lambda: CrossValidated.of(rows, seed, np.zeros(size), _but_intercept(size)))
    return {
        "pooled": lambda: repeated(pooled_logistic(rows), len(rows.offsets) - 1),
        "pooled, group intercepts": lambda: logistic_intercepts(rows, seed),
        "own α": lambda: around_zero().own(),
        "shared α": lambda: around_zero().shared(),  # its seconds do not have those of the folds
        "shared α around pooled": lambda: CrossValidated.of(
            rows, seed, pooled_logistic(rows), np.eye(size)
        ).shared(),
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
    def of(cls, rows: Rows, fold: np.ndarray, folds: int = FOLDS) -> Sums:
        """The sums of rows that are divided into folds."""
        batch, m, d = Batch(rows), rows.groups, rows.X.shape[1]
        A, b = np.zeros((m, folds, d, d)), np.zeros((m, folds, d))
        c, counts = np.zeros((m, folds)), np.zeros((m, folds))
        for k in range(folds):
            own = batch.tiled((fold == k).astype(float))
            A[:, k], b[:, k] = batch.gram(own), batch.cross(own * batch.y)
            c[:, k], counts[:, k] = batch.totals((own * batch.y**2).sum(1)), batch.totals(own.sum(1))
        return cls(A, b, c, counts)

    @classmethod
    def by_fold(cls, rows: Rows, seed: int) -> Sums:
        """The sums of folds that are drawn at random."""
        return cls.of(rows, fold_of(rows, seed))

    @classmethod
    def whole(cls, rows: Rows) -> Sums:
        """The sums of whole groups, as if they were the first fold of one; in a loop, which is fastest."""
        both, size = np.concatenate([rows.X, rows.y[:, None]], 1), rows.X.shape[1]
        found = np.empty((rows.groups, 1, size + 1, size + 1))
        for i in range(rows.groups):
            own = both[rows.offsets[i] : rows.offsets[i + 1]]
            found[i, 0] = own.T @ own
        counts = np.diff(rows.offsets)[:, None].astype(float)
        return cls(found[..., :-1, :-1], found[..., :-1, -1], found[..., -1, -1], counts)

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
        left = b - (A @ np.broadcast_to(centre, b.shape)[..., None])[..., 0]
        return centre + np.linalg.solve(A + scaled, left[..., None])[..., 0]

    def errors(self, alpha: float, centre: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        """The cross-validated sum of squares of every group."""
        A, b = (one.sum(1, keepdims=True) - one for one in (self.A, self.b))
        system = A + alpha * penalty + 1e-6 * np.eye(self.size)
        centre = np.broadcast_to(centre, (self.groups, self.size))[:, None]
        left = b - (A @ np.broadcast_to(centre, b.shape)[..., None])[..., 0]
        beta = centre + np.linalg.solve(system, left[..., None])[..., 0]
        curved = (self.A @ beta[..., None])[..., 0]
        inside = (beta * (curved - 2 * self.b)).sum(-1) + self.c
        return inside.sum(1)

    def best_alpha(self, centre: np.ndarray, penalty: np.ndarray) -> float:
        """The α that is best in the folds of all groups."""
        return float(ALPHAS[np.argmin(self.scores(centre, penalty).sum(1))])

    def scores(self, centre: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        """The cross-validated sum of squares of every α and group."""
        return np.stack([self.errors(alpha, centre, penalty) for alpha in ALPHAS])

    def expectation_maximisation(
        self, known: np.ndarray | None = None, most: int = 500, tolerance: float = 1e-6
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean, covariance and noise variance of the random-effects model, by EM.

        It ends when no entry of the covariance changes by more than the tolerance, relative to the largest.
        With a table of what is known of groups, the mean is a linear function of that: (m, d).
        """
        A, b, c, n = self.A.sum(1), self.b.sum(1), self.c.sum(), self.counts.sum()
        mean, covariance, noise = self.pooled(), 0.1 * np.eye(self.size), 1.0
        for _ in range(most):
            precision = np.linalg.inv(covariance)
            V = np.linalg.inv(A / noise + precision)
            beta = np.einsum("mde,me->md", V, b / noise + mean @ precision)
            mean = beta.mean(0)
            if known is not None:
                table = np.concatenate([np.ones((self.groups, 1)), known], 1)
                mean = table @ np.linalg.lstsq(table, beta, rcond=None)[0]
            off = beta - mean
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
    return np.concatenate([(means[:, -1] - means[:, :-1] @ slopes)[:, None], repeated(slopes, len(means))], 1)


# --- logistic loss ---------------------------------------------------------------


def pooled_logistic(rows: Rows) -> np.ndarray:
    """One logistic regression for all rows."""
    size = rows.X.shape[1]
    one = Batch(Rows(rows.X, rows.y, np.array([0, len(rows.y)])))
    return logistic(one, one.real * 1.0, np.zeros(size), 1e-6 * np.eye(size), np.zeros((1, size)))[0][0]


def logistic_intercepts(rows: Rows, seed: int) -> np.ndarray:
    """One slope per feature for all groups and an intercept for each, drawn towards that of all.

    A group with one class has no finite intercept of its own, so intercepts have a strength: the one that is
    best in the folds of all groups.
    """
    fold, scores = fold_of(rows, seed), np.zeros(len(LOGISTIC_ALPHAS))
    pooled = repeated(pooled_logistic(rows), rows.groups)
    for k in range(FOLDS):
        beta, held = pooled, fold == k
        for place in reversed(range(len(scores))):
            beta = _fit_intercepts(rows, (fold != k) * 1.0, LOGISTIC_ALPHAS[place], beta, enough=1e-3)
            eta = (rows.X[held] * beta[rows.group[held]]).sum(1)
            scores[place] += (np.logaddexp(0, eta) - rows.y[held] * eta).sum()
    return _fit_intercepts(rows, np.ones(len(rows.y)), LOGISTIC_ALPHAS[np.argmin(scores)], pooled)


def _fit_intercepts(
    rows: Rows, weight: np.ndarray, strength: float, start: np.ndarray, steps: int = 50, enough: float = 1e-6
) -> np.ndarray:
    """Minimises Σ weight ℓ(slopes · x + level + own_i) + ½ strength Σ own_i², by Newton steps.

    The Hessian is diagonal in `own`, which is eliminated; the rest is as large as one model.
    """
    X, group, m = rows.X, rows.group, rows.groups

    def by_group(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, rows.offsets[:-1])

    def value(shared: np.ndarray, own: np.ndarray) -> float:
        eta = X @ shared + own[group]
        return float(weight @ (np.logaddexp(0, eta) - rows.y * eta)) + 0.5 * strength * float(own @ own)

    shared = start.mean(0)
    own = start[:, 0] - shared[0]
    now = value(shared, own)
    for _ in range(steps):
        chance = expit(X @ shared + own[group])
        error, curved = weight * (chance - rows.y), weight * chance * (1 - chance)
        slope, pull = X.T @ error, by_group(error) + strength * own
        across, size = by_group(curved[:, None] * X), by_group(curved) + strength
        system = X.T @ (curved[:, None] * X) - across.T @ (across / size[:, None])
        move = np.linalg.solve(system + 1e-9 * np.eye(len(shared)), slope - across.T @ (pull / size))
        moves = (pull - across @ move) / size
        for length in (1.0, 0.5, 0.25, 0.1, 0.01):
            then = value(shared - length * move, own - length * moves)
            if then <= now + 1e-10:
                shared, own, now = shared - length * move, own - length * moves, then
                break
        if max(np.abs(move).max(), np.abs(moves).max()) < enough:
            break
    out = repeated(shared, m)
    out[:, 0] += own
    return out


@dataclasses.dataclass(frozen=True)
class CrossValidated:
    """Logistic regressions of all groups around a centre, with the loss of every α in the folds of each."""

    batch: Batch
    centre: np.ndarray
    penalty: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, rows: Rows, seed: int, centre: np.ndarray, penalty: np.ndarray) -> CrossValidated:
        """Tries every α in every fold."""
        batch, fold = Batch(rows), fold_of(rows, seed)
        scores = np.zeros((len(LOGISTIC_ALPHAS), rows.groups))
        for k in range(FOLDS):
            kept, held = (batch.tiled(one.astype(float)) for one in (fold != k, fold == k))
            beta = repeated(centre, rows.groups)
            for place in reversed(range(len(LOGISTIC_ALPHAS))):
                precision = LOGISTIC_ALPHAS[place] * penalty + _LEAST * np.eye(len(centre))
                beta, _ = logistic(batch, kept, centre, precision, beta, enough=1e-3)
                eta = batch.eta(beta)
                scores[place] += batch.totals((held * (np.logaddexp(0, eta) - batch.y * eta)).sum(1))
        return cls(batch, centre, penalty, scores)

    def own(self) -> np.ndarray:
        """Every group with the α that is best in its own folds."""
        return self._fit(np.argmin(self.scores, 0))

    def shared(self) -> np.ndarray:
        """All groups with the α that is best in the folds of all."""
        return self._fit(np.full(self.batch.groups, int(np.argmin(self.scores.sum(1)))))

    def _fit(self, best: np.ndarray) -> np.ndarray:
        batch = self.batch
        precision = LOGISTIC_ALPHAS[best][:, None, None] * self.penalty + _LEAST * np.eye(batch.size)
        start = repeated(self.centre, batch.groups)
        return logistic(batch, batch.real * 1.0, self.centre, precision, start)[0]


def laplace_em(
    rows: Rows, most: int = 100, tolerance: float = 1e-3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Posterior modes of all groups, mean and covariance of the prior, by EM with Laplace's approximation."""
    batch, m, size = Batch(rows), rows.groups, rows.X.shape[1]
    mean, covariance = pooled_logistic(rows), 0.1 * np.eye(size)
    beta = repeated(mean, m)
    for _ in range(most):
        # Modes need not be exact before the last steps: they move on with the prior.
        beta, hessian = logistic(
            batch, batch.real * 1.0, mean, np.linalg.inv(covariance), beta, steps=10, enough=1e-2
        )
        spread = np.linalg.inv(hessian).sum(0)
        mean, off, before = beta.mean(0), beta - beta.mean(0), covariance
        covariance = (spread + off.T @ off) / m
        if np.abs(covariance - before).max() <= tolerance * np.abs(covariance).max():
            break
    beta, _ = logistic(batch, batch.real * 1.0, mean, np.linalg.inv(covariance), beta)
    return beta, mean, covariance


# --- other libraries -------------------------------------------------------------


def boosting(
    train: Rows,
    test: Rows,
    seed: int,
    *,
    logistic: bool = False,
    quantile: float | None = None,
    known: np.ndarray | None = None,
) -> np.ndarray:
    """Predictions of gradient boosting, which gets the features and the mean target of the row's group.

    At most `CATEGORIES` groups are a category too, as scikit-learn has it; more cannot be. The mean of a
    training row's group is that of its other folds, drawn towards that of all rows as if by ten more rows.
    With a quantile, the deviation of the group's targets is a feature too; what is known of groups are more
    features.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    few = train.groups <= CATEGORIES
    own = _encoded(train, seed, train.y)
    features = [own] if quantile is None else [own, _encoded(train, seed, (train.y - own[0][:, 0]) ** 2)]
    parts = []
    for rows, place in ((train, 0), (test, 1)):
        columns = [rows.X[:, 1:]]
        columns += [one[0] if place == 0 else one[1][rows.group] for one in features]
        columns += [] if known is None else [known[rows.group]]
        columns += [rows.group[:, None]] if few else []
        parts.append(np.concatenate(columns, 1))
    X, X_test = parts
    y = train.y.astype(int) if logistic else train.y
    given: dict[str, Any] = {"random_state": seed, "categorical_features": [X.shape[1] - 1] if few else None}
    with threadpool_limits(1):  # on a busy machine its threads wait for each other for most of the time
        if not logistic:
            loss = "squared_error" if quantile is None else "quantile"
            model = HistGradientBoostingRegressor(loss=loss, quantile=quantile, **given)
            return model.fit(X, y).predict(X_test)
        chance = HistGradientBoostingClassifier(**given).fit(X, y).predict_proba(X_test)[:, 1]
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    return np.log(chance) - np.log1p(-chance)


def _encoded(rows: Rows, seed: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of a value in every row's group, without the row's own fold, and that of whole groups."""
    fold, m = fold_of(rows, seed), rows.groups
    part, level = rows.group * FOLDS + fold, values.mean()
    sums = np.bincount(part, values, m * FOLDS).reshape(m, FOLDS)
    counts = np.bincount(part, minlength=m * FOLDS).reshape(m, FOLDS)

    def drawn(total: np.ndarray, count: np.ndarray) -> np.ndarray:
        return ((total + 10 * level) / (count + 10))[:, None]

    others, of_others = (one.sum(1, keepdims=True) - one for one in (sums, counts))
    return drawn(others.ravel()[part], of_others.ravel()[part]), drawn(sums.sum(1), counts.sum(1))


def mixed_model(rows: Rows) -> np.ndarray | None:
    """statsmodels' MixedLM with all coefficients random; None if it is not installed."""
    try:
        from statsmodels.regression.mixed_linear_model import (  # pyright: ignore[reportMissingImports]
            MixedLM,
        )
    except ImportError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with few groups it warns of every covariance at its bound
        found: Any = MixedLM(rows.y, rows.X, groups=rows.group, exog_re=rows.X).fit(reml=False)
    effects = [np.asarray(found.random_effects[i]) for i in range(len(rows.offsets) - 1)]
    return found.fe_params + np.stack(effects)


def fold_of(rows: Rows, seed: int) -> np.ndarray:
    """The fold of every row, evenly within its group."""
    group = rows.group
    order = np.lexsort((np.random.default_rng(seed).random(len(group)), group))
    out = np.empty(len(group), int)
    out[order] = (np.arange(len(group)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))) % FOLDS
    return out


def _but_intercept(size: int) -> np.ndarray:
    return np.diag(np.arange(size) > 0).astype(float)


def repeated(one: np.ndarray, count: int) -> np.ndarray:
    """The same coefficients for all groups."""
    return np.tile(one, (count, 1))
