"""The gradients of some blocks on all their rows, for tables too long for a cache: piece by piece."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.groups import sources
from bilevax._problem.problem import Problem
from bilevax._problem.reading import readers
from bilevax._problem.rows import Batch, Shared
from bilevax._problem.sampling import Sample
from bilevax._step.lagrangian import Point
from bilevax._step.stored_gradients import Slopes
from bilevax._util.trees import PyTree, combine
from bilevax.solvers.gradient_table import UPPER, levels_of, parts_of, slopes_of

PIECE = 4096  # rows: some MB as floats, unpacked once and then read from the cache


def in_pieces(problem: Problem) -> bool:
    """Whether a pass over all rows is faster piece by piece: on a CPU, if blocks share a long table.

    Not if a level reads a mean: the v of the mean needs the gradients of its readers, which need their v.
    """
    long = [one for one in sources(problem).values() if isinstance(one, Shared) and one.count >= 2 * PIECE]
    levels = problem.levels
    read = any(level.is_value and readers(levels, name) for name, level in levels.items())
    return bool(long) and not read and problem.means_over_rows and jax.default_backend() == "cpu"


def whole_slopes(
    problem: Problem, part: str, point: Point, v: dict[str, PyTree], sample: Sample, by_x: bool
) -> Slopes:
    """The gradients of a part of ℓ on all rows, per block.

    Args:
      problem, part, point, v, by_x: as in `slopes_of`.
      sample: the blocks with all their rows, of which those of a long shared table are not used.
    """
    source = sources(problem)[parts_of(problem)[part]]
    if not isinstance(source, Shared) or source.count < 2 * PIECE:
        return slopes_of(problem, part, point, v, sample, by_x)

    def piece(first: Array, size: int) -> Slopes:
        rows = jax.tree.map(lambda a: a[0], source.packed.consecutive(first[None], size))
        batch = Batch(rows, shared=True)
        if part == UPPER:
            seen = dataclasses.replace(sample, upper=batch)
        else:
            own = dict.fromkeys(levels_of(problem, part), batch)
            seen = dataclasses.replace(sample, lower=sample.lower | own)
        return slopes_of(problem, part, point, v, seen, by_x)

    def add(total: Slopes, first: Array, size: int) -> Slopes:
        return combine((1, total), (size / source.count, piece(first, size)))

    turns, rest = divmod(source.count, PIECE)
    like = jax.eval_shape(lambda: piece(jnp.zeros((), jnp.int32), PIECE))
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    total = jax.lax.fori_loop(0, turns, lambda turn, total: add(total, turn * PIECE, PIECE), total)
    return add(total, jnp.asarray(turns * PIECE, jnp.int32), rest) if rest else total
