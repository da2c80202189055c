"""The one step, of which every method but RSVRB is a recipe.

sample → gather and catch up → ℓ-gradients at t and t−1 → track → scatter → move x
"""

# No `from __future__ import annotations` here: equinox reads abstract fields from real annotations.
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bilevax._problem.levels import Level
from bilevax._problem.problem import Problem
from bilevax._problem.reading import from_the_last
from bilevax._problem.sampling import Sample, Sampler, bad_slots
from bilevax._problem.view import BlockView
from bilevax._step.clocks import Clocks
from bilevax._step.coefficients import FIRST_STEP, Coefficient, evaluate, evaluate_all, first
from bilevax._step.estimators import moving_average, msvr_gamma, storm
from bilevax._step.lagrangian import Gradients, Point, gradients, lagrangian, upper_gradients
from bilevax._step.linear_algebra import run_if
from bilevax._step.lower_transformation import (
    refuse_transformation,
    transformation_of,
    without_transformations,
)
from bilevax._step.oracles import Oracles, count_pass, count_steps
from bilevax._step.ordering import after
from bilevax._step.shared_slots import averaged_over_visits
from bilevax._step.slots import Moving
from bilevax._step.smoothness import Smoothness, renew_smoothness, unscaled
from bilevax._step.state import Info, State
from bilevax._step.trackers import Identity, Optimised, Tracker
from bilevax._step.visit import Look, Rates, Visit
from bilevax._util import checks
from bilevax._util.host import numpy_of
from bilevax._util.per_entry import PerEntry
from bilevax._util.trees import PyTree, norm, root_mean_square
from bilevax.solvers.base import AbstractSolver, renewed_if_due
from bilevax.solvers.start import start_state
from bilevax.solvers.start_checks import advice, takers_of, touched_slots
from bilevax.solvers.upper import UpperStep, row_pace, upper_move

MOST_GAMMA = 10.0  # γ left out: (m−I)/(I(1−α)) of hundreds multiplies noise
MOST_OWN_GAMMA = 1.0  # the same for variables that optimise f: across a kink, changes of ∇f are noise
STACKED = 2**20  # entries of a point, up to which both points of a step are stacked on an accelerator


class Recipe(AbstractSolver):
    """A method as a few choices over the one step.

    A subclass sets the class attributes and has its hyper-parameters as fields. Hooks that a method may
    override, in the order in which a step calls them:

    - `draw(problem, state)`: the blocks and rows of a step;
    - `rates(problem, state, name, touched, stage)`: the coefficients of a level at this step;
    - `look(problem, state, sample, visits)`: the points, multipliers and gradients that a step sees;
    - `scalar(view, y, v, rates)`: what is differentiated, ℓ unless overridden;
    - `renew(problem, state, levels, z)`: a last change of what is tracked, before x moves.

    At the start: `check`, `tracker(level)`, `first_rows(sampler)`.

    Class attributes:
      corrected: True tracks with MSVR and STORM, looking at t and t−1; False with moving averages.
      lazy: True moves all slots, lazily; False only those that are visited.
      rescales: whether the scales of left-out lower steps are renewed during a run; not if estimators never
        forget what they tracked with earlier scales.
      curvature: the tracker of levels with a Hessian; None if the method does not take them.
      means: the tracker of mean levels; None if the method does not take them.
      own: the tracker of variables that optimise f itself; None if the method does not take them.
    """

    distributed: ClassVar[bool] = True
    takes_risks: ClassVar[bool] = True
    takes_tables: ClassVar[bool] = True
    corrected: ClassVar[bool]
    lazy: ClassVar[bool]
    rescales: ClassVar[bool] = True
    curvature: ClassVar[Tracker | None]
    means: ClassVar[Tracker | None] = Identity()
    own: ClassVar[Tracker | None] = Optimised()

    upper_step: eqx.AbstractVar[UpperStep | None]
    alpha: eqx.AbstractVar[Coefficient | None]
    beta: eqx.AbstractVar[float | Callable[[Array], Array]]

    def __check_init__(self) -> None:
        checks.upper_step(self.upper_step)
        if not self.fixes("alpha"):
            optional = type(self).__dataclass_fields__["alpha"].default is None
            checks.coefficient("alpha", self.alpha, high=1.0, optional=optional, by_level=True)
        checks.coefficient("alpha_bar", self.option("alpha_bar"), high=1.0, by_level=True)
        if not self.fixes("beta"):
            checks.coefficient("beta", self.beta, high=1.0, optional=False)
        if self.lazy:
            refuse_transformation(type(self).__name__, self.option("lower_step"))
        given = without_transformations(self.option("lower_step"))
        checks.coefficient("lower_step", _numbers(given), zero=True, by_level=True)
        checks.coefficient("inverse_step", _numbers(self.option("inverse_step")), zero=True, by_level=True)
        for name in ("gamma", "gamma_bar"):
            checks.coefficient(name, self.option(name), zero=True, by_level=True)
        for name in ("radius", "floor"):
            checks.coefficient(name, self.option(name), by_level=True)

    def option(self, name: str) -> Any:
        """A hyper-parameter that not every recipe has; None if this one does not."""
        return self.coefficients().get(name)

    def fixes(self, name: str) -> bool:
        """Whether a coefficient is part of the method, a class attribute: restarts do not scale it."""
        return name not in {field.name for field in dataclasses.fields(self)}

    def check(self, problem: Problem, sampler: Sampler) -> None:
        """Raises if a hyper-parameter or a level does not fit the method."""
        super().check(problem, sampler)
        for level, tracker in self.trackers(problem).items():
            self._check_inverse_step(level, tracker)
            if isinstance(self.alpha, Mapping) and level not in self.alpha:
                named = sorted(self.alpha)
                raise ValueError(f"alpha must name every lower level, got {named}, without {level!r}")
            if self.corrected:
                self._check_gamma(problem, sampler, level)

    def _check_inverse_step(self, level: str, tracker: Tracker) -> None:
        """Raises if v is to have scales of its own: it has those of y, where y has some."""
        inverse = evaluate(self.option("inverse_step"), FIRST_STEP, level)
        if isinstance(inverse, PerEntry) and self.transformation(level, tracker) is None:
            raise TypeError(
                f"inverse_step of the lower level {level!r} must be a number or a schedule unless lower_step "
                "is an optax transformation, got a PerEntry: give lower_step=PerEntry(…), which v shares"
            )

    def _check_gamma(self, problem: Problem, sampler: Sampler, level: str) -> None:
        """Raises where α = 1 would make the default γ infinite."""

        def known(name: str) -> Any:
            value = self.alpha if name == "alpha" else self.option(name)
            return value.get(level) if isinstance(value, Mapping) else value

        for alpha, gamma in (("alpha", "gamma"), ("alpha_bar", "gamma_bar")):
            given = known(gamma) is not None or known("gamma") is not None
            if given or not _is_one(known(alpha)):
                continue
            touched = touched_slots(problem, sampler, level)
            if sampler.chance(problem, level, touched) < 1:
                raise ValueError(
                    f"{alpha} must be less than 1 where {gamma} is left out and a step visits {touched} of "
                    f"{problem.slots_of(level)} slots, got {alpha} = 1: (m−I)/(I(1−α)) + (1−α) is infinite"
                )

    def start(self, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
        """The state before the first step."""
        return start_state(self, problem, x0, y0, sampler)

    def step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """Takes one step; see `AbstractSolver.step`."""
        return self.bare_step(problem, renewed_if_due(self, problem, state), stage)

    def bare_step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """One step without what is due before it."""
        problem = problem.with_centres(state.centres)
        sample = self.draw(problem, state)
        here = state.at(sample)
        visits = self.visits(problem, here, sample, stage)
        look = self.look(problem, here, sample, visits)
        seen = look.gradients
        beta = evaluate(self.beta, state.step) * (1.0 if self.fixes("beta") else 0.5**stage)
        if self.corrected:
            z = storm(here.z, seen[0].x, seen[1].x, beta)  # the latter is −G̃
        else:
            z = moving_average(here.z, seen[0].x, beta)
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
        objective, blocks = seen[0].objective, state.blocks
        if problem.risk is not None and blocks is not None:
            values = [one.values for one in seen if one.values is not None]
            weights = look.points[0].weights
            assert weights is not None
            known = problem.risk, sample, values, weights, state.step, stage, state.sampler
            blocks, objective = blocks.refresh(*known)
        levels, z = self.renew(problem, here, levels, z)
        z, added = state.apart(z)
        # z is affine in the gradients: where devices share the blocks, one sum over them serves both points.
        bad = bad_slots(problem, sample)
        bad = bad if state.tables is None else bad | state.tables.bad_lookups(sample)
        objective = jnp.where(bad, jnp.nan, objective)  # ends the run
        lag = sum(tracker.lag(visits[name], look) for name, tracker in self.trackers(problem).items())
        z, objective, lag = state.sampler.mean((z, objective, lag / sample.blocks.shape[0]))
        chance = min(state.sampler.chance(problem, n, slots.size) for n, slots in sample.slots.items())
        x, optimizer, back = upper_move(self.upper_step, state, z, stage, objective, lag, chance, beta, added)
        tables = state.tables
        if tables is not None:
            pace = row_pace(self.upper_step, state, stage)
            tables = tables.move(state.sampler, sample, state.step, added, 1 - beta, pace)
        moved = dataclasses.replace(
            state,
            step=state.step + 1,
            x=x,
            z=z,
            back=back if self.corrected else None,
            optimizer=optimizer,
            levels=levels,
            clocks=clocks,
            smoothness={name: known.after(state.step, objective) for name, known in state.smoothness.items()},
            store=look.store,
            blocks=blocks,
            tables=tables,
        )
        return moved, _info(state.sampler, objective, moved.settled.z, visits, sum(repaired))

    def due(self, state: State) -> Array | None:
        """Whether the curvature, or all values under a risk, have to be looked at before the next step."""
        asked = [self._curvature_due(state), self._values_due(state)]
        asked = [one for one in asked if one is not None]
        return functools.reduce(jnp.logical_or, asked) if asked else None

    def _curvature_due(self, state: State) -> Array | None:
        asked = [known.due for known in state.smoothness.values() if known.renewed]
        return functools.reduce(jnp.logical_or, asked) if asked else None

    def _values_due(self, state: State) -> Array | None:
        return None if state.blocks is None else state.blocks.due(state.step, state.sampler)

    def renew_estimates(self, problem: Problem, state: State) -> State:
        """The state with the curvature where it is now, and what blocks share under a risk."""
        values, curvature = self._values_due(state), self._curvature_due(state)
        if values is None:
            return dataclasses.replace(state, smoothness=self._curvature_now(problem, state))
        known, risk = state.blocks, problem.risk
        assert known is not None
        assert risk is not None
        shared, found = run_if(
            values,
            lambda: known.renewed(risk, state.step, state.sampler),
            (known.shared, known.found),
        )
        blocks = dataclasses.replace(known, shared=shared, found=found)
        if curvature is None:
            return dataclasses.replace(state, blocks=blocks)
        smoothness = run_if(curvature, lambda: self._curvature_now(problem, state), state.smoothness)
        return dataclasses.replace(state, smoothness=smoothness, blocks=blocks)

    def _curvature_now(self, problem: Problem, state: State) -> dict[str, Smoothness]:
        """The curvature of the lower problems, from the blocks that are visited next."""
        problem = problem.with_centres(state.centres)
        sample = self.draw(problem, state)
        here = state.at(sample)
        visits = self.visits(problem, here, sample, 0)
        y = {name: tracker.recall(visits[name])[0] for name, tracker in self.trackers(problem).items()}
        found = {
            name: renew_smoothness(
                problem, name, here.x, y, sample, state.sampler, known, state.step, self.rescales
            )
            for name, known in state.smoothness.items()
            if known.renewed
        }
        return state.smoothness | found

    def draw(self, problem: Problem, state: State) -> Sample:
        """The blocks and rows of a step."""
        return state.sampler.draw(problem, state.step)

    def renew(
        self, problem: Problem, state: State, levels: dict[str, Any], z: PyTree
    ) -> tuple[dict[str, Any], PyTree]:
        """The tracked quantities before x moves: for methods that sometimes compute them from scratch."""
        return levels, z

    def tracker(self, level: Level) -> Tracker | None:
        """The tracker of a level; None if the method does not take it."""
        if level.own:
            return self.own
        return self.curvature if level.has_hessian else self.means

    def trackers(self, problem: Problem) -> dict[str, Tracker]:
        """Which tracker follows which lower level."""
        out: dict[str, Tracker] = {}
        for name, level in problem.levels.items():
            tracker = self.tracker(level)
            if tracker is None:
                if level.domain is not None:
                    others = takers_of(level.domain)
                else:
                    others = "BlockNewton, MMBO or BSVRBv2" if level.sign == 0 else "BSVRBv1 or BSVRBv2"
                raise ValueError(
                    f"{type(self).__name__} takes {self._kinds()} lower levels only, got the {level.kind} "
                    f"level {name!r}: {advice(problem, others)}"
                )
            if level.has_hessian and level.sign != 1 and not tracker.indefinite:
                raise ValueError(
                    f"{type(self).__name__} needs lower levels whose Hessian is positive definite, got the "
                    f"{level.kind} level {name!r}: {advice(problem, 'BlockNewton, MMBO or BSVRBv2')}"
                )
            self._check_set(problem, name, tracker)
            out[name] = tracker
        return out

    def _check_set(self, problem: Problem, name: str, tracker: Tracker) -> None:
        """Raises if the tracker of a level cannot keep its y in its set."""
        level = problem.levels[name]
        if level.domain is None or tracker.sets == "any":
            return
        method, given = type(self).__name__, f"project= of the {level.kind} level {name!r}"
        instead = advice(problem, takers_of(level.domain))
        if tracker.sets == "none" or (self.corrected and not self.lazy):
            raise ValueError(f"{method} does not take {given}: {instead}")
        if not level.domain.entrywise:
            raise ValueError(
                f"{method} needs bounds (lower, upper), which hold single entries of y, got a projection for "
                f"{given}: {instead}"
            )

    def _kinds(self) -> str:
        """The kinds of level that the method takes, in words."""
        kinds = {"argmin": self.curvature, "mean": self.means, "minimum": self.own, "maximum": self.own}
        *first, last = [kind for kind, tracker in kinds.items() if tracker is not None]
        return f"{', '.join(first)} and {last}" if first else last

    def visits(self, problem: Problem, state: State, sample: Sample, stage: Array | int) -> dict[str, Visit]:
        """The touched slots of every level, gathered."""
        trackers = self.trackers(problem)
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
                level,
                self.transformation(name, trackers[name]),
            )
            for name, level in problem.levels.items()
        }

    def transformation(self, name: str, tracker: Tracker) -> optax.GradientTransformation | None:
        """The optax transformation that moves the variable of a level; None if plain steps do."""
        given = transformation_of(self.option("lower_step"), name)
        if given is None or "lower_step" not in tracker.coefficients:
            return None
        if not tracker.transforms:
            raise TypeError(
                f"lower_step of the lower level {name!r} must be a number or a schedule, got an optax "
                f"transformation: its tracker {type(tracker).__name__} takes plain steps only"
            )
        return given

    def look(self, problem: Problem, state: State, sample: Sample, visits: dict[str, Visit]) -> Look:
        """What a step sees at the points [now] or [now, before]."""
        recalled = {name: one.recall(visits[name]) for name, one in self.trackers(problem).items()}
        xs = [state.x, state.x_before] if self.corrected else [state.x]
        weights = state.weights(problem, sample)
        points = [
            Point(x, {n: ys[place] for n, ys in recalled.items()}, weights) for place, x in enumerate(xs)
        ]
        return self.look_at(problem, sample, visits, points)

    def look_at(
        self, problem: Problem, sample: Sample, visits: dict[str, Visit], points: list[Point]
    ) -> Look:
        """The multipliers and the gradients at some points."""
        trackers = self.trackers(problem)
        v: list[dict[str, PyTree]] = [{} for _ in points]
        for layer in from_the_last(problem.levels):
            by_y: list[dict[str, PyTree]] = [{} for _ in points]
            if any(trackers[name].needs_upper_gradient for name in layer):
                known = [_of_readers(problem, layer, one) for one in v]
                by_y = _at_points(
                    lambda at: upper_gradients(problem, at[0], sample, at[1]),
                    list(zip(points, known, strict=True)),
                )
                by_y = [averaged_over_visits(problem, sample, one) for one in by_y]
            found = {n: trackers[n].directions(visits[n], [one.get(n) for one in by_y]) for n in layer}
            v = [one | {n: vs[place] for n, vs in found.items()} for place, one in enumerate(v)]
        v = [{n: one[n] for n in trackers} for one in v]
        signs = [jnp.ones(()), -jnp.ones(())][: len(points)]
        scalar = functools.partial(self.scalar, rates={name: visit.rates for name, visit in visits.items()})
        seen = _at_points(
            lambda at: gradients(problem, at[0], at[1], sample, at[2], scalar),
            list(zip(points, v, signs, strict=True)),
        )

        def averaged(one: Gradients) -> Gradients:
            y, v = (averaged_over_visits(problem, sample, part) for part in (one.y, one.v))
            return dataclasses.replace(one, y=y, v=v)

        return Look(problem, sample, points, v, [averaged(one) for one in seen])

    def scalar(
        self, view: BlockView, y: dict[str, PyTree], v: dict[str, PyTree], rates: dict[str, Rates]
    ) -> tuple[Array, Array]:
        """The scalar of one block whose gradients a step takes, and its f; ℓ unless overridden."""
        return lagrangian(view, y, v)

    def rates(self, problem: Problem, state: State, name: str, touched: int, stage: Array | int) -> Rates:
        """The coefficients of a level at the present step: a restart halves α and shrinks steps by √2."""
        given = evaluate_all(self.coefficients(), state.step, name)
        chance = state.sampler.chance(problem, name, touched)
        halved = 1.0 if self.fixes("alpha") else 0.5**stage
        shrunk = 0.5 ** (0.5 * stage) * state.lower_factor
        alpha = given.get("alpha", self.alpha) * halved
        alpha_bar = alpha if given.get("alpha_bar") is None else given["alpha_bar"] * halved
        gamma, gamma_bar = given.get("gamma"), given.get("gamma_bar")
        if self.corrected:
            most = MOST_OWN_GAMMA if problem.levels[name].own and not self.fixes("alpha") else MOST_GAMMA
            least = numpy_of(alpha, alpha_bar).minimum
            gamma_bar = first(gamma_bar, gamma, least(msvr_gamma(alpha_bar, chance), MOST_GAMMA))
            gamma = first(gamma, least(msvr_gamma(alpha, chance), most))
        lower_step: Any = given.get("lower_step")
        if transformation_of(self.option("lower_step"), name) is not None:
            lower_step = 1.0  # the factor of its moves
        inverse_step: Any = given.get("inverse_step")
        lower_scales = inverse_scales = None
        if name in state.smoothness:
            known = state.smoothness[name]
            step = known.step(chance if self.lazy else 1.0)
            lower_step, inverse_step = (step, inverse_step) if known.lower else (lower_step, step)
            lower_scales = known.scales if known.lower else None
            inverse_scales = known.scales if known.inverse else None
        if problem.levels[name].own:
            lower_step, inverse_step = lower_step * shrunk, None
        elif problem.levels[name].has_hessian:
            lower_step, inverse_step = lower_step * shrunk, first(inverse_step, lower_step) * shrunk
        floor = first(given.get("floor"), state.floors.get(name))
        radius = given.get("radius")
        steps = (lower_step, inverse_step, radius, floor, lower_scales, inverse_scales)
        return Rates(alpha, gamma, alpha_bar, gamma_bar, *steps)

    def coefficients_at(self, problem: Problem, state: State) -> dict[str, object]:
        """The rates of every level at a state, by name and level."""
        touched = {level: touched_slots(problem, state.sampler, level) for level in problem.levels}
        found = {level: self.rates(problem, state, level, count, 0) for level, count in touched.items()}
        out: dict[str, Any] = {
            name: {level: getattr(rates, name) for level, rates in found.items() if hasattr(rates, name)}
            for name in self.coefficients()
        }
        for level, rates in found.items():
            if rates.lower_scales is not None and "lower_step" in out:
                out["lower_step"][level] = PerEntry(rates.lower_step, rates.lower_scales)
            if transformation_of(self.option("lower_step"), level) is not None:
                out["lower_step"].pop(level)
            if rates.inverse_scales is not None and "inverse_step" in out:
                shared = out["inverse_step"].pop(level)  # as y, where y takes plain steps
                if rates.lower_scales is None:
                    out["inverse_step"][level] = PerEntry(shared, rates.inverse_scales)
        return out

    def first_rows(self, sampler: Sampler) -> int | None:
        """The rows per block of the first pass: None for all of them, 0 for no pass."""
        return sampler.first_rows

    def missing(self, name: str, tracker: Tracker) -> set[str]:
        """Which of the coefficients that a level needs were left out, and must be estimated."""
        missing = {one for one in tracker.coefficients if self.leaves_out(one, name)}
        # An inverse step that is left out is the lower step, but v itself has no use for a transformation.
        shared = tracker.twin or self.transformation(name, tracker) is None
        return missing - {"inverse_step"} if shared else missing

    def leaves_out(self, coefficient: str, name: str) -> bool:
        """Whether the user gave no value of a coefficient for a level."""
        return evaluate(self.option(coefficient), FIRST_STEP, name) is None

    def oracles(self, problem: Problem) -> Oracles:
        """The oracle calls of one visited block at one point."""
        return sum((tracker.oracles for tracker in self.trackers(problem).values()), Oracles(gradients=2))

    def count_oracles(self, problem: Problem, sampler: Sampler, steps: int) -> Oracles:
        """The calls of some steps, and of the first pass over all blocks."""
        per_visit = self.oracles(problem) * (2 if self.corrected else 1)
        total = count_steps(per_visit, problem, sampler, steps)
        rows = self.first_rows(sampler)
        return total if rows == 0 else total + count_pass(self.oracles(problem), problem, rows)


def _of_readers(problem: Problem, layer: list[str], v: dict[str, PyTree]) -> dict[str, PyTree]:
    """Those of the multipliers that belong to readers of some levels."""
    return {name: one for name, one in v.items() if set(problem.levels[name].reads) & set(layer)}


def _numbers(steps: Any) -> Any:
    """A step, or a dict of them by level, without those that have a scale for every entry."""
    if isinstance(steps, Mapping):
        return {level: _numbers(one) for level, one in steps.items()}
    return steps.step if isinstance(steps, PerEntry) else steps


def _is_one(value: Any) -> bool:
    value = value(FIRST_STEP) if callable(value) else value
    unknown = value is None or checks.is_traced(value)
    return not unknown and bool(np.asarray(value) >= 1)


def _at_points(function: Callable[[Any], Any], points: list[Any]) -> list[Any]:
    """function at every point.

    On an accelerator both points are one batched program: half the launches. On a CPU they are two programs,
    because products of a matrix with one vector are faster there than those with two. They also are where x
    is so large that stacking both takes longer than launching twice.
    """
    numbers = sum(leaf.size for leaf in jax.tree.leaves(points[0]))
    if len(points) == 1 or jax.default_backend() == "cpu" or numbers > STACKED:
        once = jax.jit(function, inline=True) if len(points) > 1 else function  # traced for both at once
        return [once(point) for point in points]
    stacked = jax.vmap(function)(jax.tree.map(_stack, *points))
    return [jax.tree.map(lambda leaf, place=place: leaf[place], stacked) for place in range(len(points))]


def _stack(now: Array, before: Array) -> Array:
    """Both, along a first axis: as a `where`, which is merged into what uses it. A stack would not be."""
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
    slopes = [
        (unscaled(v.rows.y.slope, v.rates.lower_scales), v.slot_axes)
        for v in seen
        if isinstance(v.rows.y, Moving)
    ]
    inverse = [
        (unscaled(v.rows.v.slope, v.rates.inverse_scales), v.slot_axes) for v in seen if v.rows.v is not None
    ]
    lower = sampler.root_mean_square(root_mean_square(slopes))
    return Info(
        objective,
        norm(z),
        lower,
        sampler.root_mean_square(root_mean_square(inverse)),
        sampler.total(decomposed),
    )
