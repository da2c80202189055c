"""Rows stored in as few bits as possible without loss.

Drawing random rows is limited by memory bandwidth. Indicator features fit into single bits, counts into
bytes. Drawn rows have their original dtype again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.drawn import note_origin
from bilevax._util.checks import is_traced

PyTree = Any

LARGE = 100_000  # elements from which an array is worth packing
_WORD = 32
_WORTH_A_LAUNCH = 2**16  # words
_NARROW = 8  # rows this narrow use bytes: packed bits need a whole word


class Form(NamedTuple):
    """The original dtype and shape of an array's rows, and whether they are stored as bits."""

    dtype: Any
    shape: tuple[int, ...]
    bits: bool


class CompactRows(eqx.Module):
    """Rows whose large arrays are stored as bits or bytes where that is lossless.

    Args:
      rows: pytree of arrays with the same leading axis.
    """

    stored: PyTree
    forms: tuple[Form, ...] = eqx.field(static=True)

    def __init__(self, rows: PyTree):
        leaves, structure = jax.tree.flatten(rows)
        arrays = [leaf if is_traced(leaf) else jnp.asarray(leaf) for leaf in leaves]
        kept = [_pack(array) for array in arrays]
        self.forms = tuple(
            Form(array.dtype, array.shape[1:], one.dtype == jnp.uint32 and array.dtype != jnp.uint32)
            for array, one in zip(arrays, kept, strict=True)
        )
        self.stored = jax.tree.unflatten(structure, kept)

    def take(self, index: Array) -> PyTree:
        """The rows at an index."""
        rows = self._restored(jax.tree.map(lambda a: a.at[index].get(mode="promise_in_bounds"), self.stored))
        if index.ndim == 2 and jax.default_backend() != "cpu":
            for one, stored in zip(jax.tree.leaves(rows), jax.tree.leaves(self.stored), strict=True):
                if one.ndim == 3 and jnp.issubdtype(one.dtype, jnp.floating):
                    note_origin(one, stored, index)
        return rows

    def consecutive(self, first: Array, size: int) -> PyTree:
        """`size` consecutive rows from each of several first rows: (firsts, size, …)."""
        if first.shape[0] != 1:
            return self.take(first[:, None] + jnp.arange(size))
        taken = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first[0], size, allow_negative_indices=False)[None],
            self.stored,
        )
        return self._restored(taken)

    def unpacked(self) -> PyTree:
        """All rows."""
        return self._restored(self.stored)

    def _restored(self, rows: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(rows)
        return jax.tree.unflatten(
            structure, [_unpack(*pair) for pair in zip(leaves, self.forms, strict=True)]
        )


def _pack(array: Array) -> Array:
    """An array of rows as (rows, words), as bytes, or unchanged."""
    if (
        is_traced(array)
        or array.ndim < 2
        or array.size < LARGE
        or not jnp.issubdtype(array.dtype, jnp.floating)
    ):
        return array
    small = array.astype(jnp.int8)
    same = (small.astype(array.dtype) == array) & ~(jnp.signbit(array) & (array == 0))
    if not bool(jnp.all(same)):
        return array
    wide = math.prod(array.shape[1:]) > _NARROW
    return _in_bits(small) if wide and bool(jnp.all((small == 0) | (small == 1))) else small


@jax.jit  # where the rows are: they may be spread over devices
def _in_bits(small: Array) -> Array:
    rows = small.reshape(small.shape[0], -1)
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % _WORD)))
    words = padded.reshape(rows.shape[0], -1, _WORD).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(_WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _unpack(rows: Array, form: Form) -> Array:
    """Stored rows, with any leading axes, in their original form."""
    if not form.bits:
        return rows.astype(form.dtype)
    # Without the barrier each word is fetched once per bit. On an accelerator that is still cheaper than
    # launching another kernel, if the words are few.
    if jax.default_backend() == "cpu" or rows.size > _WORTH_A_LAUNCH:
        rows = jax.lax.optimization_barrier(rows)
    bits = (rows[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    flat = bits.astype(jnp.int32).astype(form.dtype).reshape((*rows.shape[:-1], -1))
    return flat[..., : math.prod(form.shape)].reshape(rows.shape[:-1] + form.shape)
