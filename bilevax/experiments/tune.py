"""`bilevax tune`: searches a grid of hyper-parameters per method, judged by the loss on validation rows.

Every method gets the same number of trials, drawn from its grid without replacement and run side by side. λ
belongs to the problem and not to a method: it is chosen first, with BSVRB v2, and then shared, because
otherwise the methods would solve different problems. So the first method runs its trials once for every λ;
the table says how many each one had.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.experiments import figures, validation
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2)
WIDE: dict[str, dict[str, tuple[float, ...]]] = {
    "BSVRBv2": {
        "upper_step": (10, 100, 1000, 10_000),
        "lower_step": (0.1, 0.5, 2.5),
        "alpha": (0.1, 0.5, 0.9),
        "gamma": (0.1, 1, 10),
        "beta": (0.01, 0.1, 0.5),
    },
    "RSVRB": {
        "upper_step": (10, 100, 1000, 10_000),
        "lower_step": (0.02, 0.1, 0.5, 2.5),
        "beta": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.5, 0.9),
    },
}
WIDE["BSVRBv1"] = WIDE["BSVRBv2"]
# As printed, but for what is refused. The paper gives no β for BSVRB.
REFUSED = {"alpha": (10, 100)}  # weights of an average are at most 1
PAPER = {
    "BSVRBv2": {
        "upper_step": (0.001, 0.01, 0.1),
        "lower_step": (0.01, 0.1, 0.5, 1, 5, 10),
        "alpha": (0.5, 0.9, 1),
        "gamma": (0.001, 0.01, 0.1, 1, 10, 100),
        "beta": (0.1,),
    },
    "RSVRB": {
        "upper_step": (0.001, 0.01, 0.1),
        "lower_step": (0.01, 0.1, 0.5, 1, 5, 10),
        "beta": (0.1, 0.5, 0.9, 1),
    },
}
PAPER["BSVRBv1"] = PAPER["BSVRBv2"]
GRIDS = {"wide": WIDE, "paper": PAPER}


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """The options of `bilevax tune` for the hyper-parameter problem.

    Attributes:
      data: the data set.
      methods: the methods to tune, in this order; unless λ is given, the first one chooses it.
      grid: "wide" (chosen for these problems) or "paper".
      trials: trials per method.
      steps: steps of every trial, which is judged by the loss after the last one.
      seed: of the split, the temperatures and the trials; experiments use other seeds.
      ridge: λ; None chooses it.
      at_once: trials in one program; None uses as many as fit into memory.
      rows: number of rows of the data to use; None uses all.
      blocks: m.
    """

    data: str = "a8a"
    methods: tuple[str, ...] = ("BSVRBv2", "BSVRBv1", "RSVRB")
    grid: str = "wide"
    trials: int = 48
    steps: int = 5000
    seed: int = 1000
    ridge: float | None = None
    at_once: int | None = None
    rows: int | None = None
    blocks: int = validation.BLOCKS

    def __post_init__(self) -> None:
        unknown = set(self.methods) - set(validation.METHODS)
        if unknown or not self.methods:
            raise ValueError(f"methods must be some of {sorted(validation.METHODS)}, got {self.methods}")
        if self.grid not in GRIDS:
            raise ValueError(f"grid must be one of {sorted(GRIDS)}, got {self.grid!r}")

    def quick(self) -> TuneOptions:
        """A short check: few trials, steps, rows and blocks."""
        return dataclasses.replace(self, trials=2, steps=200, rows=1000, blocks=10, ridge=1e-3)


def run(options: TuneOptions, folder: str | Path, *, quick: bool = False) -> dict[str, dict[str, float]]:
    """Tunes every method on a data set, and writes the best hyper-parameters to a folder.

    Returns:
      "ridge" and the best hyper-parameters by method, as in configs/validation.json.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    best, found = search(options, Kept(report.folder / "kept.json", options))
    tables = [_row(method, best, found[method]) for method in options.methods]
    for method in options.methods:
        report.fact(f"{method} scores", found[method])
    report.fact("best", best)
    title = f"Best of {options.trials} trials on {options.data}, {options.steps} steps"
    report.table("tune", tables, title, about(options.grid))
    losses = {method: found[method]["loss"][best["ridge"]] for method in found}
    report.figure("tune", _plot(losses), f"Validation loss of {title.lower()}; one seed.")
    report.finish()
    return best


def search(
    options: TuneOptions, kept: Kept, processes: int = 1
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The best hyper-parameters, and by method the "loss" of every trial by λ, and the "seconds" of all."""
    best: dict[str, Any] = {"ridge": options.ridge}
    found: dict[str, dict[str, Any]] = {}
    # Without a given λ the first method chooses it; the others follow side by side.
    alone = 1 if options.ridge is None else 0
    for methods in (options.methods[:alone], options.methods[alone:]):
        ridges = [best["ridge"]] if best["ridge"] is not None else list(RIDGES)
        cases = [(m, r, g) for m in methods for r in ridges for g in _groups(m, options)]
        tasks = {_name(*case, options): functools.partial(_sweep, *case, options) for case in cases}
        swept = kept.fill(tasks, processes)
        for method in methods:
            groups = {
                r: [swept[_name(method, r, g, options)] for g in _groups(method, options)] for r in ridges
            }
            loss = {r: np.concatenate([np.array(one["loss"], float) for one in groups[r]]) for r in ridges}
            scores = np.stack(list(loss.values()))
            if not np.isfinite(scores).any():
                raise ValueError(
                    f"all {scores.size} trials of {method} diverged: use another grid than {options.grid!r}"
                )
            place, row = np.unravel_index(np.nanargmin(scores), scores.shape)
            best["ridge"] = ridges[place]
            columns = _columns(method, options)
            best[method] = {name: float(column[row]) for name, column in columns.items()}
            seconds = sum(one["seconds"] for some in groups.values() for one in some)
            found[method] = {"loss": loss, "seconds": seconds}
    return best, found


def _row(method: str, best: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    scores = np.stack(list(found["loss"].values()))
    return {
        "method": method,
        "validation loss": float(np.nanmin(scores)),
        "trials": scores.size,
        "diverged": int(np.sum(~np.isfinite(scores))),
        "seconds": round(found["seconds"], 1),
        "ridge": best["ridge"],
        **best[method],
    }


def _name(method: str, ridge: float, group: tuple[int, int], options: TuneOptions) -> str:
    return f"{options.data}, {method}, λ = {ridge:g}, trials {group[0]} to {group[1]}"


def _columns(method: str, options: TuneOptions) -> dict[str, np.ndarray]:
    return draw_trials(GRIDS[options.grid][method], options.trials, options.seed)


def _groups(method: str, options: TuneOptions) -> list[tuple[int, int]]:
    """The first and the last trial of every sweep."""
    count = len(next(iter(_columns(method, options).values())))
    group = min(count, options.at_once or _fit(method, *_sizes(options), options.blocks))
    return [(begin, min(begin + group, count) - 1) for begin in range(0, count, group)]


def about(grid: str) -> str:
    """What of a grid as printed cannot be tried; nothing for our own."""
    if grid != "paper":
        return ""
    values = "; ".join(f"{name} = {', '.join(map(str, some))}" for name, some in REFUSED.items())
    return f"Of the paper's grid these are refused, as no weights of an average: {values}."


def draw_trials(choices: dict[str, tuple[float, ...]], trials: int, seed: int) -> dict[str, np.ndarray]:
    """Distinct random points of a grid, as columns; the whole grid if it has at most `trials` points."""
    columns = bx.grid(**choices)
    count = math.prod(len(values) for values in choices.values())
    rows = np.sort(np.random.default_rng(seed).permutation(count)[:trials])
    return {name: column[rows] for name, column in columns.items()}


def _sweep(method: str, ridge: float, group: tuple[int, int], options: TuneOptions) -> dict[str, Any]:
    """The final loss of some trials, and their seconds."""
    split = validation.load_split(options.data, options.seed, options.rows)
    task = validation.make_task(split, ridge, options.seed, options.blocks)
    rows = slice(group[0], group[1] + 1)
    swept = bx.sweep(
        task.problem,
        task.x0,
        task.y0,
        solver=validation.METHODS[method],
        settings={name: list(column[rows]) for name, column in _columns(method, options).items()},
        steps=options.steps,
        keys=jax.random.split(jax.random.key(options.seed), 1),
        blocks_per_step=max(1, options.blocks // 10),
        batch_size=validation.BATCH,
        metrics={"validation_loss": validation.validation_loss},
        every=max(1, options.steps // 10),
    )
    seconds = float(swept.seconds[-1]) + swept.compile_seconds
    return {"loss": swept.scores("validation_loss"), "seconds": seconds}


@functools.cache
def _sizes(options: TuneOptions) -> tuple[int, int]:
    """The numbers of lower variables and of training rows."""
    split = validation.load_split(options.data, options.seed, options.rows)
    task = validation.make_task(split, RIDGES[0], options.seed, options.blocks)
    return task.y0[0].size, task.x0.size


def _fit(method: str, width: int, rows: int, blocks: int) -> int:
    """How many trials fit into a third of the device's memory (into 4 GB if its size is unknown)."""
    floats = blocks * width * {"RSVRB": rows + width, "BSVRBv1": 3 * width}.get(method, 8) + 4 * rows
    stats = jax.devices()[0].memory_stats() or {}
    return max(1, int(stats.get("bytes_limit", 12e9) / 3 / (4 * floats)))


@figures.styled
def _plot(losses: dict[str, np.ndarray]) -> Any:
    figure, ((axis,),) = figures.panels(1, 1)
    for method, style in figures.styles_of(list(losses)).items():
        values = np.sort(losses[method][np.isfinite(losses[method])])
        axis.plot(values, color=style.colour, marker=style.marker, label=method)
    axis.set(xlabel="trials, best first", ylabel="validation loss")
    figures.legend_of_all(figure, columns=3)
    return figure
