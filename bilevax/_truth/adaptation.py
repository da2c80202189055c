"""Lower solutions of blocks that a run has not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Rows
from bilevax._problem.sampling import all_rows
from bilevax._problem.view import BlockView, each_block
from bilevax._step.slots import gather
from bilevax._truth.few_blocks import require_slot_per_block, solve_level
from bilevax._truth.shapes import inferred
from bilevax._util import checks
from bilevax._util.trees import PyTree, norm, result_dtype

_ENTRIES = 2**22  # of the rows of the blocks that are solved at once
_MOST_BLOCKS = 256
_SHORTEST = 4  # the least number of rows to which blocks are padded
_LEFT = 10.0  # times √ε: the share of y that the Newton step left may be


def adapt(
    problem: Problem,
    x: PyTree,
    rows: Rows | Mapping[str, Rows | None],
    *,
    blocks: PyTree = None,
    y0: PyTree = None,
    blocks_at_once: int | None = None,
) -> PyTree:
    r"""The lower solutions of new blocks at a given x, on all their rows.

    .. math:: y_j = \arg\min_y g(x, y; \text{rows of block } j)

    What was learnt in x is applied to blocks that took no part in the run: a new user's few rows, say. Blocks
    are solved together, those of similar length at a time, by damped Newton steps (up to 64 lower variables)
    or by L-BFGS and conjugate gradients (more).

    Args:
      problem: the problem that x was learnt on; only its lower levels are used.
      x: the upper variable.
      rows: the rows of the new blocks, usually a `PerBlock`; a dict by level, if levels see different rows.
      blocks: the constants of the new blocks, with their number as leading axis; may be left out if the
        problem's blocks are numbers: the new blocks then have the next ones.
      y0: where the solver starts, with one entry per new block; left out, zeros in the shape of one block's
        y, as in `solve_lower`.
      blocks_at_once: the most blocks solved together; left out, as many as keep the memory small.

    Returns:
      y with one entry per new block; a dict if the levels have names.

    Raises:
      RuntimeError: if a block was not solved; g must be smooth and strongly convex in y.
      ValueError: if blocks are missing, or a level has slots of its own or optimises f.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp, numpy as np
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y**2),
      ...     lower=lambda x, y, block, batch: jnp.mean(jnp.sum((y - batch) ** 2, 1)) + jnp.sum((y - x) ** 2),
      ...     blocks=2,
      ...     lower_data=bx.PerBlock(jnp.ones((4, 2)), [0, 2, 4]),
      ... )
      >>> new = bx.PerBlock(jnp.arange(6.0).reshape(3, 2), [0, 1, 3])
      >>> y = bx.adapt(problem, jnp.zeros(2), new)  # halfway from x to the mean of the rows
      >>> print(np.asarray(y).round(3))
      [[0.  0.5]
       [1.5 2. ]]
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a bilevax.Problem, got {type(problem).__name__}")
    problem = problem.without_centres()
    require_slot_per_block(problem, "adapt")
    _require_functions(problem)
    x = checks.floating("x", x)
    new = _with_blocks(problem, rows, blocks)
    if y0 is None:
        given: dict[str, Any] = dict.fromkeys(problem.levels)
        own = inferred(problem, all_rows(problem), x, given)
        start = {n: None if tree is None else _zeros(own[n], new.count) for n, tree in (given | own).items()}
    else:
        start = new.split("y0", y0)
        for name, tree in start.items():
            if new.levels[name].has_hessian and checks.leading_axis("y0", tree) != new.count:
                raise ValueError(
                    f"y0 must have one entry for each of the {new.count} new blocks, got "
                    f"{checks.leading_axis('y0', tree)}"
                )
        start = {n: tree if new.levels[n].has_hessian else None for n, tree in start.items()}
    if blocks_at_once is not None:
        blocks_at_once = checks.whole_number("blocks_at_once", blocks_at_once, 1)

    left = np.zeros(new.count)
    places, parts = [], []
    for length, members in _by_length(new):
        part = _cut(new, length)
        for chosen in np.array_split(members, -(-len(members) // (blocks_at_once or _at_once(part)))):
            y, move = _solve(part, x, gather(start, jnp.asarray(chosen)), jnp.asarray(chosen))
            left[chosen] = np.asarray(move, np.float64)
            places.append(chosen)
            parts.append(y)
    _require_solved(left, result_dtype(x), problem.assumptions)
    order = np.argsort(np.concatenate(places))
    return new.view(jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *parts))


def _require_functions(problem: Problem) -> None:
    """Raises if variables optimise f: a new block has no rows that judge it."""
    for name, level in problem.levels.items():
        if level.own:
            raise ValueError(
                f"adapt solves for what rows of g or c say, got the {level.kind} level {name!r}, which "
                "optimises f: call solve_lower with a problem of the new blocks, with rows for f"
            )


def _with_blocks(problem: Problem, rows: Any, blocks: PyTree) -> Problem:
    """The problem of the new blocks."""
    if blocks is None:
        own = jax.tree.leaves(problem.blocks)
        first = next((one for one in (rows.values() if isinstance(rows, Mapping) else [rows])), None)
        if len(own) != 1 or own[0].ndim != 1 or not jnp.issubdtype(own[0].dtype, jnp.integer):
            raise ValueError("blocks must be given: the constants of the new blocks, as in the problem")
        if not isinstance(first, PerBlock):
            raise ValueError("blocks must be given: the rows do not tell how many new blocks there are")
        blocks = problem.count + jnp.arange(first.starts.shape[0])
    named = {name: problem.levels[name] for name in problem.order}
    levels = named if problem.named else next(iter(named.values()))
    return Problem(
        upper=problem.upper,
        lower=levels,
        blocks=blocks,
        lower_data=rows,
        means_over_rows=problem.means_over_rows,
    )


def _zeros(own: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), own)


def _lengths(problem: Problem) -> np.ndarray:
    """The most rows that a block has in any source of its own rows; 1 without one."""
    sources = [np.asarray(one.lengths) for one in problem.lower_data if isinstance(one, PerBlock)]
    return np.max([np.ones(problem.count, int), *sources], 0)


def _by_length(problem: Problem) -> list[tuple[int, np.ndarray]]:
    """The blocks, by the power of two that their rows are padded to."""
    padded = _SHORTEST * 2 ** np.ceil(np.log2(np.maximum(_lengths(problem) / _SHORTEST, 1))).astype(int)
    return [(int(length), np.flatnonzero(padded == length)) for length in np.unique(padded)]


def _cut(problem: Problem, length: int) -> Problem:
    """The problem as it is for blocks of at most so many rows."""
    sources = tuple(
        one.up_to(min(length, one.longest)) if isinstance(one, PerBlock) else one
        for one in problem.lower_data
    )
    out = object.__new__(Problem)
    for field in dataclasses.fields(problem):
        object.__setattr__(out, field.name, getattr(problem, field.name))
    object.__setattr__(out, "lower_data", sources)
    return out


def _at_once(problem: Problem) -> int:
    """How many blocks to solve together, from the size of their rows."""
    shapes = all_rows(problem).one_block(problem, None, slots=False)
    size = sum(leaf.size for batch in shapes.lower.values() for leaf in jax.tree.leaves(batch.rows))
    return max(1, min(_MOST_BLOCKS, _ENTRIES // max(size, 1)))


@eqx.filter_jit
def _solve(problem: Problem, x: PyTree, y: dict[str, PyTree], blocks: Array) -> tuple[PyTree, Array]:
    """y of some blocks, and the Newton step that is left, as a share of y and one."""
    sampler = all_rows(problem)
    sample = sampler.visit(problem, blocks, sampler.random, None)

    def one(view: BlockView, y: dict[str, PyTree]) -> tuple[dict[str, PyTree], Array]:
        best, left = {}, jnp.zeros(())
        for name in problem.order:
            if not problem.levels[name].has_hessian:
                best[name] = view.c(name, best)
                continue
            solved = solve_level(view, name, y[name], best)
            best[name] = ravel_pytree(y[name])[1](solved.y)
            # `jnp.maximum` keeps a NaN.
            left = jnp.maximum(left, norm(solved.move) / (1 + norm(solved.y)))
        return best, left

    return each_block(problem, x, sample, one, y)


def _require_solved(left: np.ndarray, dtype: Any, assumptions: str) -> None:
    most = _LEFT * float(jnp.finfo(dtype).eps) ** 0.5
    bad = ~(left <= most)
    if bad.any():
        worst = int(np.argmax(np.nan_to_num(left, nan=np.inf)))
        raise RuntimeError(
            f"block {worst} of the new blocks was not solved: the Newton step that is left is "
            f"{left[worst]:.3g} of y, expected at most {most:.3g}. {bad.sum()} of {bad.size} blocks failed. "
            f"{assumptions}; if so, try another y0 or float64"
        )
