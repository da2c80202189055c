"""The memory of a level's slots as a table: all entries of a slot side by side in one row.

A step reads and writes a few slots out of many. With one array per quantity, each would cost a gather and a
scatter: a kernel launch on an accelerator, a cache miss on a CPU. A table costs one of each per slot.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._step.linear_algebra import change_if
from bilevax._step.slots import Memory, gather, scatter

WIDEST = 128  # entries of a slot's quantity: from some 200 on, a CPU loses by copying them into one row


class Columns(NamedTuple):
    """Where a quantity is: in the table of its dtype from `first` on, or (None) in an array of its own."""

    dtype: str
    shape: tuple[int, ...]
    first: int | None


class SlotTable(eqx.Module):
    """A level's `Memory` as a table; its quantities can be read by name.

    Attributes:
      tables: by dtype, (slots, width).
      apart: the quantities in arrays of their own.
      columns: where each quantity is, in the order of the memory's leaves.
      structure: the tree structure of the memory.
    """

    tables: dict[str, Array]
    apart: list[Array]
    columns: tuple[Columns, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)

    @property
    def memory(self) -> Memory:
        """The quantities as arrays of their own."""
        return jax.tree.map(self._read, self._places)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return jax.tree.leaves((self.tables, self.apart))[0].shape[0]

    def parts(self) -> list[tuple[str, Any]]:
        """See `Memory.parts`."""
        return self.memory.parts()

    @property
    def lazy(self) -> set[str]:
        """See `Memory.lazy`."""
        return self.memory.lazy

    @property
    def y(self) -> Any:
        return self._part("y")

    @property
    def v(self) -> Any:
        return self._part("v")

    @property
    def hessian(self) -> Array | None:
        return self._part("hessian")

    @property
    def squares(self) -> Memory:
        """The sum over all slots of every entry's square, in one pass and without copying columns."""
        tables, apart = jax.tree.map(
            lambda a: jnp.sum(jnp.square(a), axis=0, keepdims=True), (self.tables, self.apart)
        )
        return SlotTable(tables, apart, self.columns, self.structure).memory

    @property
    def _places(self) -> Memory:
        """The memory with the index of each quantity in its place."""
        return jax.tree.unflatten(self.structure, range(len(self.columns)))

    def _part(self, name: str) -> Any:
        """One quantity; outside of a compiled function nothing else is copied."""
        return jax.tree.map(self._read, getattr(self._places, name))

    def _read(self, place: int) -> Array:
        dtype, shape, first = self.columns[place]
        if first is None:
            return self.apart[sum(one.first is None for one in self.columns[:place])]
        table = self.tables[dtype]
        return table[..., first : first + math.prod(shape)].reshape(table.shape[:-1] + shape)

    def take(self, slots: Array) -> Memory:
        """The memory of some slots."""
        tables, apart = gather((self.tables, self.apart), slots)
        return SlotTable(tables, apart, self.columns, self.structure).memory

    def put(self, slots: Array, rows: Memory, distinct: bool = True) -> SlotTable:
        """The table with the memory of some slots replaced; `distinct` promises that none occurs twice."""
        leaves = self.structure.flatten_up_to(rows)
        new = _pack(leaves, self.columns)
        tables, apart = scatter((self.tables, self.apart), slots, new, distinct)
        return SlotTable(tables, apart, self.columns, self.structure)

    def unvisited(self, now: Array) -> SlotTable:
        """See `Memory.unvisited`."""
        if self._places.visit is None:
            return self
        return change_if(now, lambda table: pack(table.memory.unvisited(now)), self)


def pack(memory: Memory) -> SlotTable:
    """The memory of all slots as a table."""
    leaves, structure = jax.tree.flatten(memory)
    columns = _layout(leaves)
    return SlotTable(*_pack(leaves, columns), columns, structure)


def _layout(leaves: list[Array]) -> tuple[Columns, ...]:
    """Narrow quantities go into the table of their dtype, if it gets at least two."""
    shapes = [leaf.shape[1:] for leaf in leaves]
    narrow = [math.prod(shape) <= WIDEST for shape in shapes]
    dtypes = [leaf.dtype.name for leaf in leaves]
    together = [dtype for dtype, fits in zip(dtypes, narrow, strict=True) if fits]
    width = dict.fromkeys(dtypes, 0)
    columns = []
    for dtype, shape, fits in zip(dtypes, shapes, narrow, strict=True):
        packed = fits and together.count(dtype) > 1
        columns.append(Columns(dtype, shape, width[dtype] if packed else None))
        width[dtype] += math.prod(shape) if packed else 0
    return tuple(columns)


def _pack(leaves: list[Array], columns: tuple[Columns, ...]) -> tuple[dict[str, Array], list[Array]]:
    """Leaves with any leading axes, as tables and separate arrays."""
    parts: dict[str, list[Array]] = {}
    apart = []
    for leaf, (dtype, shape, first) in zip(leaves, columns, strict=True):
        if first is None:
            apart.append(leaf)
        else:
            lead = leaf.shape[: leaf.ndim - len(shape)]
            parts.setdefault(dtype, []).append(leaf.reshape((*lead, -1)).astype(dtype))
    return {dtype: jnp.concatenate(some, axis=-1) for dtype, some in parts.items()}, apart
