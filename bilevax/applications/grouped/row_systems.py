"""Programs that solve the small systems of groups with few rows; `row_space` has their equations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bilevax.applications.grouped.block_systems import inverses
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.newton_steps import minimise
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.small_systems import solve

_WRONG = 0.1  # of f: the most that it may be wrong by, as α is off


@functools.partial(jax.jit, static_argnums=0)
def judge(prior: Prior, loss: Loss, x: X, data: dict[str, Array], start: Array) -> tuple[Any, X, Array]:
    """The sum of f over some blocks, its gradient in x, and α."""
    offset, gram = _space(prior, x, data)
    alpha, _ = _solve(loss, offset, gram, data, start)
    slope, bend = _slope_and_bend(loss, data)
    eta = _predictors(offset, gram, alpha)
    pull = _times(gram, data["h"] * slope(eta))
    root = _root(data["a"] * bend(eta))
    q = pull - _times(gram, root * _solution(gram, root, root * pull))

    def scalar(x: X) -> tuple[Array, tuple[Array, Array]]:
        eta = _predictors(*_space(prior, x, data), alpha)
        losses = _weighted(loss, eta, data["t"][:, None], data["h"])
        wrong = jnp.vdot(q, data["a"] * slope(eta) + alpha)
        return jnp.sum(losses) - wrong, (wrong, jnp.sum(jnp.abs(losses)))

    (total, (wrong, size)), gradient = jax.value_and_grad(scalar, has_aux=True)(x)
    # Where α cannot be found, f is not known: x is not taken.
    total = jnp.where(jnp.abs(wrong) <= _WRONG * size, total, jnp.inf)
    found = jnp.all(jnp.isfinite(alpha), -1, keepdims=True)
    return total, gradient, jnp.where(found, alpha, start)


@functools.partial(jax.jit, static_argnums=0)
def explained(prior: Prior, loss: Loss, x: X, data: dict[str, Array]) -> tuple[Any, ...]:
    """What is left of the squares of some groups, Σ log |I + A G|, and their gradients."""
    offset, gram = _space(prior, x, data)
    weight = data["a"][:, 0]
    root = jnp.sqrt(weight)
    inverse, size = inverses(jnp.moveaxis(_system(gram, root[:, None])[:, 0], 0, -1))
    curved = root[:, :, None] * jnp.moveaxis(inverse, -1, 0) * root[:, None]
    off = data["t"] - offset
    alpha = jnp.einsum("gij,gj->gi", curved, off)

    def squares(x: X) -> Array:
        offset, gram = _space(prior, x, data)
        return -2 * jnp.vdot(alpha, offset) - jnp.einsum("gi,gij,gj->", alpha, gram, alpha)

    def grown(x: X) -> Array:
        return jnp.vdot(curved, _space(prior, x, data)[1])

    return jnp.vdot(off, alpha), jnp.sum(size), jax.grad(squares)(x), jax.grad(grown)(x)


@functools.partial(jax.jit, static_argnums=0)
def fit(prior: Prior, loss: Loss, x: X, data: dict[str, Array]) -> tuple[Array, ...]:
    """Coefficients (groups, d), matrices Y and Z with S Sᵀ − Yᵀ Z as their variance, and by how much of its
    loss a group could still be better."""
    offset, gram = _space(prior, x, data)
    alpha, left_over = _solve(loss, offset, gram, data, jnp.zeros_like(data["a"]))
    spread, mean = prior.spread(x), _means(prior, x, data)
    along = prior.along(x, data["X"]) @ spread.T
    beta = mean + jnp.einsum("gnd,gn->gd", along, alpha[:, 0])
    root = _root(data["a"] * _slope_and_bend(loss, data)[1](_predictors(offset, gram, alpha)))
    across = root[:, 0, :, None] * along
    return beta, across, solve(_system(gram, root)[:, 0], across), left_over


@functools.partial(jax.jit, static_argnums=0)
def held_out(prior: Prior, loss: Loss, x: X, data: dict[str, Array]) -> tuple[Array, Array]:
    """Predictors of all rows by every block, and their variances."""
    offset, gram = _space(prior, x, data)
    alpha, _ = _solve(loss, offset, gram, data, jnp.zeros_like(data["a"]))
    eta = _predictors(offset, gram, alpha)
    root = _root(data["a"] * _slope_and_bend(loss, data)[1](eta))
    across = root[..., None] * gram[:, None]
    rows = gram.shape[-1]
    left = solve(_system(gram, root).reshape(-1, rows, rows), across.reshape(-1, rows, rows))
    own = jnp.sum(across * left.reshape(across.shape), 2)
    return eta, jnp.diagonal(gram, axis1=1, axis2=2)[:, None] - own


def _means(prior: Prior, x: X, data: dict[str, Array]) -> Array:
    return jax.vmap(lambda one: prior.mean(x, one))(data["known"])[..., 0]


def _space(prior: Prior, x: X, data: dict[str, Array]) -> tuple[Array, Array]:
    """η₀ (groups, rows) and G (groups, rows, rows)."""
    along = prior.along(x, data["X"])
    return jnp.einsum("gnd,gd->gn", data["X"], _means(prior, x, data)), along @ jnp.swapaxes(along, 1, 2)


def _times(gram: Array, vectors: Array) -> Array:
    return jnp.einsum("gij,gmj->gmi", gram, vectors)


def _predictors(offset: Array, gram: Array, alpha: Array) -> Array:
    return offset[:, None] + _times(gram, alpha)


def _weighted(loss: Loss, eta: Array, target: Array, weight: Array) -> Array:
    values = _every(loss)(eta, jnp.broadcast_to(target, eta.shape))
    return jnp.where(weight > 0, weight * jnp.where(weight > 0, values, 0.0), 0.0)


def _every(function: Any) -> Any:
    """A function of one predictor and one target, for arrays (groups, blocks, rows)."""
    return jax.vmap(jax.vmap(jax.vmap(lambda eta, target: function(eta[None], target))))


def _slope_and_bend(loss: Loss, data: dict[str, Array]) -> tuple[Any, Any]:
    """ℓ' and ℓ'' of rows as functions of predictors; those of padded rows are zero."""
    real = (data["a"] > 0) | (data["h"] > 0)

    def of(function: Any, entry: Any) -> Any:
        every = _every(lambda eta, target: entry(function(eta, target)))
        return lambda eta: jnp.where(real, every(eta, jnp.broadcast_to(data["t"][:, None], eta.shape)), 0.0)

    return of(jax.grad(loss), lambda one: one[0]), of(jax.hessian(loss), lambda one: one[0, 0])


def _root(curvature: Array) -> Array:
    return jnp.sqrt(jnp.maximum(curvature, 0.0))


def _system(gram: Array, root: Array) -> Array:
    """B = I + W^½ G W^½ of every block."""
    return jnp.eye(gram.shape[-1]) + root[..., None] * gram[:, None] * root[..., None, :]


def _solution(gram: Array, root: Array, right: Array) -> Array:
    rows = gram.shape[-1]
    found = solve(_system(gram, root).reshape(-1, rows, rows), right.reshape(-1, rows, 1))
    return found.reshape(right.shape)


def _solve(
    loss: Loss, offset: Array, gram: Array, data: dict[str, Array], start: Array
) -> tuple[Array, Array]:
    """α of every block, and by how much of g one more step would lower it."""
    slope, bend = _slope_and_bend(loss, data)
    weight, shape = data["a"], start.shape

    def value(alpha: Array) -> Array:
        alpha = alpha.reshape(shape)
        pull = _times(gram, alpha)
        losses = _weighted(loss, offset[:, None] + pull, data["t"][:, None], weight)
        return jnp.sum(losses + 0.5 * alpha * pull, -1).ravel()

    def direction(alpha: Array, bend: Any = bend) -> tuple[Array, Array]:
        alpha = alpha.reshape(shape)
        eta = _predictors(offset, gram, alpha)
        rho = weight * slope(eta) + alpha
        pull, root = _times(gram, rho), _root(weight * bend(eta))
        step = rho - root * _solution(gram, root, root * pull)
        return step.reshape(-1, shape[-1]), 0.5 * jnp.sum(step * pull, -1).ravel()

    flat = start.reshape(-1, shape[-1])
    if loss.quadratic:
        alpha = flat - direction(flat)[0]
        return alpha.reshape(shape), jnp.zeros(len(flat))
    above: Any = None if loss.bound is None else _every(loss.bound)

    def by_bound(alpha: Array) -> Array:
        return direction(alpha, lambda eta: above(eta, jnp.broadcast_to(data["t"][:, None], eta.shape)))[0]

    alpha, now, _ = minimise(value, direction, None if above is None else by_bound, flat)
    gain = direction(alpha)[1]
    return alpha.reshape(shape), jnp.abs(gain) / (1 + jnp.abs(now))
