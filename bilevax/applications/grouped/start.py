"""Where learning starts: a random-effects model of the loss's parabola at one model for all rows.

With the gradients g of rows at the pooled model and their mean curvature h, η − g / h is what a row would
have as its target if the loss were ½ h (predictor − target)². For these targets a few steps of EM find how
the coefficients of groups vary; L-BFGS on F itself has little left to do from there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.blocks import whole_groups
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.sums import block_sums

_FEWEST, _PER_FEATURE = 1_000, 200  # groups that learning starts with, at most
_ROWS = 20_000  # of the pooled model
_STEPS = 30
_ENOUGH = 1e-2  # the relative change of the covariance at which steps end
_FLOOR = 1e-4  # of the mean variance


def enough(prior: Prior) -> int:
    """The number of groups to start with: more where the prior has more entries."""
    return max(_FEWEST, _PER_FEATURE * prior.size)


def starts(panel: Panel, prior: Prior, loss: Loss, pooled: np.ndarray, curvature: float) -> list[X]:
    """Priors to choose from: that of the random-effects model, with some strengths; and plain ones."""
    plain = [prior.start(pooled, one / curvature**0.5) for one in (0.03, 0.3)]
    found = random_effects(panel, prior, loss, pooled, curvature)
    if found is None:
        return plain
    mean, known, covariance = found
    return [*plain, *(prior.start_at(mean, known, one**2 * covariance) for one in (0.5, 1.0, 2.0))]


def random_effects(
    panel: Panel, prior: Prior, loss: Loss, pooled: np.ndarray, curvature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Mean (d, C), coefficients of metadata (p, d, C) and S Sᵀ (d, d), by EM; None if it fails."""
    rows, d, columns = panel.all(), prior.size, prior.columns
    if loss.quadratic:
        targets = panel.target[:, None]
    else:
        eta = rows @ pooled
        slope = np.asarray(_slopes(loss, jnp.asarray(eta), jnp.asarray(panel.target)), float)
        targets = eta - slope / curvature
    whole, every = whole_groups(panel), np.arange(panel.groups)
    A = block_sums(panel, whole.kept, every)[:, :d, :d]
    starts = panel.offsets[:-1]
    b = np.stack([np.add.reduceat(rows * (panel.weight * one)[:, None], starts, 0) for one in targets.T], -1)
    square = (panel.weight @ targets**2).sum()
    weight = panel.weight.sum() * columns
    noise = max(square / weight - (pooled * b.sum(0)).sum() / weight, 1e-3 * square / weight, 1e-12)
    # What is known of groups, and a one: the mean is a linear function of it, drawn a little towards zero.
    table = np.concatenate([np.ones((panel.groups, 1)), panel.known], 1)
    draw = np.diag([0.0] + [1.0] * prior.known)
    fit = np.linalg.solve(table.T @ table + draw, table.T)
    mean = np.broadcast_to(pooled, (panel.groups, d, columns))
    slopes = np.zeros((1 + prior.known, d, columns))
    slopes[0] = pooled
    covariance = noise * np.eye(d) * 0.1
    for _ in range(_STEPS):
        precision = np.linalg.inv(covariance)
        V = np.linalg.inv(A / noise + precision)
        beta = V @ (b / noise + precision @ mean)
        slopes = np.tensordot(fit, beta, 1)
        mean = np.tensordot(table, slopes, 1)
        off = beta - mean
        spread = V.mean(0) + np.einsum("mdc,mec->de", off, off) / (panel.groups * columns)
        # As if d more groups had varied alike in all coefficients: few groups do not tell all correlations.
        alike = np.trace(spread) / d * np.eye(d)
        before, covariance = covariance, (panel.groups * spread + d * alike) / (panel.groups + d)
        fitted = (beta * (A @ beta - 2 * b)).sum() + columns * (A * V).sum()
        noise = max(float(square + fitted) / weight, 1e-6 * square / weight, 1e-12)
        if not (np.isfinite(covariance).all() and np.isfinite(noise)):
            return None
        if np.abs(covariance - before).max() <= _ENOUGH * np.abs(covariance).max():
            break
    covariance += _FLOOR * np.trace(covariance) / d * np.eye(d)
    return slopes[0], slopes[1:], covariance / (noise * curvature)


@functools.partial(jax.jit, static_argnums=0)
def _slopes(loss: Loss, eta: Array, target: Array) -> Array:
    return jax.vmap(jax.grad(loss.row))(eta, target)
