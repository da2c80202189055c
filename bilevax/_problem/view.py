"""One sampled block, as the user's functions see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from bilevax._problem.lookups import axes_of
from bilevax._problem.problem import Problem, moved
from bilevax._problem.rows import Batch
from bilevax._problem.sampling import Sample

PyTree = Any


@dataclasses.dataclass(frozen=True)
class BlockView:
    """The functions of one sampled block, at one x and on one batch.

    Attributes:
      problem: the problem.
      x: what f and g receive as x.
      constants: the block's constants.
      upper: the batch of f.
      lower: the batch of every lower level.
      centres: a(x) of the levels whose variables are stored as offsets from it. The functions take these
        offsets for y, and pass a(x) + offset on to f and g.
    """

    problem: Problem
    x: PyTree
    constants: PyTree
    upper: Batch
    lower: dict[str, Batch]
    centres: dict[str, PyTree] = dataclasses.field(default_factory=dict)

    def f(self, y: dict[str, PyTree]) -> Array:
        """f_i(x, y; ξ), for the variables of all levels."""
        y = {name: self._position(name, one) for name, one in y.items()}
        return self.problem.upper_value(self.x, y, self.constants, self.upper)

    def g(self, name: str, y: PyTree, others: dict[str, PyTree] | None = None) -> Array:
        """g_i(x, y; ζ) of an argmin level, for its own variable; `others` has those that it reads."""
        return self._value(name, y, others)

    def optimised(self, name: str, y: dict[str, PyTree]) -> Array:
        """What the variable of a level optimises, g or f, for the variables of all levels."""
        return self.f(y) if self.problem.levels[name].own else self.g(name, y[name], y)

    def c(self, name: str, others: dict[str, PyTree] | None = None) -> PyTree:
        """c_i(x; ζ) of a mean level; `others` has the variables of levels that it reads."""
        return self._value(name, None, others)

    def term(self, name: str, y: PyTree, v: PyTree, others: dict[str, PyTree] | None = None) -> Array:
        """A level's term of the scalar ℓ, for its own variable and multiplier; `others` as in `g`."""
        return self.problem.levels[name].term(lambda y: self._value(name, y, others), y, v)

    def at(self, x: PyTree) -> BlockView:
        """The same block and batch at another x."""
        seen = self.problem.see(x, self.constants, self.lower)
        return dataclasses.replace(self, x=seen, centres=self.problem.centres(x))

    def _value(self, name: str, y: PyTree, others: dict[str, PyTree] | None) -> Any:
        """A level's function, for its own variable and those that it reads."""
        level = self.problem.levels[name]
        given = None if level.is_value else self._position(name, y)
        if level.reads:
            read = self.problem.read_by(name, {} if others is None else others)
            read = {other: self._position(other, one) for other, one in read.items()}
            given = read if level.is_value else read | {name: given}
        return level.value(self.x, given, self.constants, self.lower[name])

    def _position(self, name: str, y: PyTree) -> PyTree:
        """y itself, from what is stored of it."""
        return moved(y, self.centres[name]) if name in self.centres else y


def each_block(
    problem: Problem, x: PyTree, sample: Sample, function: Callable[..., Any], *per_block: PyTree
) -> Any:
    """function(view, …) of every sampled block, stacked along the first axis.

    Args:
      problem: the problem.
      x: the upper variable, the same for all blocks but for what they look up of its tables.
      sample: the blocks and their rows.
      function: takes a `BlockView`, then the block's own entries of `per_block`.
      per_block: trees whose leaves have the sampled blocks as leading axis.
    """

    def one(x: PyTree, constants: PyTree, upper: Batch, lower: dict[str, Batch], *own: PyTree) -> Any:
        return function(BlockView(problem, x, constants, upper, lower).at(x), *own)

    lower_axes = {name: batch.axes for name, batch in sample.lower.items()}
    axes = (axes_of(x), 0, sample.upper.axes, lower_axes, *[0] * len(per_block))
    return jax.vmap(one, in_axes=axes)(x, sample.constants, sample.upper, sample.lower, *per_block)


def with_means(
    problem: Problem, x: PyTree, sample: Sample, y: dict[str, PyTree], unknown: frozenset[str]
) -> dict[str, PyTree]:
    """The variables of a sample's slots, with those means that are not known yet as the sample shows them."""
    for name in (level for level in problem.order if level in unknown):

        def c(view: BlockView, others: dict[str, PyTree], name: str = name) -> PyTree:
            return view.c(name, others)

        y = y | {name: each_block(problem, x, sample, c, problem.read_by(name, y))}
    return y
