"""The tables of x, of which a step reads, tracks and moves the rows that it looks up.

A row holds its x, its z, what its rule tracks beside them (`_step/plain_rows.py`, `_step/adam_rows.py`), and
the step at which all was true. When it is looked up it is caught up with the present (`_step/timeline.py`),
and what the step adds to z is added. Rows that nobody looks up are caught up in turn, some in every step, so
that none is older than the timeline.

All of a row is side by side, like the memory of a slot (`_step/slot_table.py`): a row of a large table is one
cache miss, not three. So are tables whose rows are looked up together, such as two vectors of a user.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.lookups import Found, part_of
from bilevax._problem.sampling import Sample, Sampler
from bilevax._step.adam_rows import AdamRows
from bilevax._step.ordering import after, known_after
from bilevax._step.plain_rows import PlainRows, as_rows
from bilevax._step.timeline import Timeline
from bilevax._util.trees import PyTree

RowRule = PlainRows | AdamRows
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of tables that are looked up together

_SURE = "promise_in_bounds"


class LazyTables(eqx.Module):
    """The tables of x, their parts of z, and how to catch them up.

    Attributes:
      tables: by the name of their first one, tables that are looked up together, (rows, parts · width + 1):
        x, z and other parts of every row, and its stamp.
      timeline: how rows move that no step touches.
      pace: that of the latest step.
      shapes: the names of each of them, with the shapes of one row of x.
      rule: how rows move.
    """

    tables: dict[str, Array]
    timeline: Timeline
    pace: Array
    shapes: tuple[Shapes, ...] = eqx.field(static=True)
    rule: RowRule = eqx.field(static=True)

    @staticmethod
    def of(
        together: list[list[str]], x: PyTree, z: PyTree, dtype: Any, rule: RowRule | None = None
    ) -> LazyTables:
        """The tables of x and z before step 0.

        Args:
          together: the names of the tables, those that are looked up together in one list.
          x, z: with all tables.
          dtype: of how rows move.
          rule: how rows move; by plain steps, if it is left out.
        """
        rule = PlainRows() if rule is None else rule

        def flat(tree: PyTree, names: list[str]) -> Array:
            return jnp.concatenate([_flat(part_of(tree, name)) for name in names], axis=1)

        tables = {names[0]: as_rows(rule.start(flat(x, names), flat(z, names)), 0) for names in together}
        shapes = tuple(tuple((name, part_of(x, name).shape[1:]) for name in names) for names in together)
        most = max(table.shape[0] for table in tables.values())
        rest = jnp.asarray(rule.at_rest, dtype)
        return LazyTables(tables, Timeline.start(rule, most, dtype), rest, shapes, rule)

    @property
    def names(self) -> list[str]:
        """The names of all tables."""
        return [name for shapes in self.shapes for name, _ in shapes]

    def whole(self, step: Array) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """x, z and the averages of x of all rows, caught up, by table; no averages if there are none."""
        x, z, mean = {}, {}, {}
        for shapes in self.shapes:
            parts, _ = self._caught_up(self.tables[shapes[0][0]], step)
            rows = [_columns(part, shapes) for part in parts]
            x, z = x | rows[0], z | rows[1]
            mean = mean | rows[-1] if self.rule.averages else mean
        return x, z, mean

    @property
    def at_rest(self) -> LazyTables:
        """The tables that do not know where x was one step earlier."""
        still = jnp.broadcast_to(jnp.asarray(self.rule.at_rest, self.pace.dtype), self.pace.shape)
        kept = jnp.arange(still.shape[-1]) >= self.rule.moving
        return dataclasses.replace(self, pace=jnp.where(kept, self.pace, still))

    def look_up(self, sample: Sample, step: Array) -> tuple[dict[str, Found], dict[str, Found]]:
        """What a sample looks up of x, now and one step earlier; by table."""
        now, before = {}, {}
        for shapes in self.shapes:
            at = sample.lookups[shapes[0][0]]
            _, parts, earlier = self._touched(shapes[0][0], _joined(at), step)
            now |= {name: _split(rows, at) for name, rows in _columns(parts[0], shapes).items()}
            before |= {name: _split(rows, at) for name, rows in _columns(earlier, shapes).items()}
        return now, before

    def move(
        self, sampler: Sampler, sample: Sample, step: Array, added: dict[str, Found], keep: Any, pace: Array
    ) -> LazyTables:
        """The tables after a step.

        Args:
          sampler: the plan of sampling.
          sample: what was looked up.
          step: the number of the step.
          added: by table, what each lookup adds to z; a row that was looked up twice gets both.
          keep: 1 − β.
          pace: of the rule, for this step.
        """
        # Devices that share the blocks all hold the tables, and make the same changes.
        lookups = {name: sampler.everything(_joined(sample.lookups[name])) for name in self.tables}
        slopes = {}
        for shapes in self.shapes:
            new = [_joined(added[name].rows, sample.lookups[name]) for name, _ in shapes]
            slopes[shapes[0][0]] = sampler.everything(jnp.concatenate(new, axis=1)) / sampler.devices
        place = after(self.timeline.place(step), self.timeline.size**2, slopes)
        timeline, tables = self.timeline.advance(place, self.rule.move(keep, pace)), {}
        for name, table in self.tables.items():
            at, parts, _ = self._touched(name, lookups[name], step)
            at = after(at, table.shape[0], slopes[name])
            stamp, own_pace = timeline.place(step + 1), pace.astype(table.dtype)
            tables[name] = self.rule.put(table, at, parts, slopes[name], keep, own_pace, stamp)
        return LazyTables(tables, timeline, known_after(slopes, pace), self.shapes, self.rule)

    def bad_lookups(self, sample: Sample) -> Array:
        """Whether rows were looked up that a table does not have."""
        bad = jnp.zeros((), bool)
        for name, table in self.tables.items():
            at = _joined(sample.lookups[name])
            bad |= jnp.any((at < 0) | (at >= table.shape[0]))
        return bad

    def _touched(self, name: str, at: Array, step: Array) -> tuple[Array, list[Array], Array]:
        """The numbers of rows that are looked up, and then of those that are due; and both, caught up."""
        table = self.tables[name]
        at = jnp.concatenate([jnp.clip(at, 0, table.shape[0] - 1), self._due(table.shape[0], step)])
        return at, *self._caught_up(table.at[at].get(mode=_SURE), step)

    def _caught_up(self, rows: Array, step: Array) -> tuple[list[Array], Array]:
        """The parts of rows as they are at a step, and x one step earlier."""
        width = rows.shape[1] // self.rule.parts
        parts = [rows[:, place * width : (place + 1) * width] for place in range(self.rule.parts)]
        # Once for a row: the compiler would do it again for each of its entries.
        move = jax.lax.optimization_barrier(self.timeline.passed(rows[:, -1].astype(jnp.int32), step))
        return self.rule.carried(parts, move.astype(rows.dtype), self.pace.astype(rows.dtype))

    def _due(self, rows: int, step: Array) -> Array:
        """The rows that are caught up in a step, whether it looks them up or not: all are in turn."""
        together = -(-rows // self.timeline.reach)
        turns = -(-rows // together)
        return jnp.minimum((step % turns) * together + jnp.arange(together), rows - 1)


def _joined(by_source: dict[str, Array], lookups: dict[str, Array] | None = None) -> Array:
    """The lookups of all sources as one vector; or what belongs to these lookups, as the rows of a matrix."""
    shapes = {source: (-1,) if lookups is None else (lookups[source].size, -1) for source in by_source}
    return jnp.concatenate([by_source[source].reshape(shapes[source]) for source in sorted(by_source)])


def _split(rows: Array, lookups: dict[str, Array]) -> Found:
    """The inverse of `_joined`."""
    found, first = {}, 0
    for source in sorted(lookups):
        at = lookups[source]
        found[source] = rows[first : first + at.size].reshape(*at.shape, *rows.shape[1:])
        first += at.size
    return Found(found)


def _columns(rows: Array, shapes: Shapes) -> dict[str, Array]:
    """Rows of tables that are looked up together, by table."""
    found, first = {}, 0
    for name, shape in shapes:
        width = math.prod(shape)
        found[name] = rows[:, first : first + width].reshape(-1, *shape)
        first += width
    return found


def _flat(table: Array) -> Array:
    """A table as a matrix."""
    return table.reshape(table.shape[0], -1)
