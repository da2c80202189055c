"""`bilevax reproduce rates`: steps until the mean of ‖∇F‖² is at most ε², against ε, m, I and B."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.experiments import figures
from bilevax.experiments.kept import Kept, Task
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import control, error_terms, lemmas, speedup
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS, Method
from bilevax.experiments.theorems.steps_to_epsilon import cell, steps_to_epsilon


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


def run(
    options: RatesOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    processes: int = 1,
) -> dict[str, StepsOverEpsilon]:
    """Tunes, measures and fits every method; writes tables and plots to a folder.

    Every result is kept in `kept.json` as it comes; `resume` computes only what is missing there.

    Returns:
      T(ε) by method.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    tuning, constants, results = compute(options, report.folder, resume=resume, processes=processes)
    report.table(
        "tuning", [_tuning_row(*item) for item in tuning.items()], "Steps against c", _tuning_note(options)
    )
    curves = {}
    if "epsilon" in options.parts:
        curves = {name: _curve(name, constant, results, options) for name, constant in constants.items()}
        report.table(
            "rates", [_row(curve) for curve in curves.values()], "Steps until mean ‖∇F‖² ≤ ε²", _NOTE
        )
        caption = "Steps until the mean of ‖∇F‖² is at most ε²; lines: fitted exponents, dotted: theory."
        plot = _plot(list(curves.values()), options.family)
        report.figure("rates", plot, figures.spread_caption(caption, options.seeds))
    for part, module in PARTS.items():
        if part in options.parts:
            module.write(results, constants, options, report)
    report.finish()
    return curves


PARTS: dict[str, Any] = {"control": control, "sizes": speedup, "errors": error_terms, "lemmas": lemmas}


def compute(
    options: RatesOptions, folder: Path, *, resume: bool = False, processes: int = 1
) -> tuple[dict[str, dict[float, float]], dict[str, float], dict[str, Any]]:
    """Everything that takes long: T against c of every method, the best c, and all results by name."""
    # Which methods and parts were asked for is not part of a result.
    shared = dataclasses.replace(options, methods=(), parts=(), size_methods=())
    kept = Kept(folder / "kept.json", shared, resume=resume)
    asked = {f"{name}: tuning": functools.partial(tune, name, options) for name in options.run_methods}
    found = kept.fill(asked, processes)
    tuning = {
        name: {float(c): steps for c, steps in found[f"{name}: tuning"].items()}
        for name in options.run_methods
    }
    constants = {name: best_constant(name, steps, options) for name, steps in tuning.items()}
    tasks: dict[str, Task] = {}
    if "epsilon" in options.parts:
        cases = [(name, one) for name in constants for one in _epsilons(METHODS[name], options)]
        for name, epsilon in sorted(cases, key=lambda case: case[1]):  # the longest first
            tasks[f"{name}: ε = {epsilon:g}"] = functools.partial(
                cell, name, constants[name], epsilon, options, 0, options.max_steps
            )
    for part, module in PARTS.items():
        if part in options.parts:
            tasks |= module.tasks(constants, options)
    return tuning, constants, kept.fill(tasks, processes)


def tune(name: str, options: RatesOptions) -> dict[float, float]:
    """The mean T at the first ε for every c, on separate seeds; infinite if a run did not reach ε²."""
    epsilon, method = options.epsilons[0], METHODS[name]
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


def _epsilons(method: Method, options: RatesOptions) -> tuple[float, ...]:
    return options.epsilons if method.exponent == -3 else options.averaged_epsilons


def _curve(name: str, constant: float, results: dict[str, Any], options: RatesOptions) -> StepsOverEpsilon:
    """T(ε) of a method, with parameters scaled to each ε."""
    at = np.asarray(_epsilons(METHODS[name], options))
    found = [results[f"{name}: ε = {epsilon:g}"] for epsilon in at]
    steps = np.stack([np.array(one["steps"]) for one in found])
    last = np.array([np.mean(one["last"]) for one in found]) / at**2
    return StepsOverEpsilon(METHODS[name], constant, at, steps, last, fit_exponent(at, steps))


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
def _plot(curves: list[StepsOverEpsilon], family: str) -> Any:
    kinds = [mean for mean in (False, True) if any(curve.method.mean is mean for curve in curves)]
    figure, axes = figures.panels(1, len(kinds), height=3.2)
    styles = figures.styles_of([curve.method.name for curve in curves])
    for axis, mean in zip(axes[0], kinds, strict=True):
        title = f"{'mean' if mean else family} blocks"
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
