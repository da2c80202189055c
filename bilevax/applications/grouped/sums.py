r"""The squared loss, in closed form from sums of squares.

A block's rows enter through K = Σ a r rᵀ and k = Σ a r t of the rows it is fitted to and H, h and c = Σ a t²
of those it is judged on. With the precision P = (S Sᵀ)⁻¹ of the prior,

.. math::
    \beta &= (K + P)^{-1} (k + P \mu), \qquad f = \tfrac12 \beta^\top H \beta - h^\top \beta + \tfrac12 c \\
    q &= (K + P)^{-1} (H \beta - h), \qquad
    \partial f / \partial \mu = P q, \qquad \partial f / \partial P = q (\mu - \beta)^\top

So an evaluation of F takes a Cholesky factor per block, whatever its rows. All is in double precision: f is
a difference of sums.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.blocks import Blocks, Places
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.tiles import power_of_two

_MOST = 2**11  # blocks of a chunk
_ENTRIES = 2**24  # of the rows that are gathered at once


def block_sums(panel: Panel, places: Places, blocks: np.ndarray) -> np.ndarray:
    """Σ a (r, t)(r, t)ᵀ of the rows of some blocks, (blocks, d + 1, d + 1)."""
    out = np.zeros((len(blocks), panel.size + 1, panel.size + 1))
    ends = np.cumsum(places.tiles[blocks])
    most = max(_ENTRIES // (16 * (panel.size + 1)), 1)  # tiles
    first = 0
    while first < len(blocks):
        before = ends[first - 1] if first else 0
        after = max(int(np.searchsorted(ends, before + most, "right")), first + 1)
        owner, place, real = places.tiled(blocks[first:after])
        both = np.concatenate([panel.at(place), panel.target[place][..., None]], -1)
        weighted = both * np.where(real, panel.weight[place], 0.0)[..., None]
        if len(owner):
            starts = np.flatnonzero(np.diff(owner, prepend=-1))
            out[first + owner[starts]] = np.add.reduceat(np.swapaxes(weighted, 1, 2) @ both, starts, 0)
        first = after
    return out


def sums_of(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the rows that blocks are fitted to, and of those that they are judged on."""
    held = block_sums(blocks.panel, blocks.held, np.arange(blocks.count))
    # The rows outside a fold are all of the group but those of the fold; newcomers are fitted to fewer.
    order = np.argsort(blocks.group[: blocks.folds], kind="stable")
    firsts = np.flatnonzero(np.diff(blocks.group[order], prepend=-1))
    kept = np.add.reduceat(held[order], firsts, 0)[blocks.group] - held
    new = np.arange(blocks.folds, blocks.count)
    kept[new] = block_sums(blocks.panel, blocks.kept, new)
    return kept, held


class SquaredCrossValidation:
    """F and ∇F over blocks, as `CrossValidation` has them for any loss.

    Args:
      blocks: the blocks.
      prior: the form of the prior.
    """

    def __init__(self, blocks: Blocks, prior: Prior):
        self.prior, self.chunks = prior, []
        kept, held = sums_of(blocks)
        held *= blocks.judged[:, None, None]
        d, size = prior.size, min(_MOST, power_of_two(blocks.count))
        with jax.enable_x64(True):
            for first in range(0, blocks.count, size):
                part = slice(first, first + size)
                K, H, known = kept[part], held[part], blocks.panel.known[blocks.group[part]]
                arrays = (K[:, :d, :d], K[:, :d, d], H[:, :d, :d], H[:, :d, d], H[:, d, d], known)
                self.chunks.append(tuple(jnp.asarray(_padded(one, size)) for one in arrays))

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """F(x) and ∇F(x)."""
        with jax.enable_x64(True):
            x = {name: jnp.asarray(one, float) for name, one in x.items()}
            found = [_judge(self.prior, x, chunk) for chunk in self.chunks]
            value, slope = jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *found)
            return float(value), _chain(self.prior, x, slope)


def fit_sums(
    panel: Panel, prior: Prior, x: X, *, variance: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Coefficients (m, d, 1), shares and (m, d, d) variances of all groups, on all their rows."""
    whole, d = _whole(panel), prior.size
    coef, share = np.zeros((panel.groups, d, 1)), np.zeros(panel.groups)
    spreads = np.zeros((panel.groups, d, d)) if variance else None
    size = min(_MOST, power_of_two(panel.groups))
    with jax.enable_x64(True):
        x = {name: jnp.asarray(one, float) for name, one in x.items()}
        for first in range(0, panel.groups, size):
            chosen = np.arange(first, min(first + size, panel.groups))
            sums, known = block_sums(panel, whole, chosen)[:, :d], panel.known[chosen]
            both = (jnp.asarray(_padded(one, size)) for one in (sums, known))
            found = _fit(prior, x, *both, variance)
            coef[chosen, :, 0], share[chosen] = (np.asarray(one)[: len(chosen)] for one in found[:2])
            if spreads is not None:
                spreads[chosen] = np.asarray(found[2])[: len(chosen)]
    return coef, share, spreads


def held_out_sums(blocks: Blocks, prior: Prior, x: X) -> tuple[np.ndarray, np.ndarray]:
    """Errors of held-out rows in units of how uncertain their predictors are, and the rows' weights."""
    panel, d, spread = blocks.panel, prior.size, prior.matrix(x)
    kept = sums_of(blocks)[0]
    precision = np.linalg.inv(spread @ spread.T)
    mean = np.broadcast_to(np.asarray(x["mean"])[:, 0], (blocks.count, d))
    if prior.known:
        mean = mean + np.tensordot(panel.known[blocks.group], np.asarray(x["known"])[..., 0], 1)
    variance = np.linalg.inv(kept[:, :d, :d] + precision)
    beta = np.einsum("bde,be->bd", variance, kept[:, :d, d] + mean @ precision)
    owner, place, real = blocks.held.tiled(np.arange(blocks.count))
    rows = panel.at(place)
    error = panel.target[place] - np.einsum("tld,td->tl", rows, beta[owner])
    size = np.sqrt(1 + np.einsum("tld,tld->tl", rows @ variance[owner], rows))
    return (error / size)[real], (panel.weight[place] * blocks.judged[owner, None])[real]


def _whole(panel: Panel) -> Places:
    lengths = np.diff(panel.offsets)
    return Places(panel.offsets[:-1], np.zeros_like(lengths), lengths, lengths)


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    return np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1))


def _precision(prior: Prior, x: X) -> Array:
    spread = prior.spread(x)
    return jnp.linalg.inv(spread @ spread.T)


def _means(prior: Prior, x: X, known: Array) -> Array:
    return jax.vmap(lambda one: prior.mean(x, one)[:, 0])(known)


def _solver(matrices: Array) -> Any:
    factors = jax.lax.linalg.cholesky(matrices)

    def solve(right: Array) -> Array:
        half = jax.lax.linalg.triangular_solve(factors, right, left_side=True, lower=True)
        return jax.lax.linalg.triangular_solve(factors, half, left_side=True, lower=True, transpose_a=True)

    return solve


@functools.partial(jax.jit, static_argnums=0)
def _judge(prior: Prior, x: X, chunk: tuple[Array, ...]) -> tuple[Array, dict[str, Array]]:
    """The sum of f over some blocks, and its gradient in μ, P and the coefficients of metadata."""
    K, k, H, h, c, known = chunk
    P, mean = _precision(prior, x), _means(prior, x, known)
    solve = _solver(K + P)
    beta = solve((k + mean @ P)[..., None])[..., 0]
    by_beta = jnp.einsum("bde,be->bd", H, beta) - h
    q = solve(by_beta[..., None])[..., 0]
    value = 0.5 * (jnp.sum(beta * (by_beta - h)) + jnp.sum(c))
    by_mean = q @ P
    slope = {"mean": jnp.sum(by_mean, 0)[:, None], "precision": q.T @ (mean - beta)}
    if prior.known:
        slope["known"] = (known.T @ by_mean)[..., None]
    return value, slope


@functools.partial(jax.jit, static_argnums=0)
def _by_spread(prior: Prior, x: X, slope: Array) -> X:
    return jax.grad(lambda x: jnp.vdot(slope, _precision(prior, x)))(x)


def _chain(prior: Prior, x: X, slope: dict[str, Any]) -> X:
    """The gradient in x, from that in μ and P."""
    out = {name: np.array(one, float) for name, one in _by_spread(prior, x, slope["precision"]).items()}
    for name in ("mean", "known"):
        if name in slope:
            out[name] += slope[name]
    return out


@functools.partial(jax.jit, static_argnums=(0, 4))
def _fit(prior: Prior, x: X, sums: Array, known: Array, variance: bool) -> tuple[Array, ...]:
    d = prior.size
    P, mean, spread = _precision(prior, x), _means(prior, x, known), prior.spread(x)
    solve = _solver(sums[:, :, :d] + P)
    right = (sums[:, :, d] + mean @ P)[..., None]
    every = jnp.broadcast_to(jnp.eye(d, dtype=P.dtype), (len(sums), d, d))
    found = solve(jnp.concatenate([right, every], -1))
    left = found[..., 1:]
    share = jnp.mean(1 - jnp.diagonal(left, axis1=1, axis2=2) / jnp.sum(spread**2, 1), 1)
    return found[..., 0], share, left if variance else jnp.zeros(())
