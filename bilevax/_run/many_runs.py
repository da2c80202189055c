"""The compiled parts of many runs side by side: settings and seeds are two axes of one program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampling
from bilevax._step.state import State
from bilevax._util.trees import PyTree, norm
from bilevax.solvers.base import AbstractSolver

Make = Callable[..., AbstractSolver]  # of a setting, by keywords
Metric = Callable[[Problem, State], Any]


def many_runs(make: Make, sampling: Sampling, metrics: dict[str, Metric], many: bool) -> ManyRuns:
    """The compiled parts: those of an earlier call with the same functions, if there was one."""
    parts = (make, sampling, tuple(metrics.items()), many)
    try:
        return _known(*parts)
    except TypeError:  # a function that cannot be hashed
        return ManyRuns(*parts)


class ManyRuns:
    """The compiled parts of runs with the axes (settings, seeds).

    Args:
      make: makes the solver of a setting.
      sampling: how blocks and rows are drawn.
      metrics: names and functions of (problem, state).
      many: whether every seed has a problem of its own.

    Attributes:
      start: (problem, numbers, x0, y0, keys) → the states before the first step.
      advance: (problem, numbers, states, steps) → the states, which it takes over, the mean of f over the
        steps, and ‖z‖.
      metrics: by name, (problem, states) → one number per run.
    """

    def __init__(
        self,
        make: Make,
        sampling: Sampling,
        metrics: tuple[tuple[str, Metric], ...] = (),
        many: bool = False,
    ) -> None:
        over = 0 if many else None

        def start(problem: Problem, numbers: Any, x0: PyTree, y0: PyTree, key: Array) -> State:
            return make(**numbers).start(problem, x0, y0, sampling.sampler(problem, key))

        def advance(problem: Problem, numbers: Any, state: State, steps: Array) -> Any:
            solver = make(**numbers)

            def body(_: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
                state, total = carry
                state, info = solver.step(problem, state)
                return state, total + info.objective

            state, total = jax.lax.fori_loop(0, steps, body, (state, jnp.zeros(())))
            return state, total / steps, norm(state.settled.z)

        # First over seeds, then over settings: a problem, x0 and y0 are shared by the settings.
        self.start = eqx.filter_jit(
            jax.vmap(
                jax.vmap(start, in_axes=(over, None, None, None, 0)), in_axes=(None, 0, None, None, None)
            )
        )
        self.advance = jax.jit(
            jax.vmap(jax.vmap(advance, in_axes=(over, None, 0, None)), in_axes=(None, 0, 0, None)),
            donate_argnums=2,
        )
        self.metrics = {
            name: jax.jit(jax.vmap(jax.vmap(_settled(metric), in_axes=(over, 0)), in_axes=(None, 0)))
            for name, metric in metrics
        }


def _settled(metric: Metric) -> Metric:
    """A metric of states whose tables are not caught up."""
    return lambda problem, state: metric(problem, state.settled)


_known = functools.lru_cache(maxsize=8)(ManyRuns)
