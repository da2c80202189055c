"""Many runs side by side until the running mean of ‖∇F‖² is low enough, measured in every step."""

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

_CHUNK_SECONDS = 0.5  # between two looks at the clock


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem, where a run starts, and how it samples; the theorems draw blocks independently."""

    problem: bx.Problem
    x0: Any
    y0: Any
    sampling: bx.Sampling


class Lane(eqx.Module):
    """One run.

    Attributes:
      state: of the run.
      total: Σ_t ‖∇F(x_t)‖², until it has reached the goal.
      last: the last term of that sum.
      reached: the step at which the mean was first low enough; 0 if not yet, −1 if the run diverged.
    """

    state: bx.State
    total: CompensatedSum
    last: Array
    reached: Array


@dataclasses.dataclass(frozen=True)
class Reached:
    """Steps until mean_{t ≤ T} ‖∇F(x_t)‖² ≤ goal, with axes (solvers, seeds); infinite where it never was.

    Attributes:
      steps: T, or infinity.
      mean: the running mean at T, or at the last step of a run that did not get there.
      last: ‖∇F(x)‖² there.
      seconds: of all of them together, without compilation.
    """

    steps: np.ndarray
    mean: np.ndarray
    last: np.ndarray
    seconds: float


def start(task: Task, solvers: Sequence[Any], keys: Array) -> tuple[Any, Lane]:
    """Solvers × seeds: the solvers stacked, and all lanes before their first step."""
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(leaves, float), *solvers)
    x0, y0 = jax.tree.map(jnp.asarray, (task.x0, task.y0))
    return stacked, _start(stacked, task.problem, x0, y0, keys, task.sampling)


def steps_until(
    task: Task,
    solvers: Sequence[Any],
    keys: Array,
    measure: Measure,
    goal: float,
    most: int,
    progress: bx.Progress | str | None = "auto",
    race: bool = False,
) -> Reached:
    """Runs solvers of one kind, with every key, until the mean of a measure of x is at most a goal.

    Args:
      task: the problem and how it is sampled.
      solvers: solvers of one class; other numbers compile nothing anew.
      keys: random keys, one per seed.
      measure: a function of x: ‖∇F(x)‖². A pytree: other arrays in it compile nothing anew.
      goal: ε².
      most: the most steps of a run.
      progress: as in `bilevax.minimize`.
      race: stop when it is settled which solver has the least mean T; the others then count as infinite.

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
    display, chunk, done, seconds = bx.make_progress(progress, most), 16, 0, 0.0
    with display:
        while done < most and not _settled(np.asarray(lanes.reached), done, race):
            tick, before = time.perf_counter(), done
            lanes = advance(lanes, min(most, done + chunk))
            done = int(lanes.state.step.max())
            elapsed = max(time.perf_counter() - tick, 1e-9)
            seconds += elapsed
            chunk = max(16, int((done - before) / elapsed * _CHUNK_SECONDS))
            waiting = int(jnp.sum(lanes.reached == 0))
            display.update(done, lanes.reached.size * done / seconds, {"runs left": waiting})
    reached = np.asarray(lanes.reached)
    ran = np.where(reached > 0, reached, done)
    mean = np.asarray(lanes.total.high) / ran
    return Reached(np.where(reached > 0, reached, np.inf), mean, np.asarray(lanes.last), seconds)


def _settled(reached: np.ndarray, done: int, race: bool) -> bool:
    """Whether all lanes are done; in a race, whether no solver can still have a lesser mean T."""
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
    """Runs solvers of one kind with every key, and looks at their states after given numbers of steps.

    Args:
      task, solvers, keys, progress: as in `steps_until`.
      observe: numbers of a state, by name. A pytree: other arrays in it compile nothing anew.
      at: ascending numbers of steps.

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
    """Whole numbers from first to last, evenly spread over the logarithm, none twice."""
    return sorted({round(step) for step in np.geomspace(first, last, count)})


def over_lanes(function: Callable[..., Any], axes: tuple[Any, ...]) -> Callable[..., Any]:
    """function(solver, lane, …) over solvers and seeds; `axes` of the rest as in `jax.vmap`."""
    seeds = jax.vmap(function, in_axes=(None, 0, *axes))
    return jax.vmap(seeds, in_axes=(0, 0, *axes))


@eqx.filter_jit
def _start(solvers: Any, problem: bx.Problem, x0: Any, y0: Any, keys: Array, sampling: bx.Sampling) -> Lane:
    def one(solver: Any, key: Array) -> Lane:
        state = solver.init(problem, x0, y0, key=key, sampling=sampling)
        return Lane(
            state, CompensatedSum(jnp.zeros(()), jnp.zeros(())), jnp.zeros(()), jnp.zeros((), jnp.int32)
        )

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))(solvers, keys)


@eqx.filter_jit
def _advance(
    solvers: Any, problem: bx.Problem, measure: Measure, goal: Array, lanes: Lane, until: Array
) -> Lane:
    """All lanes up to a step, or until all have reached the goal. Those that have only move on."""

    def one(solver: Any, lane: Lane) -> Lane:
        last = measure(lane.state.x)
        total = lane.total + last
        low = total.high <= goal * (lane.state.step + 1)
        # A lane that is not finite any more is done, but not there.
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
    def one(solver: Any, state: bx.State) -> tuple[bx.State, dict[str, Array]]:
        state = jax.lax.fori_loop(
            0, until - state.step, lambda _, state: solver.step(problem, state)[0], state
        )
        return state, observe(state)

    return over_lanes(one, ())(solvers, states)
