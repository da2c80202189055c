"""Where learning starts: a random-effects model of the loss's parabola at one model for all rows.

With the gradients g of rows at the pooled model and their mean curvature h, η − g / h is what a row would
have as its target if the loss were ½ h (predictor − target)². For these targets a few steps of EM find how
the coefficients of groups vary; L-BFGS on F itself has little left to do from there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.sums import group_sums

if TYPE_CHECKING:
    from bilevax.applications.grouped.row_parabolas import RowParabolas

_FEWEST, _PER_FEATURE, _SHARE = 300, 100, 4  # groups that learning starts with, and their share of all
_STEPS = 30
_ENOUGH = 1e-2  # the relative change of the covariance at which steps end
_FLOOR = 1e-4  # of the mean variance


def enough(prior: Prior, groups: int) -> int:
    """The number of groups to start with: more where the prior has more entries."""
    return int(np.clip(groups // _SHARE, _FEWEST, max(_FEWEST, _PER_FEATURE * prior.size)))


class Model(NamedTuple):
    """A random-effects model of some groups: the means of their coefficients, (m, d, C), the covariance and
    the noise variance."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: float


class Expected(NamedTuple):
    """What EM expects under a model: coefficients (m, d, C), the mean of their covariances (d, d), and the
    sum of squares of what is left."""

    beta: np.ndarray
    covariance: np.ndarray
    left: float


@dataclasses.dataclass(frozen=True)
class Parabolas:
    """The rows of groups with the targets that they would have if the loss were a parabola, as sums.

    Attributes:
      A: (m, d, d), Σ a r rᵀ.
      b: (m, d, C), Σ a r t.
      square: Σ a t² of all rows and columns.
      weight: Σ a of all rows.
      known: (m, p), the metadata of the groups.
      curvature: that of the parabola.
    """

    A: np.ndarray
    b: np.ndarray
    square: float
    weight: float
    known: np.ndarray
    curvature: float

    @classmethod
    def of(cls, panel: Panel, loss: Loss, pooled: np.ndarray, curvature: float) -> Parabolas:
        """Those of a panel at a pooled model."""
        rows, starts, d = panel.all(), panel.offsets[:-1], panel.size
        targets = parabola_targets(rows, panel.target, loss, pooled, curvature)
        weighted = panel.weight[:, None] * targets
        b = [np.add.reduceat(rows * one[:, None], starts, 0) for one in weighted.T]
        square, weight = float((weighted * targets).sum()), float(panel.weight.sum())
        return cls(group_sums(panel)[:, :d, :d], np.stack(b, -1), square, weight, panel.known, curvature)

    @classmethod
    def of_sums(cls, sums: np.ndarray, known: np.ndarray) -> Parabolas:
        """Those of the squared loss, from sums of (r, t)(r, t)ᵀ, (m, d + 1, d + 1)."""
        A, b = sums[:, :-1, :-1], sums[:, :-1, -1:]
        return cls(A, b, float(sums[:, -1, -1].sum()), float(sums[:, 0, 0].sum()), known, 1.0)

    @property
    def cross(self) -> np.ndarray:
        """Σ a r t of all groups, (d, C)."""
        return self.b.sum(0)

    def expected(self, model: Model) -> Expected:
        """A step of expectation."""
        precision = np.linalg.inv(model.covariance)
        V = np.linalg.inv(self.A / model.noise + precision)
        beta = V @ (self.b / model.noise + precision @ model.mean)
        fitted = (beta * (self.A @ beta - 2 * self.b)).sum() + self.b.shape[-1] * (self.A * V).sum()
        return Expected(beta, V.mean(0), self.square + float(fitted))


def starts(parabolas: Parabolas | RowParabolas, prior: Prior, pooled: np.ndarray) -> list[X]:
    """Priors to choose from: that of the random-effects model, with some strengths; and plain ones."""
    plain = [prior.start(pooled, one / parabolas.curvature**0.5) for one in (0.03, 0.3)]
    found = random_effects(parabolas, prior, pooled)
    if found is None:
        return plain
    mean, known, covariance = found
    return [*plain, *(prior.start_at(mean, known, one**2 * covariance) for one in (0.5, 1.0, 2.0))]


def random_effects(
    parabolas: Parabolas | RowParabolas, prior: Prior, pooled: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Mean (d, C), coefficients of metadata (p, d, C) and S Sᵀ (d, d), by EM; None if it fails."""
    square, groups = parabolas.square, len(parabolas.known)
    d, columns = prior.size, prior.columns
    weight = parabolas.weight * columns
    noise = max((square - (pooled * parabolas.cross).sum()) / weight, 1e-3 * square / weight, 1e-12)
    # What is known of groups, and a one: the mean is a linear function of it, drawn a little towards zero.
    table = np.concatenate([np.ones((groups, 1)), parabolas.known], 1)
    draw = np.diag([0.0] + [1.0] * prior.known)
    fit = np.linalg.solve(table.T @ table + draw, table.T)
    mean = np.broadcast_to(pooled, (groups, d, columns))
    slopes = np.zeros((1 + prior.known, d, columns))
    slopes[0] = pooled
    covariance = noise * np.eye(d) * 0.1
    for _ in range(_STEPS):
        beta, own, left = parabolas.expected(Model(mean, covariance, noise))
        slopes = np.tensordot(fit, beta, 1)
        mean = np.tensordot(table, slopes, 1)
        off = (beta - mean).transpose(1, 0, 2).reshape(d, -1)
        spread = own + off @ off.T / (groups * columns)
        # As if d more groups had varied alike in all coefficients: few groups do not tell all correlations.
        alike = np.trace(spread) / d * np.eye(d)
        before, covariance = covariance, (groups * spread + d * alike) / (groups + d)
        noise = max(left / weight, 1e-6 * square / weight, 1e-12)
        if not (np.isfinite(covariance).all() and np.isfinite(noise)):
            return None
        if np.abs(covariance - before).max() <= _ENOUGH * np.abs(covariance).max():
            break
    covariance += _FLOOR * np.trace(covariance) / d * np.eye(d)
    return slopes[0], slopes[1:], covariance / (noise * parabolas.curvature)


def parabola_targets(
    rows: np.ndarray, target: np.ndarray, loss: Loss, pooled: np.ndarray, curvature: float
) -> np.ndarray:
    """The targets (n, C) of the parabolas of rows at a pooled model."""
    eta = rows @ pooled
    return eta - np.asarray(row_slopes(loss, jnp.asarray(eta), jnp.asarray(target)), float) / curvature


@jax.jit
def row_slopes(loss: Loss, eta: Array, target: Array) -> Array:
    """The gradient of every row's loss in its predictors."""
    return jax.vmap(jax.grad(loss))(eta, target)
