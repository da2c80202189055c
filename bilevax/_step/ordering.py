"""Hints that stop the compiler from copying large arrays that are read and then overwritten in place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._util.trees import PyTree

_LARGE = 2**16  # entries from which an extra operation costs less than a copy of the array


def read_once(read: Callable[[], PyTree], slots: Array) -> PyTree:
    """Reads slots that are overwritten later in the same step.

    The compiler may fuse a read into every computation that uses it. If one of them comes after the write, it
    copies the whole memory in every step. It does not fuse through a cond.
    """
    blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(read))
    return jax.lax.cond(slots[0] >= 0, read, lambda: blank)


def after(slots: Array, count: int, value: PyTree) -> Array:
    """The same slots, out of `count`, made to depend on a value.

    The memory is then read for the value before it is written at the slots. Without that order the compiler
    copies all of it in every step.
    """
    firsts = [jnp.isnan(leaf[(0,) * leaf.ndim]) for leaf in jax.tree.leaves(value) if leaf.size]
    never = functools.reduce(jnp.logical_or, firsts)
    return jnp.minimum(slots, count - 1 + never.astype(slots.dtype))


def known_after(value: PyTree, tree: PyTree) -> PyTree:
    """The same tree, with its arrays made to depend on all of a value; on a CPU the large ones only.

    For x and the x before it, which change places in a step. Without an order between reading and replacing
    them, the compiler first copies both. A part of x may be read for what another part moves along, so that
    each has to wait for all.
    """
    firsts = [jnp.isnan(leaf[(0,) * leaf.ndim]) for leaf in jax.tree.leaves(value) if leaf.size]
    if not firsts:
        return tree
    one = jnp.minimum(1, 1 + functools.reduce(jnp.logical_or, firsts).astype(jnp.float32))
    least = _LARGE if jax.default_backend() == "cpu" else 0
    return jax.tree.map(lambda array: array * one.astype(array.dtype) if array.size >= least else array, tree)
