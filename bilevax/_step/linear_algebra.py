"""Small dense systems, one per slot: solving, and keeping eigenvalues above a floor."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._util.trees import PyTree

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def raise_eigenvalues(
    matrices: Float[Array, "slots d d"], floor: Any, reflected: bool = False
) -> tuple[Float[Array, "slots d d"], Int[Array, ""]]:
    """The nearest symmetric matrices with eigenvalues ≥ floor (S_λ), and how many had to be changed.

    If `reflected`, an eigenvalue below the floor becomes as much larger than it, in place of equal to it.

    The floor is a number, or one per slot. A Cholesky factorisation of H − floor · 1 shows whether a matrix
    is already in the set. The others are changed: on a CPU by decomposing them one by one; on an accelerator,
    where products are much cheaper than eigenvalues, by `positive_part`.
    """
    size = matrices.shape[-1]
    floor = jnp.broadcast_to(jnp.asarray(floor, matrices.dtype), matrices.shape[:1])[:, None, None]
    symmetric = (matrices + jnp.swapaxes(matrices, -1, -2)) / 2
    if size == 1:
        raised = floor + jnp.abs(symmetric - floor) if reflected else jnp.maximum(symmetric, floor)
        return raised, jnp.sum(symmetric < floor, dtype=jnp.int32)
    shifted = symmetric - floor * jnp.eye(size, dtype=matrices.dtype)
    low = jax.vmap(one_by_one(lambda matrix: ~jnp.isfinite(_cholesky(matrix)[-1, -1])))(shifted)
    if jax.default_backend() != "cpu":
        times = 2 if reflected else 1  # |A| = A₊ + (A₊ − A)

        def change() -> Array:
            return symmetric + times * (positive_part(shifted) - shifted)

        changed = run_if(jnp.any(low), change, symmetric)
        return jnp.where(low[:, None, None], changed, symmetric), jnp.sum(low, dtype=jnp.int32)

    def lift(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        matrices, low = carry
        place = jnp.argmax(low)
        values, vectors = one_by_one(_eigh)(matrices[place])
        least = floor[place, 0, 0]
        values = least + jnp.abs(values - least) if reflected else jnp.maximum(values, least)
        lifted = (vectors * values) @ vectors.T
        return matrices.at[place].set((lifted + lifted.T) / 2), low.at[place].set(False)

    lifted, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), lift, (symmetric, low))
    return lifted, jnp.sum(low, dtype=jnp.int32)


def positive_part(matrices: Float[Array, "slots d d"]) -> Float[Array, "slots d d"]:
    """Symmetric matrices with their negative eigenvalues set to zero, by products alone.

    A₊ = (A + A sign A)/2, and X ← (3X − X³)/2 from A/‖A‖ tends to sign A. An eigenvalue a of A/‖A‖ grows by
    half in each turn until it is near ±1. Those that never get there are below the rounding error of A, which
    is added, so that none is left below zero.
    """
    size, dtype = matrices.shape[-1], matrices.dtype
    rounding = 4 * jnp.finfo(dtype).eps
    turns = math.ceil(math.log(1 / float(rounding)) / math.log(1.5)) + 6
    largest = jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True)
    scaled = matrices / jnp.maximum(largest, jnp.finfo(dtype).tiny)
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def turn(_: Array, X: Array) -> Array:
        X = 1.5 * X - 0.5 * product(X, product(X, X))
        return (X + jnp.swapaxes(X, -1, -2)) / 2

    sign = jax.lax.fori_loop(0, turns, turn, scaled)
    part = (scaled + product(scaled, sign)) / 2
    part = (part + jnp.swapaxes(part, -1, -2)) / 2 + rounding * jnp.eye(size, dtype=dtype)
    return part * largest


def solve(matrices: Float[Array, "slots d d"], right: Float[Array, "slots d k"]) -> Float[Array, "slots d k"]:
    """The solutions of positive definite systems; `right` has its right-hand sides as last axis."""
    if matrices.shape[-1] == 1:
        return right / matrices
    return jax.vmap(one_by_one(solve_one))(matrices, right)


def solve_one(matrix: Float[Array, "d d"], right: Float[Array, "d k"]) -> Float[Array, "d k"]:
    """The solution of one positive definite system; under a vmap to be called by `one_by_one`."""
    factor = _cholesky(matrix)
    half = jax.lax.linalg.triangular_solve(factor, right, left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)


def free_part(
    matrices: Float[Array, "slots d d"], free: Float[Array, "slots d"]
) -> Float[Array, "slots d d"]:
    """Matrices in the free entries alone: those of the identity in the others, which `free` has zeros for."""
    both = free[..., :, None] * free[..., None, :]
    return both * matrices + (1 - free)[..., :, None] * jnp.eye(matrices.shape[-1], dtype=matrices.dtype)


def solve_indefinite(
    matrices: Float[Array, "slots d d"], right: Float[Array, "slots d k"]
) -> Float[Array, "slots d k"]:
    """The solutions of systems that need not be positive definite."""
    return jax.vmap(one_by_one(jnp.linalg.solve))(matrices, right)


def one_by_one(function: Any) -> Any:
    """A function of one matrix that a vmap batches on an accelerator, and turns into a loop on a CPU.

    A batched factorisation on the CPU waits inside a worker thread for other workers to do its parts. On a
    machine with two cores, two of them at once wait for each other for ever: a deadlock.
    """
    return jax.custom_batching.sequential_vmap(function) if jax.default_backend() == "cpu" else function


def run_if(condition: Array, compute: Any, otherwise: Any) -> Any:
    """compute() if the condition holds. A loop of at most one pass: unlike a cond, skipped under vmap too."""
    return change_if(condition, lambda _: compute(), otherwise)


def change_if(condition: Array, change: Any, value: Any) -> Any:
    """change(value) if the condition holds; in place, if `change` reads the value from its argument only."""
    return jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.zeros((), bool), change(carry[1])), (condition, value)
    )[1]


def _eigh(matrix: Array) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    return values, vectors


def _cholesky(matrix: Array) -> Array:
    return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)


def flatten_slots(tree: PyTree) -> Float[Array, "slots d"]:
    """Each slot's tree as one vector."""
    return jax.vmap(lambda one: ravel_pytree(one)[0])(tree)


def unflatten_slots(flat: Float[Array, "slots d"], like: PyTree) -> PyTree:
    """The inverse of `flatten_slots`."""
    one = jax.tree.map(lambda a: a[0], like)
    unravel = ravel_pytree(one)[1]
    return jax.vmap(unravel)(flat)
