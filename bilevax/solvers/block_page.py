"""BlockPAGE: for finite sums; some steps recompute everything that is tracked from all rows."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Shared
from bilevax._problem.sampling import START, Sample, Sampler
from bilevax._step.coefficients import Coefficient
from bilevax._step.lagrangian import Gradients, Point
from bilevax._step.oracles import Oracles, count_pass, rows_per_visit
from bilevax._step.ordering import after
from bilevax._step.passes import MOST, over_all_blocks
from bilevax._step.slots import Memory, Moving
from bilevax._step.state import State
from bilevax._step.stored_gradients import Slopes
from bilevax._step.trackers import TrackedSolve
from bilevax._step.visit import Look, Visit
from bilevax._util import checks
from bilevax._util.trees import PyTree, combine, where_slot, zeros_like
from bilevax.solvers.gradient_table import by_parts, sees_x
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.start_checks import check_own_slots, check_same_rows
from bilevax.solvers.upper import UpperStep
from bilevax.solvers.whole_pass import in_pieces, whole_slopes

_COUNTED = 2**12  # steps whose refreshes are counted together
_GOLDEN = 0x9E3779B9  # 2³² times the golden section
_ROWS = 2**18  # rows of blocks that a refresh looks at together


class BlockPAGE(Recipe):
    r"""Loopless variance reduction for finite sums: BSVRB v2 with full refreshes in place of averaging.

    A share p of the steps refreshes the estimators of all m blocks from all their rows,

    .. math::
        s_i \leftarrow \nabla_y g_i, \qquad
        u_i \leftarrow \nabla_{yy}^2 g_i v_i - \nabla_y f_i, \qquad
        z \leftarrow \tfrac1m \sum_i \nabla_x f_i - \nabla_{xy}^2 g_i v_i

    at :math:`(x_t, y_t, v_t)`; otherwise it corrects those of the sampled blocks by their change,

    .. math::
        s_i \leftarrow s_i + \tfrac mI (\nabla_y g^t - \nabla_y g^{t-1}), \qquad
        u_i \leftarrow u_i + \tfrac mI (\nabla_v \phi^t - \nabla_v \phi^{t-1}), \qquad
        z \leftarrow z + G - \tilde G

    which is BSVRB v2 with α = ᾱ = β = 0. Then all blocks move lazily, :math:`y_i \leftarrow y_i - \tau s_i`
    and :math:`v_i \leftarrow \Pi_V[v_i - \bar\tau u_i]`, and :math:`x \leftarrow x - \eta z`. The noise is
    that of changes alone: it vanishes as the run converges, with constant steps.

    The steps that refresh are spread evenly, where PAGE flips a coin in every step: what corrections miss
    grows until the next refresh, and with a coin some refreshes come late. They are the same steps for every
    key, so that the runs of a sweep refresh together.
    Mean levels are tracked in the same way, from :math:`y_i \leftarrow c_i(x_t)`; where there are any, blocks
    are drawn anew in each step.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ; left out, 2/(3 L) · I/m, with a scale for every entry of y.
      inverse_step: τ̄; left out, τ.
      refresh_chance: p in (0, 1], the share of steps that refresh; left out, as many rows are read by
        refreshes as by the other steps.
      radius: V ≥ ‖v_i‖, e.g. C_fy/λ; left out, v is not projected.

    `lower_step`, `inverse_step` and `radius` may be dicts by lower level. The first estimators come from all
    rows unless `initial_batch_size` is given. Levels with slots of their own are refused.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.BlockPAGE(upper_step=0.1)

    Reference:
      Li et al., *PAGE: A Simple and Optimal Probabilistic Gradient Estimator for Nonconvex Optimization*,
      ICML 2021, for the estimator; the blocks and their correction by m/I are BSVRB's.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: Coefficient | None = None
    inverse_step: Coefficient | None = None
    refresh_chance: float | None = None
    radius: Coefficient | None = None

    alpha: ClassVar[float] = 0.0
    beta: ClassVar[float] = 0.0
    takes_tables: ClassVar[bool] = False  # a refresh changes all of z
    corrected = True
    lazy = True
    rescales = False
    curvature = TrackedSolve()

    def __check_init__(self) -> None:
        if callable(self.refresh_chance):
            raise TypeError("refresh_chance must be a number, got a function")
        checks.coefficient("refresh_chance", self.refresh_chance, high=1.0, kinds="a number")

    def check(self, problem: Problem, sampler: Sampler) -> None:
        """Raises if a hyper-parameter or a level does not fit the method."""
        check_own_slots(type(self).__name__, problem)
        check_same_rows(type(self).__name__, problem)
        super().check(problem, sampler)

    def start(self, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
        """The state before the first step.

        If there are mean levels, `shuffle` is ignored. Their y_i jump when they are visited, and z learns of
        it only where a block is visited twice in a row, which shuffled epochs avoid.
        """
        if any(level.is_value for level in problem.levels.values()):
            sampler = dataclasses.replace(sampler, shuffle=False)
        return super().start(problem, x0, y0, sampler)

    def first_rows(self, sampler: Sampler) -> int | None:
        """All rows of every block, unless another number is given."""
        return None if sampler.initial_batch_size is None else sampler.first_rows

    def renew(
        self, problem: Problem, state: State, levels: dict[str, Any], z: PyTree
    ) -> tuple[dict[str, Any], PyTree]:
        """Recomputes everything if this step refreshes."""
        due = self.refreshes(problem, state.sampler, state.step)
        # A loop of at most one turn: unlike a cond, it is skipped under vmap too, if no run refreshes.
        _, levels, z = jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.zeros((), bool), *self._refreshed(problem, state, *carry[1:])),
            (due, levels, z),
        )
        return levels, z

    def coefficients_at(self, problem: Problem, state: State) -> dict[str, object]:
        """Those of every recipe, and the chance of a refresh."""
        chance = self._chance(problem, state.sampler)
        return super().coefficients_at(problem, state) | {"refresh_chance": chance}

    def refreshes(self, problem: Problem, sampler: Sampler, step: Array) -> Array:
        """Whether a step refreshes. It depends on the step's number only, not on the key."""
        return _turn(step) < self._chance(problem, sampler)

    def _chance(self, problem: Problem, sampler: Sampler) -> Any:
        return default_chance(problem, sampler) if self.refresh_chance is None else self.refresh_chance

    def _refreshed(
        self, problem: Problem, state: State, levels: dict[str, Any], z: PyTree
    ) -> tuple[dict[str, Any], PyTree]:
        whole = _Whole(self.upper_step, radius=self.radius)

        def look(_: Any, blocks: Array, carry: tuple[dict[str, Any], PyTree]) -> tuple[Any, PyTree]:
            levels, z = carry
            sample = state.sampler.visit(problem, blocks, state.sampler.random.at(START), None)
            visits = whole.visits(problem, dataclasses.replace(state, levels=levels), sample, 0)
            visits = {name: _before(visit) for name, visit in visits.items()}
            seen = whole.look(problem, state, sample, visits)
            for name, tracker in whole.trackers(problem).items():
                rows, _ = tracker.refresh(visits[name], seen)
                if problem.levels[name].is_value:  # z belongs to the y from before, as in every step
                    rows = Memory(y=rows.y, previous=visits[name].rows.y, visit=rows.visit)
                slots = after(blocks, problem.count, (seen.gradients[0].x, rows.y, rows.v))
                levels = levels | {name: levels[name].put(slots, rows)}
            return levels, combine((1, z), (blocks.shape[0] / problem.count, seen.gradients[0].x))

        together = max(1, min(MOST, _ROWS // _longest(problem)))
        return over_all_blocks(problem.count, look, (levels, zeros_like(z)), together)

    def count_oracles(self, problem: Problem, sampler: Sampler, steps: int) -> Oracles:
        """Two points of the sampled blocks per step, and one of all blocks and rows per refresh."""
        refreshes = int(_count_refreshes(steps, self._chance(problem, sampler)))
        whole = count_pass(self.oracles(problem), problem, None)
        return super().count_oracles(problem, sampler, steps) + whole * refreshes


class _Whole(Recipe):
    """A refresh as a recipe: one point, and estimators that forget what they tracked before."""

    upper_step: UpperStep | None = None
    lower_step: float = 1.0
    radius: Coefficient | None = None

    alpha: ClassVar[float] = 1.0
    beta: ClassVar[float] = 1.0
    corrected = False
    lazy = True
    curvature = TrackedSolve()

    def look(self, problem: Problem, state: State, sample: Sample, visits: dict[str, Visit]) -> Look:
        """The gradients on all rows, piece by piece if that is faster. Nothing reads f here."""
        if not in_pieces(problem):
            return super().look(problem, state, sample, visits)
        trackers = self.trackers(problem)
        y = {name: tracker.recall(visits[name])[0] for name, tracker in trackers.items()}
        point = Point(state.x, y, state.weights(problem, sample))
        blocks = sample.blocks.shape[0]

        def slopes(part: str, v: dict[str, PyTree]) -> Slopes:
            by_x = sees_x(problem, part, point, sample)
            found = whole_slopes(problem, part, point, v, sample, by_x)
            x = jax.tree.map(lambda a: jnp.sum(a, 0) / blocks, found.x)
            return Slopes(x, found.y, found.v)

        v, total = by_parts(problem, trackers, visits, state.x, slopes)
        gradients = Gradients(total.x, total.y, total.v, jnp.zeros(()))
        return Look(problem, sample, [point], [v], [gradients])


def _turn(step: Array) -> Array:
    """A number in [0, 1) for each step: multiples of the golden section, which are spread evenly.

    The steps with a number below p are at most 2/p apart, and contain those of every smaller p.
    """
    turned = (jnp.asarray(step).astype(jnp.uint32) + 1) * jnp.uint32(_GOLDEN)  # the start is step −1
    return (turned >> 8).astype(float) * 2.0**-24


@jax.jit
def _count_refreshes(steps: Array, chance: Array) -> Array:
    """How many of the first steps refresh."""

    def count(turn: Array, total: Array) -> Array:
        at = turn * _COUNTED + jnp.arange(_COUNTED)
        return total + jnp.sum((_turn(at) < chance) & (at < steps))

    return jax.lax.fori_loop(0, -(-steps // _COUNTED), count, jnp.zeros((), int))


def _before(visit: Visit) -> Visit:
    """The visit as it was before this step, which may have corrected the means of some slots already."""
    rows = visit.rows
    if isinstance(rows.y, Moving):
        return visit
    y = where_slot(rows.visit == visit.step, rows.previous, rows.y)
    return dataclasses.replace(visit, rows=dataclasses.replace(rows, y=y))


def default_chance(problem: Problem, sampler: Sampler) -> float:
    """The chance with which refreshes read as many rows as the steps between them."""
    # The same on a device's share of the blocks as on all of them.
    seen, whole = rows_per_visit(problem, sampler.batch_size), rows_per_visit(problem, None)
    return min(1.0, 2 * (sampler.per_step / problem.count) * seen / whole) if whole else 1.0


def _longest(problem: Problem) -> int:
    """The most rows that a refresh reads of one block."""
    lengths = [
        source.longest if isinstance(source, PerBlock) else source.count
        for source in (problem.upper_data, *problem.lower_data)
        if isinstance(source, (PerBlock, Shared))
    ]
    return max(lengths, default=1)
