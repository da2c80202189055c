"""What makes a run the same run: what a checkpoint must have in common with the run that resumes it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Shared
from bilevax._run.digest import checksum
from bilevax._run.step_digest import environment, step_digest
from bilevax._step.state import State
from bilevax.solvers.base import AbstractSolver
from bilevax.version import __version__


def identity(problem: Problem, solver: AbstractSolver, state: State) -> dict[str, Any]:
    """What makes a run the same run: its solver, data, start, shapes and sampling, as JSON."""
    shapes = {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path((problem, state))
    }
    sampler = state.sampler
    described = {
        "bilevax": __version__.rsplit(".", 1)[0],
        "solver": _describe(solver),
        "sampling": f"{sampler.per_step} of {sampler.blocks} blocks, {sampler.batch_size} rows, "
        f"shuffle {sampler.shuffle}, first {sampler.initial_batch_size}",
        "strata": sampler.strata or 1,
        "key": [int(sampler.random.first), int(sampler.random.second)],
        "shapes": shapes,
        "rows": _forms(problem),
        "data": {
            jax.tree_util.keystr(path): checksum(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                {"problem": problem, "x0": state.settled.x, "y0": state.y, "optimizer": state.optimizer}
            )
        },
        "program": step_digest(problem, solver, state),
        "environment": environment(),
    } | ({} if problem.risk is None else {"risk": _word(problem.risk)})
    return json.loads(json.dumps(described))


def _forms(problem: Problem) -> list[str]:
    """What the rows of the problem's data are, however they are stored."""
    sources = [
        one for one in (problem.upper_data, *problem.lower_data) if isinstance(one, (Shared, PerBlock))
    ]
    return [f"{form.dtype}{list(form.shape)}" for source in sources for form in source.packed.forms]


def _describe(solver: AbstractSolver) -> dict[str, str]:
    """Class and hyper-parameters of a solver; functions by their names and the values they close over."""

    described: dict[str, str] = {"class": type(solver).__name__}
    for field in dataclasses.fields(solver):
        value = getattr(solver, field.name)
        if isinstance(value, AbstractSolver):
            described |= {f"{field.name}.{name}": word for name, word in _describe(value).items()}
        else:
            described[field.name] = _word(value)
    return described


def _word(value: Any, around: tuple[int, ...] = ()) -> str:
    """A number, or a function with what it closes over (an optax transformation is such functions)."""
    if id(value) in around:  # a function that closes over itself
        return "…"
    around = (*around, id(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_word(one, around)}' for name, one in sorted(value.items()))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_word(one, around) for one in value)})"
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
        return f"partial{_word(inside, around)}"
    if callable(value):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_full(cell)]
        own = getattr(value, "__self__", None)  # of a method
        cells += [own] if dataclasses.is_dataclass(own) else []
        inside = [_word(one, around) for one in (*cells, *(getattr(value, "__defaults__", None) or ()))]
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{name}({', '.join(inside)})" if inside else name
    if dataclasses.is_dataclass(type(value)):
        inside: Any = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return f"{type(value).__name__}{_word(inside, around)}"
    if getattr(value, "shape", ()) != ():
        return f"array {checksum(value):x}"
    try:
        return repr(float(value))
    except (TypeError, ValueError):
        return value if isinstance(value, str) else type(value).__name__


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises if the variable was never set)
    except ValueError:
        return False
    return True


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Where two identities differ, in words.

    The programs of steps are compared only if they were traced in the same environment: another version of
    JAX writes the same step in another way.
    """
    same = there.get("environment") == here.get("environment")
    ignored = {"environment"} if same else {"environment", "program"}
    found = _difference(
        {name: value for name, value in there.items() if name not in ignored},
        {name: value for name, value in here.items() if name not in ignored},
    )
    # The digest is worth a word only where nothing else tells what is different.
    programs = [line for line in found if line.startswith("program ")]
    if found == programs and programs:
        return ["the step computes something else: f, g, a schedule or a constant inside them has changed"]
    return [line for line in found if line not in programs]


def _difference(there: Any, here: Any, where: str = "") -> list[str]:
    """Where two JSON trees differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        out = []
        for name in sorted(set(there) | set(here)):
            out += _difference(there.get(name), here.get(name), f"{where}.{name}" if where else name)
        return out
    return [] if there == here else [f"{where} is {there} there and {here} here"]
