"""The bytes of a run, before it is started."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock
from bilevax._problem.sampling import Sampling, as_sampling
from bilevax._run.chunks import chunk_program, numbers_as_arrays, start_program
from bilevax._run.feeding import blank_problem
from bilevax._run.recovery import can_guard
from bilevax._run.sharding import make_shards
from bilevax._step.clocks import CompensatedSum
from bilevax._util import processes
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.default import chosen_solver


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The bytes of a run on one device (on each of them, if several share the blocks).

    Attributes:
      data: the problem: the blocks' constants and all rows.
      slots: what is remembered per slot: variables, estimators, Hessians, stamps, stored gradients.
      x: x and z; and x one step earlier where a method keeps it (it looks back, and `upper_step` is an optax
        transformation or x has less than 32 bits).
      optimizer: the state of the optax transformation.
      copies: the state to go back to if the run begins to blow up, while it is renewed; 0 if it is too large
        to be kept unasked. With `Stop(recover=False)` there is none.
      step: what a step needs besides, while it is computed.
      start: what the first pass needs besides, with x0 and y0 as they were given.
      devices: how many devices share the blocks.
    """

    data: int
    slots: int
    x: int
    optimizer: int
    copies: int
    step: int
    start: int
    devices: int

    @property
    def state(self) -> int:
        """What is carried from step to step."""
        return self.slots + self.x + self.optimizer

    @property
    def total(self) -> int:
        """The most that is held at once: data, state, and the start's working set or a step's with copies."""
        return self.data + self.state + max(self.copies + self.step, self.start)

    def __str__(self) -> str:
        parts = {
            "data": self.data,
            "memory per slot": self.slots,
            "x and its copies": self.x,
            "optimizer": self.optimizer,
            "copies to go back to": self.copies,
            "working set of a step": self.step,
            "working set of the start": self.start,
            f"at most{f', on each of {self.devices} devices' if self.devices > 1 else ''}": self.total,
        }
        width = max(map(len, parts))
        return "\n".join(f"{name:<{width}}  {_readable(count):>9}" for name, count in parts.items())


def memory_estimate(
    problem: Problem,
    x0: PyTree,
    y0: PyTree = None,
    *,
    solver: AbstractSolver | None = None,
    sampling: Sampling | None = None,
    blocks_per_step: int | Literal["all"] | None = None,
    batch_size: int | Literal["all"] | None = None,
    mesh: Mesh | None = None,
) -> MemoryEstimate:
    """Says how many bytes a run needs, by part, without allocating them.

    It compiles the run's programs for its shapes, which takes as long as for the run itself, and reads the
    compiler's own report. Metrics, checkpoints, exact steps at the end and your own arrays come on top.

    Args:
      problem: the problem; for data that do not exist yet, `jax.eval_shape` of a function that makes it.
      x0: x at the start, or its shapes (`jax.ShapeDtypeStruct`).
      y0: the lower variables at the start, or their shapes; see `minimize`.
      solver: the solver; left out, the one that `minimize` chooses.
      sampling: how blocks and rows are drawn.
      blocks_per_step: I or "all", as in `Sampling`, for short.
      batch_size: B or "all", as in `Sampling`, for short.
      mesh: devices that share the blocks; the estimate is for one of them.

    Returns:
      A `MemoryEstimate`; `print` shows it as a table.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> x, y = jax.ShapeDtypeStruct((2,), float), jax.ShapeDtypeStruct((4, 2), float)
      >>> estimate = bx.memory_estimate(
      ...     problem, x, y, solver=bx.BSVRBv2(upper_step=0.1), blocks_per_step=2
      ... )
      >>> estimate.slots  # y, s, v and u, and two stamps of two numbers each, of four blocks in float32
      192
    """
    shards = None if mesh is None else make_shards(mesh)
    sampling = as_sampling(sampling, blocks_per_step, batch_size)
    if sampling.strata is None and shards is not None:
        sampling = dataclasses.replace(sampling, strata=shards.devices)
    sampler = sampling.sampler(problem, jax.random.key(0))
    solver = chosen_solver(problem, solver, y0, sampler)
    solver.check(problem, sampler)
    problem, x0, y0 = _outlined(blank_problem(problem, sampler)), _shapes(x0), _shapes(y0)
    state = eqx.filter_eval_shape(solver.start, problem, x0, y0, sampler)
    if shards is not None:
        shards.check(solver, problem, x0, y0, sampler)
        problem = shards.place(_shapes(shards.spread(problem)))
        x0, y0, sampler = shards.place_start(x0, y0, sampler)
        state = jax.tree.map(processes.put, state, shards.like(state))
    problem, solver = _shapes(problem), numbers_as_arrays(solver)
    number, steps = _shapes(np.zeros((), jnp.zeros(0).dtype)), _shapes(np.zeros((), np.int32))
    begin = _compiled(start_program, solver, problem, x0, y0, sampler, shards)
    going = _compiled(
        chunk_program, (solver, problem), state, steps, CompensatedSum(number, number), shards, donated=True
    )
    return MemoryEstimate(
        data=_bytes(problem),
        slots=_bytes((state.levels, state.store, state.blocks)),
        x=_bytes((state.x, state.back, state.z, state.tables)),
        optimizer=_bytes(state.optimizer),
        copies=2 * _bytes(state) if can_guard(state, None) else 0,
        step=int(going.temp_size_in_bytes),
        start=int(begin.temp_size_in_bytes) + _bytes((x0, y0)),
        devices=1 if shards is None else shards.devices,
    )


def _shapes(tree: PyTree) -> Any:
    """Arrays as shapes, of the dtypes that they have on a device; what is a shape stays one."""

    def outline(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return leaf if leaf.dtype == dtype else jax.ShapeDtypeStruct(leaf.shape, dtype)
        array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))

    return jax.tree.map(outline, tree)


def _outlined(problem: Problem) -> Problem:
    """A problem as shapes, but for what says which rows belong to which block: they are laid out by it."""

    def outline(part: Any) -> Any:
        if isinstance(part, PerBlock):
            return eqx.tree_at(lambda rows: rows.packed, part, _shapes(part.packed))
        return _shapes(part)

    return jax.tree.map(outline, problem, is_leaf=lambda part: isinstance(part, PerBlock))


def _compiled(program: Any, *arguments: Any, donated: bool = False) -> Any:
    """What the compiler says of a program; `donated` gives it all arguments but the first."""
    known = eqx.partition(
        arguments, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    )
    (first, *others), rest = known

    def run(first: Any, others: Any) -> Any:
        return program(*eqx.combine((first, *others), rest))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # a number, at most
        compiled = jax.jit(run, donate_argnums=1 if donated else ()).lower(first, others).compile()
    return compiled.memory_analysis()


def _bytes(tree: PyTree) -> int:
    """On one device."""

    def held(leaf: Any) -> int:
        sharding = leaf.sharding
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(held(leaf) for leaf in jax.tree.leaves(tree))


def _readable(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
