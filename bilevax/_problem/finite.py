"""What is given to a run must be finite: numbers that are not are named before any work is done.

x0 and y0 are always refused with such numbers. Rows and constants of blocks may hold them where functions
leave them out, as marks of missing values. So the functions are asked: a row on which one of them, or its
slope, is not finite, although it is on another row, is refused with its number.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.few_rows import Checked, fetched, functions_at, is_unknown, rows_at, starting_point
from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Rows, Shared
from bilevax._problem.streamed import Streamed
from bilevax._util.trees import all_finite

PyTree = Any

_seen: dict[int, weakref.ref[Any]] = {}  # arrays that were found finite, by id
_on_device = jax.jit(all_finite)
_LARGE = 2**20  # entries: fewer are fetched from an accelerator sooner than a program is compiled for them
_MOST_BAD, _KINDS = 10_000, 8  # rows that are not finite, and kinds of them, that are looked at


class NotFinite(NamedTuple):
    """The first row of its kind in an array of the data, or block in one of constants, that is not finite.

    Attributes:
      where: the array.
      place: the row, counted over all blocks; or the block, for constants.
      good: one that is finite; None if there is none.
      count: how many are not.
      source: the data source; None for constants.
    """

    where: str
    place: int
    good: int | None
    count: int
    source: Shared | PerBlock | None

    def __str__(self) -> str:
        what = "blocks" if self.source is None else "rows"
        others = f", and {self.count - 1} other {what}" if self.count > 1 else ""
        if self.source is None:
            return f"{self.where} of block {self.place} is not finite{others}"
        owner = ""
        if isinstance(self.source, PerBlock):
            block, row = _block_and_row(self.source, self.place)
            owner = f" (row {row} of block {block})"
        return f"row {self.place} of {self.where}{owner} is not finite{others}"


def check_start(name: str, tree: PyTree, *, slots: bool = False) -> None:
    """Raises unless all entries of an argument are finite, as far as they are known.

    Tables of other libraries and masked arrays are no arrays of JAX, and are refused as well.

    Args:
      name: of the argument.
      tree: its arrays.
      slots: whether the leading axis counts slots.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where = name + jax.tree_util.keystr(path)
        if hasattr(leaf, "to_numpy") or isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(f"{where} must be a floating array, got {type(leaf).__name__}")
        if is_unknown(leaf) or _all_finite(leaf):
            continue
        array = np.asarray(leaf)
        place = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
        slot, rest = (f" in slot {place[0]}", place[1:]) if slots and place else ("", place)
        at = f" at {list(rest)}" if rest else ""
        raise ValueError(f"{where} must hold finite numbers, got {array[place]}{slot}{at}")


def check_finite(problem: Problem, x0: PyTree, y0: PyTree, x_name: str = "x0") -> None:
    """Raises if x0 or y0 is not finite, or if rows or constants of blocks make a function so.

    Args:
      problem: the problem.
      x0: where x starts.
      y0: where the lower variables start, as in `minimize`.
      x_name: what messages call x0.

    Raises:
      ValueError: with the argument, and the entry, the row or the block.
    """
    check_start(x_name, x0)
    check_start("y0", y0, slots=True)
    if is_unknown((problem, x0, y0)):
        return
    for bad in not_finite(problem):
        there = _finite_by_function(problem, x0, y0, bad.source, bad.place)
        elsewhere = {} if bad.good is None else _finite_by_function(problem, x0, y0, bad.source, bad.good)
        for name, is_finite in there.items():
            if not is_finite and elsewhere.get(name, True):
                raise ValueError(
                    f"{bad}, and {name} is not finite there: mend or leave it out, or let the function "
                    "leave such entries out"
                )


def not_finite(problem: Problem) -> Iterator[NotFinite]:
    """Where the data are not finite, array by array."""
    several = len(problem.lower_data) > 1
    sources: dict[str, PyTree] = {"blocks": problem.blocks, "upper_data": problem.upper_data}
    for number, rows in enumerate(problem.lower_data):
        sources[f"lower_data {number}" if several else "lower_data"] = rows
    for name, tree in sources.items():
        source = tree if isinstance(tree, (Shared, PerBlock)) else None
        if isinstance(tree, Rows) and source is None:
            continue
        arrays = tree if source is None else source.packed.stored  # what is packed is finite
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
            if _all_finite(leaf):
                continue
            finite = np.isfinite(np.asarray(leaf)).reshape(leaf.shape[0], -1)
            bad, good = np.flatnonzero(~finite.all(1)), np.flatnonzero(finite.all(1))
            # Marks of missing values hide no other entry: each kind of row is looked at.
            kinds = np.unique(finite[bad[:_MOST_BAD]], axis=0, return_index=True)[1]
            for place in bad[np.sort(kinds)[:_KINDS]]:
                where = f"{name}{jax.tree_util.keystr(path)}"
                yield NotFinite(where, int(place), int(good[0]) if good.size else None, bad.size, source)


def bad_batch(problem: Problem, end: int) -> str:
    """Which batch that was streamed for a step before `end` is not finite; nothing if none is."""
    for rows in (problem.upper_data, *problem.lower_data):
        window = rows.window if isinstance(rows, Streamed) else None
        if window is None:
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(window.batches):
            seen = np.asarray(leaf)[: end - int(window.first)]
            if not _all_finite(seen):
                step, block, row = map(int, np.argwhere(~np.isfinite(seen))[0][:3])
                return (
                    f"the batch that was read for step {step + int(window.first)} is not finite: "
                    f"{jax.tree_util.keystr(path)} of row {row}, for the block at place {block} of that step"
                )
    return ""


def _finite_by_function(
    problem: Problem, x0: PyTree, y0: PyTree, source: Shared | PerBlock | None, place: int
) -> dict[str, bool]:
    """By name, whether the functions that see a row (or a block's constants) are finite on it."""

    def rows_of(other: Rows | None) -> tuple[int, PyTree] | None:
        if source is not None and other is not source:
            return None
        if source is not None:
            block = _block_and_row(source, place)[0] if isinstance(source, PerBlock) else 0
            return block, rows_at(source, [place])
        if isinstance(other, (Shared, PerBlock)):
            return place, rows_at(other, [int(other.starts[place]) if isinstance(other, PerBlock) else 0])
        return (place, None) if other is None else None

    start = starting_point(problem, x0, y0)
    functions = [] if start is None else functions_at(problem, *start, rows_of)
    return {one.name: _is_finite(one) for one in functions}


def _is_finite(one: Checked) -> bool:
    """Whether a function and its slopes by x and y are finite; true of one that fails: the start says so."""

    def total(point: PyTree, constants: PyTree, rows: PyTree) -> Any:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(one.value(point, constants, rows)))

    try:
        found = jax.jit(lambda given: all_finite(jax.value_and_grad(total)(*fetched(given))))(one.given)
    except Exception:  # a user's function may fail in any way
        return True
    return bool(found)


def _block_and_row(source: PerBlock, place: int) -> tuple[int, int]:
    """The block that a row belongs to, and its number there."""
    starts = np.asarray(source.starts)
    block = int(np.searchsorted(starts, place, side="right")) - 1
    return block, place - int(starts[block])


def _all_finite(leaf: Any) -> bool:
    """Whether the entries of an array are finite; an array that does not change is looked at once."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return True
    seen = _seen.get(id(leaf))
    if seen is not None and seen() is leaf:
        return True
    there = isinstance(leaf, jax.Array) and leaf.size > _LARGE and jax.default_backend() != "cpu"
    found = bool(_on_device(leaf) if there else np.isfinite(np.asarray(leaf)).all())
    if found and isinstance(leaf, jax.Array):
        key = id(leaf)
        _seen[key] = weakref.ref(leaf, lambda _: _seen.pop(key, None))
    return found
