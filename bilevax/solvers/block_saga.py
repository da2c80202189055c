"""BlockSAGA: for finite sums; a stored gradient per block and row group."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from bilevax._problem.groups import groups_of
from bilevax._problem.problem import Problem
from bilevax._problem.reading import readers
from bilevax._problem.sampling import ROWS, Sample, Sampler
from bilevax._step.coefficients import Coefficient, LowerStep
from bilevax._step.lagrangian import Gradients, Point
from bilevax._step.oracles import Oracles, count_pass, count_rows
from bilevax._step.state import State
from bilevax._step.stored_gradients import Slopes, lower_slopes, upper_slopes
from bilevax._step.trackers import TrackedSolve
from bilevax._step.visit import Look, Visit
from bilevax._util.trees import PyTree
from bilevax.solvers.gradient_table import (
    UPPER,
    blank_table,
    by_parts,
    filled_table,
    grouped_sample,
    levels_of,
    parts_of,
)
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.start_checks import check_own_slots, check_same_rows
from bilevax.solvers.upper import UpperStep


class BlockSAGA(Recipe):
    r"""Stored gradients for finite sums: SOBA's step on sampled blocks, with noise that vanishes.

    The rows of every block are cut into groups of `batch_size`. Of each block i and group k the newest
    :math:`\nabla_y g`, :math:`\nabla_{yy}^2 g\, v`, :math:`\nabla_{xy}^2 g\, v`, :math:`\nabla_y f` and
    :math:`\nabla_x f` are stored, with their means over the groups. A step draws I blocks and a group of
    each, and takes as every one of these gradients

    .. math:: \bar a_i + K_i w_{ik} (g_{ik} - a_{ik})

    from the fresh g, the stored a, its mean over the K_i groups and the group's share w_ik of the rows
    (:math:`K_i w_{ik} = 1` if all groups are equally long); for x the mean is over all blocks. Then

    .. math::
        y_i \leftarrow y_i - \tau \nabla_y g_i, \qquad
        v_i \leftarrow \Pi_V[v_i - \bar\tau (\nabla_{yy}^2 g_i v_i - \nabla_y f_i)], \qquad
        x \leftarrow x - \eta z

    on the sampled blocks, with constant steps. Mean levels are :math:`y_i \leftarrow c_i`, reduced likewise.

    Memory is m · K · (2 d_y + d_x) numbers for the lower and m · K · (d_y + d_x) for the upper rows (without
    d_x for an f or g that does not look at x). A table larger than the device's memory raises a MemoryError.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ, or an optax transformation; left out, 2/(3 L), with a scale for every entry of y.
      inverse_step: τ̄; left out, τ, or 2/(3 L) if y moves by a transformation.
      radius: V ≥ ‖v_i‖; left out, v is not projected.

    All but `upper_step` may be dicts by lower level. The table is filled from all rows at the start;
    `initial_batch_size=0` starts it from zero, and no other number is taken. Levels with slots of their own
    are refused.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.BlockSAGA(upper_step=0.1)

    Reference:
      Dagréou et al., *A framework for bilevel optimization that enables stochastic and global variance
      reduction algorithms*, NeurIPS 2022, whose SABA this is for m = 1.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    inverse_step: Coefficient | None = None
    radius: Coefficient | None = None

    distributed: ClassVar[bool] = False  # the stored gradients are not split over devices
    takes_tables: ClassVar[bool] = False  # it stores gradients by all of x
    alpha: ClassVar[float] = 1.0
    beta: ClassVar[float] = 1.0
    corrected = False
    lazy = False
    curvature = TrackedSolve()

    def check(self, problem: Problem, sampler: Sampler) -> None:
        """Raises if a hyper-parameter or a level does not fit the method."""
        check_own_slots(type(self).__name__, problem)
        check_same_rows(type(self).__name__, problem)
        if any(rows is not None and rows.common for rows in (problem.upper_data, *problem.lower_data)):
            raise ValueError(
                "BlockSAGA draws a row group for every block, got Shared(…, common=True): use BSVRBv2"
            )
        if sampler.initial_batch_size not in (None, "all", 0):
            raise ValueError(
                "initial_batch_size must be None, 'all' or 0 for BlockSAGA, whose table holds all rows, got "
                f"{sampler.initial_batch_size!r}"
            )
        super().check(problem, sampler)
        for name, level in problem.levels.items():
            found = readers(problem.levels, name)
            if level.is_value and found:  # its v is made of their gradients, which are reduced with that v
                raise ValueError(
                    f"BlockSAGA does not take a mean level that others read, got {name!r}, which "
                    f"{found[0]!r} reads: use BlockPAGE"
                )

    def start(self, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
        """The state before the first step, with the table filled from all rows."""
        state = super().start(problem, x0, y0, sampler)
        parts = blank_table(problem, state)
        if self.first_rows(sampler) != 0:
            parts = filled_table(problem, state, parts)
        return dataclasses.replace(state, store=parts)

    def first_rows(self, sampler: Sampler) -> int | None:
        """All rows of every block, or none."""
        return 0 if sampler.initial_batch_size == 0 else None

    def draw(self, problem: Problem, state: State) -> Sample:
        """The blocks of a step, and a row group of each."""
        sampler = state.sampler
        blocks = sampler.blocks_at(state.step)
        random = sampler.random.at(ROWS).at(state.step)
        groups = groups_of(problem, sampler.batch_size)
        drawn = {name: one.draw(random.at(place), blocks) for place, (name, one) in enumerate(groups.items())}
        return grouped_sample(problem, groups, blocks, drawn)

    def look(self, problem: Problem, state: State, sample: Sample, visits: dict[str, Visit]) -> Look:
        """The point, and the gradients there as the stored ones reduce them."""
        trackers, sources, parts = self.trackers(problem), parts_of(problem), dict(state.store)
        y = {name: tracker.recall(visits[name])[0] for name, tracker in trackers.items()}
        point = Point(state.x, y, state.weights(problem, sample))

        def reduced(part: str, v: dict[str, PyTree]) -> Slopes:
            by_x = parts[part].mean.x is not None
            if part == UPPER:
                fresh, seen["f"] = upper_slopes(problem, point, sample, by_x)
            else:
                fresh = lower_slopes(problem, levels_of(problem, part), point, v, sample, by_x)
            drawn = sample.drawn[sources[part]]
            found, parts[part] = parts[part].reduce(fresh, sample.blocks, drawn, problem.count)
            return found

        seen: dict[str, Array] = {}
        v, total = by_parts(problem, trackers, visits, state.x, reduced)
        f = seen["f"]
        return Look(
            problem, sample, [point], [v], [Gradients(total.x, total.y, total.v, jnp.mean(f), f)], parts
        )

    def count_oracles(self, problem: Problem, sampler: Sampler, steps: int) -> Oracles:
        """A group of each sampled block per step; first a pass over all rows, and one over all groups."""
        groups, visits = groups_of(problem, sampler.batch_size), steps * sampler.per_step
        drawn = visits * sum(one.mean_rows(problem.count) for one in groups.values())
        total = self.oracles(problem) * visits + Oracles(rows=round(drawn))
        if self.first_rows(sampler) == 0:
            return total
        trackers, table = self.trackers(problem), count_rows(problem, None, problem.count)
        for part, source in parts_of(problem).items():
            of_levels = sum((trackers[n].oracles for n in levels_of(problem, part)), Oracles())
            once = Oracles(gradients=2) if part == UPPER else of_levels
            table += once * groups[source].total(problem.count)
        return total + table + count_pass(self.oracles(problem), problem, None)
