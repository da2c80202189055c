"""Which blocks a step visits, and which of their rows it sees.

Blocks come from a keyed permutation of 0..m−1 that is evaluated only where it is needed, so that both
ways of sampling cost O(I) per step, keep no O(m) state and run under vmap:

- shuffled epochs: step t takes the next I places of the permutation keyed by t's epoch;
- independent draws: step t takes the first I places of the permutation keyed by t itself.

A stratified plan divides the blocks into consecutive parts of equal size, and draws equally many from each,
with a random stream per part. What it draws depends only on the number of strata, not on how many devices
share them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.lookups import lookups
from bilevax._problem.problem import Problem
from bilevax._problem.rows import Batch
from bilevax._problem.sample_sizes import chosen_sizes
from bilevax._problem.stream import Stream, permuted
from bilevax._problem.streamed import Streamed
from bilevax._util import checks

PyTree = Any


# The uses of the streams that are split off from a run's stream.
BLOCKS, SECOND_BLOCKS, ROWS, START, POWER = range(5)
KEYS = 2**31 - 1  # of the streams of a visit, whose first numbers are those of the data sources


class Sample(eqx.Module):
    """What one step sees: block indices, their constants, the slots they touch, and two batches.

    `drawn` says which row groups the batches are, for methods that draw rows in groups. `lookups` has, by
    table of x and data source, the rows of the table that the batches look up.
    """

    blocks: Array
    constants: PyTree
    slots: dict[str, Array]
    upper: Batch
    lower: dict[str, Batch]
    drawn: PyTree = None
    lookups: PyTree = None


class Sampler(eqx.Module):
    """The plan of sampling: a pure function of the step number.

    Attributes:
      random: the random stream of the run.
      blocks: m.
      per_step: I, the blocks visited in a step; all of them, in order, when I = m.
      batch_size: B rows per block and level; None takes all rows.
      shuffle: shuffled epochs if True, else independent uniform draws of I distinct blocks.
      strata: into how many strata the blocks are divided; None draws from all of them as one.
      initial_batch_size: see `Sampling`.
      axis: on a device that holds a share of the blocks, the axis of the mesh; m, I and the strata are then
        those of the share.
      keyed: whether functions that take keys get new ones in each step; else they get the same ones always.
    """

    random: Stream
    blocks: int = eqx.field(static=True)
    per_step: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    shuffle: bool = eqx.field(static=True)
    strata: int | None = eqx.field(static=True, default=None)
    initial_batch_size: int | Literal["all"] | None = eqx.field(static=True, default=None)
    axis: str | None = eqx.field(static=True, default=None)
    keyed: bool = eqx.field(static=True, default=True)

    @property
    def stratum_size(self) -> int:
        """The blocks of one stratum."""
        return self.blocks // (self.strata or 1)

    @property
    def first_rows(self) -> int | None:
        """The rows per block of the first estimators: None for all of them, 0 for none."""
        if self.initial_batch_size == "all":
            return None
        return self.batch_size if self.initial_batch_size is None else self.initial_batch_size

    def blocks_at(self, step: Array, stream: int = BLOCKS) -> Array:
        """The I distinct blocks of a step; another stream gives an independent choice."""
        return self.by_stratum(lambda place: self._blocks_of(place, step, stream))

    def draw(self, problem: Problem, step: Array) -> Sample:
        """Everything that step `step` samples."""
        problem = problem.with_rows(lambda rows: rows.at(step))

        def of_stratum(place: Array | int) -> Sample:
            every = self.random.at(ROWS).at(step)
            blocks, random = self._blocks_of(place, step), self.stream(every, place)
            return self.visit(problem, blocks, random, self.batch_size, common=every)

        return self.by_stratum(of_stratum)

    def by_stratum(self, function: Callable[[Array | int], Any]) -> Any:
        """function(place) of every stratum on this device, concatenated along the blocks."""
        if (self.strata or 1) == 1:
            return function(0)
        parts = jax.vmap(function)(jnp.arange(self.strata))

        def joined(part: Any) -> Any:
            if isinstance(part, Batch) and part.shared:  # the same for all strata
                rows = jax.tree.map(lambda a: a[0], part.rows)
                return Batch(rows, shared=True, random=joined(part.random))
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), part)

        return jax.tree.map(joined, parts, is_leaf=lambda part: isinstance(part, Batch))

    def stream(self, random: Stream, place: Array | int) -> Stream:
        """The stream of the stratum at a place on this device, split off from another stream."""
        return random if self.strata is None else random.at(self.first_stratum + place)

    @property
    def first_stratum(self) -> Array | int:
        """The index, among all strata, of the first one on this device."""
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

    def everything(self, values: Array) -> Array:
        """The values of all blocks, from those of the blocks on each of them."""
        return values if self.axis is None else jax.lax.all_gather(values, self.axis, tiled=True)

    def root_mean_square(self, value: Array) -> Array:
        """The root mean square over them."""
        return value if self.axis is None else jnp.sqrt(jax.lax.pmean(jnp.square(value), self.axis))

    def _blocks_of(self, place: Array | int, step: Array, stream: int = BLOCKS) -> Array:
        size, count = self.stratum_size, self.per_step // (self.strata or 1)
        if self.per_step == self.blocks:
            return place * size + jnp.arange(size, dtype=jnp.int32)
        per_epoch = size // count if self.shuffle else 1
        step = jnp.asarray(step)
        per_epoch = jnp.full_like(step, per_epoch)
        first = jax.lax.rem(step, per_epoch) * count  # steps are not negative, as `%` would have to ask
        random = self.stream(self.random.at(stream).at(jax.lax.div(step, per_epoch)), place)
        return place * size + permuted(random, first + jnp.arange(count), size)

    def visit(
        self,
        problem: Problem,
        blocks: Array,
        random: Stream,
        batch_size: int | None,
        slots: bool = True,
        common: Stream | None = None,
    ) -> Sample:
        """The sample of given blocks.

        Args:
          problem: the problem.
          blocks: the blocks.
          random: what their rows are drawn with.
          batch_size: how many; None for all.
          slots: whether to say which slots they touch, and which rows of tables.
          common: what rows that all strata see alike are drawn with; left out, `random`.
        """
        constants = jax.tree.map(lambda a: a.at[blocks].get(mode="promise_in_bounds"), problem.blocks)
        common = random if common is None else common
        lower = problem.draw_lower(random, blocks, batch_size, common)
        touched = {
            n: _slots(level, blocks, constants, lower[n]) for n, level in problem.levels.items() if slots
        }
        upper = problem.draw_upper(random, blocks, batch_size, lower, common)
        looked_up = None
        if problem.tables and slots:
            looked_up = lookups(problem.tables, constants, problem.by_source(upper, lower))
        if problem.random and self.keyed:
            own = random.at(KEYS).at(jnp.arange(blocks.shape[0]))
            lower = {n: dataclasses.replace(batch, random=own) for n, batch in lower.items()}
            upper = dataclasses.replace(upper, random=own)
        return Sample(blocks, constants, touched, upper, lower, lookups=looked_up)

    def probe(self, problem: Problem, look: Callable[[], Sample]) -> Sample:
        """What is seen before the first step: a look, or step 0 where rows are known for steps only."""
        return self.draw(problem, jnp.zeros((), jnp.int32)) if is_streamed(problem) else look()

    def one_block(self, problem: Problem, batch_size: int | None, slots: bool = True) -> Sample:
        """The shapes of a sample of one block, with that many rows or (None) all of them."""
        return _visit_one.eval_shape(problem, self, batch_size, slots)

    def chance(self, problem: Problem, name: str, touched: int) -> float:
        """The share of a level's slots that a step touches: the probability that one is sampled."""
        return min(1.0, touched / problem.slots_of(name))


@functools.partial(jax.jit, static_argnums=(2, 3))  # for its shapes, which are then known the next time
def _visit_one(problem: Problem, sampler: Sampler, batch_size: int | None, slots: bool) -> Sample:
    outline = problem.with_rows(lambda rows: rows.outline())
    return sampler.visit(outline, jnp.zeros(1, jnp.int32), sampler.random, batch_size, slots)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How many blocks and rows a step sees, and how they are drawn.

    Args:
      blocks_per_step: I, the blocks a step visits, or "all".
      batch_size: B, the rows per visited block and level, or "all".
      shuffle: blocks in shuffled epochs if True, else drawn independently in each step.
      initial_batch_size: the rows per block that the first estimators come from; None takes `batch_size`,
        "all" takes all rows, 0 starts the estimators from zero.
      strata: divides the blocks into this many consecutive parts of equal size, and draws equally many from
        each; left out, one per device. The same number draws the same samples on any number of devices.

    If I or B is left out, a step sees all blocks or rows while it reads at most 16,384 rows that way.
    Otherwise I is m/20, but at least 128 and at most 512, and B is 4096/I, but at least 32 and at most 512
    (more, if rows are short); blocks or rows that are fewer are all seen. B is not chosen where
    `means_over_rows=False`.

    Example:
      >>> import bilevax as bx
      >>> sampling = bx.Sampling(blocks_per_step=10, batch_size=32, initial_batch_size="all")
    """

    blocks_per_step: int | Literal["all"] | None = None
    batch_size: int | Literal["all"] | None = None
    shuffle: bool = True
    initial_batch_size: int | Literal["all"] | None = None
    strata: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size != "all":
            checks.whole_number("batch_size", self.batch_size, 1)
        if self.strata is not None:
            checks.whole_number("strata", self.strata, 1)
        if not isinstance(self.shuffle, bool):
            raise TypeError(f"shuffle must be True or False, got {self.shuffle!r}")
        initial = self.initial_batch_size
        if isinstance(initial, str):
            if initial != "all":
                raise ValueError(f"initial_batch_size must be an integer, None or 'all', got {initial!r}")
        elif initial is not None:
            checks.whole_number("initial_batch_size", initial, 0)

    def sampler(self, problem: Problem, key: Array) -> Sampler:
        """The plan for a problem and a random key, checked against both."""
        if not isinstance(problem, Problem):
            raise TypeError(f"problem must be a bilevax.Problem, got {type(problem).__name__}")
        if self.blocks_per_step is not None and self.blocks_per_step != "all":
            checks.whole_number("blocks_per_step", self.blocks_per_step, 1, problem.count)
        if not (
            isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
        ):
            raise TypeError(f"key must be one key made by jax.random.key(seed), got {key!r}")
        strata, initial = self.strata, self.initial_batch_size
        if is_streamed(problem):
            if problem.risk is not None:
                raise ValueError(
                    "risk does not go with Streamed rows: its weights need the value of every block before "
                    f"the first step, got {type(problem.risk).__name__}"
                )
            strata, initial = _checked_streaming(self)
        per_step, batch_size = chosen_sizes(problem, self.blocks_per_step, self.batch_size, strata or 1)
        if batch_size is None and is_streamed(problem):
            raise ValueError(
                "batch_size must be given for Streamed rows, which cannot all be read: diagnostics and "
                "verify cannot be had"
            )
        strata = None if strata is None else _checked_strata(strata, problem, per_step)
        return Sampler(
            Stream.start(key),
            problem.count,
            per_step,
            batch_size,
            self.shuffle,
            strata,
            initial,
            problem.axis,
        )


def is_streamed(problem: Problem) -> bool:
    """Whether some rows stay on the host, and are known for the blocks of steps only."""
    return any(isinstance(one, Streamed) for one in (problem.upper_data, *problem.lower_data))


def _checked_streaming(sampling: Sampling) -> tuple[int | None, int | Literal["all"] | None]:
    """The strata and the first batch of a run with streamed rows."""
    if sampling.strata not in (None, 1):
        raise ValueError(f"strata must be left out for Streamed rows, got {sampling.strata}")
    if sampling.initial_batch_size not in (None, 0):
        raise ValueError(
            "initial_batch_size must be 0 for Streamed rows, which are read for the blocks of steps only, "
            f"got {sampling.initial_batch_size!r}"
        )
    return None, 0


def all_rows(problem: Problem) -> Sampler:
    """The plan of all blocks and all their rows; functions that take keys get the same ones always."""
    return dataclasses.replace(Sampling("all", "all").sampler(problem, jax.random.key(0)), keyed=False)


def as_sampling(
    sampling: Sampling | None,
    blocks_per_step: int | Literal["all"] | None = None,
    batch_size: int | Literal["all"] | None = None,
) -> Sampling:
    """The sampling that a function was given, as an object or by its two most common fields."""
    direct = {"blocks_per_step": blocks_per_step, "batch_size": batch_size}
    if sampling is None:
        return Sampling(blocks_per_step, batch_size)
    given: dict[str, Any] = {name: value for name, value in direct.items() if value is not None}
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a bilevax.Sampling, got {type(sampling).__name__}")
    twice = [name for name in given if getattr(sampling, name) is not None]
    if twice:
        raise ValueError(f"{twice[0]} is given twice: directly and in sampling; give it once")
    return dataclasses.replace(sampling, **given)


def _checked_strata(strata: Any, problem: Problem, per_step: int) -> int | None:
    count = checks.whole_number("strata", strata, 1)
    for number, what in ((problem.count, "the number of blocks"), (per_step, "blocks_per_step")):
        if number % count:
            raise ValueError(
                f"{what} must be divisible by the number of strata (if not given, the devices of the "
                f"mesh), got {number} and {count} strata"
            )
    # One stratum of a whole problem is the same as none; one on a device is one of several.
    return None if count == 1 and problem.axis is None else count


def bad_slots(problem: Problem, sample: Sample) -> Array | bool:
    """Whether a level's own slots are out of range; False, and free, where slots are blocks."""
    bad: Array | bool = False
    for name, level in problem.levels.items():
        if level.slots is not None:
            slots = sample.slots[name]
            bad |= jnp.any((slots < 0) | (slots >= problem.slots_of(name)))
    return bad


def _slots(level: Any, blocks: Array, constants: PyTree, batch: Batch) -> Array:
    if level.slots is None:
        return blocks
    return jax.vmap(level.slots, in_axes=(0, batch.axis))(constants, batch.rows)
