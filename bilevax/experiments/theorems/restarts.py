"""`bilevax reproduce restarts`: F − min F over steps under the PL condition, in stages and without."""

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
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.scalings import Sizes, bsvrb_v1, bsvrb_v2
from bilevax.experiments.theorems.truth import Gap
from bilevax.testing.pl import PLBlocks

METHODS = {"BSVRB v1": bsvrb_v1, "BSVRB v2": bsvrb_v2}
# η L_F over the rate. f sees x through y alone: x must be slower than y and v, or all three oscillate.
UPPER = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bilevax reproduce restarts` is run with.

    Attributes:
      methods: "BSVRB v1", "BSVRB v2".
      first: T₁, the steps of the first stage.
      stages: K.
      tuning_stages: K of the runs that c is chosen by.
      constants: the values of c to choose from; the first stage has β = c²/w.
      constant_stages: the runs without restarts have the parameters of these stages all the time; may be
        empty.
      seeds: runs per setting, side by side.
      seed: of the first of them.
      blocks, blocks_per_step, batch_size: m, I, B.
      dimension, rows: d_x = d_y, and rows per block.
      nonconvexity: κ; F is not convex for κ > 1.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    first: int = 250
    stages: int = 8
    tuning_stages: int = 6
    constants: tuple[float, ...] = (0.05, 0.07, 0.1, 0.14, 0.2)
    constant_stages: tuple[int, ...] = (0, 2, 4, 7)
    seeds: int = 8
    seed: int = 0
    blocks: int = 20
    blocks_per_step: int = 5
    batch_size: int = 4
    dimension: int = 5
    rows: int = 100
    nonconvexity: float = 3.0

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"methods must be among {list(METHODS)}, got {name!r}")

    @property
    def sampling(self) -> Sizes:
        """m, I and B."""
        return Sizes(self.blocks, self.blocks_per_step, self.batch_size)

    def quick(self) -> Settings:
        """Few stages and seeds."""
        return dataclasses.replace(
            self, stages=5, tuning_stages=4, constants=(0.1, 0.14), constant_stages=(0, 4), seeds=3
        )


class SeenGap(eqx.Module):
    """F − min F of a state."""

    gap: Gap

    def __call__(self, state: bx.State) -> dict[str, Array]:
        return {"gap": self.gap(state.x)}


@dataclasses.dataclass(frozen=True)
class Curve:
    """F − min F over steps.

    Attributes:
      method: its name.
      stages: "restarts", or the stage k whose parameters a run without them has.
      step: the steps.
      gap: F − min F, (seeds, steps).
    """

    method: str
    stages: str
    step: np.ndarray
    gap: np.ndarray


def run(settings: Settings, folder: str | Path, *, quick: bool = False) -> list[Curve]:
    """Runs every method with and without restarts; writes a table and a plot into a folder."""
    settings = settings.quick() if quick else settings
    report = Report(folder, settings, quick=quick)
    family = bilevax.testing.pl_blocks(
        m=settings.blocks, d_x=settings.dimension, d_y=settings.dimension, rows=settings.rows,
        nonconvexity=settings.nonconvexity,
    )  # fmt: skip
    mu = family.constants.pl
    assert mu is not None
    report.fact("mu", mu)
    curves, constants = [], {}
    for name in settings.methods:
        constants[name] = tuned(name, family, settings)
        curves += measure(name, constants[name], family, settings)
    report.fact("tuned constants", constants)
    rows = [_row(curve, settings, mu) for curve in curves]
    note = (
        "T: F − min F in the last quarter of the stage that ends there, the mean over seeds. Exponent: of "
        "that in T, over the later half of the stages, a fit per seed, mean ± half of the 95% confidence "
        "interval; Theorem 2 has −1 (F − min F ∝ 1/(μT)). c, and with it the first stage, is tuned on other "
        "seeds; the constant parameters are those of stage k."
    )
    report.table("restarts", rows, "Restarts under the PL condition", note)
    report.figure("restarts", _plot(curves, settings))
    report.finish()
    return curves


def ends(settings: Settings) -> np.ndarray:
    """The steps after which stages end."""
    return settings.first * (2 ** np.arange(1, settings.stages + 1) - 1)


def late_steps(settings: Settings) -> np.ndarray:
    """Steps in the last quarter of each stage, (stages, 16): the mean over them is what it has reached."""
    lengths = settings.first * 2 ** np.arange(settings.stages)
    return np.linspace(ends(settings) - lengths / 4, ends(settings), 16, axis=1).astype(int)


def reached(curve: Curve, settings: Settings) -> np.ndarray:
    """F − min F in the last quarter of each stage, (stages, seeds)."""
    return np.stack([curve.gap[:, np.isin(curve.step, steps)].mean(1) for steps in late_steps(settings)])


def tuned(name: str, family: PLBlocks, settings: Settings) -> float:
    """The c with the least F − min F at the end of fewer stages, on seeds of its own."""
    print(f"{name}: c")
    stages = min(settings.tuning_stages, settings.stages)
    solvers = [
        bx.Restart(_solver(name, c, family, settings), first=settings.first, stages=stages)
        for c in settings.constants
    ]
    keys = jax.random.split(jax.random.key(settings.seed + 1000), max(2, settings.seeds // 2))
    gaps = _gaps(solvers, family, settings, keys, [solvers[0].steps]).mean((1, 2))
    gaps = np.where(np.isfinite(gaps), gaps, np.inf)
    if not np.isfinite(gaps).any():
        raise ValueError(
            f"constants must hold one with which {name} does not diverge, got {settings.constants}"
        )
    return settings.constants[int(np.argmin(gaps))]


def measure(name: str, c: float, family: PLBlocks, settings: Settings) -> list[Curve]:
    """The curves of a method: with restarts, and with the constant parameters of some stages."""
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    last = int(ends(settings)[-1])
    at = sorted({*lanes.log_spaced(min(50, last), last, 60), *late_steps(settings).ravel().tolist()})
    base = _solver(name, c, family, settings)
    print(f"{name}: restarts")
    restarted = _gaps(
        [bx.Restart(base, first=settings.first, stages=settings.stages)], family, settings, keys, at
    )
    stages = [k for k in settings.constant_stages if k < settings.stages]
    print(f"{name}: without")
    plain = [at_stage(base, k) for k in stages]
    constant = _gaps(plain, family, settings, keys, at) if plain else []
    labels = ["restarts", *(f"k = {k}" for k in stages)]
    return [
        Curve(name, label, np.asarray(at), gap)
        for label, gap in zip(labels, [*restarted, *constant], strict=True)
    ]


def at_stage(solver: Any, k: int) -> Any:
    """A solver with the parameters that `Restart` gives it in stage k."""
    halved = {field: getattr(solver, field) * 0.5**k for field in ("alpha", "alpha_bar", "beta")}
    steps = [name for name in ("upper_step", "lower_step", "inverse_step") if hasattr(solver, name)]
    return dataclasses.replace(
        solver, **halved, **{name: getattr(solver, name) * 0.5 ** (k / 2) for name in steps}
    )


def _solver(name: str, c: float, family: PLBlocks, settings: Settings) -> Any:
    return METHODS[name](c, 1.0, settings.sampling, family.constants, UPPER)


def _gaps(solvers: list[Any], family: PLBlocks, settings: Settings, keys: Array, at: list[int]) -> np.ndarray:
    # Theorem 2 needs no large batch at the start.
    sampling = bx.Sampling(settings.blocks_per_step, settings.batch_size, shuffle=False)
    task = lanes.Task(family.problem, family.x0, family.y0, sampling)
    return lanes.trace(task, solvers, keys, SeenGap(Gap.of(family)), at)["gap"]


def _exponent(curve: Curve, settings: Settings) -> Exponent:
    """Of what the later half of the stages reach, in the steps until then."""
    later = slice(settings.stages // 2, None)
    return fit_exponent(ends(settings)[later], reached(curve, settings)[later])


def _row(curve: Curve, settings: Settings, mu: float) -> dict[str, Any]:
    row: dict[str, Any] = {"method": curve.method, "parameters": curve.stages}
    row["exponent"] = str(_exponent(curve, settings))
    gaps = reached(curve, settings).mean(1)
    row["μ T (F − min F)"] = f"{mu * curve.step[-1] * gaps[-1]:.2g}"
    return row | {f"T = {end}": f"{gap:.1e}" for end, gap in zip(ends(settings), gaps, strict=True)}


def _plot(curves: list[Curve], settings: Settings) -> Any:
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(curve.method for curve in curves))
    figure = Figure(figsize=(5.5 * len(methods), 4.2), layout="constrained")
    for axis, method in zip(figure.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        for curve in (curve for curve in curves if curve.method == method):
            staged = curve.stages == "restarts"
            label = "RE-: in stages" if staged else f"constant, {curve.stages}"
            axis.loglog(
                curve.step,
                curve.gap.mean(0),
                label=label,
                linewidth=2.2 if staged else 1,
                zorder=3 if staged else 2,
            )
            if staged:
                at = ends(settings)[settings.stages // 2 :]
                line = _exponent(curve, settings).at(at)
                axis.loglog(at, line[-1] * at[-1] / at, "k:", label="∝ 1/(μT), Theorem 2")
        axis.set(title=method, xlabel="step", ylabel="F − min F")
        axis.legend(fontsize=8)
    return figure
