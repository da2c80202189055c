r"""One scalar per block, and the three gradients a step needs.

.. math:: \ell_i(x, y, v; \xi, \zeta) = f_i(x, y; \xi) - \langle v, \nabla_y g_i(x, y; \zeta) \rangle

with + ⟨v, c_i(x; ζ)⟩ in place of the bracket for a mean level. Then, where ∇_y f stands for the derivative of
all that follows y in ℓ (f, and the terms of levels that read y),

- ∂ℓ/∂x is the block's hyper-gradient term, if v ≈ [∇²_yy g]⁻¹ ∇_y f;
- −∂ℓ/∂y = ∇²_yy g · v − ∇_y f is the gradient of the quadratic whose minimiser is that v;
- −∂ℓ/∂v = ∇_y g is the lower gradient (∂ℓ/∂v = c for a mean level).

Summed over the sampled blocks, one reverse pass gives all three without a per-block gradient in x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._problem.view import BlockView, each_block
from bilevax._util.trees import PyTree, combine, result_dtype, spread

Scalar = Callable[[BlockView, dict[str, PyTree], dict[str, PyTree]], tuple[Array, Array]]


class Point(eqx.Module):
    """Where ℓ is evaluated: x, and per level the sampled slots' y (leading axis: sampled blocks).

    Under a risk also the weights of the sampled blocks in the mean of ∂ℓ/∂x; None if they all are one.
    """

    x: PyTree
    y: dict[str, PyTree]
    weights: Array | None = None


class Gradients(eqx.Module):
    """∂ℓ/∂x averaged over the sampled blocks, ∂ℓ/∂y and ∂ℓ/∂v per block, and the mean of f.

    At the point before, x is −∂ℓ/∂x. Under a risk, ∂ℓ/∂x is a weighted mean, and `values` are f per block.
    """

    x: PyTree
    y: dict[str, PyTree]
    v: dict[str, PyTree]
    objective: Array
    values: Array | None = None


def lagrangian(view: BlockView, y: dict[str, PyTree], v: dict[str, PyTree]) -> tuple[Array, Array]:
    """ℓ of one block, and its f."""
    f = view.f(y)
    return sum((view.term(name, y[name], v[name], y) for name in v), f), f


def with_terms(
    view: BlockView, name: str, y: dict[str, PyTree], by_y: PyTree, v: dict[str, PyTree]
) -> PyTree:
    """∂/∂y of all that follows the variable of a level: of f, and of the terms of the levels that read it."""
    if not v:
        return by_y

    def terms(own: PyTree) -> Array:
        there = y | {name: own}
        return sum((view.term(n, y[n], one, there) for n, one in v.items()), jnp.zeros((), result_dtype(own)))

    return combine((1, by_y), (1, jax.grad(terms)(y[name])))


def gradients(
    problem: Problem,
    point: Point,
    v: dict[str, PyTree],
    sample: Sample,
    sign: Any = 1.0,
    scalar: Scalar = lagrangian,
) -> Gradients:
    """The three gradients of a scalar at a point, on a sample.

    Where a batch reads few entries of x, the gradient by x is a sum into zeros, and the compiler turns it
    into a sum into whatever it is added to: no pass over x. It does so only if the gradient already has its
    sign and is divided by the number of blocks. So ℓ is scaled first, and the gradients by y and v are scaled
    back. (In less than 32 bits they would lose precision: there the gradient by x is scaled afterwards.)
    The weights of a risk are part of that scale: the gradients by y and v are as if there were none. To be
    scaled back they need a weight, so that one of zero counts as the square of the unit of rounding.

    Args:
      problem: the problem.
      point: x and y.
      v: the multipliers, per level.
      sample: the blocks and their rows.
      sign: the gradient by x is multiplied by this.
      scalar: what to differentiate: a function of (view, y, v) that returns ℓ and f of one block.
    """
    blocks, sign = sample.blocks.shape[0], jnp.asarray(sign)
    narrow = any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves((point, v)))
    share, weights = sign / blocks, point.weights

    def total(x: Any, y: Any, v: Any) -> tuple[Array, Any]:
        scalars, f = each_block(problem, x, sample, scalar, y, v)
        whole = jnp.sum(scalars if weights is None else _positive(weights, scalars.dtype) * scalars)
        whole = whole if narrow else share.astype(whole.dtype) * whole
        return whole, jnp.mean(f) if weights is None else (jnp.mean(f), f)

    (by_x, by_y, by_v), f = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(point.x, point.y, v)
    if narrow:
        by_x = combine((share, by_x))
    else:
        by_y, by_v = combine((sign * blocks, (by_y, by_v)))
    if weights is None:
        return Gradients(by_x, by_y, by_v, f)
    by_y, by_v = jax.tree.map(lambda a: a / spread(_positive(weights, a.dtype), a), (by_y, by_v))
    return Gradients(by_x, by_y, by_v, *f)


def _positive(weights: Array, dtype: Any) -> Array:
    return jnp.maximum(weights.astype(dtype), jnp.finfo(dtype).eps ** 2)


def upper_gradients(
    problem: Problem, point: Point, sample: Sample, v: dict[str, PyTree] | None = None
) -> dict[str, PyTree]:
    """∇_y f_i per sampled block; with the multipliers of some levels, the gradient of f_i and their terms.

    For a y that only these levels read, that is the gradient of all that follows it.
    """
    known = {} if v is None else v

    def one(view: BlockView, y: dict[str, PyTree], v: dict[str, PyTree]) -> Array:
        return sum((view.term(name, y[name], v[name], y) for name in v), view.f(y))

    def total(y: dict[str, PyTree]) -> Array:
        return jnp.sum(each_block(problem, point.x, sample, one, y, known))

    return jax.grad(total)(point.y)


def hessians(problem: Problem, name: str, point: Point, sample: Sample) -> Array:
    """∇²_yy g_i of one argmin level, per sampled block, as matrices over the flattened y."""

    def one(view: BlockView, y: PyTree, others: dict[str, PyTree]) -> Array:
        flat, unflatten = ravel_pytree(y)
        return jax.jacfwd(jax.grad(lambda flat: view.g(name, unflatten(flat), others)))(flat)

    return each_block(problem, point.x, sample, one, point.y[name], problem.read_by(name, point.y))


def lower_slopes(problem: Problem, name: str, point: Point, sample: Sample) -> PyTree:
    """∇_y g_i of one argmin level, per sampled block."""

    def one(view: BlockView, y: PyTree, others: dict[str, PyTree]) -> PyTree:
        return jax.grad(lambda y: view.g(name, y, others))(y)

    return each_block(problem, point.x, sample, one, point.y[name], problem.read_by(name, point.y))
