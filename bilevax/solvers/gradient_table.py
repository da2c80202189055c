"""The table of stored gradients: its parts, how it is laid out, and how it is filled at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.groups import Drawn, Groups, groups_of, source_names
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._step.lagrangian import Point
from bilevax._step.passes import MOST, over_all_blocks
from bilevax._step.slots import Moving, gather
from bilevax._step.state import State
from bilevax._step.stored_gradients import (
    Part,
    Slopes,
    blank_part,
    lower_sees_x,
    lower_slopes,
    upper_sees_x,
    upper_slopes,
)
from bilevax._step.trackers import Tracker
from bilevax._step.visit import Visit
from bilevax._util.memory import available_bytes
from bilevax._util.trees import PyTree, combine, zeros_like

UPPER = "f"  # the part of ℓ that is f; the others have the names of their data sources
_NUMBERS = 2**24  # entries of gradients by x that are held at once while the table is filled


def parts_of(problem: Problem) -> dict[str, str]:
    """The parts of ℓ, each with the data source of its rows."""
    upper, lower = source_names(problem)
    terms = [source for name, source in lower.items() if not problem.levels[name].own]
    return {UPPER: upper} | {source: source for source in dict.fromkeys(terms)}


def slopes_of(
    problem: Problem, part: str, point: Point, v: dict[str, PyTree], sample: Sample, by_x: bool
) -> Slopes:
    """The gradients of a part, per block."""
    if part == UPPER:
        return upper_slopes(problem, point, sample, by_x)[0]
    return lower_slopes(problem, levels_of(problem, part), point, v, sample, by_x)


def by_parts(
    problem: Problem,
    trackers: dict[str, Tracker],
    visits: dict[str, Visit],
    x: PyTree,
    slopes: Callable[[str, dict[str, PyTree]], Slopes],
) -> tuple[dict[str, PyTree], Slopes]:
    """The multipliers, and the gradients of ℓ, from those of its parts.

    Args:
      problem: the problem.
      trackers, visits: by level.
      x: like the gradient by x, which may be in no part.
      slopes: the gradients of a part (by x over all blocks), from its name and the multipliers.
    """
    found = [slopes(UPPER, {})]
    v = {name: t.directions(visits[name], [found[0].y[name]])[0] for name, t in trackers.items()}
    found += [slopes(part, v) for part in parts_of(problem) if part != UPPER]
    return v, Slopes(
        _sum([one.x for one in found if one.x is not None], zeros_like(x)),
        {name: _sum([one.y[name] for one in found if name in one.y], None) for name in trackers},
        {name: _sum([one.v[name] for one in found if name in one.v], None) for name in trackers},
    )


def _sum(trees: list[PyTree], empty: PyTree) -> PyTree:
    return combine(*((1, tree) for tree in trees)) if trees else empty


def levels_of(problem: Problem, part: str) -> list[str]:
    """The lower levels of a part: those with a term of ℓ that draw from its source."""
    of_lower = source_names(problem)[1].items()
    return [name for name, source in of_lower if source == part and not problem.levels[name].own]


def grouped_sample(
    problem: Problem, groups: dict[str, Groups], blocks: Array, drawn: dict[str, Drawn]
) -> Sample:
    """The sample of some blocks, with the drawn groups as batches."""
    batches = {name: one.take(blocks, drawn[name].number) for name, one in groups.items()}
    of_upper, of_lower = source_names(problem)
    constants = jax.tree.map(lambda a: a.at[blocks].get(mode="promise_in_bounds"), problem.blocks)
    lower = {name: batches[source] for name, source in of_lower.items()}
    slots = dict.fromkeys(problem.levels, blocks)
    return Sample(blocks, constants, slots, batches[of_upper], lower, drawn)


def blank_table(problem: Problem, state: State) -> dict[str, Part]:
    """A table of zeros.

    Raises:
      MemoryError: if it is larger than the memory of the device.
    """
    groups = groups_of(problem, state.sampler.batch_size)

    def one_block(state: State) -> dict[str, Slopes]:
        blocks = jnp.zeros(1, jnp.int32)
        sample = grouped_sample(
            problem, groups, blocks, {n: one.look_up(blocks, blocks) for n, one in groups.items()}
        )
        point = Point(state.x, gather(_start_of_y(state), blocks))
        v = zeros_like(point.y)
        return {
            part: slopes_of(problem, part, point, v, sample, sees_x(problem, part, point, sample))
            for part in parts_of(problem)
        }

    like = jax.eval_shape(one_block, state)
    most = {part: groups[source].most for part, source in parts_of(problem).items()}
    _check_memory(problem, like, most)
    return {part: blank_part(like[part], problem.count, most[part]) for part in like}


def filled_table(problem: Problem, state: State, parts: dict[str, Part]) -> dict[str, Part]:
    """The table with the gradients of all blocks and groups at the start, where v = 0."""
    groups = groups_of(problem, state.sampler.batch_size)
    y, out = _start_of_y(state), {}
    v = {name: zeros_like(y[name]) for name in problem.levels}
    width = sum(leaf.size for leaf in jax.tree.leaves(state.x))
    together, weights = max(1, min(MOST, _NUMBERS // width)), None
    if problem.risk is not None and state.blocks is not None:
        weights = problem.risk.weights(state.blocks.shared, state.blocks.values, None)
    for part, source in parts_of(problem).items():
        look = _filling(problem, groups, part, source, Point(state.x, y, weights), v)
        out[part] = over_all_blocks(problem.count, look, parts[part], together)
        if part == UPPER:
            means = {n: out[part].mean.y[n] for n, level in problem.levels.items() if level.is_value}
            v = v | means
    return out


def _filling(
    problem: Problem, groups: dict[str, Groups], part: str, source: str, start: Point, v: dict[str, PyTree]
) -> Any:
    def look(_: Any, blocks: Array, whole: Part) -> Part:
        weights = None if start.weights is None else start.weights[blocks]
        point, here = Point(start.x, gather(start.y, blocks), weights), gather(v, blocks)
        first = {name: one.look_up(blocks, jnp.zeros_like(blocks)) for name, one in groups.items()}

        def one_group(number: Array, whole: Part) -> Part:
            drawn = first | {source: groups[source].look_up(blocks, jnp.full_like(blocks, number))}
            sample = grouped_sample(problem, groups, blocks, drawn)
            fresh = slopes_of(problem, part, point, here, sample, whole.mean.x is not None)
            return whole.insert(fresh, blocks, drawn[source], problem.count)

        return jax.lax.fori_loop(0, whole.most, one_group, whole)

    return look


def sees_x(problem: Problem, part: str, point: Point, sample: Sample) -> bool:
    """Whether a part of ℓ reads x at all."""
    if part == UPPER:
        return upper_sees_x(problem, point, sample)
    return lower_sees_x(problem, levels_of(problem, part), point, sample)


def _start_of_y(state: State) -> dict[str, PyTree]:
    return {n: one.y.value if isinstance(one.y, Moving) else one.y for n, one in state.levels.items()}


def _check_memory(problem: Problem, like: dict[str, Slopes], most: dict[str, int]) -> None:
    need = sum(
        problem.count * most[part] * int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize
        for part, slopes in like.items()
        for leaf in jax.tree.leaves(slopes)
    )
    have = available_bytes()
    if need > have:
        groups = ", ".join(f"{count} of {part}" for part, count in most.items())
        raise MemoryError(
            f"BlockSAGA stores gradients by x, y and v of every block and row group: {problem.count} blocks "
            f"with {groups} groups each need {need:,} bytes, the device has {have:,}. A larger batch_size "
            "makes fewer groups; BlockPAGE stores no gradients."
        )
