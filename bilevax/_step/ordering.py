"""Hints that stop the compiler from copying large arrays that are read and then overwritten in place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._util.trees import PyTree

_LARGE = 2**16  # numbers from which an array is worth an operation more that spares a copy


def read_once(read: Callable[[], PyTree], slots: Array) -> PyTree:
    """Slots that are written to afterwards, as read by a function.

    A read may be merged into every computation that uses it, some of which come after the write: the compiler
    then copies the whole memory in every step. It does not look into a cond.
    """
    blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(read))
    return jax.lax.cond(slots[0] >= 0, read, lambda: blank)


def after(slots: Array, count: int, value: PyTree) -> Array:
    """The same slots of so many, but known only when a value is.

    A memory is then read for the value before it is written at the slots. Without that order between the two,
    the compiler copies all of it in every step.
    """
    firsts = [jnp.isnan(leaf[(0,) * leaf.ndim]) for leaf in jax.tree.leaves(value) if leaf.size]
    never = functools.reduce(jnp.logical_or, firsts)
    return jnp.minimum(slots, count - 1 + never.astype(slots.dtype))


def known_after(value: PyTree, tree: PyTree) -> PyTree:
    """The same tree, but large arrays of it are known only when the value is.

    For x and the x before it, which change places in a step: without an order between what is computed from
    them and what replaces them, the compiler first makes a copy of both.
    """

    def late(array: Array, value: Array) -> Array:
        if array.size < _LARGE:
            return array
        first = value[(0,) * value.ndim]
        return array * jnp.minimum(1, 1 + jnp.isnan(first).astype(jnp.float32)).astype(array.dtype)

    return jax.tree.map(late, tree, value)
