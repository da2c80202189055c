"""`bilevax reproduce hyperopt`: validation loss over epochs and seconds, BSVRB v1 and v2 against RSVRB."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.experiments import figures, tune, validation
from bilevax.experiments.arguments import check_names
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report, spread

BASE = "RSVRB"


@dataclasses.dataclass(frozen=True)
class HyperoptOptions:
    """The options of `bilevax reproduce hyperopt`.

    Attributes:
      protocol: "ours", with the hyper-parameters of `configs/validation.json`; or "paper", with the best of
        the paper's grid, which are looked for first.
      data: the data sets.
      methods: the methods.
      trials: runs per method, each with its own split, temperatures and samples.
      steps: maximum number of steps of a run.
      seconds: maximum duration of a run, without compilation; None has no limit.
      seed: seed of the first trial.
      rows: number of rows of the data to use; None uses all.
      blocks: m.
      settings: points of the paper's grid that every method tries, in "paper"; the first one, BSVRB v2, tries
        them with every λ.
      tuning_steps: steps of each such try.
      at_once: tries in one program; None takes as many as fit into memory.
      shorter: what the tuned steps of x and of y and v are multiplied by.
    """

    protocol: str = "ours"
    data: tuple[str, ...] = ("a8a", "w8a")
    methods: tuple[str, ...] = ("BSVRBv1", "BSVRBv2", "RSVRB")
    trials: int = 4
    steps: int = 5000
    seconds: float | None = 60.0
    seed: int = 0
    rows: int | None = None
    blocks: int = validation.BLOCKS
    settings: int = 24
    tuning_steps: int = 1000
    at_once: int | None = None
    shorter: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.protocol not in ("ours", "paper"):
            raise ValueError(f"protocol must be 'ours' or 'paper', got {self.protocol!r}")
        check_names("methods", self.methods, validation.METHODS)
        check_names("data", self.data, validation.DATA)

    def quick(self) -> HyperoptOptions:
        """A short check: the first data set, few trials, steps, rows and blocks.

        Few steps limit it, not seconds, in which a busy machine may take none.
        """
        few: dict[str, Any] = {
            "data": self.data[:1],
            "steps": 100,
            "seconds": None,
            "rows": 1000,
            "blocks": 10,
        }
        if self.protocol == "paper":
            few |= {"trials": 1, "settings": 4, "tuning_steps": 50, "steps": 60}
        else:
            few |= {"trials": 2, "shorter": validation.ON_FEW_ROWS}
        return dataclasses.replace(self, **few)


@dataclasses.dataclass(frozen=True)
class TrialCurve:
    """The validation loss of one trial over epochs and seconds."""

    epochs: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray

    def seconds_to(self, loss: float) -> float:
        """The seconds until the loss was at most this value; infinite if it never was."""
        reached = np.flatnonzero(self.loss <= loss)
        return float(self.seconds[reached[0]]) if reached.size else np.inf


def run(
    options: HyperoptOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    processes: int = 1,
) -> dict[str, dict[str, list[TrialCurve]]]:
    """Runs all methods on all data sets; writes a table and a plot to a folder.

    Every run is kept in `kept.json` as it ends; `resume` runs only what is missing there. The search of the
    paper's protocol uses several processes; runs whose seconds are measured are alone.

    Returns:
      The curves of the trials, by data set and method.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    configs, curves = compute(options, report.folder, resume=resume, processes=processes)
    for name, config in configs.items():
        report.fact(f"tuned {name}", config)
    rows = [row for name, found in curves.items() for row in _rows(name, found, options)]
    note = (
        "at equal epochs: the loss after as many epochs as all runs have. reached: seconds, without "
        "compilation, until the mean loss of the trials is as low as RSVRB's at the end. The paper shows "
        "only curves: all methods are similar over epochs, v1 and v2 are faster than RSVRB, and v2 is by far "
        f"the fastest on w8a. {_budgets(options)}"
    )
    report.table("hyperopt", rows, "Validation loss: BSVRB and RSVRB", note)
    caption = "Validation loss over epochs and over seconds without compilation."
    report.figure("hyperopt", _plot(curves), figures.spread_caption(caption, options.trials, "trials"))
    report.finish()
    return curves


def compute(
    options: HyperoptOptions, folder: Path, *, resume: bool = False, processes: int = 1
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, list[TrialCurve]]]]:
    """Everything that takes long: by data set the hyper-parameters, and the curves by method."""
    shared = dataclasses.replace(options, data=())  # which data were asked for is not part of a result
    kept = Kept(folder / "kept.json", shared, resume=resume)
    configs = {name: _config(name, options, kept, processes) for name in options.data}
    curves: dict[str, dict[str, list[TrialCurve]]] = {}
    for name, config in configs.items():
        curves[name] = {method: [] for method in options.methods}
        for method in options.methods:
            for trial in range(options.trials):
                print(f"{name}, {method}, trial {trial + 1} of {options.trials}")
                run_it = functools.partial(_trial, name, method, config, options, options.seed + trial)
                found = kept.get(f"{name}, {method}, trial {trial}", run_it)
                curve = TrialCurve(**{field: np.array(values) for field, values in found.items()})
                curves[name][method].append(curve)
    return configs, curves


def _config(name: str, options: HyperoptOptions, kept: Kept, processes: int) -> dict[str, Any]:
    """λ and the hyper-parameters of every method on a data set."""
    if options.protocol == "ours":
        return validation.tuned(name)
    search = tune.TuneOptions(
        data=name,
        methods=tuple(method for method in tune.TuneOptions.methods if method in options.methods),
        grid="paper",
        trials=options.settings,
        steps=options.tuning_steps,
        at_once=options.at_once,
        rows=options.rows,
        blocks=options.blocks,
    )
    return kept.get(f"{name}, tuned", lambda: tune.search(search, kept, processes)[0])


def _budgets(options: HyperoptOptions) -> str:
    """How much tuning each method had, in words."""
    if options.protocol == "ours":
        return f"Tuning: {validation.origin()}"
    first = next(method for method in tune.TuneOptions.methods if method in options.methods)
    return (
        f"Tuning: {options.settings} points of the paper's grid for every method, {options.tuning_steps} "
        f"steps each; {first} tried them with each of {len(tune.RIDGES)} values of λ, and the others with "
        f"the λ that it chose. {tune.about('paper')}"
    )


def _trial(name: str, method: str, config: dict[str, Any], options: HyperoptOptions, seed: int) -> TrialCurve:
    split = validation.load_split(name, seed, options.rows)
    task = validation.make_task(split, config["ridge"], seed, options.blocks)
    blocks_per_step = max(1, options.blocks // 10)

    def run(steps: int, seconds: float | None) -> bx.Result:
        return bx.minimize(
            task.problem,
            task.x0,
            task.y0,
            solver=_solver(method, config[method], options),
            steps=steps,
            key=jax.random.key(seed),
            blocks_per_step=blocks_per_step,
            batch_size=validation.BATCH,
            metrics={"validation loss": validation.validation_loss},
            every=max(1, options.steps // (500 if method == BASE else 200)),
            stop=bx.Stop(seconds=seconds, throw=False, raise_on_interrupt=True, verify=False),
        )

    run(1, None)  # compiles, outside of the limit
    result = run(options.steps, options.seconds)
    history = result.history
    if not history["step"].size:
        raise ValueError(f"seconds must leave time for a step, got {options.seconds} for {method} on {name}")
    epochs = history["step"] / validation.steps_per_epoch(split, blocks_per_step)
    return TrialCurve(epochs, history["seconds"], history["validation loss"])


def _solver(method: str, tuned: dict[str, float], options: HyperoptOptions) -> Any:
    """A method with its tuned hyper-parameters, its steps made shorter."""
    return validation.make_solver(method, validation.shortened(tuned, options.shorter))


def _rows(name: str, found: dict[str, list[TrialCurve]], options: HyperoptOptions) -> list[dict[str, Any]]:
    common = min(curve.epochs[-1] for curves in found.values() for curve in curves)
    goal = _end(found[BASE]) if BASE in found else None
    base = _reached(found[BASE], goal) if goal is not None else None
    rows = []
    for method, curves in found.items():
        row: dict[str, Any] = {
            "data": name,
            "method": method,
            "final loss": spread([curve.loss[-1] for curve in curves]),
            "epochs": spread([curve.epochs[-1] for curve in curves], 1),
            "at equal epochs": spread([np.interp(common, curve.epochs, curve.loss) for curve in curves]),
            "seconds": spread([curve.seconds[-1] for curve in curves], 2),
        }
        if goal is not None and base is not None:
            reached = _reached(curves, goal)
            row["reached"] = f"{reached:.2f}" if np.isfinite(reached) else "never"
            row["times faster"] = f"{base / reached:.1f}" if np.isfinite(reached) else ""
        rows.append(row)
    return rows


def _end(curves: list[TrialCurve]) -> float:
    """The mean loss of the trials at their ends."""
    return float(np.mean([curve.loss[-1] for curve in curves]))


def _reached(curves: list[TrialCurve], loss: float) -> float:
    """The seconds until the mean loss of the trials is at most this; one that has ended keeps its loss."""
    seconds = np.unique(np.concatenate([curve.seconds for curve in curves]))
    seconds = seconds[seconds >= max(curve.seconds[0] for curve in curves)]
    mean = np.mean([np.interp(seconds, curve.seconds, curve.loss) for curve in curves], axis=0)
    return TrialCurve(seconds, seconds, mean).seconds_to(loss * (1 + 1e-9))


def average(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and standard deviation of curves, at points that all of them cover."""
    end = min(at[-1] for at, _ in curves)
    begin = max(at[0] for at, _ in curves)
    points = np.geomspace(max(begin, 1e-9), max(end, begin, 1e-9), 400)
    values = np.stack([np.interp(points, at, loss) for at, loss in curves])
    return points, values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(points))


@figures.styled
def _plot(curves: dict[str, dict[str, list[TrialCurve]]]) -> Any:
    figure, axes = figures.panels(len(curves), 2)
    for row, (name, found) in zip(axes, curves.items(), strict=True):
        styles = figures.styles_of(list(found))
        for which, axis in zip(("epochs", "seconds"), row, strict=True):
            for method, trials in found.items():
                at, mean, sd = average([(getattr(curve, which), curve.loss) for curve in trials])
                figures.band(axis, at, mean, sd, styles[method], method)
            axis.set(title=name, xlabel=which, ylabel="validation loss", xscale="log")
    figures.legend_of_all(figure)
    return figure
