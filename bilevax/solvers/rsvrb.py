"""RSVRB: randomized-coordinate STORM of every piece of the hyper-gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import SECOND_BLOCKS, START, Sample, Sampler
from bilevax._problem.view import BlockView, each_block
from bilevax._step.clocks import Clock, Clocks, CompensatedSum
from bilevax._step.coefficients import evaluate, first
from bilevax._step.linear_algebra import raise_eigenvalues, solve, unflatten_slots
from bilevax._step.lower_transformation import refuse_transformation
from bilevax._step.oracles import Oracles, count_pass, count_steps
from bilevax._step.ordering import after
from bilevax._step.slots import Moving, gather, project_ball, scatter
from bilevax._step.smoothness import Smoothness, estimate_floor, estimate_smoothness, scaled, unscaled
from bilevax._step.state import Info, Restraint, State
from bilevax._step.trackers import check_factorable
from bilevax._util import checks
from bilevax._util.memory import available_bytes
from bilevax._util.per_entry import PerEntry
from bilevax._util.trees import PyTree, combine, norm, result_dtype, spread, zeros_like
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.start_checks import checked_start, takers_of
from bilevax.solvers.upper import UpperStep, upper_move, upper_start


class Pieces(eqx.Module):
    """What is tracked of every block: ∇_x f, ∇_y f, ∇²_yy g and ∇²_xy g over flattened x and y."""

    by_x: Array
    by_y: Array
    hessian: Array
    jacobian: Array


class Tracked(eqx.Module):
    """The memory of RSVRB's lower level.

    Attributes:
      y: every block's variable, now, and the tracked ∇_y g that it descends along.
      y_before: every block's variable one step earlier.
      pieces: the tracked pieces, as of each block's last visit.
      stamp: the clock of Σ log(1−β) at that visit, by which the pieces are scaled since.
    """

    y: Moving
    y_before: PyTree
    pieces: Pieces
    stamp: CompensatedSum

    def parts(self) -> list[tuple[str, PyTree]]:
        """The stored quantities by their letters, causes before effects."""
        return [("s", self.y.slope), ("y", self.y.value), ("H", self.pieces)]

    def unvisited(self, now: Array) -> Tracked:
        """The memory of blocks that were always where they are, if `now` is true; else itself."""
        y_before = jax.tree.map(lambda y, old: jnp.where(now, y, old), self.y.value, self.y_before)
        return dataclasses.replace(self, y_before=y_before)

    @property
    def lazy(self) -> set[str]:
        """The letters of the variables that move between visits: none."""
        return set()

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.stamp.high.shape[0]

    @property
    def squares(self) -> Tracked:
        """Every stored entry squared."""
        return jax.tree.map(jnp.square, self)


class RSVRB(AbstractSolver):
    r"""Randomized stochastic variance-reduced bilevel method.

    Every piece :math:`p \in \{\nabla_x f, \nabla_y f, \nabla_y g, \nabla_{yy}^2 g, \nabla_{xy}^2 g\}`
    of every block is tracked by STORM on the randomized coordinate estimator, which is m/I times the
    sample on sampled blocks and zero elsewhere:

    .. math::
        p_i \leftarrow \begin{cases}
            (1-\beta)(p_i - \tfrac mI p_i(x_{t-1}, y_{i,t-1})) + \tfrac mI p_i(x_t, y_{i,t}) & i \in I_t \\
            (1-\beta) p_i & \text{otherwise} \end{cases}

    Then, on a second independent sample of blocks :math:`J_t`,

    .. math::
        z \leftarrow (1-\beta)(z - \tilde G) + G, \qquad
        G = \tfrac1I \sum_{j \in J_t} \nabla_x f_j
            - \nabla_{xy}^2 g_j S_\lambda[\nabla_{yy}^2 g_j]^{-1} \nabla_y f_j

    from the tracked pieces after the refresh (:math:`\tilde G`: before it); all blocks move,
    :math:`y_i \leftarrow \Pi_Y[y_i - \tau s_i]`, and :math:`x \leftarrow x - \eta z`.

    The scaling of the unsampled pieces is done when a block is next touched. The variables y, which are
    small beside the Jacobians, move in every step, so that their projection is exact. Memory is
    O(m · d_y · d_x).

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ; left out, 2/(3 L) · I/m, with a scale for every entry of y.
      beta: β in (0, 1]; left out, 0.03 I/m: the scaling (1−β) of a block between two visits must stay
        near one.
      radius: the radius of the ball that y is projected onto; left out, y is not projected.
      floor: λ, the least eigenvalue of the tracked Hessians; left out, half the least
        curvature that the first batches show.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.RSVRB(upper_step=0.1)

    Reference:
      Guo et al., *Randomized Stochastic Variance-Reduced Methods for Multi-Task Stochastic Bilevel
      Optimization*, 2021.
    """

    distributed: ClassVar[bool] = True
    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: float | Callable[[Array], Array] | PerEntry | None = None
    beta: float | Callable[[Array], Array] | None = None
    radius: float | Callable[[Array], Array] | None = None
    floor: float | Callable[[Array], Array] | None = None

    def __check_init__(self) -> None:
        checks.upper_step(self.upper_step)
        refuse_transformation(type(self).__name__, self.lower_step)
        if not isinstance(self.lower_step, PerEntry):
            checks.coefficient("lower_step", self.lower_step, zero=True)
        checks.coefficient("beta", self.beta, high=1.0)
        checks.coefficient("radius", self.radius)
        checks.coefficient("floor", self.floor)

    def check(self, problem: Problem, sampler: Sampler) -> None:
        """Raises if a hyper-parameter or the level does not fit the method."""
        super().check(problem, sampler)
        _only_level(problem)

    def start(self, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
        """The state before the first step.

        Raises:
          MemoryError: if the tracked Jacobians would not fit.
        """
        name = _only_level(problem)
        rows = sampler.first_rows
        x, levels, _ = checked_start(problem, x0, y0, sampler)
        y = levels[name]
        check_factorable(name, y)
        dtype = jnp.result_type(result_dtype(x), result_dtype(y))
        d_x, d_y = _size(x), _size(jax.tree.map(lambda a: a[0], y))
        _check_memory(problem.count, d_x, d_y, dtype)
        smoothness = {}
        if self.lower_step is None or self.floor is None or rows == 0:
            smoothness = {name: estimate_smoothness(problem, name, x, levels, sampler)}
        floors = {}
        if self.floor is None:
            floors = {name: estimate_floor(problem, name, x, levels, sampler, smoothness[name].bound)}
        bound = smoothness[name].bound if smoothness else 1.0
        used = smoothness if self.lower_step is None else {}
        if isinstance(self.lower_step, PerEntry):
            used = {name: Smoothness.given(self.lower_step, True)}
        scales = used[name].scales if used else None
        m, slope = problem.count, zeros_like(y)
        pieces = Pieces(
            jnp.zeros((m, d_x), dtype),
            jnp.zeros((m, d_y), dtype),
            jnp.broadcast_to(bound * jnp.eye(d_y, dtype=dtype), (m, d_y, d_y)).astype(dtype),
            jnp.zeros((m, d_y, d_x), dtype),
        )
        z = zeros_like(x)
        if rows != 0:
            floor = first(evaluate(self.floor, jnp.zeros((), jnp.int32)), floors.get(name))

            def look(block: Array, carry: tuple[Pieces, PyTree, PyTree]) -> tuple[Pieces, PyTree, PyTree]:
                pieces, slope, z = carry
                ids, (stratum, place) = block[None], jnp.divmod(block, sampler.stratum_size)
                random = sampler.stream(sampler.random.at(START).at(place), stratum)
                sample = sampler.visit(problem, ids, random, rows)
                fresh, s = _pieces(problem, name, x, gather(y, ids), sample)
                raised = raise_eigenvalues(fresh.hessian, floor)[0]
                fresh = eqx.tree_at(lambda p: p.hessian, fresh, raised)
                term = _unravel_like(x, _term(fresh) / m)
                s = scaled(s, scales)
                return scatter(pieces, ids, fresh), scatter(slope, ids, s), jax.tree.map(jnp.add, z, term)

            pieces, slope, z = jax.lax.fori_loop(0, m, look, (pieces, slope, z))
            z = sampler.mean(z)
        stamp = CompensatedSum(jnp.zeros((m,), dtype), jnp.zeros((m,), dtype))
        memory = Tracked(Moving(y, slope, None), y, pieces, stamp)
        clocks = {name: Clocks(Clock.start(dtype), Clock.start(dtype))}
        return State(
            step=jnp.zeros((), jnp.int32),
            x=x,
            z=z,
            back=x,  # little beside the Jacobians
            optimizer=upper_start(self.upper_step, x),
            levels={name: memory},
            clocks=clocks,
            smoothness=used,
            floors=floors,
            sampler=sampler,
            named=problem.named,
            centres=problem.centre_functions,
            restraint=Restraint.none(result_dtype(x)),
        )

    def coefficients_at(self, problem: Problem, state: State) -> dict[str, Any]:
        """β, τ and λ at a state."""
        name, chance = _only_level(problem), state.sampler.per_step / problem.count
        step: Any = evaluate(self.lower_step, state.step)
        if name in state.smoothness:
            known = state.smoothness[name]
            step = PerEntry(known.step(chance), known.scales)
        return {
            "beta": first(evaluate(self.beta, state.step), 0.03 * chance),
            "lower_step": step,
            "floor": first(evaluate(self.floor, state.step), state.floors.get(name)),
        }

    def count_oracles(self, problem: Problem, sampler: Sampler, steps: int) -> Oracles:
        """Every piece of the visited blocks, at two points per step and at one in the first pass."""
        pieces = Oracles(gradients=3, matrices=2)
        total, rows = count_steps(pieces * 2, problem, sampler, steps), sampler.first_rows
        return total if rows == 0 else total + count_pass(pieces, problem, rows)

    def step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """Takes one step; see `BSVRBv2.step`."""
        name = _only_level(problem)
        memory: Tracked = state.levels[name]
        chance = state.sampler.per_step / problem.count
        used = self.coefficients_at(problem, state)
        beta, floor, given = used["beta"] * 0.5**stage, used["floor"], used["lower_step"]
        tau = (given.step if isinstance(given, PerEntry) else given) * 0.5 ** (0.5 * stage)
        tau *= state.lower_factor
        clock = state.clocks[name].y
        # log(1−β), kept finite: β = 1 forgets all but 1e-30 of a piece.
        later = clock.advance(jnp.log(jnp.maximum(1 - jnp.asarray(beta, clock.now.high.dtype), 1e-30)))

        sample = state.sampler.draw(problem, state.step)
        second = state.sampler.blocks_at(state.step, SECOND_BLOCKS)
        before = _tracked_gradient(memory, second, clock.now, floor)

        ids = after(sample.blocks, problem.count, before)
        now, s_now = _pieces(problem, name, state.x, gather(memory.y.value, ids), sample)
        old, s_old = _pieces(problem, name, state.x_before, gather(memory.y_before, ids), sample)

        def storm(tracked: Array, now: Array, old: Array) -> Array:
            b, scale = jnp.asarray(beta, tracked.dtype), jnp.asarray(1 / chance, tracked.dtype)
            return (1 - b) * (tracked - scale * old) + scale * now

        caught_up = _catch_up(memory, ids, clock.now, floor)
        refreshed = jax.tree.map(storm, caught_up, now, old)
        raised, decomposed = raise_eigenvalues(refreshed.hessian, floor)
        refreshed = eqx.tree_at(lambda p: p.hessian, refreshed, raised)
        slope = jax.tree.map(lambda s: (1 - jnp.asarray(beta, s.dtype)) * s, memory.y.slope)
        scales = state.smoothness[name].scales if name in state.smoothness else None
        samples = scaled(s_now, scales), scaled(s_old, scales)
        tracked_s = jax.tree.map(storm, gather(memory.y.slope, ids), *samples)
        slope = scatter(slope, ids, tracked_s)
        y = combine((1, memory.y.value), (-tau, slope))
        y = project_ball(y, evaluate(self.radius, state.step), 1)
        memory = Tracked(
            Moving(y, slope, None),
            memory.y.value,
            scatter(memory.pieces, ids, refreshed),
            scatter(memory.stamp, ids, later.stamp(ids.shape)),
        )
        refreshed_gradient = _tracked_gradient(memory, second, later.now, floor)
        z = jax.tree.map(
            lambda z, g, h: (1 - jnp.asarray(beta, z.dtype)) * (z - h) + g,
            state.z, _unravel_like(state.x, refreshed_gradient), _unravel_like(state.x, before),
        )  # fmt: skip
        objective = _objective(problem, state.x, {name: gather(memory.y_before, ids)}, sample)
        z, objective = state.sampler.mean((z, objective))
        chance = state.sampler.chance(problem, name, ids.size)
        x, optimizer, _ = upper_move(self.upper_step, state, z, stage, objective, jnp.zeros(()), chance, beta)
        clocks = {name: Clocks(later, state.clocks[name].v)}
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            x=x,
            z=z,
            back=state.x,
            optimizer=optimizer,
            levels={name: memory},
            clocks=clocks,
        )
        residual = state.sampler.root_mean_square(norm(unscaled(tracked_s, scales)) / ids.shape[0] ** 0.5)
        return state, Info(objective, norm(z), residual, jnp.zeros(()), state.sampler.total(decomposed))


def _only_level(problem: Problem) -> str:
    names = list(problem.levels)
    level = problem.levels[names[0]]
    if len(names) != 1 or not level.has_hessian or level.sign != 1 or level.slots is not None:
        kinds = {name: one.kind for name, one in problem.levels.items()}
        raise ValueError(f"RSVRB takes one argmin lower level with a slot per block, got {kinds}")
    if level.domain is not None:
        raise ValueError(
            f"RSVRB does not take project= of the argmin level {names[0]!r}: use {takers_of(level.domain)}"
        )
    return names[0]


def _pieces(problem: Problem, name: str, x: PyTree, y: PyTree, sample: Sample) -> tuple[Pieces, PyTree]:
    """The samples of all pieces at a point, and of ∇_y g, per sampled block."""
    flat_x, unravel_x = ravel_pytree(x)

    def one(view: BlockView, y: PyTree) -> tuple[Pieces, Array]:
        flat_y, unravel_y = ravel_pytree(y)

        def f(flat_x: Array, flat_y: Array) -> Array:
            return view.at(unravel_x(flat_x)).f({name: unravel_y(flat_y)})

        def lower_gradient(flat_x: Array, flat_y: Array) -> Array:
            at_x = view.at(unravel_x(flat_x))
            return jax.grad(lambda flat_y: at_x.g(name, unravel_y(flat_y)))(flat_y)

        by_x, by_y = jax.grad(f, argnums=(0, 1))(flat_x, flat_y)
        hessian = jax.jacfwd(lower_gradient, argnums=1)(flat_x, flat_y)
        jacobian = jax.jacrev(lower_gradient, argnums=0)(flat_x, flat_y)
        return Pieces(by_x, by_y, hessian, jacobian), lower_gradient(flat_x, flat_y)

    pieces, s = each_block(problem, x, sample, one, y)
    return pieces, unflatten_slots(s, y)


def _catch_up(memory: Tracked, blocks: Array, time: CompensatedSum, floor: Any) -> Pieces:
    """The pieces of some blocks, scaled for the steps they were not sampled in."""
    scale = jnp.exp(time - gather(memory.stamp, blocks))
    pieces = jax.tree.map(lambda a: spread(scale, a) * a, gather(memory.pieces, blocks))
    # Scaling and clipping alternate in every step; max((1−β)^k h, λ) is the same.
    raised = raise_eigenvalues(pieces.hessian, floor)[0]
    return eqx.tree_at(lambda p: p.hessian, pieces, raised)


def _tracked_gradient(memory: Tracked, blocks: Array, time: CompensatedSum, floor: Any) -> Array:
    return _term(_catch_up(memory, blocks, time, floor)) / blocks.shape[0]


def _term(pieces: Pieces) -> Array:
    """Σ over blocks of ∇_x f − ∇²_xy g [∇²_yy g]⁻¹ ∇_y f, over the flattened x."""
    v = solve(pieces.hessian, pieces.by_y[..., None])[..., 0]
    # Block by block, then summed: in one contraction the Jacobians would be transposed first.
    return jnp.sum(pieces.by_x - jnp.einsum("byx,by->bx", pieces.jacobian, v), 0)


def _objective(problem: Problem, x: PyTree, y: dict[str, PyTree], sample: Sample) -> Array:
    return jnp.mean(each_block(problem, x, sample, lambda view, y: view.f(y), y))


def _unravel_like(x: PyTree, flat: Array) -> PyTree:
    one, unravel = ravel_pytree(x)
    return unravel(flat.astype(one.dtype))


def _size(tree: PyTree) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _check_memory(blocks: int, d_x: int, d_y: int, dtype: Any) -> None:
    need = blocks * (d_y * d_x + d_x + d_y * d_y) * np.dtype(dtype).itemsize
    have = available_bytes()
    if need > have:
        raise MemoryError(
            f"RSVRB tracks a Jacobian per block: {blocks} blocks × d_y = {d_y} × d_x = {d_x} in "
            f"{np.dtype(dtype)} need {need:,} bytes, the device has {have:,}. "
            "BSVRBv1 and BSVRBv2 need no Jacobian."
        )
