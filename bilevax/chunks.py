"""Compiled chunks of steps: the only place where a run computes."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.memory import Clock, Memory, Moving, Reading
from bilevax.problem import Problem
from bilevax.sharding import Shards
from bilevax.solvers.state import State
from bilevax.trees import PyTree, norm, root_mean_square


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


def compiled_init(
    solver: Any,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    key: Array,
    shards: Shards | None = None,
    **plan: Any,
) -> State:
    """`solver.init`, compiled; its buffers are nobody else's and none is held twice: it can be donated."""
    # Python floats would be compiled in.
    x0, y0 = jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, float) else a, (x0, y0))
    return _init(numbers_as_arrays(solver), problem, x0, y0, key, plan, shards)


def compiled_chunk(
    inputs: tuple[Any, Problem],
    state: State,
    steps: Array | int,
    total: tuple[float, float] = (0.0, 0.0),
    shards: Shards | None = None,
) -> tuple[State, Reading]:
    """Steps of (solver, problem) in one compiled loop that takes over the state.

    The loop ends early when f is not finite any more, so that what went wrong can still be seen.

    Args:
      inputs: the solver, its numbers as arrays (`numbers_as_arrays`), and the problem.
      state: where to start from.
      steps: how many steps.
      total: what to add f to: a high and a low part.
      shards: the devices that share the blocks, if they are several.

    Returns:
      The state, and `total` plus f of the steps: a compensated sum in order, with the same bits in however
      many chunks.
    """
    return _advance(inputs, state, *_numbers(steps, total), shards)


class Sizes(eqx.Module):
    """Root mean squares over all slots of the tracked lower gradients and of u; and ‖z‖."""

    gradient_norm: Array
    lower_residual: Array
    inverse_residual: Array


@jax.jit
def sizes(state: State) -> Sizes:
    """How far the tracked gradients are from zero."""
    levels = list(state.levels.values())
    slopes = [(memory.y.slope, 1) for memory in levels if isinstance(memory.y, Moving)]
    inverse = [(m.v.slope, 1) for m in levels if isinstance(m, Memory) and m.v is not None]
    return Sizes(norm(state.z), root_mean_square(slopes), root_mean_square(inverse))


def _numbers(steps: Any, total: tuple[float, float]) -> tuple[Any, Any]:
    """As arrays of no device in particular."""
    parts: list[Any] = [np.asarray(part, jnp.zeros(0).dtype) for part in total]
    return np.asarray(steps, np.int32), Reading(*parts)


def start_program(
    solver: Any,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    key: Array,
    plan: dict[str, Any],
    shards: Shards | None,
) -> State:
    """What `compiled_init` compiles."""
    if shards is not None:
        state = shards.init(solver, problem, x0, y0, key, plan)
    else:
        state = solver.init(problem, x0, y0, key=key, **plan)
    # What init hands through, or has twice, gets buffers of its own; nothing else is copied by the compiler.
    return jax.tree.map(jnp.copy, state)


def chunk_program(
    inputs: tuple[Any, Problem], state: State, steps: Array, total: Reading, shards: Shards | None
) -> tuple[State, Reading]:
    """What `compiled_chunk` compiles; it takes over all but the first argument."""
    if shards is not None:
        return shards.advance(_loop, *inputs, state, steps, total)
    return _loop(*inputs, state, steps, total)


_init = eqx.filter_jit(start_program)
_advance = eqx.filter_jit(chunk_program, donate="all-except-first")


def _loop(solver: Any, problem: Problem, state: State, steps: Array, total: Reading) -> tuple[State, Reading]:
    last = state.step + steps

    def going_on(carry: tuple[State, Clock]) -> Array:
        state, total = carry
        return (state.step < last) & jnp.isfinite(total.now.high)

    def body(carry: tuple[State, Clock]) -> tuple[State, Clock]:
        state, total = carry
        state, info = solver.step(problem, state)
        return state, total.advance(info.objective)

    state, clock = jax.lax.while_loop(going_on, body, (state, Clock(total, total)))
    return state, clock.now
