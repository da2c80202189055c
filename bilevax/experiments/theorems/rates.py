"""`bilevax reproduce rates`: steps until the mean of ‖∇F‖² is at most ε², against ε, m, I and B."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.experiments import figures
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import control, error_terms, speedup
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS, Method
from bilevax.experiments.theorems.steps_to_epsilon import steps_to_epsilon


@dataclasses.dataclass(frozen=True)
class StepsOverEpsilon:
    """T(ε) of one method.

    Attributes:
      method: the method.
      constant: its tuned c.
      epsilons: ε.
      steps: T, (ε, seeds); infinite where a run did not reach ε².
      last: ‖∇F(x_T)‖²/ε², the mean over seeds: the part of ε² that is noise.
      exponent: the fit.
    """

    method: Method
    constant: float
    epsilons: np.ndarray
    steps: np.ndarray
    last: np.ndarray
    exponent: Exponent


def run(options: RatesOptions, folder: str | Path, *, quick: bool = False) -> dict[str, StepsOverEpsilon]:
    """Tunes, measures and fits every method; writes tables and plots to a folder.

    Returns:
      T(ε) by method.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    tuning = {name: tune(METHODS[name], options) for name in options.methods}
    report.table(
        "tuning", [_tuning_row(*item) for item in tuning.items()], "Steps against c", _tuning_note(options)
    )
    constants = {name: best_constant(name, steps, options) for name, steps in tuning.items()}
    curves = {}
    if "epsilon" in options.parts:
        curves = {name: measure(METHODS[name], constant, options) for name, constant in constants.items()}
        report.table(
            "rates", [_row(curve) for curve in curves.values()], "Steps until mean ‖∇F‖² ≤ ε²", _NOTE
        )
        caption = "Steps until the mean of ‖∇F‖² is at most ε²; lines: fitted exponents, dotted: theory."
        report.figure("rates", _plot(list(curves.values())), figures.spread_caption(caption, options.seeds))
    if "control" in options.parts:
        control.measure(constants, options, report)
    if "sizes" in options.parts:
        speedup.measure(constants, options, report)
    if "errors" in options.parts:
        error_terms.measure(constants, options, report)
    report.finish()
    return curves


def tune(method: Method, options: RatesOptions) -> dict[float, float]:
    """The mean T at the first ε for every c, on separate seeds; infinite if a run did not reach ε²."""
    epsilon = options.epsilons[0]
    print(f"{method.name}: c at ε = {epsilon}")
    keys = jax.random.split(jax.random.key(options.seed + 1000), max(2, options.seeds // 2))
    reached = steps_to_epsilon(method, options.constants, epsilon, options, keys, options.tuning_max_steps)
    return dict(zip(options.constants, reached.steps.mean(1).tolist(), strict=True))


def best_constant(name: str, steps: dict[float, float], options: RatesOptions) -> float:
    """The c with the smallest T."""
    c = min(steps, key=lambda c: steps[c])
    if steps[c] == np.inf:
        raise ValueError(
            f"constants must contain one with which {name} reaches ε = {options.epsilons[0]} in "
            f"{options.tuning_max_steps} steps, got {options.constants}"
        )
    return c


def measure(method: Method, constant: float, options: RatesOptions) -> StepsOverEpsilon:
    """T(ε) of a method, with parameters scaled to each ε."""
    keys = jax.random.split(jax.random.key(options.seed), options.seeds)
    epsilons = options.epsilons if method.exponent == -3 else options.averaged_epsilons
    found = []
    for epsilon in epsilons:
        print(f"{method.name}: ε = {epsilon}")
        found.append(steps_to_epsilon(method, [constant], epsilon, options, keys, options.max_steps))
    steps = np.stack([one.steps[0] for one in found])
    last = np.array([one.last.mean() for one in found]) / np.square(epsilons)
    at = np.asarray(epsilons)
    return StepsOverEpsilon(method, constant, at, steps, last, fit_exponent(at, steps))


_NOTE = (
    "exponent: of T in ε, one fit per seed, mean ± half of the 95% confidence interval. noise: ‖∇F(x_T)‖²/ε² "
    "at the last step, the part of ε² that is not due to the distance from x0. Parameters by each theorem's "
    "scaling (scalings.py); c is tuned at the largest ε."
)


def _tuning_row(name: str, steps: dict[float, float]) -> dict[str, Any]:
    return {"method": name} | {f"c = {c:g}": "" if t == np.inf else f"{t:.0f}" for c, t in steps.items()}


def _tuning_note(options: RatesOptions) -> str:
    missing = f"empty where a run did not reach ε² in {options.tuning_max_steps} steps"
    return f"The mean T at ε = {options.epsilons[0]}; {missing}."


def _row(curve: StepsOverEpsilon) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": curve.method.name,
        "theory": curve.method.exponent,
        "exponent": str(curve.exponent),
        "standard error": f"{curve.exponent.error:.3f}",
        "c": curve.constant,
        "noise": f"{curve.last.mean():.2f}",
    }
    for epsilon, steps in zip(curve.epsilons, curve.steps, strict=True):
        missed = int(np.sum(~np.isfinite(steps)))
        row[f"T({epsilon:g})"] = f"{missed} of {steps.size} failed" if missed else f"{steps.mean():.0f}"
    return row


@figures.styled
def _plot(curves: list[StepsOverEpsilon]) -> Any:
    kinds = [mean for mean in (False, True) if any(curve.method.mean is mean for curve in curves)]
    figure, axes = figures.panels(1, len(kinds), height=3.2)
    styles = figures.styles_of([curve.method.name for curve in curves])
    for axis, mean in zip(axes[0], kinds, strict=True):
        title = "mean blocks" if mean else "quadratic blocks"
        for curve in (curve for curve in curves if curve.method.mean is mean):
            label = f"{curve.method.name}: {curve.exponent} (theory {curve.method.exponent})"
            middle, (color, marker) = curve.steps.mean(1), styles[curve.method.name]
            spread = figures.deviation(curve.steps.T)
            axis.errorbar(curve.epsilons, middle, spread, fmt=marker, color=color, capsize=2, label=label)
            axis.plot(curve.epsilons, curve.exponent.at(curve.epsilons), color=color)
            theory = middle[0] * (curve.epsilons / curve.epsilons[0]) ** curve.method.exponent
            axis.plot(curve.epsilons, theory, color=color, linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="ε", ylabel="steps T(ε)", title=title)
        figures.mark(axis, sorted({float(e) for curve in curves for e in curve.epsilons}))
        figures.legend_below(axis, columns=1)
    return figure
