r"""Stored gradients, with which the noise of a finite sum vanishes.

ℓ is a sum of parts with rows of their own: f on the upper rows, and −⟨v, ∇_y g⟩ on those of each lower
source. Of each part the newest gradient of every block i and row group k is stored, a_ik, with its mean
:math:`\bar a_i = \sum_k w_{ik} a_{ik}` over the K_i groups, w_ik being a group's share of the rows. A fresh
gradient g_ik of a uniformly drawn group then gives

.. math:: \bar a_i + K_i w_{ik} (g_{ik} - a_{ik})

whose mean is the gradient on all rows, and whose noise vanishes as the stored gradients become the present
ones. In x the mean is over the blocks as well, so that sampling blocks adds no noise either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.groups import Drawn
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._problem.view import BlockView, each_block
from bilevax._step.lagrangian import Point
from bilevax._step.ordering import after, read_once
from bilevax._step.slots import gather, scatter
from bilevax._util.trees import PyTree, spread


class Slopes(eqx.Module):
    """The gradients of one part of ℓ: by x, and by level those by y and by v.

    Gradients by variables that a part does not depend on are None or left out.
    """

    x: PyTree
    y: dict[str, PyTree]
    v: dict[str, PyTree]


class Part(eqx.Module):
    """The stored gradients of one part.

    Attributes:
      stored: with leading axis m K: that of block i and group k is in row i K + k.
      mean: their means over the groups, with leading axis m; of x, over the blocks too.
      most: K, the groups of the longest block.
    """

    stored: Slopes
    mean: Slopes
    most: int = eqx.field(static=True)

    def reduce(self, fresh: Slopes, blocks: Array, drawn: Drawn, count: int) -> tuple[Slopes, Part]:
        """The variance-reduced gradients of the drawn groups, and the part with the fresh ones stored.

        Args:
          fresh: the gradients of the drawn groups.
          blocks: whose groups they are.
          drawn: which groups.
          count: m.
        """
        places = blocks * self.most + drawn.number
        change = jax.tree.map(jnp.subtract, fresh, read_once(lambda: gather(self.stored, places), places))
        per_block, mean = (change.y, change.v), gather((self.mean.y, self.mean.v), blocks)
        y, v = _plus(mean, drawn.scale, per_block)
        mean_y, mean_v = scatter((self.mean.y, self.mean.v), blocks, _plus(mean, drawn.share, per_block))
        x = _plus_sum(self.mean.x, drawn.scale / blocks.shape[0], change.x)
        mean_x = _plus_sum(self.mean.x, drawn.share / count, change.x)
        rows = jax.tree.leaves(self.stored)[0].shape[0]
        places = after(places, rows, (x, y, v, mean_x))
        part = Part(scatter(self.stored, places, fresh), Slopes(mean_x, mean_y, mean_v), self.most)
        return Slopes(x, y, v), part

    def insert(self, fresh: Slopes, blocks: Array, drawn: Drawn, count: int) -> Part:
        """The part with more gradients stored and added to its means, while it is being filled."""
        places = blocks * self.most + drawn.number
        kept = drawn.share > 0  # otherwise the place belongs to another group

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(spread(kept, new).astype(bool), new, old)

        rows = jax.tree.map(choose, fresh, gather(self.stored, places))
        means = (self.mean.y, self.mean.v)
        y, v = scatter(means, blocks, _plus(gather(means, blocks), drawn.share, (fresh.y, fresh.v)))
        x = _plus_sum(self.mean.x, drawn.share / count, fresh.x)
        return Part(scatter(self.stored, places, rows), Slopes(x, y, v), self.most)


def blank_part(like: Slopes, blocks: int, most: int) -> Part:
    """A part of zeros, for gradients of the shapes that `like` has for one or more blocks."""

    def zeros(rows: tuple[int, ...]) -> Any:
        return lambda leaf: jnp.zeros(rows + leaf.shape[1:], leaf.dtype)

    per_block = jax.tree.map(zeros((blocks,)), (like.y, like.v))
    return Part(
        jax.tree.map(zeros((blocks * most,)), like), Slopes(jax.tree.map(zeros(()), like.x), *per_block), most
    )


def upper_slopes(problem: Problem, point: Point, sample: Sample, by_x: bool) -> tuple[Slopes, Array]:
    """The gradients of f by y and (`by_x`) by x, and f itself, per block."""

    def one(view: BlockView, y: dict[str, PyTree]) -> tuple[Array, Any]:
        def f(y: dict[str, PyTree], x: PyTree) -> Array:
            return view.at(x).f(y)

        return jax.value_and_grad(f, argnums=(0, 1) if by_x else 0)(y, point.x)

    value, found = each_block(problem, point.x, sample, one, point.y)
    by_y, by_x_too = found if by_x else (found, None)
    return Slopes(_weighed(point, by_x_too), by_y, {}), value


def lower_slopes(
    problem: Problem, names: list[str], point: Point, v: dict[str, PyTree], sample: Sample, by_x: bool
) -> Slopes:
    """The gradients of the terms of some lower levels, per block."""

    def one(view: BlockView, y: dict[str, PyTree], v: dict[str, PyTree]) -> Any:
        def term(y: dict[str, PyTree], v: dict[str, PyTree], x: PyTree) -> Array:
            return _terms(view.at(x), y, v)

        return jax.grad(term, argnums=(0, 1, 2) if by_x else (0, 1))(y, v, point.x)

    ours = {name: v[name] for name in names}
    by_y, by_v, *by_x_too = each_block(problem, point.x, sample, one, _seen_by(problem, names, point), ours)
    # The term of a level without a Hessian, ⟨v, c(x)⟩, does not contain its own y.
    kept = {name for name in names if problem.levels[name].has_hessian}
    kept |= {other for name in names for other in problem.levels[name].reads}
    by_y = {name: one for name, one in by_y.items() if name in kept}
    return Slopes(_weighed(point, by_x_too[0]) if by_x else None, by_y, by_v)


def _weighed(point: Point, by_x: PyTree) -> PyTree:
    """Gradients by x per block, times the weights of the blocks under a risk."""
    weights = point.weights
    return by_x if weights is None else jax.tree.map(lambda a: spread(weights, a) * a, by_x)


def upper_sees_x(problem: Problem, point: Point, sample: Sample) -> bool:
    """Whether f reads x at all."""
    return _reads(lambda x: each_block(problem, x, sample, lambda view, y: view.f(y), point.y), point.x)


def lower_sees_x(problem: Problem, names: list[str], point: Point, sample: Sample) -> bool:
    """Whether some of the lower levels read x."""

    def one(view: BlockView, y: dict[str, PyTree]) -> Array:
        return _terms(view, y, {name: y[name] for name in names})

    y = _seen_by(problem, names, point)
    return _reads(lambda x: each_block(problem, x, sample, one, y), point.x)


def _seen_by(problem: Problem, names: list[str], point: Point) -> dict[str, PyTree]:
    """The variables that the terms of some levels contain."""
    others = [other for name in names for other in problem.levels[name].reads]
    return {name: point.y[name] for name in dict.fromkeys([*names, *others])}


def _terms(view: BlockView, y: dict[str, PyTree], v: dict[str, PyTree]) -> Array:
    """The terms of some levels in ℓ."""
    terms = [view.term(name, y[name], v[name], y) for name in v]
    return sum(terms[1:], terms[0])


def _reads(function: Callable[[PyTree], Any], x: PyTree) -> bool:
    """Whether a function's program reads its argument."""
    program = jax.make_jaxpr(function)(x).jaxpr
    mentioned = [var for equation in program.eqns for var in equation.invars] + list(program.outvars)
    return any(var is argument for argument in program.invars for var in mentioned)


def _plus(tree: PyTree, scalars: Array, change: PyTree) -> PyTree:
    """tree + scalars · change, one scalar per block."""
    return jax.tree.map(lambda a, b: a + spread(scalars, b) * b, tree, change)


def _plus_sum(tree: PyTree, scalars: Array, change: PyTree) -> PyTree:
    """tree + the sum over the blocks of scalars · change."""
    return jax.tree.map(lambda a, b: a + jnp.tensordot(scalars.astype(b.dtype), b, axes=1), tree, change)
