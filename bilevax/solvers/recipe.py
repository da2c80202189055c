"""The one step, of which every method but RSVRB is a recipe.

sample → gather and catch up → ℓ-gradients at t and t−1 → track → scatter → move x
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.levels import Mean
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample, Sampler, make_sampler
from bilevax._step.clocks import Clocks
from bilevax._step.coefficients import Coefficient, evaluate, first
from bilevax._step.estimators import moving_average, msvr_gamma, storm
from bilevax._step.lagrangian import Point, gradients, upper_gradients
from bilevax._step.oracles import Oracles
from bilevax._step.ordering import after
from bilevax._step.slots import Moving
from bilevax._step.state import Info, State
from bilevax._step.trackers import Identity, Look, Rates, TrackedHessian, Tracker, Visit
from bilevax._util import checks
from bilevax._util.trees import PyTree, norm, root_mean_square
from bilevax.solvers.inputs import first_rows
from bilevax.solvers.start import start_state
from bilevax.solvers.upper import UpperStep, upper_move

STACKED = 2**20  # numbers of a point, up to which both points of a step are stacked on an accelerator


class Recipe(eqx.Module):
    """A method as three choices; see the methods' own files.

    Class attributes:
      corrected: True tracks with MSVR and STORM, looking at t and t−1; False with moving averages.
      lazy: True moves all slots, lazily; False only those that are visited.
      curvature: the tracker of argmin levels; None if the method takes mean levels only.
    """

    distributed: ClassVar[bool] = True  # its step takes means over devices that share the blocks
    corrected: ClassVar[bool]
    lazy: ClassVar[bool]
    curvature: ClassVar[Tracker | None]

    upper_step: eqx.AbstractVar[UpperStep]
    alpha: eqx.AbstractVar[Coefficient]
    beta: eqx.AbstractVar[float | Callable[[Array], Array]]

    def __check_init__(self) -> None:
        checks.upper_step(self.upper_step)
        if not self.fixes("alpha"):
            checks.coefficient("alpha", self.alpha, high=1.0, optional=False, by_level=True)
        checks.coefficient("alpha_bar", self.option("alpha_bar"), high=1.0, by_level=True)
        if not self.fixes("beta"):
            checks.coefficient("beta", self.beta, high=1.0, optional=False)
        for name in ("lower_step", "inverse_step", "gamma", "gamma_bar"):
            checks.coefficient(name, self.option(name), zero=True, by_level=True)
        for name in ("radius", "floor"):
            checks.coefficient(name, self.option(name), by_level=True)

    def option(self, name: str) -> Any:
        """A field that not every recipe has."""
        return getattr(self, name, None)

    def fixes(self, name: str) -> bool:
        """Whether a coefficient is part of the method, a class attribute: restarts do not scale it."""
        return name not in {field.name for field in dataclasses.fields(self)}

    def init(
        self,
        problem: Problem,
        x0: PyTree,
        y0: PyTree = None,
        *,
        key: Array,
        blocks_per_step: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        initial_batch_size: int | Literal["all"] | None = None,
        strata: int | None = None,
    ) -> State:
        """The state before the first step.

        Args:
          problem: the problem.
          x0: where x starts.
          y0: where the lower variables start, with the slots as leading axis; a dict if the levels
            have names. A mean level may be left None: it then starts from its first batch.
          key: the random key of the whole run.
          blocks_per_step: I, the blocks a step visits; None visits all of them.
          batch_size: B, the rows per visited block; None takes all of them.
          shuffle: blocks in shuffled epochs if True, else drawn anew in each step.
          initial_batch_size: the rows per block that the first estimators come from; None takes
            `batch_size`, "all" takes all rows, 0 starts the estimators from zero.
          strata: divides the blocks into so many runs of equal length, and draws as many of each; None draws
            from all of them as one.

        Returns:
          The state, to be given to `step`.
        """
        sampler = make_sampler(problem, key, blocks_per_step, batch_size, shuffle, strata)
        return start_state(self, problem, x0, y0, sampler, initial_batch_size)

    def step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """Takes one step.

        Args:
          problem: the problem.
          state: what `init` or the step before returned.
          stage: the number of restarts so far (see `Restart`).

        Returns:
          The new state, and what the step saw.
        """
        sample = self.draw(problem, state)
        visits = self.visits(problem, state, sample, stage)
        look = self.look(problem, state, sample, visits)
        seen = look.gradients
        beta = evaluate(self.beta, state.step) * (1.0 if self.fixes("beta") else 0.5**stage)
        if self.corrected:
            z = storm(state.z, seen[0].x, seen[1].x, beta)  # the latter is −G̃
        else:
            z = moving_average(state.z, seen[0].x, beta)
        levels, clocks, repaired = {}, {}, []
        for name, tracker in self.trackers(problem).items():
            visit = visits[name]
            rows, count = tracker.refresh(visit, look)
            slopes = [one.slope for one in (rows.y, rows.v) if isinstance(one, Moving)]
            slots = after(sample.slots[name], problem.slots_of(name), (z, slopes))
            levels[name] = state.levels[name].put(slots, rows, problem.levels[name].slots is None)
            clocks[name] = _tick(visit)
            repaired.append(count)
            visits[name] = eqx.tree_at(lambda visit: visit.rows, visit, rows)
        levels, z = self.renew(problem, state, levels, z)
        # z is affine in the gradients: where devices share the blocks, one sum over them serves both points.
        z, objective = state.sampler.mean((z, seen[0].objective))
        x, optimizer, back = upper_move(self.upper_step, state, z, stage)
        moved = dataclasses.replace(
            state,
            step=state.step + 1,
            x=x,
            z=z,
            back=back if self.corrected else None,
            optimizer=optimizer,
            levels=levels,
            clocks=clocks,
            store=look.store,
        )
        return moved, _info(state.sampler, objective, z, visits, sum(repaired))

    def draw(self, problem: Problem, state: State) -> Sample:
        """The blocks and rows of a step."""
        return state.sampler.draw(problem, state.step)

    def renew(
        self, problem: Problem, state: State, levels: dict[str, Any], z: PyTree
    ) -> tuple[dict[str, Any], PyTree]:
        """The tracked quantities before x moves: for methods that now and then compute them anew."""
        return levels, z

    def trackers(self, problem: Problem) -> dict[str, Tracker]:
        """Which tracker follows which lower level."""
        out: dict[str, Tracker] = {}
        for name, level in problem.levels.items():
            tracker = Identity() if isinstance(level, Mean) else self.curvature
            if tracker is None:
                raise ValueError(
                    f"{type(self).__name__} takes mean lower levels only, got the argmin level {name!r}: "
                    "use BSVRBv1 or BSVRBv2"
                )
            out[name] = tracker
        return out

    def visits(self, problem: Problem, state: State, sample: Sample, stage: Array | int) -> dict[str, Visit]:
        """The touched slots of every level, gathered."""
        return {
            name: Visit(
                state.levels[name].take(sample.slots[name]),
                state.clocks[name],
                self.rates(problem, state, name, sample.slots[name].size, stage),
                state.step,
                name,
                self.corrected,
                self.lazy,
                sample.slots[name].ndim,
            )
            for name in problem.levels
        }

    def look(self, problem: Problem, state: State, sample: Sample, visits: dict[str, Visit]) -> Look:
        """The points [now] or [now, before], the v there, and the gradients of ℓ there."""
        trackers = self.trackers(problem)
        recalled = {name: tracker.recall(visits[name]) for name, tracker in trackers.items()}
        xs = [state.x, state.x_before] if self.corrected else [state.x]
        points = [Point(x, {n: ys[place] for n, ys in recalled.items()}) for place, x in enumerate(xs)]
        by_y: list[dict[str, PyTree]] = [{} for _ in points]
        if any(tracker.needs_upper_gradient for tracker in trackers.values()):
            by_y = _at_points(lambda point: upper_gradients(problem, point, sample), points)
        found = {n: t.directions(visits[n], [one.get(n) for one in by_y]) for n, t in trackers.items()}
        v = [{n: vs[place] for n, vs in found.items()} for place in range(len(points))]
        signs = [jnp.ones(()), -jnp.ones(())][: len(points)]
        seen = _at_points(
            lambda at: gradients(problem, at[0], at[1], sample, at[2]),
            list(zip(points, v, signs, strict=True)),
        )
        return Look(problem, sample, points, v, seen)

    def rates(self, problem: Problem, state: State, name: str, touched: int, stage: Array | int) -> Rates:
        """The coefficients of a level at the present step: a restart halves α and shrinks steps by √2."""

        def at(option: str) -> Any:
            return evaluate(self.option(option), state.step, name)

        chance = state.sampler.chance(problem, name, touched)
        halved, shrunk = 1.0 if self.fixes("alpha") else 0.5**stage, 0.5 ** (0.5 * stage)
        alpha = at("alpha") * halved
        alpha_bar = alpha if at("alpha_bar") is None else at("alpha_bar") * halved
        gamma, gamma_bar = at("gamma"), at("gamma_bar")
        if self.corrected:
            gamma_bar = first(gamma_bar, gamma, msvr_gamma(alpha_bar, chance))
            gamma = first(gamma, msvr_gamma(alpha, chance))
        lower_step, inverse_step = at("lower_step"), at("inverse_step")
        if name in state.smoothness:
            smoothness = state.smoothness[name]
            safe = 2 / (3 * smoothness) * (chance if self.lazy else 1.0)
            lower_step = first(lower_step, safe)
        if not isinstance(problem.levels[name], Mean):
            lower_step, inverse_step = lower_step * shrunk, first(inverse_step, lower_step) * shrunk
        floor = first(at("floor"), state.floors.get(name))
        return Rates(alpha, gamma, alpha_bar, gamma_bar, lower_step, inverse_step, at("radius"), floor)

    def oracles(self, problem: Problem) -> Oracles:
        """What a step asks of f and g for each block it visits."""
        points = 2 if self.corrected else 1
        total = Oracles(gradients=2)
        for tracker in self.trackers(problem).values():
            total += tracker.oracles
        return total * points

    def first_rows(self, initial_batch_size: Any, batch_size: int | None) -> int | None:
        """The rows per block of the first pass: None for all of them, 0 for no pass."""
        return first_rows(initial_batch_size, batch_size)

    def missing(self, name: str) -> set[str]:
        """Which of the coefficients that an argmin level needs were left out, and must be estimated."""
        needed = {"lower_step"} | ({"floor"} if isinstance(self.curvature, TrackedHessian) else set())
        start = jnp.zeros((), jnp.int32)
        return {option for option in needed if evaluate(self.option(option), start, name) is None}


def _at_points(function: Callable[[Any], Any], points: list[Any]) -> list[Any]:
    """function at every point.

    On an accelerator both points are one batched program: half the launches. On a CPU they are two: its
    products of a matrix with one vector are faster than those with two. So they are where x is so large that
    to stack both takes longer than to launch.
    """
    numbers = sum(leaf.size for leaf in jax.tree.leaves(points[0]))
    if len(points) == 1 or jax.default_backend() == "cpu" or numbers > STACKED:
        return [function(point) for point in points]
    stacked = jax.vmap(function)(jax.tree.map(_stack, *points))
    return [jax.tree.map(lambda leaf, place=place: leaf[place], stacked) for place in range(len(points))]


def _stack(now: Array, before: Array) -> Array:
    """Both, along a first axis: as a choice, which is merged into what uses it. A stack would not be."""
    place = jnp.arange(2).reshape((2,) + (1,) * jnp.ndim(now))
    return jnp.where(place == 0, now, before)


def _tick(visit: Visit) -> Clocks:
    rates, clocks = visit.rates, visit.clocks
    return Clocks(
        clocks.y if rates.lower_step is None else clocks.y.advance(rates.lower_step),
        clocks.v if rates.inverse_step is None else clocks.v.advance(rates.inverse_step),
    )


def _info(sampler: Sampler, objective: Array, z: PyTree, visits: dict[str, Visit], decomposed: Any) -> Info:
    seen = list(visits.values())
    slopes = [(v.rows.y.slope, v.slot_axes) for v in seen if isinstance(v.rows.y, Moving)]
    inverse = [(v.rows.v.slope, v.slot_axes) for v in seen if v.rows.v is not None]
    lower = sampler.root_mean_square(root_mean_square(slopes))
    return Info(
        objective,
        norm(z),
        lower,
        sampler.root_mean_square(root_mean_square(inverse)),
        sampler.total(decomposed),
    )
