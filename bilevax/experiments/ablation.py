"""`bilevax reproduce ablation`: what more blocks (I) and more rows (B) per step give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.experiments import validation
from bilevax.experiments.report import Report
from bilevax.solvers.toolkit import msvr_gamma


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bilevax reproduce ablation` is run with.

    Attributes:
      data: the data set.
      methods: the methods.
      blocks_per_step: the values of I, at the paper's B.
      batch_sizes: the values of B, at the paper's I.
      trials: runs per setting, all in one vmapped program.
      steps: steps of every run.
      seed: of the first trial.
      rows: use only so many rows of the data; None takes all.
      blocks: m.
    """

    data: str = "a8a"
    methods: tuple[str, ...] = ("BSVRBv1", "BSVRBv2")
    blocks_per_step: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    batch_sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    trials: int = 4
    steps: int = 2000
    seed: int = 0
    rows: int | None = None
    blocks: int = validation.BLOCKS


@dataclasses.dataclass(frozen=True)
class Curve:
    """The mean validation loss of all trials of one (I, B)."""

    method: str
    varied: str
    value: int
    step: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    sd: np.ndarray


def run(settings: Settings, folder: str | Path, *, quick: bool = False) -> list[Curve]:
    """Runs the methods with every I and every B; writes a table and a plot into a folder."""
    if quick:
        settings = dataclasses.replace(
            settings, blocks_per_step=(2, 10), batch_sizes=(4, 32), trials=2, steps=100, rows=1000, blocks=20
        )
    report = Report(folder, settings, quick=quick)
    config = validation.tuned(settings.data)
    report.fact("tuned", config)
    curves, seen = [], {}
    for method in settings.methods:
        pairs = [("I", value, validation.BATCH) for value in settings.blocks_per_step]
        pairs += [("B", validation.BLOCKS_PER_STEP, value) for value in settings.batch_sizes]
        for varied, count, batch in pairs:
            if (method, count, batch) not in seen:
                print(f"{method}, I = {count}, B = {batch}")
                seen[method, count, batch] = _curve(method, varied, count, batch, config, settings)
            value = count if varied == "I" else batch
            curves.append(dataclasses.replace(seen[method, count, batch], varied=varied, value=value))
    note = (
        "steps and seconds: until the validation loss is that which the smallest value ends with; "
        f"seconds are of one run among {settings.trials} side by side. speed-up: against the "
        "smallest value. The paper shows curves only: 'the convergence speed increases as I and B increases'."
    )
    report.table("ablation", table(curves), f"Speed-up in I and in B on {settings.data}", note)
    report.figure("ablation", _plot(curves))
    report.finish()
    return curves


def _curve(
    method: str, varied: str, count: int, batch: int, config: dict[str, Any], settings: Settings
) -> Curve:
    seeds = range(settings.seed, settings.seed + settings.trials)
    splits = [validation.load_split(settings.data, seed, settings.rows) for seed in seeds]
    tasks = [
        validation.make_task(split, config["ridge"], seed, settings.blocks)
        for split, seed in zip(splits, seeds, strict=True)
    ]
    numbers = scaled(config[method], count / settings.blocks)
    swept = bx.sweep(
        [task.problem for task in tasks],
        tasks[0].x0,
        tasks[0].y0,
        solver=validation.METHODS[method],
        settings={name: [value] for name, value in numbers.items()},
        steps=settings.steps,
        keys=jax.random.split(jax.random.key(settings.seed), settings.trials),
        blocks_per_step=count,
        batch_size=batch,
        metrics={"validation_loss": validation.validation_loss},
        every=max(1, settings.steps // 100),
    )
    losses = swept.history["validation_loss"][0]
    value = count if varied == "I" else batch
    seconds = swept.seconds / settings.trials
    return Curve(method, varied, value, swept.step, seconds, losses.mean(0), losses.std(0, ddof=1))


def scaled(numbers: dict[str, float], share: float) -> dict[str, float]:
    """Tuned numbers, for another share I/m of the blocks in a step than they were tuned with.

    A block that is visited more often may move further in a step: τ grows with I, as in Theorem 1. γ keeps
    its ratio to Theorem 1's.

    Example:
      >>> scaled({"lower_step": 0.5, "alpha": 0.1, "gamma": 10.0}, share=0.2)["lower_step"]
      1.0
    """
    tuned = validation.BLOCKS_PER_STEP / validation.BLOCKS
    out = numbers | {"lower_step": numbers["lower_step"] * share / tuned}
    if "gamma" in numbers:
        alpha = numbers["alpha"]
        out["gamma"] *= float(msvr_gamma(alpha, share) / msvr_gamma(alpha, tuned))
    return out


def table(curves: list[Curve]) -> list[dict[str, Any]]:
    """Steps and seconds until every curve is as low as the first of its group ends."""
    rows = []
    for method, varied in dict.fromkeys((curve.method, curve.varied) for curve in curves):
        group = [curve for curve in curves if (curve.method, curve.varied) == (method, varied)]
        goal = group[0].loss[-1]
        reached = [np.flatnonzero(curve.loss <= goal) for curve in group]
        first = reached[0][0]
        for curve, places in zip(group, reached, strict=True):
            row: dict[str, Any] = {
                "method": method,
                varied: curve.value,
                "final loss": f"{curve.loss[-1]:.4f}",
            }
            if places.size:
                place = places[0]
                row |= {
                    "steps": int(curve.step[place]),
                    "speed-up in steps": f"{group[0].step[first] / curve.step[place]:.1f}",
                    "seconds": f"{curve.seconds[place]:.3f}",
                    "speed-up in seconds": f"{group[0].seconds[first] / curve.seconds[place]:.1f}",
                }
            rows.append(row)
    order = ("method", "I", "B", "final loss", "steps", "speed-up in steps", "seconds", "speed-up in seconds")
    return [{name: row[name] for name in order if name in row} for row in rows]


def _plot(curves: list[Curve]) -> Any:
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(curve.method for curve in curves))
    figure = Figure(figsize=(10, 3.6 * len(methods)), layout="constrained")
    for axes, method in zip(figure.subplots(len(methods), 2, squeeze=False), methods, strict=True):
        for axis, varied in zip(axes, ("I", "B"), strict=True):
            for curve in curves:
                if (curve.method, curve.varied) == (method, varied):
                    axis.plot(curve.step, curve.loss, label=f"{varied} = {curve.value}")
            axis.set(title=method, xlabel="steps", ylabel="validation loss")
            axis.legend()
    return figure
