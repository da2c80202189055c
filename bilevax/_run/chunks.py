"""Compiled chunks of steps: all computation of a run happens here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampler
from bilevax._run.sharding import Shards
from bilevax._step.clocks import CompensatedSum
from bilevax._step.smoothness import unscaled
from bilevax._step.state import State
from bilevax._util import checks
from bilevax._util.hurried import HurriedJit
from bilevax._util.trees import PyTree, all_finite, norm
from bilevax.solvers.base import AbstractSolver, renewed_if_due


def advance(problem: Problem, solver: AbstractSolver, state: State, steps: int | Array) -> State:
    """Takes many steps as one compiled loop: pure, for use under `jax.jit` and `jax.vmap`.

    Args:
      problem: the problem.
      solver: the solver whose `init` made the state.
      state: where to start from.
      steps: how many steps; may be traced.

    Returns:
      The state after them.
    """
    checks.solver(solver, AbstractSolver)
    if not isinstance(state, State):
        raise TypeError(f"state must be what solver.init returns, got {checks.kind_of(state)}")
    return jax.lax.fori_loop(0, steps, lambda _, state: solver.step(problem, state)[0], state)


def numbers_as_arrays(solver: AbstractSolver) -> AbstractSolver:
    """A solver with traced hyper-parameters: other values need no new compilation."""

    def convert(leaf: Any) -> Any:
        number = isinstance(leaf, (int, float, np.number)) and not isinstance(leaf, bool)
        # As `jnp.asarray`, which compiles a program for it.
        return jax.device_put(float(leaf)) if number else leaf

    return jax.tree.map(convert, solver)


def compiled_start(
    solver: AbstractSolver,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    sampler: Sampler,
    shards: Shards | None = None,
) -> State:
    """`solver.start`, compiled. The state aliases no other buffers, so that it can be donated."""
    given = _for_start(solver, problem, x0, y0, sampler, shards)
    state = _start(*given, work=_first_work(problem, sampler))
    if state.centres != problem.centre_functions:
        raise TypeError(
            f"{type(solver).__name__} cannot store y as offsets (argmin with around=…): a start that can "
            "begins at `problem.offsets(x, y)` and sets `centres=problem.centre_functions` in its state"
        )
    return state


def _for_start(solver: AbstractSolver, problem: Problem, x0: PyTree, y0: PyTree, *others: Any) -> Any:
    """The arguments of `start_program`."""
    # Python floats would become constants of the program.
    x0, y0 = jax.tree.map(lambda a: jax.device_put(a) if isinstance(a, float) else a, (x0, y0))
    return numbers_as_arrays(solver), problem, x0, y0, *others


def prepare(
    solver: AbstractSolver,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    sampler: Sampler,
    steps: int,
    copies: Callable[[State], bool] = lambda state: False,
) -> None:
    """Begins to compile, in other threads, what a run of so many steps on one device will need.

    `copies` says, of a state with shapes for arrays, whether `looked_at` will be asked for copies.
    """
    given = _for_start(solver, problem, x0, y0, sampler, None)
    state = _start.prepare(*given, work=_first_work(problem, sampler))
    work = work_of(problem, state, steps)
    for turn, _ in _legs(0, 0):
        _advance.prepare(given[:2], state, *_numbers(0, (0.0, 0.0)), None, turn, work=work)
    looked_at.prepare(state, copies(state))


def compiled_chunk(
    inputs: tuple[AbstractSolver, Problem],
    state: State,
    steps: int,
    total: tuple[float, float] = (0.0, 0.0),
    shards: Shards | None = None,
    work: float = math.inf,
) -> tuple[State, CompensatedSum]:
    """Steps of (solver, problem) in compiled loops that take over the state.

    They end early when f is no longer finite, so that the state still shows what went wrong; on an
    accelerator up to 31 steps later.

    Args:
      inputs: the solver, with its hyper-parameters as arrays (`numbers_as_arrays`), and the problem.
      state: where to start from.
      steps: how many steps.
      total: a high and a low part, to which f is added.
      shards: the devices that share the blocks, if they are several.
      work: `work_of` the whole run; left out, the program is optimised.

    Returns:
      The state, and `total` plus f of the steps: a compensated sum, with the same bits for any division into
      chunks.
    """
    summed: Any = total
    for turn, some in _legs(int(state.step), steps):
        state, summed = _advance(inputs, state, *_numbers(some, summed), shards, turn, work=work)
    return state, summed


def _legs(step: int, steps: int) -> list[tuple[int, int]]:
    """How the loops share the steps from a step on: the length of a loop's turns, and its steps.

    On an accelerator the host decides about every turn of a loop whose length is not known: so most steps are
    taken in turns of a fixed length. The first ones are not: a bad start shows at once. Each loop is a
    program, so that the compiler can work on both at the same time. Without steps both take part.
    """
    if jax.default_backend() == "cpu":
        return [(1, steps)]
    before = min(steps, -step % _TURN if step else _TURN)
    whole = (steps - before) // _TURN * _TURN
    legs = (1, before), (_TURN, whole), (1, steps - before - whole)
    return [leg for leg in legs if leg[1]] or [*legs[:2]]


def _may_renew(step: Array) -> Array | bool:
    """Whether estimates may be renewed at a step: on an accelerator not where a turn of steps may lie."""
    return True if jax.default_backend() == "cpu" else (step < _TURN) | (step % _TURN == 0)


def work_of(problem: Problem, state: State, steps: int) -> float:
    """About how many numbers some steps read; on an accelerator, where hurried steps are not worth it, ∞."""
    return steps * work_of_a_step(problem, state) if jax.default_backend() == "cpu" else math.inf


def work_of_a_step(problem: Problem, state: State) -> float:
    """About how many numbers a step reads."""
    sampler = state.sampler
    batches = sampler.per_step * _numbers_in(sampler.one_block(problem, sampler.batch_size, slots=False))
    slots = _numbers_in((state.levels, state.store))  # and of tables, a step reads hardly anything
    others = _numbers_in(state) - slots - _numbers_in(state.tables)
    return batches + others + slots * sampler.per_step / sampler.blocks


class Sizes(eqx.Module):
    """‖z‖, root mean squares over all slots of the tracked ∇_y g and of u, and whether all is finite."""

    gradient_norm: Array
    lower_residual: Array
    inverse_residual: Array
    finite: Array


# Autotuning on a GPU would allocate arrays as large as the state.
@functools.partial(HurriedJit, calls=100, options={"xla_gpu_autotune_level": 0})
def looked_at(state: State, copy: bool) -> tuple[Sizes, State | None]:
    """How far the tracked gradients are from zero, and a copy of the state if asked for one.

    A chunk takes over the buffers of the state that it is given; those of the copy stay.
    """
    return _sizes(state.settled), jax.tree.map(jnp.copy, state) if copy else None


def _sizes(state: State) -> Sizes:
    return Sizes(
        norm(state.z),
        _root_mean_square(state, "s"),
        _root_mean_square(state, "u"),
        all_finite((state.x, state.z, state.optimizer, state.levels, state.store, state.blocks)),
    )


def _root_mean_square(state: State, letter: str) -> Array:
    """Of a tracked slope, over all slots of all levels that have it."""
    total, slots = jnp.zeros(()), 0
    for name, memory in state.levels.items():
        squares = dict(memory.squares.parts())
        if letter not in squares:
            continue
        known = state.smoothness.get(name)
        if known is not None and (known.lower if letter == "s" else known.inverse):
            squares[letter] = unscaled(squares[letter], jax.tree.map(jnp.square, known.scales))
        total += sum(jnp.sum(leaf) for leaf in jax.tree.leaves(squares[letter]))
        slots += memory.slots
    return jnp.sqrt(total / max(slots, 1))


def _first_work(problem: Problem, sampler: Sampler) -> int:
    """How many numbers the first pass over all blocks reads."""
    rows = sampler.batch_size if sampler.first_rows == 0 else sampler.first_rows
    return problem.count * _numbers_in(sampler.one_block(problem, rows, slots=False))


def _numbers_in(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _numbers(steps: Any, total: tuple[float, float] | CompensatedSum) -> tuple[Any, CompensatedSum]:
    """As arrays; those that are not on a device yet are not placed there."""
    if not isinstance(total, CompensatedSum):
        dtype = jax.dtypes.canonicalize_dtype(float)
        parts: list[Any] = [np.asarray(part, dtype) for part in total]
        total = CompensatedSum(*parts)
    return np.asarray(steps, np.int32), total


def start_program(
    solver: AbstractSolver,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    sampler: Sampler,
    shards: Shards | None,
) -> State:
    """What `compiled_start` compiles."""
    start = solver.start if shards is None else functools.partial(shards.start, solver)
    # Arrays that start returns unchanged, or twice, get buffers of their own; the compiler copies no others.
    return jax.tree.map(jnp.copy, start(problem, x0, y0, sampler))


def chunk_program(
    inputs: tuple[AbstractSolver, Problem],
    state: State,
    steps: Array,
    total: CompensatedSum,
    shards: Shards | None,
    turn: int = 1,
) -> tuple[State, CompensatedSum]:
    """What `compiled_chunk` compiles; it takes over all but the first argument."""
    loop = functools.partial(_loop, turn=turn)
    if shards is not None:
        return shards.advance(loop, *inputs, state, steps, total)
    return loop(*inputs, state, steps, total)


_TURN = 32  # steps that an accelerator takes between two questions to the host whether to go on

# It runs once: trying kernels out takes longer than it saves.
_start = HurriedJit(start_program, options={"xla_gpu_autotune_level": 0})
_advance = HurriedJit(chunk_program, kept=1)


def _loop(
    solver: AbstractSolver, problem: Problem, state: State, steps: Array, total: CompensatedSum, turn: int = 1
) -> tuple[State, CompensatedSum]:
    """Turns of some steps each, until `steps` are taken, or f is not finite.

    What is due between steps is done outside the loop over turns: a program that may branch off in every step
    is slower in all of them. Where it is done does not depend on where chunks end.
    """
    last = state.step + steps
    renews = solver.due(state) is not None

    def body(carry: tuple[State, CompensatedSum]) -> tuple[State, CompensatedSum]:
        state, total = carry
        state, info = solver.bare_step(problem, state)
        return state, total + info.objective

    def turned(carry: tuple[State, CompensatedSum]) -> tuple[State, CompensatedSum]:
        return body(carry) if turn == 1 else jax.lax.fori_loop(0, turn, lambda _, carry: body(carry), carry)

    def going_on(carry: tuple[State, CompensatedSum]) -> Array:
        state, total = carry
        return (state.step < last) & jnp.isfinite(total.high)

    def undisturbed(carry: tuple[State, CompensatedSum]) -> Array:
        return going_on(carry) & ~(jnp.asarray(solver.due(carry[0])) & _may_renew(carry[0].step))

    def leg(carry: tuple[State, CompensatedSum]) -> tuple[State, CompensatedSum]:
        state, total = carry
        carry = renewed_if_due(solver, problem, state, _may_renew(state.step)), total
        # Every turn of many steps may be followed by what is due: a loop of its own would ask the host twice.
        return jax.lax.while_loop(undisturbed, turned, carry) if renews and turn == 1 else turned(carry)

    return jax.lax.while_loop(going_on, leg, (state, total))
