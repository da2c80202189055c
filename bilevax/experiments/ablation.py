"""`bilevax reproduce ablation`: the speed-up from more blocks (I) and more rows (B) per step."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.experiments import figures, validation
from bilevax.experiments.arguments import check_names
from bilevax.experiments.kept import Kept, Task
from bilevax.experiments.report import Report
from bilevax.solvers.toolkit import msvr_gamma


@dataclasses.dataclass(frozen=True)
class AblationOptions:
    """The options of `bilevax reproduce ablation`.

    Attributes:
      data: the data set.
      methods: the methods.
      blocks_per_step: values of I, at the paper's B.
      batch_sizes: values of B, at the paper's I.
      trials: runs per (I, B), all in one vmapped program.
      steps: steps of every run.
      seed: seed of the first trial.
      rows: number of rows of the data to use; None uses all.
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

    def __post_init__(self) -> None:
        check_names("methods", self.methods, validation.METHODS)

    def quick(self) -> AblationOptions:
        """A short check: few values, trials, steps, rows and blocks."""
        return dataclasses.replace(
            self, blocks_per_step=(2, 10), batch_sizes=(4, 32), trials=2, steps=100, rows=1000, blocks=20
        )


@dataclasses.dataclass(frozen=True)
class SizeCurve:
    """The validation loss over steps for one I and B: mean and standard deviation over trials.

    Attributes:
      method: the method.
      varied, value: which of "I" and "B" is varied, and its value.
      step, seconds: when the loss was measured; seconds are per trial.
      loss, sd: mean and standard deviation.
    """

    method: str
    varied: str
    value: int
    step: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    sd: np.ndarray


def run(
    options: AblationOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    processes: int = 1,
) -> list[SizeCurve]:
    """Runs the methods with every I and every B; writes a table and a plot to a folder.

    Every result is kept in `kept.json` as it comes; `resume` computes only what is missing there. With
    several processes each has a core to itself.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    config = validation.tuned(options.data)
    report.fact("tuned", config)
    kept = Kept(report.folder / "kept.json", dataclasses.replace(options, methods=()), resume=resume)
    pairs = [("I", value, validation.BATCH) for value in options.blocks_per_step]
    pairs += [("B", validation.BLOCKS_PER_STEP, value) for value in options.batch_sizes]
    tasks: dict[str, Task] = {
        _name(method, count, batch): functools.partial(_losses, method, count, batch, config, options)
        for method in options.methods
        for _, count, batch in reversed(pairs)  # the longest first
    }
    found = kept.fill(tasks, processes, alone=True)
    curves = [
        SizeCurve(
            method,
            varied,
            count if varied == "I" else batch,
            **{name: np.array(values) for name, values in found[_name(method, count, batch)].items()},
        )
        for method in options.methods
        for varied, count, batch in pairs
    ]
    note = (
        "steps, seconds: until the validation loss is as low as at the end with the smallest I or B; the "
        f"time of {options.trials} runs side by side is divided by {options.trials}. speed-up: relative to "
        "the smallest I or B. The paper shows only curves: 'the convergence speed increases as I and B "
        "increases'."
    )
    report.table("ablation", table(curves), f"Speed-up in I and in B on {options.data}", note)
    caption = f"Validation loss on {options.data} over steps, for several I and several B."
    report.figure("ablation", _plot(curves), figures.spread_caption(caption, options.trials, "trials"))
    report.finish()
    return curves


def _name(method: str, count: int, batch: int) -> str:
    return f"{method}, I = {count}, B = {batch}"


def _losses(
    method: str, count: int, batch: int, config: dict[str, Any], options: AblationOptions
) -> dict[str, np.ndarray]:
    """The validation loss over steps and seconds for one I and B."""
    print(_name(method, count, batch))
    seeds = range(options.seed, options.seed + options.trials)
    splits = [validation.load_split(options.data, seed, options.rows) for seed in seeds]
    tasks = [
        validation.make_task(split, config["ridge"], seed, options.blocks)
        for split, seed in zip(splits, seeds, strict=True)
    ]
    hyperparameters = scaled(config[method], count / options.blocks)
    if options.rows is not None:  # a short check
        hyperparameters = validation.shortened(hyperparameters, validation.ON_FEW_ROWS)
    swept = bx.sweep(
        [task.problem for task in tasks],
        tasks[0].x0,
        tasks[0].y0,
        solver=validation.METHODS[method],
        settings={name: [value] for name, value in hyperparameters.items()},
        steps=options.steps,
        keys=jax.random.split(jax.random.key(options.seed), options.trials),
        blocks_per_step=count,
        batch_size=batch,
        metrics={"validation_loss": validation.validation_loss},
        every=max(1, options.steps // 100),
    )
    losses = swept.history["validation_loss"][0]
    return {
        "step": swept.step,
        "seconds": swept.seconds / options.trials,
        "loss": losses.mean(0),
        "sd": losses.std(0, ddof=1),
    }


def scaled(hyperparameters: dict[str, float], share: float) -> dict[str, float]:
    """Adapts tuned hyper-parameters to another share I/m of blocks per step.

    A block that is visited more often may move further in a step: τ is proportional to I, as in Theorem 1.
    The ratio of γ to the formula of Theorem 1 stays the same.

    Example:
      >>> scaled({"lower_step": 0.5, "alpha": 0.1, "gamma": 10.0}, share=0.2)["lower_step"]
      1.0
    """
    tuned = validation.BLOCKS_PER_STEP / validation.BLOCKS
    out = hyperparameters | {"lower_step": hyperparameters["lower_step"] * share / tuned}
    if "gamma" in hyperparameters:
        alpha = hyperparameters["alpha"]
        out["gamma"] *= float(msvr_gamma(alpha, share) / msvr_gamma(alpha, tuned))
    return out


def table(curves: list[SizeCurve]) -> list[dict[str, Any]]:
    """Steps and seconds until each curve is as low as the end of the first curve of its group."""
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


@figures.styled
def _plot(curves: list[SizeCurve]) -> Any:
    methods = list(dict.fromkeys(curve.method for curve in curves))
    figure, axes = figures.panels(len(methods), 2)
    for row, method in zip(axes, methods, strict=True):
        for axis, varied in zip(row, ("I", "B"), strict=True):
            shown = [curve for curve in curves if (curve.method, curve.varied) == (method, varied)]
            for curve, style in zip(shown, figures.shades(len(shown)), strict=True):
                label = f"{varied} = {curve.value}"
                figures.band(axis, curve.step, curve.loss, curve.sd, style, label)
            axis.set(title=method, xlabel="steps", ylabel="validation loss")
            figures.legend_below(axis, columns=3)
    return figure
