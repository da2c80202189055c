"""The hyper-parameters of a solver by name: what a run used, and the same solver with other ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import Partial

from bilevax._problem.problem import Problem
from bilevax._step.coefficients import evaluate_all, first
from bilevax._step.pace import automatic_step
from bilevax._step.state import State
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.restart import Restart

AT_REST = "x at rest"


class Change(NamedTuple):
    """Another value of a hyper-parameter, and how a user would write it."""

    name: str
    value: Any
    text: str


class Knobs:
    """The hyper-parameters of a solver; those of the solver inside, if it is a `Restart`."""

    def __init__(self, solver: AbstractSolver):
        self.solver = solver
        self.own: Any = getattr(solver, "solver", solver)
        self.values = self.own.coefficients()
        given = {name: value for name, value in self.values.items() if value is not None}
        self._times = {
            name: times(value) for name, value in ({"upper_step": automatic_step()} | given).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def is_given(self, name: str) -> bool:
        """Whether the user chose a value: it is neither left out nor the default."""
        value = self.values.get(name)
        if value is None:
            return False
        defaults = {field.name: field.default for field in dataclasses.fields(self.own)}
        default = defaults.get(name)
        return not (isinstance(default, float) and is_number(value) and np.isclose(float(value), default))

    def default(self, name: str) -> Any:
        """The value that a field has if it is left out; None if it is estimated then."""
        (found,) = [field.default for field in dataclasses.fields(self.own) if field.name == name]
        return found

    def replaced(self, values: Mapping[str, Any]) -> AbstractSolver:
        """The solver with other values, which are not checked."""

        def fields(solver: Any) -> list[Any]:
            return [getattr(getattr(solver, "solver", solver), name) for name in values]

        return eqx.tree_at(fields, self.solver, list(values.values()), is_leaf=lambda leaf: leaf is None)

    def scaled(self, name: str, factor: float, used: Mapping[str, float]) -> Change:
        """A factor times a hyper-parameter, or times what was used if it was left out."""
        value = self.values[name]
        if value is None and name != "upper_step":
            return self.set_to(name, factor * used[name])
        changed = self._times[name](factor)
        if value is None:
            return Change(name, changed, f"{name}=bx.automatic_step(speed={factor:g})")
        if isinstance(value, optax.GradientTransformation):
            return Change(name, changed, f"{name}=optax.chain(…, optax.scale({factor:g}))")
        if callable(value):
            return Change(name, changed, f"{factor:g} times the schedule {name}")
        return Change(name, changed, f"{name}={shown(changed)}")

    def set_to(self, name: str, value: float) -> Change:
        """A number in place of a hyper-parameter: rounded, so that what is tried is what a message says."""
        return Change(name, rounded(value), f"{name}={rounded(value):g}")

    def left_out(self, name: str) -> Change:
        """A hyper-parameter left out."""
        return Change(name, None, f"{name} left out")

    def at_rest(self) -> Change:
        """No upper step, such that the states of the solver keep their structure."""
        return Change("upper_step", self._times["upper_step"](0.0), AT_REST)


def used(solver: AbstractSolver, problem: Problem, state: State) -> dict[str, float]:
    """The coefficients of the lower levels at a state, the automatic ones too.

    If levels differ, that which goes wrong first: the largest, and the least floor.
    """
    own: Any = getattr(solver, "solver", solver)
    stage: Any = solver.stage(state.step) if isinstance(solver, Restart) else 0
    found: dict[str, list[float]] = {}
    for name, slots in state.sampler.draw(problem, state.step).slots.items():
        if hasattr(own, "rates"):
            rates = vars(own.rates(problem, state, name, slots.size, stage))
        else:  # a solver that is no recipe: what it was given, and what was estimated
            rates = evaluate_all(own.coefficients(), state.step, name)
            chance = state.sampler.chance(problem, name, slots.size)
            if name in state.smoothness:
                rates["lower_step"] = state.smoothness[name].step(chance)
                rates["lower_scales"] = state.smoothness[name].scales
            rates["floor"] = first(rates.get("floor"), state.floors.get(name))
        # The plain step that is as short as the automatic one is for the steepest entry of y.
        for step, scales in (("lower_step", "lower_scales"), ("inverse_step", "inverse_scales")):
            least = [float(jnp.min(leaf)) for leaf in jax.tree.leaves(rates.pop(scales, None))]
            rates[step] = rates[step] * min(least) if least else rates.get(step)
        for letter, value in rates.items():
            if value is not None and not isinstance(value, optax.GradientTransformation):
                found.setdefault(letter, []).append(float(value))
    return {name: min(some) if name == "floor" else max(some) for name, some in found.items()}


def rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.1e}")


def shown(value: Any) -> str:
    """A hyper-parameter in a message."""
    if isinstance(value, optax.GradientTransformation):
        return "an optax transformation"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{level!r}: {shown(one)}" for level, one in value.items()) + "}"
    return "a schedule" if callable(value) else f"{float(value):.3g}"


def is_number(value: Any) -> bool:
    """Whether a hyper-parameter is one number: no schedule, transformation or dict."""
    return not callable(value) and not isinstance(value, (Mapping, tuple)) and np.ndim(value) == 0


def times(value: Any) -> Callable[[float], Any]:
    """A function of a factor that returns that many times a hyper-parameter, or 0 if the factor is 0.

    Numbers are rounded to two digits. The factor of a schedule or a transformation is an array: other factors
    need no new compilation.
    """
    if isinstance(value, optax.GradientTransformation):
        inside = optax.with_extra_args_support(value)

        def update(factor: Array, moves: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            moves, state = inside.update(moves, state, params, **extra)
            return jax.tree.map(lambda a: jnp.where(factor == 0, 0, factor * a).astype(a.dtype), moves), state

        def transformation(factor: float) -> Any:
            scaled: Any = Partial(update, jnp.asarray(factor))
            return optax.GradientTransformationExtraArgs(inside.init, scaled)

        return transformation
    if isinstance(value, Mapping):
        by_level = {level: times(one) for level, one in value.items() if one is not None}
        return lambda factor: {level: one(factor) for level, one in by_level.items()}
    if callable(value):
        schedule: Any = value

        def scaled(factor: Array, step: Array) -> Array:
            return jnp.where(factor == 0, 0, factor * schedule(step))

        return lambda factor: Partial(scaled, jnp.asarray(factor))
    return lambda factor: rounded(factor * float(value))
