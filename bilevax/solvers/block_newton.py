"""Newton steps on small lower problems, moving averages elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import equinox as eqx
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampler
from bilevax._step.coefficients import Coefficient, evaluate, first
from bilevax._step.newton import NewtonSteps
from bilevax._step.state import State
from bilevax._step.visit import Rates
from bilevax._util.host import numpy_of
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.start_checks import touched_slots
from bilevax.solvers.upper import UpperStep

_FIRST, _DECAY = 0.3, 3.0  # the weight of a new batch: at most the first, then the second over √visits
_EXACT = 0.4  # the weight of a batch of all rows


class FallingWeight(eqx.Module):
    """min(0.3, 3/√visits) of a slot that a step visits with this chance: a schedule of the step number."""

    chance: float = eqx.field(static=True)

    def __call__(self, step: Array) -> Array:
        here = numpy_of(step)
        return here.minimum(_FIRST, _DECAY / here.sqrt(1.0 + step * self.chance))

    def __repr__(self) -> str:
        return f"min({_FIRST:g}, {_DECAY:g}/√visits)"


class BlockNewton(Recipe):
    r"""Newton steps on lower problems of low dimension, with averaged Hessians.

    For sampled blocks, with the weight c of a new batch and the batch's :math:`\nabla_y g_i` and
    :math:`\nabla_{yy}^2 g_i`,

    .. math::
        H_i &\leftarrow (1-c) H_i + c \nabla_{yy}^2 g_i, \qquad
        y_i \leftarrow y_i - c H_i^{-1} \nabla_y g_i, \qquad
        v_i \leftarrow v_i - c H_i^{-1} (\nabla_{yy}^2 g_i v_i - \nabla_y f_i) \\
        z &\leftarrow (1-\beta) z + \beta \tfrac1I \sum_i (\nabla_x f_i - \nabla_{xy}^2 g_i v_i)

    then x moves along z. Mean levels are averaged with the same weight. Nothing depends on the units of x, y
    or F, and the conditioning of the lower problems does not matter. A visit costs
    :math:`O(B d_y^2 + d_y^3)`, and the memory is :math:`O(m d_y^2)`: for up to some 30 lower variables.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z; left out,
        `automatic_step()`.
      alpha: c, the weight of a new batch in (0, 1]; left out, min(0.3, 3/√visits), or 0.4 if a
        step sees all rows, and no function draws random numbers.
      beta: β in (0, 1].

    `alpha` may be a dict by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.BlockNewton()
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    alpha: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.05

    corrected = False
    lazy = False
    curvature = NewtonSteps()

    def rates(self, problem: Problem, state: State, name: str, touched: int, stage: Array | int) -> Rates:
        """The weight of a new batch; a restart halves it."""
        given = evaluate(self.alpha, state.step, name)
        weight: Any = first(given, evaluate(_left_out(problem, state.sampler, name, touched), state.step))
        alpha = weight * 0.5**stage * state.lower_factor
        if problem.levels[name].own:  # a step along the newest gradient, no longer than its curvature allows
            known = state.smoothness[name]
            return Rates(1.0, None, None, None, alpha / known.value, None, None, None, known.scales, None)
        return Rates(alpha, None, alpha, *[None] * 7)

    def coefficients_at(self, problem: Problem, state: State) -> dict[str, object]:
        """The weight of a new batch of every level: its schedule, where it falls."""
        touched = {name: touched_slots(problem, state.sampler, name) for name in problem.levels}
        return {"alpha": {n: _left_out(problem, state.sampler, n, count) for n, count in touched.items()}}


def _left_out(problem: Problem, sampler: Sampler, name: str, touched: int) -> float | FallingWeight:
    """The weight of a new batch if none is given: it falls, to average the noise of the batches out."""
    noisy = sampler.batch_size is not None or problem.random
    return FallingWeight(sampler.chance(problem, name, touched)) if noisy else _EXACT
