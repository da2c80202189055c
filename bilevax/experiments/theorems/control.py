"""A control: moving averages with steps ∝ ε, as variance-reduced methods have them, stay above ε²."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bilevax.experiments.report import Report
from bilevax.experiments.theorems.lanes import Reached
from bilevax.experiments.theorems.scalings import METHODS, Method

Steps = Callable[[Method, list[float], float, Any, Any, int], Reached]


def measure(constants: dict[str, float], settings: Any, report: Report, steps: Steps) -> list[dict[str, Any]]:
    """Runs the moving averages with β, τ and η ∝ ε; writes `control.csv` and `.md`.

    At the first ε they are the tuned ones.

    Args:
      constants: the tuned c of each method.
      settings: `rates.Settings`.
      report: of the whole command.
      steps: runs a method, `rates.steps_of`.

    Returns:
      The rows of the table.
    """
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    first, rows = settings.averaged_epsilons[0], []
    for name in (name for name in constants if METHODS[name].exponent == -4):
        row: dict[str, Any] = {"method": name}
        for epsilon in settings.averaged_epsilons[: settings.control_epsilons]:
            print(f"control, {name}: ε = {epsilon}")
            # β, τ and η are c²ε² times something: ∝ ε, and the same as before at the first ε.
            c = constants[name] * math.sqrt(first / epsilon)
            reached = steps(METHODS[name], [c], epsilon, settings, keys, settings.control_most)
            row[f"ε = {epsilon:g}"] = _told(reached, epsilon)
        rows.append(row)
    if rows:
        note = (
            "T if all seeds got there; else how many did, and the mean of ‖∇F‖²/ε² after "
            f"{settings.control_most} steps. At the first ε the parameters are the tuned ones."
        )
        report.table("control", rows, "Moving averages with steps ∝ ε", note)
    return rows


def _told(reached: Reached, epsilon: float) -> str:
    there = np.isfinite(reached.steps[0])
    if there.all():
        return f"{reached.steps.mean():.0f}"
    return f"{there.sum()} of {there.size}; mean {reached.mean[0].mean() / epsilon**2:.2f}"
