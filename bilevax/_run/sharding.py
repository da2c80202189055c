"""Blocks over the devices of a mesh, on one host or on several.

Blocks, their constants, their rows and their memory are split along the axis "blocks" of a mesh; x, z, the
optimizer and shared rows are held by every device. A device sees its share as a problem of its own, with its
own blocks and strata, and takes the same step on it; only z and the step's `Info` are averaged over the
devices. Outside of the compiled programs a state is that of the whole problem, wherever its arrays are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bilevax._problem.problem import Problem
from bilevax._problem.rows import Rows
from bilevax._problem.sampling import Sampler
from bilevax._step.state import State
from bilevax._util import processes
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver

AXIS = "blocks"
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices that share the blocks of a problem."""

    mesh: Mesh

    @property
    def devices(self) -> int:
        """How many they are."""
        return self.mesh.shape[AXIS]

    @property
    def several_processes(self) -> bool:
        """Whether they belong to more than one process."""
        return not self._sharding(EVERYWHERE).is_fully_addressable

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that shows and logs."""
        return not self.several_processes or jax.process_index() == 0

    def check(
        self, solver: AbstractSolver, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler
    ) -> None:
        """Raises if these devices cannot share the problem's blocks, or the solver does not support it."""
        if not solver.distributed:
            raise TypeError(
                f"mesh: {type(solver).__name__} cannot run on several devices: its step does not average "
                "over them (a class whose step does sets distributed = True)"
            )
        if (sampler.strata or 1) % self.devices:
            raise ValueError(
                f"strata must be divisible by the devices of the mesh, got {sampler.strata or 1} strata on "
                f"{self.devices} devices"
            )
        for name, level in problem.levels.items():
            if level.slots is not None:
                raise ValueError(
                    f"mesh: the lower level {name!r} has slots of its own, which are not split over devices: "
                    "only levels with one slot per block are"
                )
        # Errors of shape, in terms of the whole problem.
        eqx.filter_eval_shape(solver.start, problem, x0, y0, sampler)

    def spread(self, problem: Problem) -> Problem:
        """The problem with its rows laid out for the devices."""

        def spread(rows: Rows | None) -> Rows | None:
            return None if rows is None else rows.spread(self.devices)

        lower = tuple(map(spread, problem.lower_data))
        return _changed(problem, upper_data=spread(problem.upper_data), lower_data=lower)

    def place(self, problem: Problem) -> Problem:
        """A problem that is laid out, with every array where it belongs."""
        return jax.tree.map(
            lambda leaf, spec: processes.put(leaf, self._sharding(spec)), problem, _specs(problem)
        )

    def place_start(self, x0: PyTree, y0: PyTree, sampler: Sampler) -> tuple[PyTree, PyTree, Sampler]:
        """x0, y0 and the sampler where they belong."""
        return self._put(x0, EVERYWHERE), self._put(y0, SPLIT), self._put(sampler, EVERYWHERE)

    def like(self, state: State) -> State:
        """For each array of a state, where it belongs."""
        memory, rest = _split(state)
        memory = jax.tree.map(lambda _: self._sharding(SPLIT), memory)
        return _joined(memory, jax.tree.map(lambda _: self._sharding(EVERYWHERE), rest))

    def start(
        self, solver: AbstractSolver, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler
    ) -> State:
        """`solver.start`, each device on its share."""

        def of_share(
            solver: AbstractSolver, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler
        ) -> Any:
            return _split(self._whole(solver.start(problem, x0, y0, self._share(sampler))))

        specs = (EVERYWHERE, SPLIT, EVERYWHERE)
        on_each = self._on_each(of_share, specs, (SPLIT, EVERYWHERE))
        return _joined(*on_each(solver, problem, x0, y0, sampler))

    def advance(
        self,
        loop: Callable[..., tuple[State, Any]],
        solver: AbstractSolver,
        problem: Problem,
        state: State,
        *numbers: Any,
    ) -> tuple[State, Any]:
        """loop(solver, problem, state, numbers), each device on its share."""

        def of_share(
            solver: AbstractSolver, problem: Problem, memory: Any, rest: State, *numbers: Any
        ) -> Any:
            state = dataclasses.replace(_joined(memory, rest), sampler=self._share(rest.sampler))
            state, out = loop(solver, problem, state, *numbers)
            return *_split(self._whole(state)), out

        specs = (SPLIT, EVERYWHERE, *[EVERYWHERE] * len(numbers))
        run = self._on_each(of_share, specs, (SPLIT, EVERYWHERE, EVERYWHERE))
        memory, rest, out = run(solver, problem, *_split(state), *numbers)
        return _joined(memory, rest), out

    def _on_each(self, function: Callable[..., Any], specs: tuple[Any, ...], out_specs: Any) -> Any:
        """function(solver, problem, …), on every device's share of the problem."""

        def run(solver: AbstractSolver, problem: Problem, *rest: Any) -> Any:
            numbers, functions = eqx.partition(solver, eqx.is_array)
            arrays, shape = eqx.partition(problem, eqx.is_array)

            def of_share(numbers: Any, arrays: Any, *rest: Any) -> Any:
                problem = self._share_of(eqx.combine(arrays, shape))
                return function(eqx.combine(numbers, functions), problem, *rest)

            given = (EVERYWHERE, _specs(arrays), *specs)
            # No derivative goes through the means over devices, so replication need not be tracked.
            over = jax.shard_map(
                of_share, mesh=self.mesh, in_specs=given, out_specs=out_specs, check_vma=False
            )
            return over(numbers, arrays, *rest)

        return run

    def _share_of(self, problem: Problem) -> Problem:
        """On a device: its own blocks as a problem."""
        device = jax.lax.axis_index(AXIS)

        def share(rows: Rows | None) -> Rows | None:
            return None if rows is None else rows.share(device)

        return _changed(
            problem,
            count=problem.count // self.devices,
            axis=AXIS,
            upper_data=share(problem.upper_data),
            lower_data=tuple(map(share, problem.lower_data)),
        )

    def _share(self, sampler: Sampler) -> Sampler:
        """A device's share of a plan."""
        strata = None if sampler.strata is None else sampler.strata // self.devices
        blocks, per_step = sampler.blocks // self.devices, sampler.per_step // self.devices
        return dataclasses.replace(sampler, blocks=blocks, per_step=per_step, strata=strata, axis=AXIS)

    def _whole(self, state: State) -> State:
        """The state with the sampling plan of the whole problem."""
        share = state.sampler
        strata = None if share.strata is None else share.strata * self.devices
        blocks, per_step = share.blocks * self.devices, share.per_step * self.devices
        sampler = dataclasses.replace(share, blocks=blocks, per_step=per_step, strata=strata, axis=None)
        return dataclasses.replace(state, sampler=sampler)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _put(self, tree: PyTree, spec: PartitionSpec) -> PyTree:
        return jax.tree.map(lambda leaf: processes.put(leaf, self._sharding(spec)), tree)


def make_shards(mesh: Any) -> Shards:
    """Checks a mesh that the user gave."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    others = {name: size for name, size in mesh.shape.items() if name != AXIS and size > 1}
    if AXIS not in mesh.shape or others:
        raise ValueError(
            f"mesh must have an axis {AXIS!r}, and no other of more than one device, got {dict(mesh.shape)}"
        )
    if mesh.is_multi_process and len({device.process_index for device in mesh.devices.flat}) < (
        jax.process_count()
    ):
        raise ValueError("mesh must hold devices of one process or of all of them, got some of them")
    # Shardings are left to the compiler outside of the steps, whatever kind of axis the user's mesh has.
    return Shards(Mesh(mesh.devices, mesh.axis_names))


def _specs(problem: Problem) -> Problem:
    """Which arrays of a problem are split, and which are everywhere."""

    def of(rows: Any) -> Any:
        return jax.tree.map(lambda _: SPLIT if rows.split else EVERYWHERE, rows)

    blocks = jax.tree.map(lambda _: SPLIT, problem.blocks)
    lower = tuple(of(rows) for rows in problem.lower_data)
    risk = jax.tree.map(lambda _: SPLIT, problem.risk)  # the groups of the blocks
    return _changed(problem, blocks=blocks, upper_data=of(problem.upper_data), lower_data=lower, risk=risk)


def _split(state: State) -> tuple[Any, State]:
    """A state's memory, and the rest of it."""
    values, blocks = None, state.blocks
    if blocks is not None:
        values, blocks = blocks.values, dataclasses.replace(blocks, values=None)
    return (state.levels, values), dataclasses.replace(state, levels={}, blocks=blocks)


def _joined(memory: Any, rest: State) -> State:
    """The inverse of `_split`."""
    levels, values = memory
    blocks = None if rest.blocks is None else dataclasses.replace(rest.blocks, values=values)
    return dataclasses.replace(rest, levels=levels, blocks=blocks)


def _changed(problem: Problem, **changes: Any) -> Problem:
    """The problem with some attributes, static ones too, replaced."""
    out = object.__new__(Problem)
    for field in dataclasses.fields(problem):
        object.__setattr__(out, field.name, changes.get(field.name, getattr(problem, field.name)))
    return out
