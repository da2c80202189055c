"""The tables of x, of which a step reads, tracks and moves the rows that it looks up.

A row holds its x, its z and the step at which both were true. When it is looked up it is caught up with the
present (`_step/timeline.py`), and what the step adds to z is added. Rows that nobody looks up are caught up
in turn, some in every step, so that none is older than the timeline.

All of a row is side by side, like the memory of a slot (`_step/slot_table.py`): a row of a large table is one
cache miss, not three.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from bilevax._problem.lookups import Found, part_of, with_part
from bilevax._problem.sampling import Sample, Sampler
from bilevax._step.ordering import after
from bilevax._step.timeline import Timeline
from bilevax._util.trees import PyTree

_SURE = "promise_in_bounds"


class LazyTables(eqx.Module):
    """The tables of x, their parts of z, and how to catch them up.

    Attributes:
      tables: by name, (rows, 2 width + 1): x, z and the stamp of every row.
      timeline: how rows move that no step touches.
      shapes: by name, the shape of one row of x.
    """

    tables: dict[str, Array]
    timeline: Timeline
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = eqx.field(static=True)

    @staticmethod
    def of(names: list[str], x: PyTree, z: PyTree, dtype: Any) -> LazyTables:
        """The tables of x and z before step 0."""

        def packed(x: Array, z: Array) -> Array:
            rows = x.shape[0]
            parts = x.reshape(rows, -1), z.reshape(rows, -1), jnp.zeros((rows, 1), x.dtype)
            return jnp.concatenate(parts, axis=1)

        tables = {name: packed(part_of(x, name), part_of(z, name)) for name in names}
        shapes = tuple((name, part_of(x, name).shape[1:]) for name in names)
        most = max(table.shape[0] for table in tables.values())
        return LazyTables(tables, Timeline.start(most, dtype), shapes)

    def whole(self, x: PyTree, z: PyTree, step: Array) -> tuple[PyTree, PyTree]:
        """x and z with all rows of the tables, caught up."""
        for name, shape in self.shapes:
            rows = self._caught_up(self.tables[name], step)
            values, slopes = (part.reshape(-1, *shape) for part in self._parts(rows))
            x, z = with_part(x, name, values), with_part(z, name, slopes)
        return x, z

    def look_up(self, sample: Sample, step: Array) -> tuple[dict[str, Found], dict[str, Found]]:
        """What a sample looks up of x and of z, by table."""
        x, z = {}, {}
        for name, shape in self.shapes:
            at = sample.lookups[name]
            rows = self._touched(name, _joined(at), step)[1]
            x[name], z[name] = (_split(part, at, shape) for part in self._parts(rows))
        return x, z

    def move(
        self, sampler: Sampler, sample: Sample, step: Array, added: dict[str, Found], keep: Any, amount: Array
    ) -> LazyTables:
        """The tables after a step.

        Args:
          sampler: the plan of sampling.
          sample: what was looked up.
          step: the number of the step.
          added: by table, what each lookup adds to z; a row that was looked up twice gets both.
          keep: 1 − β.
          amount: η.
        """
        # Devices that share the blocks all hold the tables, and make the same changes.
        lookups = {name: sampler.everything(_joined(at)) for name, at in sample.lookups.items()}
        slopes = {
            name: sampler.everything(_joined(added[name].rows, at)) / sampler.devices
            for name, at in sample.lookups.items()
        }
        place = after(self.timeline.place(step), self.timeline.size**2, slopes)
        timeline, tables = self.timeline.advance(place, keep, amount), {}
        for name, table in self.tables.items():
            new, step_size = slopes[name], jnp.asarray(amount, table.dtype)
            at, rows = self._touched(name, lookups[name], step)
            at = after(at, table.shape[0], new)
            x, z = self._parts(rows)
            z = jnp.asarray(keep, table.dtype) * z
            table = table.at[at].set(_row(x - step_size * z, z, timeline.place(step + 1)), mode=_SURE)
            tables[name] = table.at[at[: len(new)]].add(_row(-step_size * new, new, 0), mode=_SURE)
        return LazyTables(tables, timeline, self.shapes)

    def bad_lookups(self, sample: Sample) -> Array:
        """Whether rows were looked up that a table does not have."""
        bad = jnp.zeros((), bool)
        for name, table in self.tables.items():
            at = _joined(sample.lookups[name])
            bad |= jnp.any((at < 0) | (at >= table.shape[0]))
        return bad

    def _touched(self, name: str, at: Array, step: Array) -> tuple[Array, Array]:
        """Rows that are looked up, and then those that are due, with their numbers, caught up with a step."""
        table = self.tables[name]
        at = jnp.concatenate([jnp.clip(at, 0, table.shape[0] - 1), self._due(table.shape[0], step)])
        return at, self._caught_up(table.at[at].get(mode=_SURE), step)

    def _caught_up(self, rows: Array, step: Array) -> Array:
        """Rows as they are at a step."""
        x, z = self._parts(rows)
        r, q = self.timeline.passed(rows[:, -1].astype(jnp.int32), step)
        r, q = (number[:, None].astype(rows.dtype) for number in (r, q))
        return _row(x - q * z, r * z, self.timeline.place(step))

    def _due(self, rows: int, step: Array) -> Array:
        """The rows that are caught up in a step, whether it looks them up or not: all are in turn."""
        together = -(-rows // self.timeline.reach)
        turns = -(-rows // together)
        return jnp.minimum((step % turns) * together + jnp.arange(together), rows - 1)

    def _parts(self, rows: Array) -> tuple[Array, Array]:
        width = rows.shape[1] // 2
        return rows[:, :width], rows[:, width : 2 * width]


def _joined(by_source: dict[str, Array], lookups: dict[str, Array] | None = None) -> Array:
    """The lookups of all sources as one vector; or what belongs to these lookups, as the rows of a matrix."""
    shapes = {source: (-1,) if lookups is None else (lookups[source].size, -1) for source in by_source}
    return jnp.concatenate([by_source[source].reshape(shapes[source]) for source in sorted(by_source)])


def _split(rows: Array, lookups: dict[str, Array], shape: tuple[int, ...]) -> Found:
    """The inverse of `_joined`."""
    found, first = {}, 0
    for source in sorted(lookups):
        at = lookups[source]
        found[source] = rows[first : first + at.size].reshape(*at.shape, *shape)
        first += at.size
    return Found(found)


def _row(x: Array, z: Array, stamp: Any) -> Array:
    """All that is stored of rows."""
    return jnp.concatenate([x, z, jnp.full_like(x[:, :1], stamp)], axis=1)
