"""F, ∇F and the fits of groups for any loss, by Newton steps on all blocks together.

∇F is that of the scalar f − ⟨v, ∇_w g⟩ with v = [∇²_ww g]⁻¹ ∇_w f; lower problems start from their last
solutions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.blocks import Blocks, whole_groups
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.newton_steps import minimise
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.small_systems import solve
from bilevax.applications.grouped.tiles import chunks

_UNSOLVED = 1e-2  # of g, by which one more step would lower it
_WRONG = 0.1  # of f: the most that it may be wrong by, as w is off


class CrossValidation:
    """F and ∇F over blocks.

    Args:
      blocks: the blocks.
      prior: the form of the prior.
      loss: of a row.
    """

    def __init__(self, blocks: Blocks, prior: Prior, loss: Loss):
        self.blocks, self.prior, self.loss = blocks, prior, loss
        self.chunks = list(chunks(blocks))
        shape = (prior.width, prior.columns)
        self.w = [jnp.zeros((len(chunk.data["known"]), *shape)) for chunk in self.chunks]

    def part(self, places: np.ndarray) -> CrossValidation:
        """F of some blocks."""
        return CrossValidation(self.blocks.part(places), self.prior, self.loss)

    def errors(self, places: np.ndarray, x: X) -> tuple[np.ndarray, np.ndarray]:
        """Errors of the held-out rows of some folds in units of how uncertain their predictors are, and the
        rows' weights."""
        return held_out_tiles(self.blocks.rows_alike(places), self.prior, self.loss, x)

    def predictions(self, places: np.ndarray, x: X) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predictors (n, columns), targets and weights in F of the held-out rows of some folds."""
        return held_out_predictors(self.blocks.part(places), self.prior, self.loss, x)

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """F(x) and ∇F(x)."""
        here, found = on_device(x), []
        for place, chunk in enumerate(self.chunks):
            one, slope, self.w[place] = _judge(self.prior, self.loss, here, chunk.data, self.w[place])
            found.append((one, slope))
        value, gradient = jax.tree.map(lambda *parts: sum(np.asarray(part, float) for part in parts), *found)
        return float(value), gradient


def fit_tiles(
    panel: Panel, prior: Prior, loss: Loss, x: X, *, variance: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Coefficients (m, d, columns), shares and (m, d, d) variances of all groups, on all their rows, and how
    many of them could not be fitted well."""
    d, columns = prior.size, prior.columns
    coef, share = np.zeros((panel.groups, d, columns)), np.zeros(panel.groups)
    spreads, unsolved = np.zeros((panel.groups, d, d)) if variance else None, 0
    for chunk in chunks(whole_groups(panel)):
        found = _fit(prior, loss, on_device(x), chunk.data, variance)
        count = len(chunk.blocks)
        coef[chunk.blocks], share[chunk.blocks] = np.asarray(found[0])[:count], np.asarray(found[1])[:count]
        unsolved += int((~(np.asarray(found[2])[:count] <= _UNSOLVED)).sum())
        if spreads is not None:
            spreads[chunk.blocks] = np.asarray(found[3])[:count]
    return coef, share, spreads, unsolved


def held_out_tiles(blocks: Blocks, prior: Prior, loss: Loss, x: X) -> tuple[np.ndarray, np.ndarray]:
    """Errors of held-out rows in units of how uncertain their predictors are, and the rows' weights."""
    errors, weights = [], []
    for chunk in chunks(blocks):
        error, weight = _held_out(prior, loss, on_device(x), chunk.data)
        real = np.asarray(weight) > 0
        errors.append(np.asarray(error, float)[real])
        weights.append(np.asarray(weight, float)[real])
    return np.concatenate(errors), np.concatenate(weights)


def held_out_predictors(
    blocks: Blocks, prior: Prior, loss: Loss, x: X
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictors (n, columns), targets and weights in F of held-out rows."""
    found = []
    for chunk in chunks(blocks):
        eta, data = np.asarray(_predicted(prior, loss, on_device(x), chunk.data), float), chunk.data
        real = np.asarray(data["h"]) > 0
        found.append([np.asarray(one, float)[real] for one in (eta, data["th"], data["h"])])
    eta, target, weight = (np.concatenate(part) for part in zip(*found, strict=True))
    return eta, target, weight


@functools.partial(jax.jit, static_argnums=0)
def _predicted(prior: Prior, loss: Loss, x: X, data: dict[str, Array]) -> Array:
    w = _solve(prior, loss, x, data, jnp.zeros((len(data["known"]), prior.width, prior.columns)))[0]
    return _predictors(data["Xh"], _coefficients(prior, x, w, data), data["ofh"])


@functools.partial(jax.jit, static_argnums=0)
def _judge(prior: Prior, loss: Loss, x: X, data: dict[str, Array], w0: Array) -> tuple[Array, X, Array]:
    """The sum of f over some blocks, its gradient in x, and the lower solutions.

    The value is that of the scalar too: if w is a little off, f is wrong by ⟨v, ∇_w g⟩ to first order. If w
    is far off, as it cannot be found, that would be anything: the value is infinite, and x is not taken.
    """
    w, hessian, _ = _solve(prior, loss, x, data, w0, nearly=True)

    def of_held(beta: Array) -> tuple[Array, Array]:
        losses = _weighted(loss, _predictors(data["Xh"], beta, data["ofh"]), data["th"], data["h"])
        return jnp.sum(losses), jnp.sum(jnp.abs(losses))

    def of_kept(beta: Array) -> Array:
        return jnp.sum(_weighted(loss, _predictors(data["X"], beta, data["of"]), data["t"], data["a"]))

    def solved(right: Array) -> Array:
        return solve(hessian, right.reshape(*hessian.shape[:2], 1)).reshape(w.shape)

    spread, beta = prior.spread(x), _coefficients(prior, x, w, data)

    def bent(v: Array) -> tuple[Array, Array]:
        """∇ of the loss of the kept rows in β, and its derivative along S v."""
        return jax.jvp(jax.grad(of_kept), (beta,), (jnp.einsum("de,bec->bdc", spread, v),))

    (value, size), by_held = jax.value_and_grad(of_held, has_aux=True)(beta)
    slope = jnp.einsum("de,bdc->bec", spread, by_held)
    v = solved(slope)
    # The Hessian is that before the last step, which was a short one: v is refined once by that of w itself.
    by_kept, along = bent(v)
    more = solved(slope - v - jnp.einsum("de,bdc->bec", spread, along))
    v, along = v + more, along + bent(more)[1]

    def of_x(x: X) -> tuple[Array, Array]:
        """β, and what v is in terms of it."""
        return _coefficients(prior, x, w, data), jnp.einsum("de,bec->bdc", prior.spread(x), v)

    (_, turned), pull = jax.vjp(of_x, x)
    (gradient,) = pull((by_held - along, -by_kept))
    wrong = jnp.vdot(by_kept, turned) + jnp.vdot(v, w)  # ⟨v, ∇_w g⟩
    total = jnp.where(jnp.abs(wrong) <= _WRONG * size, value - wrong, jnp.inf)
    found = jnp.all(jnp.isfinite(w), (1, 2), keepdims=True)
    return total, gradient, jnp.where(found, w, w0)  # the next steps start here


@functools.partial(jax.jit, static_argnums=(0, 4))
def _fit(prior: Prior, loss: Loss, x: X, data: dict[str, Array], variance: bool) -> tuple[Array, ...]:
    """The coefficients of some groups, the share of the prior variance that their rows account for, and the
    variances; between them, by how much of its loss a group could still be better."""
    start = jnp.zeros((len(data["known"]), prior.width, prior.columns))
    w, hessian, left_over = _solve(prior, loss, x, data, start)
    # The rows of S for every column: coefficient (d, c) is row (d, c) of it times w.
    every = jnp.kron(prior.spread(x), jnp.eye(prior.columns, dtype=w.dtype))
    right = jnp.broadcast_to(every.T, (len(w), *every.T.shape))
    left = every @ solve(hessian, right)
    share = jnp.mean(1 - jnp.diagonal(left, axis1=1, axis2=2) / jnp.sum(every**2, 1), 1)
    return _coefficients(prior, x, w, data), share, left_over, left if variance else jnp.zeros(())


@functools.partial(jax.jit, static_argnums=0)
def _held_out(prior: Prior, loss: Loss, x: X, data: dict[str, Array]) -> tuple[Array, Array]:
    start = jnp.zeros((len(data["known"]), prior.width, 1))
    w, hessian, _ = _solve(prior, loss, x, data, start)
    inverse = solve(hessian, jnp.broadcast_to(jnp.eye(prior.width), hessian.shape))
    rows = jnp.einsum("tdl,de->tle", data["Xh"], prior.spread(x))
    variance = jnp.sum((rows @ inverse[data["ofh"]]) * rows, -1)
    error = data["th"] - _predictors(data["Xh"], _coefficients(prior, x, w, data), data["ofh"])[..., 0]
    return error / jnp.sqrt(1 + variance), data["h"]


def _coefficients(prior: Prior, x: X, w: Array, data: dict[str, Array]) -> Array:
    """β of every block, (blocks, d, columns)."""
    mean = jax.vmap(lambda one: prior.mean(x, one))(data["known"])
    return mean + jnp.einsum("de,bec->bdc", prior.spread(x), w)


def _predictors(rows: Array, beta: Array, owner: Array) -> Array:
    """Those of tiles (tiles, d, rows), as (tiles, rows, columns)."""
    return jnp.einsum("tdl,tdc->tlc", rows, beta[owner])


def _weighted(loss: Loss, eta: Array, target: Array, weight: Array) -> Array:
    values = jax.vmap(jax.vmap(loss))(eta, target)
    return jnp.where(weight > 0, weight * jnp.where(weight > 0, values, 0.0), 0.0)


def _solve(
    prior: Prior, loss: Loss, x: X, data: dict[str, Array], w0: Array, *, nearly: bool = False
) -> tuple[Array, Array, Array]:
    """The minimisers of g, its Hessians, and by how much of g one more step would lower it.

    Sums over rows are those of X, and S comes in once per block. With `nearly`, Newton steps end earlier, and
    the Hessians are those before the last of them.
    """
    rows, owner, weight = data["X"], data["of"], data["a"]
    spread, size = prior.spread(x), prior.width * prior.columns
    slope = jax.vmap(jax.vmap(jax.grad(loss)))
    bend = jax.vmap(jax.vmap(jax.hessian(loss)))

    def by_block(tiles: Array) -> Array:
        return jax.ops.segment_sum(tiles, owner, len(w0), indices_are_sorted=True)

    def predictors(w: Array) -> Array:
        return _predictors(rows, _coefficients(prior, x, w, data), owner)

    def value(w: Array) -> Array:
        losses = _weighted(loss, predictors(w), data["t"], weight)
        return by_block(jnp.sum(losses, 1)) + 0.5 * jnp.sum(w**2, (1, 2))

    def direction(w: Array, bend: Any = bend) -> tuple[Array, Array, Array]:
        """A step, by how much it lowers the parabola with the same gradient, and the Hessian."""
        eta = predictors(w)
        real = weight[..., None] > 0
        first = jnp.where(real, weight[..., None] * slope(eta, data["t"]), 0.0)
        second = jnp.where(real[..., None], weight[..., None, None] * bend(eta, data["t"]), 0.0)
        gradient = jnp.einsum("de,bdc->bec", spread, by_block(rows @ first)) + w
        if prior.columns == 1:
            curved = by_block((rows * second[..., 0, 0][:, None]) @ jnp.swapaxes(rows, 1, 2))
            hessian = spread.T @ curved @ spread
        else:
            curved = by_block(jnp.einsum("tdl,tlcp,tfl->tdcfp", rows, second, rows))
            hessian = jnp.einsum("de,bdcfp,fg->becgp", spread, curved, spread).reshape(-1, size, size)
        hessian += jnp.eye(size, dtype=hessian.dtype)
        step = solve(hessian, gradient.reshape(-1, size, 1)).reshape(w.shape)
        return step, 0.5 * jnp.sum(step * gradient, (1, 2)), hessian

    if loss.quadratic:
        step, gain, hessian = direction(w0)
        return w0 - step, hessian, jnp.zeros_like(gain)
    above: Any = None if loss.bound is None else jax.vmap(jax.vmap(loss.bound))

    def by_bound(w: Array) -> Array:
        return direction(w, lambda eta, target: above(eta, target)[..., None, None])[0]

    sure = None if above is None else by_bound
    w, now, (_, gain, hessian) = minimise(value, direction, sure, w0, nearly=nearly)
    if not nearly:
        _, gain, hessian = direction(w)
    return w, hessian, jnp.abs(gain) / (1 + jnp.abs(now))


def on_device(x: X) -> X:
    """x in the device's precision."""
    return jax.tree.map(lambda one: jnp.asarray(np.asarray(one, jnp.result_type(float))), x)
