"""The user's functions, each with a few rows of one block to look at it on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.bits import CompactRows
from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Rows, Shared
from bilevax._util import checks

PyTree = Any
Value = Callable[[PyTree, PyTree, PyTree], PyTree]  # of (point, constants, rows)
Choice = Callable[[Rows | None], tuple[int, PyTree] | None]  # a block, and some of its rows

_ROWS = 8


class Checked(NamedTuple):
    """A user's function, with the rows to compare.

    Attributes:
      name: what messages call it.
      value: the function, of a point (x, y by level), constants and rows.
      given: what it is evaluated on first, with parts that are `fetched` within the program.
      block: the number of the block.
    """

    name: str
    value: Value
    given: tuple[PyTree, PyTree, PyTree]
    block: int


class _Entry(eqx.Module):
    """One block's entries of some arrays. Fetching them is part of the program that uses them."""

    arrays: PyTree
    place: Any

    def fetched(self) -> PyTree:
        return jax.tree.map(lambda a: jnp.asarray(a)[self.place], self.arrays)


class _SomeRows(eqx.Module):
    """Rows with these numbers."""

    packed: CompactRows
    places: Any

    def fetched(self) -> PyTree:
        return self.packed.take(self.places)


def fetched(tree: PyTree) -> PyTree:
    """A tree with the entries and rows that parts of it stand for."""

    def is_part(node: Any) -> bool:
        return isinstance(node, (_Entry, _SomeRows))

    return jax.tree.map(lambda node: node.fetched() if is_part(node) else node, tree, is_leaf=is_part)


def starting_point(problem: Problem, x0: PyTree, y0: PyTree) -> tuple[PyTree, dict[str, PyTree]] | None:
    """x0 and y0 by level; None if y0 does not fit the problem."""
    y = dict.fromkeys(problem.levels) if y0 is None else problem.split("y0", y0)
    fits = all(_fits(problem, name, tree) for name, tree in y.items())
    return (checks.floating("x0", x0), y) if fits else None


def _fits(problem: Problem, name: str, y: PyTree) -> bool:
    """Whether a level's y has an entry for every slot, or is left out where it may be."""
    if y is None:
        return problem.levels[name].is_value
    slots = problem.slots_of(name)
    return all(np.ndim(leaf) and np.shape(leaf)[0] == slots for leaf in jax.tree.leaves(y))


def is_unknown(tree: PyTree) -> bool:
    """Whether some array is traced, or held by other processes."""
    leaves = jax.tree.leaves(tree)
    return any(checks.is_traced(leaf) or not getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def functions_at(problem: Problem, x: PyTree, y: dict[str, PyTree], rows_of: Choice) -> Iterator[Checked]:
    """The functions that can be looked at, each with a block and rows of it that its data source has."""
    own_slots = any(level.slots is not None for level in problem.levels.values())
    sources = {name: problem.lower_data[place] for name, place in problem.source_of}
    upper = problem.upper_data if problem.upper_shares is None else sources[problem.upper_shares]
    found = None if own_slots else rows_of(upper)
    if found is not None:
        block, rows = found
        constants = _entry(problem.blocks, block)
        start = _starting_y(problem, x, y, block)
        if start is not None:
            yield Checked(
                "upper",
                lambda point, c, rows: problem.upper(point[0], problem.view(point[1]), c, rows),
                ((x, start), constants, rows),
                block,
            )
    for name, level in problem.levels.items():
        found = None if level.own or level.slots is not None else rows_of(sources[name])
        if found is None:
            continue
        block, rows = found
        constants = _entry(problem.blocks, block)
        if level.reads:
            whole = None if own_slots else _starting_y(problem, x, y, block)
            if whole is None:
                continue
            start = problem.read_by(name, whole) | ({} if level.is_value else {name: whole[name]})
            value = functools.partial(_of_lower, level.function)
        elif level.has_hessian:
            start = _entry(y[name], block)
            value = functools.partial(_of_lower, level.function)
        else:
            start, value = None, functools.partial(_of_mean, level.function)
        yield Checked(f"lower level {name!r}", value, ((x, start), constants, rows), block)


def _of_lower(function: Callable[..., Any], point: PyTree, constants: PyTree, rows: PyTree) -> PyTree:
    return function(*point, constants, rows)


def _of_mean(function: Callable[..., Any], point: PyTree, constants: PyTree, rows: PyTree) -> PyTree:
    return function(point[0], constants, rows)


def _starting_y(problem: Problem, x: PyTree, y: dict[str, PyTree], block: int) -> dict[str, PyTree] | None:
    """One block's y; a mean without a start is computed from a few rows. None if that is not possible."""
    sources = {name: problem.lower_data[place] for name, place in problem.source_of}
    start = {}
    for name in problem.order:
        level = problem.levels[name]
        if y[name] is not None:
            start[name] = _entry(y[name], block)
            continue
        found = some_rows(sources[name], block)
        rows = None if found is None else found[1]
        if not level.is_value or (found is None and sources[name] is not None):
            return None
        try:
            read = (problem.read_by(name, start),) if level.reads else ()
            given = (x, *read, _entry(problem.blocks, block), rows)
            start[name] = jax.jit(lambda given, c=level.function: c(*fetched(given)))(given)
        except Exception:  # a user's function may fail in any way; the start of the run will say so
            return None
    return start


def some_rows(source: Rows | None, block: int | None = None) -> tuple[int, PyTree] | None:
    """Rows of a block, the longest unless one is given, from its first to its last; None if there is one."""
    if isinstance(source, Shared):
        first, length, block = 0, source.count, block or 0
    elif isinstance(source, PerBlock):
        lengths = np.asarray(source.lengths)
        block = int(np.argmax(lengths)) if block is None else block
        first, length = int(source.starts[block]), int(lengths[block])
    else:
        return None
    count = min(_ROWS, length)
    if count < 2:
        return None
    return block, rows_at(source, first + np.linspace(0, length - 1, count))


def rows_at(source: Shared | PerBlock, places: Any) -> PyTree:
    """Rows with these numbers, to be fetched by the program that uses them."""
    return _SomeRows(source.packed, np.asarray(places, np.int32))


def _entry(tree: PyTree, place: int) -> _Entry:
    return _Entry(tree, np.int32(place))
