"""What a run carries from step to step, and what a step tells about itself."""

from __future__ import annotations

from typing import Any

import equinox as eqx
from jax import Array

from bilevax.curvature import Clocks
from bilevax.memory import Memory, Moving
from bilevax.sampling import Sampler
from bilevax.trees import PyTree


class State(eqx.Module):
    """The state of a run: a pytree of arrays.

    Attributes:
      step: how many steps were taken.
      x: the upper variable.
      x_before: x one step earlier; None if the method does not look back.
      z: the tracked ∇F.
      optimizer: the state of the optax transformation, if `upper_step` is one.
      levels: the per-slot memory of each lower level.
      clocks: per level, the sums of steps that lazy slots catch up with.
      smoothness: the estimates of L_g, where a step was left out.
      floors: the floors of the tracked Hessians, where they were left out.
      sampler: the plan of sampling.
      store: the stored gradients of a method that keeps them; else None.
    """

    step: Array
    x: PyTree
    x_before: PyTree
    z: PyTree
    optimizer: PyTree
    levels: dict[str, Any]
    clocks: dict[str, Clocks]
    smoothness: dict[str, Array]
    floors: dict[str, Array]
    sampler: Sampler
    named: bool = eqx.field(static=True)
    store: PyTree = None

    @property
    def y(self) -> PyTree:
        """The lower variables, all caught up with the present step."""
        return self._view({name: self._current(memory.y, name, "y") for name, memory in self.levels.items()})

    @property
    def v(self) -> PyTree:
        """The tracked [∇²_yy g]⁻¹ ∇_y f, caught up; None for levels that do not track it.

        Its projection onto the ball of `radius` is applied when a slot is next visited.
        """
        return self._view(
            {n: self._current(m.v, n, "v") if isinstance(m, Memory) else None for n, m in self.levels.items()}
        )

    def _current(self, variable: Any, name: str, clock: str) -> PyTree:
        return (
            variable.at(getattr(self.clocks[name], clock).now) if isinstance(variable, Moving) else variable
        )

    def _view(self, by_level: dict[str, PyTree]) -> PyTree:
        return by_level if self.named else next(iter(by_level.values()))


class Info(eqx.Module):
    """What a step saw.

    Attributes:
      objective: the mean of f over the sampled blocks and rows.
      gradient_norm: ‖z‖, the size of the tracked ∇F.
      lower_residual: root mean square of the tracked ∇_y g over the visited slots (0 for mean levels).
      inverse_residual: the same of the tracked ∇²_yy g v − ∇_y f, where v is tracked.
      decomposed: how many tracked Hessians fell below the floor and had to be decomposed.
    """

    objective: Array
    gradient_norm: Array
    lower_residual: Array
    inverse_residual: Array
    decomposed: Array
