"""One sampled block, as the user's functions see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from bilevax._problem.problem import Problem
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
    """

    problem: Problem
    x: PyTree
    constants: PyTree
    upper: Batch
    lower: dict[str, Batch]

    def f(self, y: dict[str, PyTree]) -> Array:
        """f_i(x, y; ξ), for the variables of all levels."""
        return self.problem.upper_value(self.x, y, self.constants, self.upper)

    def g(self, name: str, y: PyTree) -> Array:
        """g_i(x, y; ζ) of an argmin level, for its own variable."""
        return self.problem.levels[name].value(self.x, y, self.constants, self.lower[name])

    def c(self, name: str) -> PyTree:
        """c_i(x; ζ) of a mean level."""
        return self.problem.levels[name].value(self.x, None, self.constants, self.lower[name])

    def term(self, name: str, y: PyTree, v: PyTree) -> Array:
        """A level's term of the scalar ℓ, for its own variable and multiplier."""
        return self.problem.levels[name].term(self.x, y, v, self.constants, self.lower[name])

    def at(self, x: PyTree) -> BlockView:
        """The same block and batch at another x."""
        return dataclasses.replace(self, x=self.problem.see(x, self.constants, self.lower))


def each_block(
    problem: Problem, x: PyTree, sample: Sample, function: Callable[..., Any], *per_block: PyTree
) -> Any:
    """function(view, …) of every sampled block, stacked along the first axis.

    Args:
      problem: the problem.
      x: the upper variable, the same for all blocks.
      sample: the blocks and their rows.
      function: takes a `BlockView`, then the block's own entries of `per_block`.
      per_block: trees whose leaves have the sampled blocks as leading axis.
    """

    def one(constants: PyTree, upper: Batch, lower: dict[str, Batch], *own: PyTree) -> Any:
        return function(BlockView(problem, x, constants, upper, lower).at(x), *own)

    lower_axes = {name: batch.axis for name, batch in sample.lower.items()}
    axes = (0, sample.upper.axis, lower_axes, *[0] * len(per_block))
    return jax.vmap(one, in_axes=axes)(sample.constants, sample.upper, sample.lower, *per_block)
