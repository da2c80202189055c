"""`bilevax reproduce rates`: steps until the mean of ‖∇F‖² is below ε², against ε, m, I and B."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.experiments.report import Report
from bilevax.experiments.theorems import control, error_terms, lanes, speedup
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task
from bilevax.experiments.theorems.scalings import METHODS, Method, Sizes
from bilevax.experiments.theorems.truth import Truth

PARTS = ("epsilon", "control", "sizes", "errors")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bilevax reproduce rates` is run with.

    Attributes:
      methods: the methods, of `scalings.METHODS`.
      parts: what is measured: "epsilon", "control", "sizes" (m, I and B), "errors".
      epsilons: the values of ε of variance-reduced methods; the constants are tuned at the first one.
      averaged_epsilons: those of moving averages, whose runs are longer.
      constants: the values of c to choose from.
      seeds: runs per ε, side by side.
      seed: of the first of them; tuning uses others.
      most: the most steps of a run.
      tuning_most: the same, of tuning.
      blocks, blocks_per_step, batch_size: m, I, B.
      dimension, rows: d_x = d_y, and rows per block.
      control_epsilons, control_most: how many ε, and the most steps, of the control (`control.py`).
      size_methods: those of the methods for which m, I and B vary.
      size_epsilon: the ε at which they do.
      block_copies: m varies as so many times `blocks`; I and B vary at the second of these m.
      blocks_per_steps, batch_sizes: the values of I, B, and of both together.
      full_epsilon, full_batch_sizes: ε and the values of B at I = m.
      error_epsilon, error_steps: of the runs whose error terms are followed.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    parts: tuple[str, ...] = PARTS
    epsilons: tuple[float, ...] = (0.2, 0.1414, 0.1, 0.0707, 0.05, 0.0354)
    averaged_epsilons: tuple[float, ...] = (0.2, 0.1414, 0.1, 0.0707, 0.05)
    constants: tuple[float, ...] = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
    seeds: int = 8
    seed: int = 0
    most: int = 2_000_000
    tuning_most: int = 8000
    blocks: int = 20
    blocks_per_step: int = 5
    batch_size: int = 4
    dimension: int = 5
    rows: int = 100
    control_epsilons: int = 4
    control_most: int = 400_000
    size_methods: tuple[str, ...] = ("BSVRB v1", "BSVRB v2", "MMBO-v2")
    size_epsilon: float = 0.1414
    block_copies: tuple[int, ...] = (1, 2, 4, 8)
    blocks_per_steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    full_epsilon: float = 0.05
    full_batch_sizes: tuple[int, ...] = (1, 2, 4)
    error_epsilon: float = 0.1
    error_steps: int = 20_000

    def __post_init__(self) -> None:
        for name, known in (("methods", METHODS), ("parts", PARTS)):
            unknown = [one for one in getattr(self, name) if one not in known]
            if unknown:
                raise ValueError(f"{name} must be among {list(known)}, got {unknown[0]!r}")

    @property
    def sampling(self) -> Sizes:
        """m, I and B."""
        return Sizes(self.blocks, self.blocks_per_step, self.batch_size)

    def quick(self) -> Settings:
        """A check of the whole chain: few methods, seeds and values, and large ε."""
        return dataclasses.replace(
            self,
            methods=self.methods if len(self.methods) < len(METHODS) else ("BSVRB v2", "MMBO-v2"),
            epsilons=(0.3, 0.2, 0.1414),
            averaged_epsilons=(0.3, 0.2),
            constants=(0.5, 0.7),
            seeds=3,
            most=50_000,
            control_epsilons=2,
            control_most=20_000,
            size_methods=("BSVRB v2",),
            size_epsilon=0.2,
            block_copies=(1, 2),
            blocks_per_steps=(4, 8),
            batch_sizes=(4, 8),
            full_epsilon=0.1,
            full_batch_sizes=(2, 4),
            error_steps=2000,
        )


@dataclasses.dataclass(frozen=True)
class Curve:
    """T(ε) of one method.

    Attributes:
      method: the method.
      constant: its tuned c.
      epsilons: ε.
      steps: T, (ε, seeds); infinite where a run did not get there.
      last: ‖∇F(x_T)‖²/ε², the mean over seeds: how much of ε² is noise that stays.
      exponent: the fit.
    """

    method: Method
    constant: float
    epsilons: np.ndarray
    steps: np.ndarray
    last: np.ndarray
    exponent: Exponent


def run(settings: Settings, folder: str | Path, *, quick: bool = False) -> dict[str, Curve]:
    """Tunes, measures and fits every method; writes tables and plots into a folder.

    Returns:
      The curves, by method.
    """
    settings = settings.quick() if quick else settings
    report = Report(folder, settings, quick=quick)
    tuning = {name: tune(METHODS[name], settings) for name in settings.methods}
    report.table(
        "tuning", [_tuning_row(*item) for item in tuning.items()], "Steps against c", _tuning_note(settings)
    )
    constants = {name: best_constant(name, steps, settings) for name, steps in tuning.items()}
    curves = {}
    if "epsilon" in settings.parts:
        curves = {name: measure(METHODS[name], constant, settings) for name, constant in constants.items()}
        report.table(
            "rates", [_row(curve) for curve in curves.values()], "Steps until mean ‖∇F‖² ≤ ε²", _NOTE
        )
        report.figure("rates", _plot(list(curves.values())))
    if "control" in settings.parts:
        control.measure(constants, settings, report, steps_of)
    if "sizes" in settings.parts:
        speedup.measure(constants, settings, report)
    if "errors" in settings.parts:
        error_terms.measure(constants, settings, report)
    report.finish()
    return curves


def tune(method: Method, settings: Settings) -> dict[float, float]:
    """The mean T at the first ε for every c, on seeds of its own; infinite if a run did not get there."""
    epsilon = settings.epsilons[0]
    print(f"{method.name}: c at ε = {epsilon}")
    keys = jax.random.split(jax.random.key(settings.seed + 1000), max(2, settings.seeds // 2))
    reached = steps_of(method, settings.constants, epsilon, settings, keys, settings.tuning_most)
    return dict(zip(settings.constants, reached.steps.mean(1).tolist(), strict=True))


def best_constant(name: str, steps: dict[float, float], settings: Settings) -> float:
    """The c with the least T."""
    c = min(steps, key=lambda c: steps[c])
    if steps[c] == np.inf:
        raise ValueError(
            f"constants must hold one with which {name} gets to ε = {settings.epsilons[0]} in "
            f"{settings.tuning_most} steps, got {settings.constants}"
        )
    return c


def measure(method: Method, constant: float, settings: Settings) -> Curve:
    """T(ε) of a method, each ε with its own parameters."""
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    epsilons = settings.epsilons if method.exponent == -3 else settings.averaged_epsilons
    found = []
    for epsilon in epsilons:
        print(f"{method.name}: ε = {epsilon}")
        found.append(steps_of(method, [constant], epsilon, settings, keys, settings.most))
    steps = np.stack([one.steps[0] for one in found])
    last = np.array([one.last.mean() for one in found]) / np.square(epsilons)
    at = np.asarray(epsilons)
    return Curve(method, constant, at, steps, last, fit_exponent(at, steps))


def steps_of(
    method: Method, constants: Any, epsilon: float, settings: Settings, keys: Any, most: int
) -> lanes.Reached:
    """T of a method at one ε, for every c and key."""
    family = make_family(method.mean, settings.blocks, settings.dimension, settings.rows)
    solvers = [method.make(c, epsilon, settings.sampling, family.constants) for c in constants]
    task = make_task(family, settings.sampling, initial_rows(epsilon))
    return lanes.steps_until(task, solvers, keys, Truth.of(family).squared_gradient, epsilon**2, most)


_NOTE = (
    "Exponent: of T in ε, a fit per seed, mean ± half of the 95% confidence interval. noise: ‖∇F(x_T)‖²/ε² "
    "at the last step, the part of ε² that is not the way from x0 any more. Parameters by each theorem's "
    "scaling (scalings.py), c tuned at the largest ε."
)


def _tuning_row(name: str, steps: dict[float, float]) -> dict[str, Any]:
    return {"method": name} | {f"c = {c:g}": "" if t == np.inf else f"{t:.0f}" for c, t in steps.items()}


def _tuning_note(settings: Settings) -> str:
    missing = f"empty where a run did not get there in {settings.tuning_most} steps"
    return f"The mean T at ε = {settings.epsilons[0]}; {missing}."


def _row(curve: Curve) -> dict[str, Any]:
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
        row[f"T({epsilon:g})"] = f"{missed} of {steps.size} not" if missed else f"{steps.mean():.0f}"
    return row


def _plot(curves: list[Curve]) -> Any:
    from matplotlib.figure import Figure

    kinds = [mean for mean in (False, True) if any(curve.method.mean is mean for curve in curves)]
    figure = Figure(figsize=(5.5 * len(kinds), 4.2), layout="constrained")
    for axis, mean in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        title = "mean blocks" if mean else "quadratic blocks"
        for curve in (curve for curve in curves if curve.method.mean is mean):
            label = f"{curve.method.name}: {curve.exponent} (theory {curve.method.exponent})"
            middle, spread = curve.steps.mean(1), curve.steps.std(1)
            bars = axis.errorbar(curve.epsilons, middle, spread, fmt="o", markersize=4, label=label)
            color = bars.lines[0].get_color()
            axis.plot(curve.epsilons, curve.exponent.at(curve.epsilons), color=color)
            theory = middle[0] * (curve.epsilons / curve.epsilons[0]) ** curve.method.exponent
            axis.plot(curve.epsilons, theory, color=color, linestyle=":")
        axis.set(
            xscale="log", yscale="log", xlabel="ε", ylabel="steps T(ε)", title=f"{title} (dotted: theory)"
        )
        axis.legend(fontsize=8)
    return figure
