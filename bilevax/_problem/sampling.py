"""Which blocks a step visits, and which of their rows it sees.

Blocks come from a keyed permutation of 0..m−1 that is evaluated only where it is needed, so that both
ways of sampling cost O(I) per step, keep no O(m) state and run under vmap:

- shuffled epochs: step t takes the next I places of the permutation keyed by t's epoch;
- independent draws: step t takes the first I places of the permutation keyed by t itself.

A stratified plan divides the blocks into runs of equal length and draws as many of each, from streams of
their own. What it draws depends on the number of strata alone, and not on how many devices share them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.rows import Batch
from bilevax._problem.stream import Stream, mix
from bilevax._util import checks

PyTree = Any

_ROUNDS = 8
_FEW = 64  # so few blocks are sorted by random words: eight rounds do not mix a grid of few points

# What the streams that split off from a run's stream are for.
BLOCKS, SECOND_BLOCKS, ROWS, START, POWER = range(5)


class Sample(eqx.Module):
    """What one step sees: block indices, their constants, the slots they touch, and two batches.

    `drawn` tells which row groups the batches are, where a method draws its rows in groups.
    """

    blocks: Array
    constants: PyTree
    slots: dict[str, Array]
    upper: Batch
    lower: dict[str, Batch]
    drawn: PyTree = None


class Sampler(eqx.Module):
    """The plan of sampling: a pure function of the step number.

    Attributes:
      random: the random stream of the run.
      blocks: m.
      per_step: I, the blocks visited in a step; all of them, in order, when I = m.
      batch_size: B rows per block and level; None takes all rows.
      shuffle: shuffled epochs if True, else independent uniform draws of I distinct blocks.
      strata: into how many strata the blocks are divided; None draws from all of them as one.
      axis: on a device that holds a share of the blocks, the axis of the mesh; m, I and the strata are then
        those of the share.
    """

    random: Stream
    blocks: int = eqx.field(static=True)
    per_step: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    shuffle: bool = eqx.field(static=True)
    strata: int | None = eqx.field(static=True, default=None)
    axis: str | None = eqx.field(static=True, default=None)

    @property
    def stratum_size(self) -> int:
        """The blocks of one stratum."""
        return self.blocks // (self.strata or 1)

    def blocks_at(self, step: Array, stream: int = BLOCKS) -> Array:
        """The I distinct blocks of a step; another stream gives an independent choice."""
        return self.by_stratum(lambda place: self._blocks_of(place, step, stream))

    def draw(self, problem: Problem, step: Array) -> Sample:
        """Everything that step `step` samples."""

        def of_stratum(place: Array | int) -> Sample:
            random = self.stream(self.random.at(ROWS).at(step), place)
            return self.visit(problem, self._blocks_of(place, step), random, self.batch_size)

        return self.by_stratum(of_stratum)

    def by_stratum(self, function: Callable[[Array | int], Any]) -> Any:
        """What `function` gives for each stratum here, by its place, one after the other along the blocks."""
        if (self.strata or 1) == 1:
            return function(0)
        parts = jax.vmap(function)(jnp.arange(self.strata))

        def joined(part: Any) -> Any:
            if isinstance(part, Batch) and part.shared:  # the same for all strata
                return jax.tree.map(lambda a: a[0], part)
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), part)

        return jax.tree.map(joined, parts, is_leaf=lambda part: isinstance(part, Batch))

    def stream(self, random: Stream, place: Array | int) -> Stream:
        """The stream of the stratum at a place here, split off from another."""
        return random if self.strata is None else random.at(self.first_stratum + place)

    @property
    def first_stratum(self) -> Array | int:
        """The number, among all strata, of the first one here."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * (self.strata or 1)

    @property
    def devices(self) -> int:
        """How many devices share the blocks."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over the devices that share the blocks."""
        return tree if self.axis is None else jax.lax.pmean(tree, self.axis)

    def total(self, tree: PyTree) -> PyTree:
        """The sum over them."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)

    def largest(self, value: Array) -> Array:
        """The largest of them."""
        return value if self.axis is None else jax.lax.pmax(value, self.axis)

    def root_mean_square(self, value: Array) -> Array:
        """The root mean square over them."""
        return value if self.axis is None else jnp.sqrt(jax.lax.pmean(jnp.square(value), self.axis))

    def _blocks_of(self, place: Array | int, step: Array, stream: int = BLOCKS) -> Array:
        size, count = self.stratum_size, self.per_step // (self.strata or 1)
        if self.per_step == self.blocks:
            return place * size + jnp.arange(size, dtype=jnp.int32)
        per_epoch = size // count if self.shuffle else 1
        first = (step % per_epoch) * count
        random = self.stream(self.random.at(stream).at(step // per_epoch), place)
        return place * size + permuted(random, first + jnp.arange(count), size)

    def visit(
        self, problem: Problem, blocks: Array, random: Stream, batch_size: int | None, slots: bool = True
    ) -> Sample:
        """The sample of given blocks; `slots=False` leaves out which slots they touch."""
        constants = jax.tree.map(lambda a: a.at[blocks].get(mode="promise_in_bounds"), problem.blocks)
        lower = problem.draw_lower(random, blocks, batch_size)
        touched = {
            n: _slots(level, blocks, constants, lower[n]) for n, level in problem.levels.items() if slots
        }
        upper = problem.draw_upper(random.at(0), blocks, batch_size, lower)
        return Sample(blocks, constants, touched, upper, lower)

    def one_block(self, problem: Problem, batch_size: int | None, slots: bool = True) -> Sample:
        """The shapes of a sample of one block, with that many rows or (None) all of them."""

        def look(problem: Problem, sampler: Sampler) -> Sample:
            return sampler.visit(problem, jnp.zeros(1, jnp.int32), sampler.random, batch_size, slots)

        return jax.eval_shape(look, problem, self)

    def chance(self, problem: Problem, name: str, touched: int) -> float:
        """The share of a level's slots that a step touches: the probability that one is sampled."""
        return min(1.0, touched / problem.slots_of(name))


def make_sampler(
    problem: Problem,
    key: Array,
    blocks_per_step: int | None,
    batch_size: int | None,
    shuffle: bool,
    strata: int | None = None,
) -> Sampler:
    """Checks what the user asked for, and plans it."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a bilevax.Problem, got {type(problem).__name__}")
    per_step = problem.count
    if blocks_per_step is not None:
        per_step = checks.whole_number("blocks_per_step", blocks_per_step, 1, problem.count)
    if batch_size is not None:
        batch_size = checks.whole_number("batch_size", batch_size, 1)
    if not isinstance(shuffle, bool):
        raise TypeError(f"shuffle must be True or False, got {shuffle!r}")
    if not (
        isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    ):
        raise TypeError(f"key must be one key made by jax.random.key(seed), got {key!r}")
    if strata is not None:
        strata = _checked_strata(strata, problem, per_step)
    return Sampler(Stream.start(key), problem.count, per_step, batch_size, shuffle, strata, problem.axis)


def _checked_strata(strata: Any, problem: Problem, per_step: int) -> int | None:
    count = checks.whole_number("strata", strata, 1)
    for number, what in ((problem.count, "the number of blocks"), (per_step, "blocks_per_step")):
        if number % count:
            raise ValueError(
                f"{what} must be divisible by the number of strata (if not given, the devices of the "
                f"mesh), got {number} and {count} strata"
            )
    # One stratum of a whole problem is no stratum; one of a device's share is one of several.
    return None if count == 1 and problem.axis is None else count


def permuted(random: Stream, places: Array, size: int) -> Array:
    """The values at `places` of a random permutation of 0..size−1, in O(len(places)).

    A Feistel network over a grid of rows · columns ≥ size points; a value beyond `size` is walked on along
    its cycle until it falls inside, which keeps the map a permutation. (Hashes are cut to 24 bits so that no
    sum wraps.)
    """
    if size <= _FEW:
        return jnp.argsort(random.bits((size,)))[places].astype(jnp.int32)
    rows, columns = _grid(size)
    keys = [random.at(turn).first for turn in range(_ROUNDS)]

    def scramble(value: Array) -> Array:
        row, column = value // columns, value % columns
        for turn in range(0, _ROUNDS, 2):
            row = (row + (mix(column ^ keys[turn]) >> 8)) % jnp.uint32(rows)
            column = (column + (mix(row ^ keys[turn + 1]) >> 8)) % jnp.uint32(columns)
        return row * jnp.uint32(columns) + column

    value = scramble(places.astype(jnp.uint32))

    def walk(value: Array) -> Array:
        return jnp.where(value >= size, scramble(value), value)

    if jax.default_backend() == "cpu":
        value = jax.lax.while_loop(lambda value: jnp.any(value >= size), walk, value)
    else:  # where asking whether one is still outside would be a message to the host in every step
        for _ in range(_walks(size, rows * columns)):
            value = walk(value)
    return value.astype(jnp.int32)


@functools.lru_cache
def _grid(size: int) -> tuple[int, int]:
    """The grid with the fewest points beyond size, at most about four times as many rows as columns.

    Example:
      >>> _grid(1000), _grid(101)
      ((40, 25), (17, 6))
    """
    root = math.isqrt(size - 1) + 1
    sides = range(max(2, root // 2), root + 1)
    columns = min(reversed(sides), key=lambda side: -size % side)
    return -(-size // columns), columns


def _walks(size: int, points: int) -> int:
    """How often a value may have to be walked on: more often only with a chance below 1e-18."""
    return 0 if size == points else math.ceil(18 / -math.log10(1 - size / points))


def _slots(level: Any, blocks: Array, constants: PyTree, batch: Batch) -> Array:
    if level.slots is None:
        return blocks
    return jax.vmap(level.slots, in_axes=(0, batch.axis))(constants, batch.rows)
