"""Arithmetic on pytrees, with coefficients cast to each leaf's own dtype."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PyTree = Any


def combine(*terms: tuple[Any, PyTree]) -> PyTree:
    """The linear combination of trees given as (coefficient, tree) pairs."""
    coefficients = [coefficient for coefficient, _ in terms]
    trees = [tree for _, tree in terms]

    def add(*leaves: Array) -> Array:
        total = jnp.asarray(coefficients[0], leaves[0].dtype) * leaves[0]
        for coefficient, leaf in zip(coefficients[1:], leaves[1:], strict=True):
            total = total + jnp.asarray(coefficient, leaf.dtype) * leaf
        return total

    return jax.tree.map(add, *trees)


def step_along(start: PyTree, amount: Array, direction: PyTree) -> PyTree:
    """start − amount · direction, where amount has one entry per slot (leading axes of the leaves)."""

    def move(value: Array, slope: Array) -> Array:
        return value - spread(amount, value) * slope

    return jax.tree.map(move, start, direction)


def spread(scalars: Array, like: Array) -> Array:
    """Per-slot scalars, shaped and typed to multiply the slots' leaf `like`."""
    shape = scalars.shape + (1,) * (like.ndim - scalars.ndim)
    return jnp.reshape(scalars, shape).astype(like.dtype)


def where_slot(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    """Per-slot choice between two trees with the same leading axes as `condition`."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(jnp.reshape(condition, condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(choose, yes, no)


def inner(a: PyTree, b: PyTree) -> Array:
    """The Euclidean inner product of two trees."""
    products = [jnp.vdot(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return sum(products[1:], products[0])


def norm(tree: PyTree) -> Array:
    """The Euclidean norm of a tree."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def all_finite(tree: PyTree) -> Array:
    """Whether every floating entry is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def zeros_like(tree: PyTree) -> PyTree:
    """A tree of zeros of the same shapes."""
    return jax.tree.map(jnp.zeros_like, tree)


def result_dtype(tree: PyTree) -> jnp.dtype:
    """The floating dtype that all leaves of a tree promote to (at least float32)."""
    return jnp.result_type(jnp.float32, *[leaf.dtype for leaf in jax.tree.leaves(tree)])


def root_mean_square(trees: list[tuple[PyTree, int]]) -> Array:
    """Over the slots of trees, each given with how many of its leading axes count slots; 0 for none."""
    slots = sum(math.prod(jax.tree.leaves(tree)[0].shape[:axes]) for tree, axes in trees)
    return norm([tree for tree, _ in trees]) / max(slots, 1) ** 0.5
