r"""One scalar per block, and the three gradients a step needs.

.. math:: \ell_i(x, y, v; \xi, \zeta) = f_i(x, y; \xi) - \langle v, \nabla_y g_i(x, y; \zeta) \rangle

with + ⟨v, c_i(x; ζ)⟩ in place of the bracket for a mean level. Then

- ∂ℓ/∂x is the block's hyper-gradient term, if v ≈ [∇²_yy g]⁻¹ ∇_y f;
- −∂ℓ/∂y = ∇²_yy g · v − ∇_y f is the gradient of the quadratic whose minimiser is that v;
- −∂ℓ/∂v = ∇_y g is the lower gradient (∂ℓ/∂v = c for a mean level).

Summed over the sampled blocks, one reverse pass gives all three without a per-block gradient in x.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.levels import Argmin
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._util.trees import combine

PyTree = Any


class Point(eqx.Module):
    """Where ℓ is taken: x, and per level the sampled slots' y (leading axis: sampled blocks)."""

    x: PyTree
    y: dict[str, PyTree]


class Gradients(eqx.Module):
    """∂ℓ/∂x averaged over the sampled blocks, ∂ℓ/∂y and ∂ℓ/∂v per block, and the mean of f.

    At the point before, x is −∂ℓ/∂x.
    """

    x: PyTree
    y: dict[str, PyTree]
    v: dict[str, PyTree]
    objective: Array


def gradients(
    problem: Problem, point: Point, v: dict[str, PyTree], sample: Sample, sign: Any = 1.0
) -> Gradients:
    """The three gradients at a point, on a sample; that by x times a sign.

    Where a batch looks at few of the numbers of x, its gradient is a sum into zeros, which the compiler turns
    into a sum into whatever it is added to: no pass over x. It does so only if the gradient comes with its
    sign, and divided by the number of blocks. The gradients by y and v are put right afterwards. (They would
    lose by it in less than 32 bits: there the gradient by x is divided afterwards.)
    """
    blocks, sign = sample.blocks.shape[0], jnp.asarray(sign)
    narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves((point, v)))
    share = sign / blocks

    def one(x: Any, y: Any, v: Any, constants: Any, upper: Any, lower: Any) -> tuple[Array, Array]:
        x = problem.see(x, constants, lower)
        f = problem.upper_value(x, y, constants, upper.rows, upper.weight)
        terms = [
            level.pairing(x, y[name], v[name], constants, lower[name].rows, lower[name].weight)
            for name, level in problem.levels.items()
        ]
        return sum(terms, f), f

    def total(x: Any, y: Any, v: Any) -> tuple[Array, Array]:
        scalars, f = over_blocks(one, sample)(x, y, v, sample.constants, sample.upper, sample.lower)
        scalar = jnp.sum(scalars)
        return scalar if narrow else share.astype(scalar.dtype) * scalar, jnp.mean(f)

    (by_x, by_y, by_v), f = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(point.x, point.y, v)
    if narrow:
        by_x = combine((share, by_x))
    else:
        by_y, by_v = combine((sign * blocks, (by_y, by_v)))
    return Gradients(by_x, by_y, by_v, f)


def upper_gradients(problem: Problem, point: Point, sample: Sample) -> dict[str, PyTree]:
    """∇_y f_i per sampled block."""

    def one(x: Any, y: Any, _: Any, constants: Any, upper: Any, lower: Any) -> Array:
        return problem.upper_value(x, y, constants, upper.rows, upper.weight)

    rows = (sample.constants, sample.upper, sample.lower)
    return jax.grad(lambda y: jnp.sum(over_blocks(one, sample)(point.x, y, y, *rows)))(point.y)


def hessians(problem: Problem, name: str, point: Point, sample: Sample) -> Array:
    """∇²_yy g_i of one argmin level, per sampled block, as matrices over the flattened y."""
    level = problem.levels[name]
    assert isinstance(level, Argmin)

    def one(x: Any, y: Any, _: Any, constants: Any, upper: Any, lower: Any) -> Array:
        flat, unflatten = ravel_pytree(y)

        def value(flat: Array) -> Array:
            return level.value(x, unflatten(flat), constants, lower[name].rows, lower[name].weight)

        return jax.jacfwd(jax.grad(value))(flat)

    rows = (sample.constants, sample.upper, sample.lower)
    return over_blocks(one, sample)(point.x, point.y[name], point.y[name], *rows)


def over_blocks(function: Any, sample: Sample) -> Any:
    """vmap over the sampled blocks of function(x, y, v, constants, upper batch, lower batches)."""
    lower = {name: batch.axis for name, batch in sample.lower.items()}
    return jax.vmap(function, in_axes=(None, 0, 0, 0, sample.upper.axis, lower))
