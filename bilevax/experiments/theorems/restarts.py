"""`bilevax reproduce restarts`: F − min F over steps under the PL condition, with and without restarts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import Array

import bilevax as bx
import bilevax.testing
from bilevax.experiments import figures
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.base_options import TheoremOptions
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.scalings import bsvrb_v1, bsvrb_v2
from bilevax.experiments.theorems.truth import Gap
from bilevax.testing.pl import PLBlocks

METHODS = {"BSVRB v1": bsvrb_v1, "BSVRB v2": bsvrb_v2}
RESET = "restarts, x_0 = x_1"
PRINTED = "restarts as printed"
# η L_F, divided by the rate. f depends on x only through y: x must move more slowly than y and v, or all
# three oscillate.
UPPER = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartsOptions(TheoremOptions):
    """The options of `bilevax reproduce restarts`, besides `TheoremOptions`.

    Attributes:
      methods: "BSVRB v1", "BSVRB v2".
      first: T₁, the number of steps of the first stage.
      stages: K.
      tuning_stages: K when c is tuned.
      constants: candidates for c; the first stage has β = c²/w.
      printed: whether to run Algorithm 3 as printed too: stages that end at random steps, and x_0 = x_1.
      constant_stages: runs without restarts use the parameters of one of these stages throughout; may be
        empty.
      nonconvexity: κ; F is non-convex for κ > 1.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    first: int = 250
    stages: int = 8
    tuning_stages: int = 6
    constants: tuple[float, ...] = (0.05, 0.07, 0.1, 0.14, 0.2)
    constant_stages: tuple[int, ...] = (0, 2, 4, 7)
    printed: bool = True
    nonconvexity: float = 3.0

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"methods must be among {list(METHODS)}, got {name!r}")

    def quick(self) -> RestartsOptions:
        """A short check: few stages and seeds."""
        return dataclasses.replace(
            self, stages=5, tuning_stages=4, constants=(0.1, 0.14), constant_stages=(0, 4), seeds=3
        )


class SeenGap(eqx.Module):
    """F − min F of a state."""

    gap: Gap

    def __call__(self, state: bx.State) -> dict[str, Array]:
        return {"gap": self.gap(state.x)}


@dataclasses.dataclass(frozen=True)
class GapCurve:
    """F − min F over steps.

    Attributes:
      method: its name.
      stages: "restarts", a variant of them, or the stage k whose parameters a run without restarts uses.
      step: the steps.
      gap: F − min F, (seeds, steps).
    """

    method: str
    stages: str
    step: np.ndarray
    gap: np.ndarray


def run(options: RestartsOptions, folder: str | Path, *, quick: bool = False) -> list[GapCurve]:
    """Runs every method with and without restarts; writes a table and a plot to a folder."""
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    family = bilevax.testing.pl_blocks(
        m=options.blocks, d_x=options.dimension, d_y=options.dimension, rows=options.rows,
        nonconvexity=options.nonconvexity,
    )  # fmt: skip
    mu = family.constants.pl
    assert mu is not None
    report.fact("mu", mu)
    curves, constants = [], {}
    for name in options.methods:
        constants[name] = tuned(name, family, options)
        curves += measure(name, constants[name], family, options)
    report.fact("tuned constants", constants)
    rows = [_row(curve, options, mu) for curve in curves]
    note = (
        "T = …: the mean over seeds of F − min F in the last quarter of the stage that ends at T. exponent: "
        "of F − min F in T over the second half of the stages, one fit per seed, mean ± half of the 95% "
        "confidence interval; −1 in Theorem 2 (F − min F ∝ 1/(μT)). c, which sets the first stage, is tuned "
        "on other seeds. k: constant parameters, those of stage k. As printed: every stage returns its state "
        "after a random number of its steps, and the next begins there with x_0 = x_1; T = … is what the "
        "stage that may last until T returned."
    )
    report.table("restarts", rows, "Restarts under the PL condition", note)
    caption = "F − min F over steps, with restarts and with constant parameters of each stage."
    report.figure("restarts", _plot(curves, options), figures.spread_caption(caption, options.seeds))
    report.finish()
    return curves


def ends(options: RestartsOptions) -> np.ndarray:
    """The step at which each stage ends."""
    return options.first * (2 ** np.arange(1, options.stages + 1) - 1)


def late_steps(options: RestartsOptions) -> np.ndarray:
    """16 steps in the last quarter of each stage, (stages, 16)."""
    lengths = options.first * 2 ** np.arange(options.stages)
    return np.linspace(ends(options) - lengths / 4, ends(options), 16, axis=1).astype(int)


def reached(curve: GapCurve, options: RestartsOptions) -> np.ndarray:
    """The mean F − min F in the last quarter of each stage, (stages, seeds)."""
    return np.stack([curve.gap[:, np.isin(curve.step, steps)].mean(1) for steps in late_steps(options)])


def tuned(name: str, family: PLBlocks, options: RestartsOptions) -> float:
    """The c with the smallest F − min F after `tuning_stages`, on separate seeds."""
    print(f"{name}: c")
    stages = min(options.tuning_stages, options.stages)
    solvers = [
        bx.Restart(_solver(name, c, family, options), first=options.first, stages=stages)
        for c in options.constants
    ]
    keys = jax.random.split(jax.random.key(options.seed + 1000), max(2, options.seeds // 2))
    gaps = _gaps(solvers, family, options, keys, [solvers[0].steps]).mean((1, 2))
    gaps = np.where(np.isfinite(gaps), gaps, np.inf)
    if not np.isfinite(gaps).any():
        raise ValueError(
            f"constants must contain one with which {name} does not diverge, got {options.constants}"
        )
    return options.constants[int(np.argmin(gaps))]


def measure(name: str, c: float, family: PLBlocks, options: RestartsOptions) -> list[GapCurve]:
    """The curves of a method: with restarts, and with constant parameters."""
    keys = jax.random.split(jax.random.key(options.seed), options.seeds)
    last = int(ends(options)[-1])
    at = sorted({*lanes.log_spaced(min(50, last), last, 60), *late_steps(options).ravel().tolist()})
    base = _solver(name, c, family, options)
    print(f"{name}: restarts")
    restarted = _gaps(
        [bx.Restart(base, first=options.first, stages=options.stages)], family, options, keys, at
    )
    found = [GapCurve(name, "restarts", np.asarray(at), restarted[0])]
    if options.printed:
        print(f"{name}: restarts as printed")
        resetting = bx.Restart(base, first=options.first, stages=options.stages, reset=True)
        reset = _gaps([resetting], family, options, keys, at)[0]
        found += [GapCurve(name, RESET, np.asarray(at), reset), _at_random(name, base, family, options, keys)]
    stages = [k for k in options.constant_stages if k < options.stages]
    print(f"{name}: constant parameters")
    plain = [at_stage(base, k) for k in stages]
    constant = _gaps(plain, family, options, keys, at) if plain else []
    return found + [
        GapCurve(name, f"k = {k}", np.asarray(at), gap) for k, gap in zip(stages, constant, strict=True)
    ]


def _at_random(name: str, base: Any, family: PLBlocks, options: RestartsOptions, keys: Array) -> GapCurve:
    """F − min F of what the stages of Algorithm 3 return, each after its own random number of steps."""
    gaps = []
    for seed in range(options.seeds):
        solver = bx.Restart(base, first=options.first, stages=options.stages, seed=seed, reset=True)
        returned = np.cumsum(solver.lengths).tolist()
        gaps.append(_gaps([solver], family, options, keys[seed : seed + 1], returned)[0, 0])
    return GapCurve(name, PRINTED, ends(options), np.stack(gaps))


def at_stage(solver: Any, k: int) -> Any:
    """A solver with the parameters that `Restart` uses in stage k."""
    halved = {field: getattr(solver, field) * 0.5**k for field in ("alpha", "alpha_bar", "beta")}
    steps = [name for name in ("upper_step", "lower_step", "inverse_step") if hasattr(solver, name)]
    return dataclasses.replace(
        solver, **halved, **{name: getattr(solver, name) * 0.5 ** (k / 2) for name in steps}
    )


def _solver(name: str, c: float, family: PLBlocks, options: RestartsOptions) -> Any:
    solver = METHODS[name](c, 1.0, options.sizes, family.constants, UPPER)
    return dataclasses.replace(solver, gamma=None, gamma_bar=None)  # they follow α from stage to stage


def _gaps(
    solvers: list[Any], family: PLBlocks, options: RestartsOptions, keys: Array, at: list[int]
) -> np.ndarray:
    # Theorem 2 needs no large initial batch.
    sampling = bx.Sampling(options.blocks_per_step, options.batch_size, shuffle=False)
    task = lanes.Task(family.problem, family.x0, family.y0, sampling)
    return lanes.trace(task, solvers, keys, SeenGap(Gap.of(family)), at)["gap"]


def _exponent(curve: GapCurve, options: RestartsOptions) -> Exponent:
    """The exponent of F − min F in T over the second half of the stages."""
    later = slice(options.stages // 2, None)
    return fit_exponent(ends(options)[later], reached(curve, options)[later])


def _row(curve: GapCurve, options: RestartsOptions, mu: float) -> dict[str, Any]:
    row: dict[str, Any] = {"method": curve.method, "parameters": curve.stages}
    row["exponent"] = str(_exponent(curve, options))
    gaps = reached(curve, options).mean(1)
    row["μ T (F − min F)"] = f"{mu * curve.step[-1] * gaps[-1]:.2g}"
    return row | {f"T = {end}": f"{gap:.1e}" for end, gap in zip(ends(options), gaps, strict=True)}


@figures.styled
def _plot(curves: list[GapCurve], options: RestartsOptions) -> Any:
    methods = list(dict.fromkeys(curve.method for curve in curves))
    figure, axes = figures.panels(1, len(methods), height=3.4)
    for axis, method in zip(axes[0], methods, strict=True):
        axis.set(title=method, xlabel="step", ylabel="F − min F", xscale="log", yscale="log")
        shown = [curve for curve in curves if curve.method == method]
        for curve, style in zip(shown, figures.shades(len(shown)), strict=True):
            staged = curve.stages == "restarts"
            constant = curve.stages.startswith("k")
            label = f"constant, {curve.stages}" if constant else f"RE-: {curve.stages}"
            looks: Any = {"linewidth": 2.0, "zorder": 3} if staged else {"linewidth": 1.0}
            figures.curve(axis, curve.step, curve.gap, style, label, **looks)
            if staged:
                at = ends(options)[options.stages // 2 :]
                line = _exponent(curve, options).at(at)
                axis.loglog(at, line[-1] * at[-1] / at, "k:", label="∝ 1/(μT), Theorem 2")
    figures.legend_of_all(figure, columns=3)
    return figure
