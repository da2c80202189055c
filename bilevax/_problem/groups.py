"""Row groups: the finitely many batches that a finite sum consists of.

The rows of a block are cut into groups of B consecutive rows. A shorter last group is read together with rows
before it, which get weight zero. A block's mean over all rows is the mean of its groups, weighted by their
shares of the rows.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.rows import Batch, PerBlock, Rows, Shared
from bilevax._problem.stream import Stream


class Drawn(eqx.Module):
    """Which group was drawn for each block.

    Attributes:
      number: the group, counted within the block.
      count: how many groups the block has.
      share: the group's share of the block's rows.
    """

    number: Array
    count: Array
    share: Array

    @property
    def scale(self) -> Array:
        """The weight that makes a uniformly drawn group unbiased: one if all groups are equally long."""
        return self.count * self.share


class Groups(eqx.Module):
    """The groups of a data source.

    Attributes:
      source: the rows; None for functions that need none: a single group.
      size: B, the rows of a group.
      most: how many groups the longest block has.
    """

    source: Rows | None
    size: int = eqx.field(static=True)
    most: int = eqx.field(static=True)

    @staticmethod
    def of(source: Rows | None, batch_size: int | None) -> Groups:
        """The groups of at most `batch_size` rows; None makes all rows of a block one group."""
        if source is None:
            return Groups(None, 1, 1)
        if not isinstance(source, (Shared, PerBlock)):
            raise TypeError(
                "stored gradients need rows that can be numbered, bilevax.Shared or bilevax.PerBlock, got "
                f"{type(source).__name__}"
            )
        longest = source.longest if isinstance(source, PerBlock) else source.count
        size = longest if batch_size is None else min(batch_size, longest)
        return Groups(source, size, -(-longest // size))

    def draw(self, random: Stream, blocks: Array) -> Drawn:
        """A group for each block, uniformly."""
        first, end = self._bounds(blocks)
        return self.look_up(blocks, random.integers(blocks.shape, -((first - end) // self.size)))

    def look_up(self, blocks: Array, number: Array) -> Drawn:
        """Groups by number. A number beyond the block's groups returns its last group, with share zero."""
        first, end = self._bounds(blocks)
        length = end - first
        count = -(-length // self.size)
        rows = jnp.clip(length - number * self.size, 0, self.size)
        share = rows.astype(float) / length.astype(float)
        return Drawn(jnp.minimum(number, count - 1), count, share)

    def total(self, blocks: int) -> int:
        """The groups of all blocks together."""
        return int(jnp.sum(self.look_up(jnp.arange(blocks), jnp.zeros(blocks, int)).count))

    def mean_rows(self, blocks: int) -> float:
        """The rows of a uniformly drawn group of a uniformly drawn block, on average."""
        if self.source is None:
            return 0.0
        first, end = self._bounds(jnp.arange(blocks))
        return float(jnp.mean((end - first) / (-((first - end) // self.size))))

    def take(self, blocks: Array, number: Array) -> Batch:
        """The rows of groups."""
        if not isinstance(self.source, (Shared, PerBlock)):
            return Batch(None, shared=True)
        if self.most == 1:
            return self.source.draw(Stream(jnp.uint32(0), jnp.uint32(0)), blocks, None)
        first, end = self._bounds(blocks)
        begin = first + number * self.size
        read = jnp.minimum(begin, self.source.count - self.size)
        rows = self.source.packed.consecutive(read, self.size)
        if self._even():
            return Batch(rows)
        place = read[:, None] + jnp.arange(self.size)
        inside = (place >= begin[:, None]) & (place < end[:, None])
        return Batch(rows, weight=inside / jnp.sum(inside, 1, keepdims=True).astype(float))

    def _bounds(self, blocks: Array) -> tuple[Array, Array]:
        """The first row of each block, and the one after its last."""
        if isinstance(self.source, PerBlock):
            begin = self.source.starts[blocks]
            return begin, begin + self.source.lengths[blocks]
        zero = jnp.zeros(blocks.shape, jnp.int32)
        return zero, zero + (self.source.count if isinstance(self.source, Shared) else 1)

    def _even(self) -> bool:
        """Whether every group is known to be full."""
        source = self.source
        if isinstance(source, PerBlock):
            return source.even and source.longest % self.size == 0
        return isinstance(source, Shared) and source.count % self.size == 0


def groups_of(problem: Problem, batch_size: int | None) -> dict[str, Groups]:
    """The groups of every data source that a problem has, by the names of `sources`."""
    return {name: Groups.of(source, batch_size) for name, source in sources(problem).items()}


def sources(problem: Problem) -> dict[str, Any]:
    """The data sources: "upper" (unless f sees a lower level's batch), and "lower 0", "lower 1", …"""
    out: dict[str, Any] = {} if problem.upper_shares else {"upper": problem.upper_data}
    return out | {f"lower {place}": source for place, source in enumerate(problem.lower_data)}


def source_names(problem: Problem) -> tuple[str, dict[str, str]]:
    """The names of the `sources` that f and each lower level draw their rows from."""
    lower = {name: f"lower {place}" for name, place in problem.source_of}
    return (lower[problem.upper_shares] if problem.upper_shares else "upper"), lower
