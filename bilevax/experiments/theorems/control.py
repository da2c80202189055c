"""A control: moving averages with steps ∝ ε, as variance-reduced methods use them, do not reach ε²."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from bilevax.experiments.report import Report
from bilevax.experiments.theorems.lanes import Reached
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS
from bilevax.experiments.theorems.steps_to_epsilon import steps_to_epsilon


def measure(constants: dict[str, float], options: RatesOptions, report: Report) -> list[dict[str, Any]]:
    """Runs the moving averages with β, τ and η ∝ ε; writes `control.csv` and `control.md`.

    At the first ε the parameters are the tuned ones.

    Args:
      constants: the tuned c of each method.
      options: of the experiment.
      report: where the table goes.

    Returns:
      The rows of the table.
    """
    keys = jax.random.split(jax.random.key(options.seed), options.seeds)
    first, rows = options.averaged_epsilons[0], []
    for name in (name for name in constants if METHODS[name].exponent == -4):
        row: dict[str, Any] = {"method": name}
        for epsilon in options.averaged_epsilons[: options.control_epsilons]:
            print(f"control, {name}: ε = {epsilon}")
            # β, τ and η are ∝ c²ε². This c makes them ∝ ε, and keeps their tuned values at the first ε.
            c = constants[name] * math.sqrt(first / epsilon)
            reached = steps_to_epsilon(METHODS[name], [c], epsilon, options, keys, options.control_max_steps)
            row[f"ε = {epsilon:g}"] = _cell(reached, epsilon)
        rows.append(row)
    if rows:
        note = (
            "The mean T if all seeds reached ε²; otherwise how many did, and the mean of ‖∇F‖²/ε² after "
            f"{options.control_max_steps} steps. At the first ε the parameters are the tuned ones."
        )
        report.table("control", rows, "Moving averages with steps ∝ ε", note)
    return rows


def _cell(reached: Reached, epsilon: float) -> str:
    done = np.isfinite(reached.steps[0])
    if done.all():
        return f"{reached.steps.mean():.0f}"
    return f"{done.sum()} of {done.size}; mean {reached.mean[0].mean() / epsilon**2:.2f}"
