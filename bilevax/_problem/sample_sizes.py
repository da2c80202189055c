"""How many blocks and rows a step sees, where a user leaves it out.

A step sees everything while that is cheap, so that small problems are solved without noise. Otherwise

    I = m/20, between 128 and 512,        B = 4096/I, between 32 and 512

(all blocks, if there are fewer; more than 512 blocks, or rows of a block, where a step stays cheap: if the
blocks have few rows, or if the rows have few entries). What is tracked of a block is as old as its last
visit, m/I steps: at equal rows per step, many blocks with few rows each do better than few with many.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from bilevax._problem.problem import Problem
from bilevax._problem.rows import Rows
from bilevax._problem.stream import Stream

CHEAP = 2**14  # rows that a step may read: more, and it sees a share of the blocks and rows
_VISITED, _FEWEST_BLOCKS, _MOST_BLOCKS = 20, 128, 512
_ROWS, _FEWEST_ROWS, _MOST_ROWS = 2**12, 32, 512
_ENTRIES = 2**20  # of the rows of all blocks in a step, up to which more rows than that are cheap


def chosen_sizes(
    problem: Problem,
    blocks_per_step: int | Literal["all"] | None,
    batch_size: int | Literal["all"] | None,
    strata: int = 1,
) -> tuple[int, int | None]:
    """I, and B or None for all rows.

    Args:
      problem: the problem.
      blocks_per_step: what the user gave; None if nothing.
      batch_size: what the user gave; None if nothing.
      strata: what I must be divisible by, if it is chosen.
    """
    m, blocks = problem.count, problem.count if blocks_per_step == "all" else blocks_per_step
    size = None if batch_size == "all" else batch_size
    if blocks is None or batch_size is None:
        if blocks is None:
            visited = max(rows_of_a_visit(problem, size), 1)
            blocks = m if m * visited <= CHEAP else _share(m, visited, strata)
        rows = [_longest(source) for source in _sources(problem)]
        widest = max(map(_entries, _sources(problem)), default=1)
        # Where f and g are not means over rows, B is part of the problem.
        if batch_size is None and problem.means_over_rows and blocks * sum(rows) > CHEAP:
            most = max(_MOST_ROWS, _ENTRIES // (blocks * widest))
            some = min(max(_ROWS // blocks, _FEWEST_ROWS), most)
            size = some if some < max(rows) else None
    return int(blocks), None if size is None else int(size)


def rows_of_a_visit(problem: Problem, size: int | None) -> int:
    """How many rows a step reads of a block, of all sources together; None takes all of them."""
    sources = _sources(problem)
    return sum(map(_longest, sources)) if size is None else size * len(sources)


def _sources(problem: Problem) -> list[Rows]:
    return [one for one in (problem.upper_data, *problem.lower_data) if one is not None]


def _share(blocks: int, rows: int, strata: int) -> int:
    """I of m blocks, of which a visit reads so many rows."""
    most = max(_MOST_BLOCKS, CHEAP // rows)
    share = min(max(blocks // _VISITED, _FEWEST_BLOCKS), most, blocks)
    return min(-(-share // strata) * strata, blocks)


def _longest(source: Rows) -> int:
    """The most rows that a block has; 0 for a source that cannot return all of them."""
    return max((leaf.shape[0] for leaf in _rows_of_one_block(source)), default=0)


def _entries(source: Rows) -> int:
    """How many numbers a row has; 1 for a source that cannot return all rows."""
    leaves = _rows_of_one_block(source)
    return max(sum(leaf.size // max(leaf.shape[0], 1) for leaf in leaves), 1)


def _rows_of_one_block(source: Rows) -> list[Any]:
    """The shapes of all rows of a block; none for a source that cannot return them."""

    def look(source: Rows, random: Stream) -> Any:
        return source.draw(random, jnp.zeros(1, jnp.int32), None)

    word = jax.ShapeDtypeStruct((), jnp.uint32)
    try:
        batch = jax.eval_shape(look, source, Stream(word, word))  # pyright: ignore[reportArgumentType]
    except Exception:  # a source that needs a batch size says so itself, when it is first used
        return []
    leaves = jax.tree.leaves(batch.rows)
    if batch.shared:
        return [leaf for leaf in leaves if leaf.ndim > 0]
    return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves if leaf.ndim > 1]
