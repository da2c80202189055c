"""Programs that solve the small systems of many blocks, for the squared loss.

Blocks are the last axis of all arrays, so that arithmetic is on many of them at once, and they come in tiles
that stay in a processor's cache: one tile after the other takes a third of the time of all together. Batches
of factorisations may wait for each other on a CPU, and one after the other takes longer still.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.device_sums import on_accelerator

_TILE = 2**14  # entries of the matrices of a tile
_LEAST = 16  # blocks of a tile


def tiled(array: Any, size: int) -> Any:
    """Blocks (n, …) as tiles (n / blocks, …, blocks), for matrices of so many rows."""
    blocks = len(array)
    if not on_accelerator():
        blocks = min(blocks, max(_LEAST, 1 << (_TILE // size**2).bit_length()))
    module: Any = jnp if isinstance(array, Array) else np
    return module.moveaxis(array.reshape(len(array) // blocks, blocks, *array.shape[1:]), 1, -1)


def untiled(array: Any) -> np.ndarray:
    """Blocks (n, …), from tiles."""
    blocks = np.moveaxis(np.asarray(array), -1, 1)
    return blocks.reshape(len(blocks) * blocks.shape[1], *blocks.shape[2:])


def _summed(of_tile: Callable[..., tuple[Array, ...]], tiles: tuple[Array, ...]) -> tuple[Array, ...]:
    """The sums over tiles of what is found in each."""
    if len(tiles[0]) == 1:
        return of_tile(*(one[0] for one in tiles))
    return jax.tree.map(lambda one: jnp.sum(one, 0), jax.lax.map(lambda one: of_tile(*one), tiles))


@jax.jit
def judge(
    kept: Array, held: Array, known: Array, P: Array, centre: Array, slopes: Array
) -> tuple[Array, ...]:
    """The sum of f over some blocks, and its gradients in P, the mean and the slopes."""
    d = len(P)

    def of_tile(kept: Array, held: Array, known: Array) -> tuple[Array, ...]:
        H, h, c = held[:d, :d], held[:d, d], held[d, d]
        mean, matrices = centre[:, None] + slopes.T @ known, kept[:d, :d] + P[..., None]
        inverse, _ = inverses(matrices)
        beta = _solution(matrices, inverse, kept[:d, d] + P @ mean)
        by_beta = _product(H, beta) - h
        q = _solution(matrices, inverse, by_beta)
        value = 0.5 * (jnp.sum(beta * (by_beta - h)) + jnp.sum(c))
        by_mean = P @ q
        return value, q @ (mean - beta).T, jnp.sum(by_mean, 1), known @ by_mean.T

    return _summed(of_tile, (kept, held, known))


@jax.jit
def explained(
    total: Array, known: Array, real: Array, P: Array, centre: Array, slopes: Array
) -> tuple[Array, ...]:
    """What E and its gradient need of some groups, `real` ones: sums of what is left, of log |A + P|, of
    (μ − β)(μ − β)ᵀ and (A + P)⁻¹, and the gradients in the mean and the slopes."""
    d = len(P)

    def of_tile(total: Array, known: Array, real: Array) -> tuple[Array, ...]:
        mean, matrices = centre[:, None] + slopes.T @ known, total[:d, :d] + P[..., None]
        inverse, size = inverses(matrices)
        beta = _solution(matrices, inverse, total[:d, d] + P @ mean)
        off = (mean - beta) * real
        pull = P @ off
        left = jnp.sum(total[d, d]) - jnp.sum(total[:d, d] * beta) + jnp.sum(mean * pull)
        return left, size @ real, off @ off.T, inverse @ real, jnp.sum(pull, 1), known @ pull.T

    return _summed(of_tile, (total, known, real))


@functools.partial(jax.jit, static_argnums=6)
def fit(
    sums: Array, known: Array, P: Array, centre: Array, slopes: Array, between: Array, variance: bool
) -> tuple[Array, ...]:
    """The coefficients of some groups, the share of the variances `between` groups that their rows
    account for, and the variances; all in tiles."""
    d = len(P)

    def of_tile(sums: Array, known: Array) -> tuple[Array, ...]:
        matrices = sums[:d, :d] + P[..., None]
        left, _ = inverses(matrices)
        coef = _solution(matrices, left, sums[:d, d] + P @ (centre[:, None] + slopes.T @ known))
        own = jnp.diagonal(left).T  # (d, blocks)
        share = jnp.mean(1 - own / between[:, None], 0)
        return coef, share, left if variance else jnp.zeros(sums.shape[-1:])

    return jax.lax.map(lambda one: of_tile(*one), (sums, known))


def inverses(matrices: Array) -> tuple[Array, Array]:
    """Of positive definite matrices (d, d, blocks), by sweeping one pivot after the other; and the logarithms
    of their determinants, from the pivots."""
    d = len(matrices)

    def sweep(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        a, size = carry
        own = (jnp.arange(d) == k)[:, None]
        pivot, column = a[k, k], a[:, k]
        row = a[k] / pivot
        # Written as one expression for all entries: nothing but the result goes through memory.
        there, here = own[:, None], own[None]
        swept = jnp.where(here, -(column / pivot)[:, None], a - column[:, None] * row)
        return jnp.where(there, jnp.where(here, 1 / pivot, row), swept), size + jnp.log(pivot)

    return jax.lax.fori_loop(0, d, sweep, (matrices, jnp.zeros(matrices.shape[-1:], matrices.dtype)))


def _product(matrices: Array, vectors: Array) -> Array:
    return jnp.sum(matrices * vectors, 1)


def _solution(matrices: Array, inverse: Array, right: Array) -> Array:
    """The inverse times a vector, per block, refined once: a sweep loses more digits than a factorisation."""
    first = _product(inverse, right)
    return first + _product(inverse, right - _product(matrices, first))
