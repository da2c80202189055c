"""The loop around compiled chunks of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import checks
from bilevax.problem import Problem
from bilevax.progress import Choice, Progress, make_progress
from bilevax.restart import Restart
from bilevax.sampling import make_sampler
from bilevax.solvers.start import check_coefficients
from bilevax.solvers.state import State
from bilevax.trees import PyTree, norm


class Result(eqx.Module):
    """What `minimize` returns.

    Attributes:
      x: the upper variable at the end.
      y: the lower variables at the end, caught up; a dict if the levels have names.
      state: the whole state, from which the run can go on.
      history: arrays by name: "step", "seconds", "objective" (mean over the steps since the entry
        before), "gradient_norm" (‖z‖) and every metric.
      steps_per_second: speed of the compiled steps, compilation left out.
      compile_seconds: time to trace and compile.
    """

    x: PyTree
    y: PyTree
    state: State
    history: dict[str, np.ndarray]
    steps_per_second: float
    compile_seconds: float


def minimize(
    problem: Problem,
    solver: Any,
    x0: PyTree,
    y0: PyTree = None,
    *,
    steps: int,
    key: Array,
    blocks_per_step: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    initial_batch_size: int | Literal["all"] | None = None,
    metrics: Mapping[str, Callable[[Problem, State], Any]] | None = None,
    every: int | None = None,
    progress: Choice | Progress | None = "auto",
) -> Result:
    """Minimises F by a solver.

    Args:
      problem: what to solve.
      solver: `BSVRBv2(…)` or another method, or a `Restart` of one.
      x0: where x starts.
      y0: where the lower variables start, with the slots as leading axis; a dict if the levels have
        names. A mean level may be left None.
      steps: how many steps to take.
      key: the random key: the same key gives the same run.
      blocks_per_step: I, the blocks a step visits; None visits all of them.
      batch_size: B, the rows per visited block; None takes all of them.
      shuffle: blocks in shuffled epochs if True, else drawn anew in each step.
      initial_batch_size: rows per block of the first estimators; see `BSVRBv2.init`.
      metrics: functions of (problem, state), called between compiled chunks; each gives one number.
      every: steps between two entries of the history; left out, a hundredth of the run.
      progress: "auto" (a bar on a terminal, lines elsewhere), "bar", "lines", or None for silence.

    Returns:
      A `Result`.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> solver = bx.BSVRBv2(upper_step=0.1)
      >>> result = bx.minimize(
      ...     problem, solver, jnp.zeros(2), jnp.zeros((4, 2)),
      ...     steps=500, key=jax.random.key(0), progress=None,
      ... )
      >>> [round(float(value), 3) for value in result.x]  # the mean of the blocks
      [3.0, 4.0]
    """
    steps = checks.whole_number("steps", steps, 0)
    every = max(1, steps // 100) if every is None else checks.whole_number("every", every, 1)
    checks.solver(solver)
    if not (metrics is None or isinstance(metrics, Mapping)):
        raise TypeError(
            f"metrics must be a dict of functions of (problem, state), got {type(metrics).__name__}"
        )
    measures = dict(metrics or {})
    for name, measure in measures.items():
        if not callable(measure):
            raise TypeError(
                f"metrics[{name!r}] must be a function of (problem, state), got {type(measure).__name__}"
            )
    display = make_progress(progress, steps)
    # Inside `_init` the solver's numbers are traced: what depends on their values is checked here.
    sampler = make_sampler(problem, key, blocks_per_step, batch_size, shuffle)
    check_coefficients(solver.solver if isinstance(solver, Restart) else solver, problem, sampler)

    began = time.perf_counter()
    plan = {
        "blocks_per_step": blocks_per_step,
        "batch_size": batch_size,
        "shuffle": shuffle,
        "initial_batch_size": initial_batch_size,
    }
    state = compiled_init(solver, problem, x0, y0, key, **plan)
    inputs = (numbers_as_arrays(solver), problem)
    state, _ = compiled_chunk(inputs, state, jnp.asarray(0))
    jax.block_until_ready(state)
    compile_seconds = time.perf_counter() - began

    history: dict[str, list[float]] = {"step": [], "seconds": [], "objective": [], "gradient_norm": []}
    running, done = 0.0, 0
    with display:
        while True:
            count = min(every, steps - done)
            tick = time.perf_counter()
            state, objective = compiled_chunk(inputs, state, jnp.asarray(count))
            jax.block_until_ready(state)
            running += time.perf_counter() - tick
            done += count
            entry = {
                "step": done,
                "seconds": running,
                "objective": float(objective),
                "gradient_norm": float(_norm(state.z)),
            }
            entry |= {name: float(measure(problem, state)) for name, measure in measures.items()}
            for name, value in entry.items():
                history.setdefault(name, []).append(value)
            shown = {name: entry[name] for name in entry if name not in ("step", "seconds")}
            display.update(done, done / running if running else 0.0, shown)
            if done >= steps:
                break
    arrays = {name: np.asarray(values) for name, values in history.items()}
    return Result(state.x, state.y, state, arrays, steps / running if running else 0.0, compile_seconds)


def advance(problem: Problem, solver: Any, state: State, steps: int | Array) -> State:
    """Takes many steps as one compiled loop: pure, for use under `jax.jit` and `jax.vmap`.

    Args:
      problem: the problem.
      solver: the solver whose `init` made the state.
      state: where to start from.
      steps: how many steps; may be traced.

    Returns:
      The state after them.
    """
    return jax.lax.fori_loop(0, steps, lambda _, state: solver.step(problem, state)[0], state)


def numbers_as_arrays(solver: Any) -> Any:
    """A solver whose numbers are traced, so that other values of them compile nothing anew."""

    def convert(leaf: Any) -> Any:
        number = isinstance(leaf, (int, float, np.number)) and not isinstance(leaf, bool)
        return jnp.asarray(float(leaf)) if number else leaf

    return jax.tree.map(convert, solver)


@eqx.filter_jit
def _init(solver: Any, problem: Problem, x0: PyTree, y0: PyTree, key: Array, plan: dict[str, Any]) -> State:
    return solver.init(problem, x0, y0, key=key, **plan)


def compiled_init(solver: Any, problem: Problem, x0: PyTree, y0: PyTree, key: Array, **plan: Any) -> State:
    """`solver.init`, compiled; its buffers are nobody else's and none is held twice: it can be donated."""
    return jax.tree.map(jnp.copy, _init(numbers_as_arrays(solver), problem, x0, y0, key, plan))


def compiled_chunk(inputs: tuple[Any, Problem], state: State, steps: Array) -> tuple[State, Array]:
    """Steps of (solver, problem) in one compiled loop that takes over the state, and their mean objective."""
    solver, problem = inputs
    return _advance((numbers_as_arrays(solver), problem), state, steps)


@eqx.filter_jit(donate="all-except-first")
def _advance(inputs: tuple[Any, Problem], state: State, steps: Array) -> tuple[State, Array]:
    solver, problem = inputs

    def body(_: Any, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, total = carry
        state, info = solver.step(problem, state)
        return state, total + info.objective.astype(total.dtype)

    state, total = jax.lax.fori_loop(0, steps, body, (state, jnp.zeros((), float)))
    return state, total / jnp.maximum(steps, 1)


_norm = jax.jit(norm)
