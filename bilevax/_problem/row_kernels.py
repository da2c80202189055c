"""Kernels that fetch drawn rows as they are stored, by their numbers, and multiply them at once.

Forward, a thread has a row: it reads the words of its bits, and adds an entry of every vector where a bit
is set. Transposed, a thread has a column of each word: all threads of a warp read the same words,
coefficients and numbers of rows, and each adds to sums of its own. So a row of a hundred indicators costs
16 bytes, sums stay in registers, and no thread waits for another. Sums are in float32, in a fixed order.

The kernels are Pallas's, for NVIDIA GPUs. `plain` and `plain_transposed` are the same products for every
device, and the faster ones for few rows, which the compiler merges with what surrounds them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_WORD = 32
MANY = 2**15  # drawn rows from which a kernel pays
_SUMS = 64  # that a thread has room for, in the transposed product


class Drawn(NamedTuple):
    """Rows with these numbers, (blocks, batch), among the stored ones, and their width when unpacked."""

    stored: Array
    index: Array
    width: int

    @property
    def packed(self) -> bool:
        """Whether the rows are bits."""
        return self.stored.dtype == jnp.uint32


class Tiling(NamedTuple):
    """Rows and warps of a program; transposed, the programs of a block, and the rows read at once."""

    rows: int = 256
    warps: int = 4
    parts: int = 16
    together: int = 4


TILING = Tiling()


def taken(drawn: Drawn, dtype: Any) -> Array:
    """The rows themselves, (blocks, batch, width)."""
    rows = drawn.stored.at[drawn.index].get(mode="promise_in_bounds")
    if not drawn.packed:
        return rows.astype(dtype)
    bits = (rows[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    return bits.astype(jnp.int32).astype(dtype).reshape((*rows.shape[:-1], -1))[..., : drawn.width]


def plain(drawn: Drawn, vectors: Array) -> Array:
    """Rows times the vectors (blocks, k, width) of their blocks: (blocks, k, batch)."""
    return jnp.sum(taken(drawn, vectors.dtype)[:, None] * vectors[:, :, None], axis=-1)


def plain_transposed(drawn: Drawn, coefficients: Array) -> Array:
    """The transposed rows times coefficients (blocks, k, batch): (blocks, k, width)."""
    return jnp.sum(taken(drawn, coefficients.dtype)[:, None] * coefficients[..., None], axis=2)


def many(drawn: Drawn, dtype: Any) -> bool:
    """Whether the rows are of a kind and number for which kernels pay, where there are kernels."""
    batch = drawn.index.shape[1]
    return (
        dtype == jnp.float32
        and drawn.stored.dtype in (jnp.uint32, jnp.int8, jnp.float32)
        and drawn.index.size >= MANY
        and batch % TILING.rows == 0
        and batch % (TILING.parts * TILING.together) == 0
        and drawn.stored.size < 2**31
    )


def forward(drawn: Drawn, vectors: Array) -> Array:
    """As `plain`, on an NVIDIA GPU."""
    if drawn.packed and _triton() is not None:
        return packed_kernel(drawn, vectors)
    # Kept, or the compiler would compute the sums again in each operation that reads them.
    return jax.lax.optimization_barrier(plain(drawn, vectors))


def transposed(drawn: Drawn, coefficients: Array) -> Array:
    """As `plain_transposed`, on an NVIDIA GPU."""
    per_thread = -(-drawn.width // _WORD) * coefficients.shape[1]
    if per_thread > _SUMS or _triton() is None:
        return plain_transposed(drawn, coefficients)
    return transposed_kernel(drawn, coefficients)


@functools.cache
def _triton() -> Any:
    """The part of Pallas that compiles for NVIDIA GPUs; None if this JAX has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas import triton
    except ImportError:
        return None
    return triton


def packed_kernel(
    drawn: Drawn, vectors: Array, tiling: Tiling = TILING, interpret: bool = False, unroll: int = _WORD
) -> Array:
    """Rows of bits times vectors."""
    from jax.experimental import pallas as pl  # here, as it takes long to import

    width, words = drawn.width, drawn.stored.shape[1]
    blocks, k = vectors.shape[:2]
    batch = drawn.index.shape[1]

    def kernel(stored: Any, index: Any, vectors: Any, out: Any) -> None:
        block, here = pl.program_id(0), pl.ds(pl.program_id(1) * tiling.rows, tiling.rows)
        number = index[block, here]

        def add_bits(turn: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            first = turn * unroll
            word = stored[number, first // _WORD]
            for place in range(unroll):
                column = jnp.minimum(first + place, width - 1)  # bits beyond the width are zeros
                bit = (first % _WORD + place) if unroll < _WORD else place
                is_set = (word & (jnp.uint32(1) << jnp.uint32(bit))) != 0
                sums = tuple(
                    one + jnp.where(is_set, vectors[block, j, column], 0.0) for j, one in enumerate(sums)
                )
            return sums

        zeros = tuple(jnp.zeros(tiling.rows, jnp.float32) for _ in range(k))
        for j, one in enumerate(jax.lax.fori_loop(0, words * (_WORD // unroll), add_bits, zeros)):
            out[block, j, here] = one

    return _call(kernel, (blocks, batch // tiling.rows), (blocks, k, batch), tiling.warps, interpret)(
        drawn.stored, drawn.index, vectors
    )


def transposed_kernel(
    drawn: Drawn, coefficients: Array, tiling: Tiling = TILING, interpret: bool = False
) -> Array:
    """Transposed rows times coefficients. Each part of the rows has a sum of its own; they are added last."""
    from jax.experimental import pallas as pl

    blocks, k, batch = coefficients.shape
    groups = -(-drawn.width // _WORD)
    turns = batch // (tiling.parts * tiling.together)

    def kernel(stored: Any, index: Any, coefficients: Any, out: Any) -> None:
        block, part = pl.program_id(0), pl.program_id(1)
        lane = jnp.arange(_WORD)

        def entries(number: Array, group: int) -> Callable[[Array], Array]:
            """How a row's columns of a group weigh a coefficient."""
            if drawn.packed:
                is_set = (stored[number, group] & (jnp.uint32(1) << lane.astype(jnp.uint32))) != 0
                return lambda coefficient: jnp.where(is_set, coefficient, 0.0)
            columns = jnp.minimum(group * _WORD + lane, drawn.width - 1)
            values = stored[number, columns].astype(jnp.float32)
            return lambda coefficient: values * coefficient

        def add_rows(turn: Any, sums: Any) -> Any:
            first = (part * turns + turn) * tiling.together
            numbers = [index[block, first + row] for row in range(tiling.together)]
            weighs = [[entries(number, group) for group in range(groups)] for number in numbers]
            for row in range(tiling.together):
                given = [coefficients[block, j, first + row] for j in range(k)]
                sums = tuple(
                    tuple(one + weighs[row][group](given[j]) for j, one in enumerate(own))
                    for group, own in enumerate(sums)
                )
            return sums

        zeros = tuple(tuple(jnp.zeros(_WORD, jnp.float32) for _ in range(k)) for _ in range(groups))
        for group, own in enumerate(jax.lax.fori_loop(0, turns, add_rows, zeros)):
            for j, one in enumerate(own):
                out[block, part, j, pl.ds(group * _WORD, _WORD)] = one

    shape = (blocks, tiling.parts, k, groups * _WORD)
    sums = _call(kernel, (blocks, tiling.parts), shape, 1, interpret)(drawn.stored, drawn.index, coefficients)
    return jnp.sum(sums, axis=1)[..., : drawn.width]


def _call(kernel: Any, grid: tuple[int, int], shape: tuple[int, ...], warps: int, interpret: bool) -> Any:
    from jax.experimental import pallas as pl

    options = {} if interpret else {"compiler_params": _triton().CompilerParams(num_warps=warps)}
    out = jax.ShapeDtypeStruct(shape, np.float32)
    return pl.pallas_call(kernel, grid=grid, out_shape=out, interpret=interpret, **options)
