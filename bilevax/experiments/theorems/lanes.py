"""Many runs side by side, until the running mean of ‖∇F‖², measured at every step, reaches a goal."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.solvers.toolkit import CompensatedSum

Measure = Callable[[Array], Array]

_CHUNK_SECONDS = 0.5  # of one compiled call


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem, the start of a run, and its sampling."""

    problem: bx.Problem
    x0: Any
    y0: Any
    sampling: bx.Sampling


class Lane(eqx.Module):
    """One of the runs side by side.

    Attributes:
      state: the solver's state.
      total: Σ_t ‖∇F(x_t)‖², until the run reaches the goal.
      last: the last term of that sum.
      reached: the first step at which the mean was at most the goal; 0 if not yet, −1 if the run diverged.
    """

    state: bx.State
    total: CompensatedSum
    last: Array
    reached: Array


@dataclasses.dataclass(frozen=True)
class Reached:
    """Steps until mean_{t ≤ T} ‖∇F(x_t)‖² ≤ goal, with axes (solvers, seeds).

    Attributes:
      steps: T; infinite if the run did not reach the goal.
      mean: the running mean at T, or at the last step of a run that did not reach the goal.
      last: ‖∇F(x)‖² at the same step.
      seconds: of all runs together, without compilation.
    """

    steps: np.ndarray
    mean: np.ndarray
    last: np.ndarray
    seconds: float


def start(task: Task, solvers: Sequence[Any], keys: Array) -> tuple[Any, Lane]:
    """The stacked solvers, and a lane before its first step for every solver and key."""
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(leaves, float), *solvers)
    x0, y0 = jax.tree.map(jnp.asarray, (task.x0, task.y0))
    return stacked, _start(stacked, task.problem, x0, y0, keys, task.sampling)


def steps_until(
    task: Task,
    solvers: Sequence[Any],
    keys: Array,
    measure: Measure,
    goal: float,
    max_steps: int,
    progress: bx.Progress | str | None = "auto",
    race: bool = False,
) -> Reached:
    """Runs solvers of one class with every key, until the running mean of a function of x reaches a goal.

    Args:
      task: the problem, its start and its sampling.
      solvers: solvers of one class; other coefficients need no recompilation.
      keys: random keys, one per seed.
      measure: a function of x, such as ‖∇F(x)‖². If it is a pytree, other arrays need no recompilation.
      goal: ε².
      max_steps: maximum number of steps of a run.
      progress: as in `bilevax.minimize`.
      race: stop as soon as it is certain which solver has the smallest mean T; unfinished runs count as
        infinite.

    Returns:
      The steps, per solver and seed.
    """
    stacked, lanes = start(task, solvers, keys)
    bound = jnp.asarray(goal, float)

    def advance(lanes: Lane, until: int) -> Lane:
        return jax.block_until_ready(
            _advance(stacked, task.problem, measure, bound, lanes, jnp.asarray(until))
        )

    lanes = advance(lanes, 0)
    display, chunk, done, seconds = bx.make_progress(progress, max_steps), 16, 0, 0.0
    with display:
        while done < max_steps and not _settled(np.asarray(lanes.reached), done, race):
            tick, before = time.perf_counter(), done
            lanes = advance(lanes, min(max_steps, done + chunk))
            done = int(lanes.state.step.max())
            elapsed = max(time.perf_counter() - tick, 1e-9)
            seconds += elapsed
            chunk = max(16, int((done - before) / elapsed * _CHUNK_SECONDS))
            waiting = int(jnp.sum(lanes.reached == 0))
            display.update(done, lanes.reached.size * done / seconds, {"runs left": waiting})
    reached = np.asarray(lanes.reached)
    mean = np.asarray(lanes.total.high) / np.where(reached > 0, reached, done)
    return Reached(np.where(reached > 0, reached, np.inf), mean, np.asarray(lanes.last), seconds)


def _settled(reached: np.ndarray, done: int, race: bool) -> bool:
    """Whether all lanes are done; in a race, whether no other solver can still have a smaller mean T."""
    if not (reached == 0).any():
        return True
    means = np.where((reached > 0).all(1), reached.mean(1), np.inf)
    return race and done >= reached.shape[1] * means.min()


def trace(
    task: Task,
    solvers: Sequence[Any],
    keys: Array,
    observe: Callable[[bx.State], dict[str, Array]],
    at: Sequence[int],
    progress: bx.Progress | str | None = "auto",
) -> dict[str, np.ndarray]:
    """Runs solvers of one class with every key, and observes their states at given steps.

    Args:
      task, solvers, keys, progress: as in `steps_until`.
      observe: scalars of a state, by name. If it is a pytree, other arrays need no recompilation.
      at: the steps, ascending.

    Returns:
      By name, (solvers, seeds, len(at)).
    """
    stacked, lanes = start(task, solvers, keys)
    display, entries, seconds, state = bx.make_progress(progress, at[-1]), [], 0.0, lanes.state
    with display:
        for step in at:
            tick = time.perf_counter()
            state, seen = _observe(stacked, task.problem, observe, state, jnp.asarray(step))
            entries.append(jax.device_get(seen))
            seconds += time.perf_counter() - tick
            display.update(step, step * len(solvers) * len(keys) / seconds, {})
    return {name: np.stack([entry[name] for entry in entries], -1) for name in entries[0]}


def log_spaced(first: int, last: int, count: int) -> list[int]:
    """Distinct integers from first to last, about evenly spaced on a logarithmic scale."""
    return sorted({round(step) for step in np.geomspace(first, last, count)})


def over_lanes(function: Callable[..., Any], axes: tuple[Any, ...]) -> Callable[..., Any]:
    """Maps function(solver, lane, …) over solvers and seeds; `axes` of other arguments as in `jax.vmap`."""
    seeds = jax.vmap(function, in_axes=(None, 0, *axes))
    return jax.vmap(seeds, in_axes=(0, 0, *axes))


@eqx.filter_jit
def _start(solvers: Any, problem: bx.Problem, x0: Any, y0: Any, keys: Array, sampling: bx.Sampling) -> Lane:
    def one(solver: bx.AbstractSolver, key: Array) -> Lane:
        state = solver.init(problem, x0, y0, key=key, sampling=sampling)
        return Lane(
            state, CompensatedSum(jnp.zeros(()), jnp.zeros(())), jnp.zeros(()), jnp.zeros((), jnp.int32)
        )

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))(solvers, keys)


@eqx.filter_jit
def _advance(
    solvers: Any, problem: bx.Problem, measure: Measure, goal: Array, lanes: Lane, until: Array
) -> Lane:
    """Advances all lanes to a step, or until all have reached the goal."""

    def one(solver: bx.AbstractSolver, lane: Lane) -> Lane:
        last = measure(lane.state.x)
        total = lane.total + last
        low = total.high <= goal * (lane.state.step + 1)
        # A lane that is no longer finite has failed.
        reached = jnp.where(low, lane.state.step + 1, jnp.where(jnp.isfinite(total.high), 0, -1))
        noted, before = (total, last, reached), (lane.total, lane.last, lane.reached)
        kept = jax.tree.map(lambda new, old: jnp.where(lane.reached == 0, new, old), noted, before)
        return Lane(solver.step(problem, lane.state)[0], *kept)

    def going_on(lanes: Lane) -> Array:
        return jnp.any((lanes.reached == 0) & (lanes.state.step < until))

    return jax.lax.while_loop(going_on, lambda lanes: over_lanes(one, ())(solvers, lanes), lanes)


@eqx.filter_jit
def _observe(
    solvers: Any, problem: bx.Problem, observe: Callable[[bx.State], Any], states: bx.State, until: Array
) -> tuple[bx.State, dict[str, Array]]:
    def one(solver: bx.AbstractSolver, state: bx.State) -> tuple[bx.State, dict[str, Array]]:
        state = jax.lax.fori_loop(
            0, until - state.step, lambda _, state: solver.step(problem, state)[0], state
        )
        return state, observe(state)

    return over_lanes(one, ())(solvers, states)
