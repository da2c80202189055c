"""Tables: parts of x of which a batch reads the rows that it looks up by index.

A weight for every training row, or embeddings of users and items, may have millions of rows, of which a batch
reads some hundreds. A problem says which: index(block, batch). Its functions then receive those rows in place
of the table, so that nobody differentiates by the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.random_functions import Keyed
from bilevax._util import checks

if TYPE_CHECKING:
    from bilevax._problem.rows import Batch

PyTree = Any
Index = Callable[[PyTree, PyTree], Array | None]

WHOLE = ""  # the name of a table that is all of x


class Found(eqx.Module):
    """Rows of a table that a step has looked up, in place of the table.

    Attributes:
      rows: by data source, with the sampled blocks as leading axis.
    """

    rows: dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LooksUp:
    """A function of x that receives rows in place of tables.

    Attributes:
      function: takes x first, and a block and a batch last.
      tables: the tables of x, each with its index.
      source: the data source of its batch.
    """

    function: Callable[..., Any]
    tables: tuple[tuple[str, Index], ...]
    source: str

    def __call__(self, x: PyTree, *rest: PyTree) -> Any:
        block, batch = rest[-2:]
        rows = batch.rows if isinstance(batch, Keyed) else batch
        for name, index in self.tables:
            table = part_of(x, name)
            if isinstance(table, Found):
                found = table.rows.get(self.source)
            else:  # outside of steps, or in those that move all rows
                at = index(block, rows)
                found = None if at is None else rows_of(table, at)
            x = with_part(x, name, found)
        return self.function(x, *rest)


def rows_of(table: Array, at: Array) -> Array:
    """Rows of a table; one that it does not have is not a number, so that it is noticed."""
    return table.at[jnp.where(at < 0, table.shape[0], at)].get(mode="fill", fill_value=jnp.nan)


def part_of(x: PyTree, name: str) -> PyTree:
    """A table of x, or what stands in its place."""
    return x if name == WHOLE else x[name]


def with_part(x: PyTree, name: str, part: PyTree) -> PyTree:
    """x with something else in place of a table."""
    return part if name == WHOLE else x | {name: part}


def without_parts(x: PyTree, names: list[str]) -> PyTree:
    """x with None in place of these tables."""
    for name in names:
        x = with_part(x, name, None)
    return x


def axes_of(x: PyTree) -> PyTree:
    """The axis of the blocks in x, for `jax.vmap`: rows that were looked up have one."""
    return jax.tree.map(
        lambda part: 0 if isinstance(part, Found) else None, x, is_leaf=lambda part: isinstance(part, Found)
    )


def lookups(
    tables: tuple[tuple[str, Index], ...], constants: PyTree, batches: Mapping[str, Batch]
) -> dict[str, dict[str, Array]]:
    """Which rows of every table the sampled blocks look up, by data source."""
    found: dict[str, dict[str, Array]] = {}
    for name, index in tables:
        of_sources = {
            source: jax.vmap(index, in_axes=(0, batch.axis))(constants, batch.rows)
            for source, batch in batches.items()
        }
        found[name] = {source: at for source, at in of_sources.items() if at is not None}
    return found


def as_tables(given: Any) -> tuple[tuple[str, Index], ...]:
    """The tables that a user gave: a function, or a dict of them by name."""
    named = given if isinstance(given, Mapping) else {} if given is None else {WHOLE: given}
    for name, index in named.items():
        if not callable(index):
            where = f"tables[{name!r}]" if isinstance(given, Mapping) else "tables"
            raise TypeError(f"{where} must be a function index(block, batch), got {type(index).__name__}")
    return tuple(named.items())


def check_tables(
    tables: tuple[tuple[str, Index], ...], x: PyTree, block: PyTree, batches: Mapping[str, PyTree]
) -> None:
    """Raises if x does not have these tables, or an index is none; for shapes of a block and its batches."""
    for name, index in tables:
        where = "x0" if name == WHOLE else f"x0[{name!r}]"
        if name != WHOLE and not (isinstance(x, dict) and name in x):
            got = sorted(x) if isinstance(x, dict) else checks.kind_of(x)
            raise ValueError(f"x0 must be a dict with the table {name!r}, got {got}")
        table = part_of(x, name)
        if not (hasattr(table, "shape") and len(table.shape) > 0):
            got = f"shape {table.shape}" if hasattr(table, "shape") else type(table).__name__
            raise ValueError(f"{where} is a table and must be one array with rows, got {got}")
        label = "tables" if name == WHOLE else f"tables[{name!r}]"
        found = [checks.traced(label, index, block=block, batch=rows) for rows in batches.values()]
        if all(one is None for one in found):
            raise ValueError(f"{label} must return row numbers for some batch, got None for all")
        for one in found:
            if one is not None and not (hasattr(one, "dtype") and jnp.issubdtype(one.dtype, jnp.integer)):
                raise ValueError(f"{label} must return an array of integers or None, got {one}")
