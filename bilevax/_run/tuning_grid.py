"""What a grid of hyper-parameters means: its combinations, and which of them are one compiled program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bilevax._step.pace import automatic_step
from bilevax.solvers.base import AbstractSolver

_SPEEDS = (0.1, 0.3, 1.0, 3.0, 10.0)


def changed(solver: AbstractSolver, **settings: Any) -> AbstractSolver:
    """The solver with other hyper-parameters; those of the solver inside, for a `Restart`."""
    if "speed" in settings:
        if "upper_step" in settings:
            raise ValueError("grid must not hold both speed and upper_step: speed is that of automatic_step")
        settings["upper_step"] = automatic_step(settings.pop("speed"))
    inner = getattr(solver, "solver", None)
    names = [field.name for field in dataclasses.fields(solver)]
    if isinstance(inner, AbstractSolver):
        own = {name: value for name, value in settings.items() if name in names}
        others = {name: value for name, value in settings.items() if name not in names}
        return dataclasses.replace(solver, **{"solver": changed(inner, **others)} | own)
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise ValueError(
            f"grid must name hyper-parameters of {type(solver).__name__}, which are {', '.join(names)}, "
            f"got {', '.join(unknown)}"
        )
    return dataclasses.replace(solver, **settings)


def static_names(solver: AbstractSolver | None) -> set[str]:
    """The names of the hyper-parameters that must be known when a program is compiled."""
    if solver is None:
        return set()
    inner = getattr(solver, "solver", None)
    static = {field.name for field in dataclasses.fields(solver) if field.metadata.get("static", False)}
    return static | (static_names(inner) if isinstance(inner, AbstractSolver) else set())


def default_grid(solver: AbstractSolver | None) -> dict[str, list[float]]:
    """Speeds around that of the automatic step, or steps around the one that the solver has."""
    if solver is None:
        raise ValueError("grid must be given if solver is a function, such as grid={'rate': [0.01, 0.1]}")
    inner = getattr(solver, "solver", None)
    if isinstance(inner, AbstractSolver):
        return default_grid(inner)
    step = getattr(solver, "upper_step", None)
    if step is None:
        return {"speed": list(_SPEEDS)}
    if not _is_number(step):
        raise ValueError(
            "grid must be given if the upper_step of the solver is a schedule or a transformation, such as "
            "grid={'beta': [0.05, 0.2]}"
        )
    return {"upper_step": [speed * float(step) for speed in _SPEEDS]}


def combinations(grid: Any) -> list[dict[str, Any]]:
    """All combinations of a grid, the last name running fastest."""
    if not isinstance(grid, Mapping) or not grid:
        raise TypeError(
            f"grid must be a dict of values by name, such as {{'alpha': [0.1, 0.5]}}, got {grid!r}"
        )
    choices: dict[str, list[Any]] = {}
    for name, values in grid.items():
        one = isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__")
        distinct: list[Any] = []
        for value in [] if one else values:
            value = value.item() if isinstance(value, (np.generic, np.ndarray, jax.Array)) else value
            if not any(value is other or value == other for other in distinct):
                distinct.append(value)
        if not distinct:
            raise ValueError(f"grid[{name!r}] must be a list of at least one value, got {values!r}")
        choices[name] = distinct
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def same_program(settings: list[dict[str, Any]], static: set[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """Trials by what a program has to know: all that is not a number, or static."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for trial, setting in enumerate(settings):
        fixed = {name: v for name, v in setting.items() if name in static or not _is_number(v)}
        for known, members in groups:
            if known == fixed:
                members.append(trial)
                break
        else:
            groups.append((fixed, [trial]))
    return groups


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
