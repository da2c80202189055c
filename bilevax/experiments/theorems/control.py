"""A control: moving averages with steps ∝ ε, as variance-reduced methods use them, do not reach ε²."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from bilevax.experiments.kept import Task
from bilevax.experiments.report import Report
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS
from bilevax.experiments.theorems.steps_to_epsilon import cell


def tasks(constants: dict[str, float], options: RatesOptions) -> dict[str, Task]:
    """The runs of the moving averages with β, τ and η ∝ ε; at the first ε the parameters are the tuned ones.

    Args:
      constants: the tuned c of each method.
      options: of the experiment.

    Returns:
      What computes each of them, by name, long ones first.
    """
    first, found = options.averaged_epsilons[0], {}
    for name, epsilon in _cases(constants, options):
        # β, τ and η are ∝ c²ε². This c makes them ∝ ε, and keeps their tuned values at the first ε.
        c = constants[name] * math.sqrt(first / epsilon)
        found[_name(name, epsilon)] = functools.partial(
            cell, name, c, epsilon, options, 0, options.control_max_steps
        )
    return dict(reversed(found.items()))


def write(
    results: dict[str, Any], constants: dict[str, float], options: RatesOptions, report: Report
) -> list[dict[str, Any]]:
    """Writes `control.csv` and `control.md` from the results of the tasks; returns the rows."""
    rows: dict[str, dict[str, Any]] = {}
    for name, epsilon in _cases(constants, options):
        row = rows.setdefault(name, {"method": name})
        row[f"ε = {epsilon:g}"] = _cell(results[_name(name, epsilon)], epsilon)
    if rows:
        note = (
            "The mean T if all seeds reached ε²; otherwise how many did, and the mean of ‖∇F‖²/ε² after "
            f"{options.control_max_steps} steps. At the first ε the parameters are the tuned ones."
        )
        report.table("control", list(rows.values()), "Moving averages with steps ∝ ε", note)
    return list(rows.values())


def _cases(constants: dict[str, float], options: RatesOptions) -> list[tuple[str, float]]:
    epsilons = options.averaged_epsilons[: options.control_epsilons]
    return [(name, one) for name in constants if METHODS[name].exponent == -4 for one in epsilons]


def _name(method: str, epsilon: float) -> str:
    return f"{method}: control, ε = {epsilon:g}"


def _cell(reached: dict[str, Any], epsilon: float) -> str:
    steps, mean = np.array(reached["steps"]), np.array(reached["mean"])
    done = np.isfinite(steps)
    if done.all():
        return f"{steps.mean():.0f}"
    return f"{done.sum()} of {done.size}; mean {mean.mean() / epsilon**2:.2f}"
