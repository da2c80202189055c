r"""The units of a loss that a user gives.

Such a loss takes targets as they are, so that it cannot be told in which units predictions and losses are.
But learning needs to know: how far a step goes, what counts as a small change, and how strong the prior may
be. So one constant prediction for all rows is found first. With the gradients g of rows there and their mean
curvature h, a parabola of that curvature would have targets that are g / h away. The unit of predictions is
the root mean square of that, and losses are in units of what the parabola rises by over it:

.. math::
    \ell(\eta) \to \frac{\ell(\text{shift} + \text{scale}\, \eta) - \text{level}}{\text{size}} + \tfrac12,
    \qquad \text{scale} = \frac{\sqrt{\overline{g^2}}}{\bar h}, \qquad
    \text{size} = \text{scale}^2\, \bar h

For ½ (prediction − target)², that is what it would be with standardised targets.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.losses import Loss, Units

_ROWS = 20_000  # that are looked at, at most
_FAR = 2.0 ** np.arange(-100, 101, 2)  # constants that are tried, beside quantiles of the target
_QUANTILES = np.linspace(0, 1, 21)
_ROUNDS, _BETWEEN = 12, 33  # the best of so many constants between two others, so many times
_STRAIGHT = 1e-6  # of the curvature of ½ (prediction − target)²: too little to tell anything


def units_of(loss: Loss, target: np.ndarray, weight: np.ndarray, seed: int, *, constant: bool) -> Units:
    """The units of a loss.

    Args:
      loss: of a row, as the user gave it.
      target: (n,).
      weight: (n,).
      seed: of the rows that are looked at.
      constant: whether the best constant prediction is sought; else it is zero, as for logits.
    """
    few = np.random.default_rng(seed).permutation(len(target))[:_ROWS]
    target, weight = np.asarray(target[few], float), weight[few] / weight[few].sum()
    with jax.enable_x64(True):
        best = _best_constant(loss, target, weight) if constant else 0.0
        level, pull, bend = (float(one) for one in _around(loss, best, target, weight))
    if not np.isfinite([level, pull, bend]).all():
        raise ValueError(
            "groups cannot be fitted at the start: the loss must be finite at all targets, smooth and convex"
        )
    pull = pull or 1.0
    usual = pull / (float(np.sqrt(weight @ (target - weight @ target) ** 2)) or 1.0)
    bend = bend if bend > _STRAIGHT * usual else usual
    return Units(best, pull / bend, level, pull**2 / bend)


def _best_constant(loss: Loss, target: np.ndarray, weight: np.ndarray) -> float:
    tried = np.unique(np.concatenate([-_FAR, [0.0], _FAR, np.quantile(target, _QUANTILES)]))
    for _ in range(_ROUNDS):
        values = np.asarray(_means(loss, tried, target, weight))
        place = int(np.argmin(np.where(np.isfinite(values), values, np.inf)))
        best = float(tried[place])
        ends = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
        tried = np.linspace(*ends, _BETWEEN)
    return best


@jax.jit
def _means(loss: Loss, constants: Array, target: Array, weight: Array) -> Array:
    """The mean loss of every constant."""
    of_rows = jax.vmap(loss.row, (None, 0))
    return jax.lax.map(lambda one: weight @ of_rows(jnp.full(loss.columns, one), target), constants)


@jax.jit
def _around(loss: Loss, constant: Array, target: Array, weight: Array) -> tuple[Array, Array, Array]:
    """The mean loss of a constant, the root mean square of its gradients, and the mean curvature."""
    eta = jnp.full(loss.columns, constant, target.dtype)
    value, slope, bend = (
        jax.vmap(of_row, (None, 0))(eta, target)
        for of_row in (loss.row, jax.grad(loss.row), jax.hessian(loss.row))
    )
    curvature = jnp.trace(bend, axis1=-2, axis2=-1) / loss.columns
    return weight @ value, jnp.sqrt(weight @ jnp.mean(slope**2, -1)), weight @ curvature
