"""The loss of one row, from the linear predictors of its group and its target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

REGRESSION = ("squared", "poisson", "quantile", "huber")
_MOST = 30.0  # of the logarithm of a Poisson mean


class Units(NamedTuple):
    """In which units a loss is looked at: (ℓ(shift + scale η) − level) / size + ½."""

    shift: float
    scale: float
    level: float
    size: float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["units"],  # numbers, so that one program is compiled for all data
    meta_fields=["row", "columns", "quadratic", "bound"],
)
@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of rows. Called, it returns ℓ(predictors, target) of one row, in its units.

    Attributes:
      row: ℓ as it was given, convex in the predictors, a vector of `columns` entries.
      columns: how many linear predictors a row has.
      quadratic: whether ℓ is ½ (predictor − target)².
      bound: a curvature of ℓ in its one predictor at which a parabola lies above ℓ, for steps where ℓ itself
        is nearly straight; None if steps by ∇²ℓ do.
      units: of a loss that a user gave; None if predictors and losses are as `row` has them.
    """

    row: Callable[[Array, Array], Array]
    columns: int = 1
    quadratic: bool = False
    bound: Callable[[Array, Array], Array] | None = None
    units: Units | None = None

    def __call__(self, eta: Array, target: Array) -> Array:
        """The loss of one row."""
        if self.units is None:
            return self.row(eta, target)
        units = self.units
        return (self.row(units.shift + units.scale * eta, target) - units.level) / units.size + 0.5


@functools.lru_cache  # one object per loss: JAX compiles anew for every other object
def regression_loss(name: str | Callable[..., Any], quantile: float, size: float) -> Loss:
    """The loss of a regressor.

    Args:
      name: one of `REGRESSION`, or a function of a prediction and a target.
      quantile: of the quantile loss.
      size: the residual at which Huber's loss turns linear, or over which the corner of the quantile loss is
        rounded off.
    """
    if callable(name):
        return Loss(lambda eta, target: name(eta[0], target))
    if name == "squared":
        return Loss(lambda eta, target: 0.5 * (eta[0] - target) ** 2, quadratic=True)
    if name == "poisson":
        return Loss(lambda eta, target: _half_deviance(eta[0], target))
    if name == "quantile":
        return Loss(
            lambda eta, target: smooth_pinball(target - eta[0], quantile, size),
            bound=lambda eta, target: _softplus_bound((target - eta[0]) / size) / size,
        )
    return Loss(
        lambda eta, target: _huber(eta[0] - target, size),
        bound=lambda eta, target: size / jnp.maximum(jnp.abs(eta[0] - target), size),
    )


@functools.lru_cache
def classification_loss(name: str | Callable[..., Any], classes: int) -> Loss:
    """The loss of a classifier, from logits (of the second of two classes, or of all) and a class code."""
    columns = 1 if classes == 2 else classes
    if callable(name):
        return Loss(lambda eta, code: name(eta[0] if columns == 1 else eta, code.astype(int)), columns)
    if columns == 1:
        return Loss(lambda eta, code: jax.nn.softplus(eta[0]) - code * eta[0])
    return Loss(lambda eta, code: jax.nn.logsumexp(eta) - eta[code.astype(int)], columns)


def check_loss(loss: Loss) -> None:
    """Raises TypeError unless a user's loss is a number that JAX can differentiate twice."""
    eta, target = (jax.ShapeDtypeStruct(shape, jnp.result_type(float)) for shape in ((loss.columns,), ()))
    try:
        jax.eval_shape(jax.hessian(loss.row), eta, target)
        shape = jax.eval_shape(loss.row, eta, target).shape
        if shape:
            raise ValueError(f"an array of shape {shape}")
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise TypeError(
            "loss must be a function of a prediction and a target that returns one number, written with "
            f"jax.numpy, got {type(error).__name__}: {first}"
        ) from error


def smooth_pinball(residual: Array, quantile: float, size: float) -> Array:
    """The pinball loss with its corner rounded off: q r + s softplus(−r/s), for target − prediction r."""
    return quantile * residual + size * jax.nn.softplus(-residual / size)


def pinball(residual: np.ndarray, quantile: float) -> np.ndarray:
    """The pinball loss itself, of target − prediction.

    Example:
      >>> pinball(np.array([2.0, -1.0]), 0.9).round(3).tolist()
      [1.8, 0.1]
    """
    return np.where(residual >= 0, quantile * residual, (quantile - 1) * residual)


def _huber(residual: Array, bend: float) -> Array:
    size = jnp.abs(residual)
    return jnp.where(size <= bend, 0.5 * residual**2, bend * (size - 0.5 * bend))


def _softplus_bound(u: Array) -> Array:
    """tanh(u/2) / (2u): a parabola of this curvature touches softplus at ±u and lies above it elsewhere."""
    safe = jnp.where(jnp.abs(u) > 1e-3, u, 1.0)
    return jnp.where(jnp.abs(u) > 1e-3, jnp.tanh(safe / 2) / (2 * safe), 0.25)


def _half_deviance(eta: Array, count: Array) -> Array:
    """exp(η) − t η less its least value, t (exp(δ) − 1 − δ) with δ = η − log t: of large counts, the loss
    itself has no digits left for what matters."""
    some = count > 0
    safe = jnp.where(some, count, 1.0)
    off = eta - jnp.log(safe)
    return jnp.where(some, safe * (_bounded_expm1(off) - off), 1 + _bounded_expm1(eta))


def _bounded_expm1(eta: Array) -> Array:
    """exp less one, that goes on along a tangent where it would overflow in a long Newton step."""
    low = jnp.expm1(jnp.minimum(eta, _MOST))
    return jnp.where(eta <= _MOST, low, low + jnp.exp(_MOST) * (eta - _MOST))
