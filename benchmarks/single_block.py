"""One block: compares methods on three finite problems, by seconds and by passes over the data.

    python -m benchmarks.single_block a8a w8a mnist --seconds 6

a8a, w8a: a strength of l2 regularisation per feature, for logistic regression,

    min_x h(x) = mean over a8a.t of softplus(−label row·y(x)),
    y(x) = argmin_y mean over a8a of softplus(−label row·y) + ½ Σ_j exp(x_j) y_j²

mnist: a weight for each of 20,000 training rows, half of whose labels are wrong, for softmax regression,

    min_x h(x) = mean over 5,000 clean rows of the cross-entropy of y(x),
    y(x) = argmin_y mean over the rows of sigmoid(x_j) cross-entropy_j + ½ 0.01 ‖y‖²

The gap is (h(x) − h*)/(h(x₀) − h*). h is computed exactly, by solving for y(x) outside the measured time. h*
is the smallest value of all runs and of L-BFGS on h with exact gradients, from several starts. Every method,
ours and those of others (`single_block_peers.py`), has the same start, and is run with both kinds of upper
steps: plain ones, and Adam with a falling step; both in the same box. The steps, and how often a method looks
at all rows, are chosen by the same search, in shorter runs on another seed. Seconds are the processor time of
one core, to which the process is pinned: with more of them XLA hands small operations from thread to thread,
which doubles the time of a step. The methods take turns seed by seed. Kinds of steps, or methods, may run in
processes and on cores of their own (`--kinds`, `--methods`, `--evaluations 0`, each with its `--out`);
`--join` then makes one table of their folders.

Data: the folder BILEVAX_DATA, with libsvm/a8a, a8a.t, w8a, w8a.t, and mnist.npz.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.single_block_cases import CASES, Case
from benchmarks.single_block_peers import PEERS
from benchmarks.single_block_runs import (
    BATCH,
    DEFAULT,
    KINDS,
    MARKS,
    METHODS,
    PASSES,
    OurRun,
    PeerRun,
    run,
    skipped,
)
from bilevax.experiments.report import Report

RARITIES = (1.0, 4.0)  # of looks at all rows: as many rows as the steps between them read, or a quarter


def tune(
    case: Case, method: str, kind: str, seconds: float, clock: Callable[[], float]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The point of a grid of steps with the smallest h after some time; and all points."""
    tried = []
    uppers = case.adam_steps if kind == "adam" else case.upper_steps
    rarities = RARITIES if method in PASSES else (1.0,)
    for upper, lower, rarity in itertools.product(uppers, case.lower_steps, rarities):
        setting = {"kind": kind, "upper_step": upper, "lower_step": lower, "rarity": rarity}
        found = run(case, method, setting, seconds, 1000, clock)
        value = case.value(found.x[-1], found.y[-1]) if len(found.x) == len(MARKS) else np.inf
        tried.append(setting | {"value": value})
    return min(tried, key=lambda one: one["value"]), tried


def rows_of(name: str, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the table: gaps over seconds, as medians over seeds, and the passes at the end."""
    start, least = record["start"], record["least"]
    marks = [f"{mark * record['seconds']:.2g} s" for mark in MARKS]
    for kind, methods in record["methods"].items():
        for method, found in methods.items():
            setting = found["setting"]
            row: dict[str, Any] = {"problem": name, "upper steps": kind, "method": method}
            row |= {"η": f"{setting['upper_step']:g}", "τ": f"{setting['lower_step']:g}"}
            row["rarity"] = f"{setting['rarity']:g}" if method in PASSES else ""
            whole = [one for one in found["runs"] if len(one["value"]) == len(MARKS)]
            if not whole:
                yield row | {marks[0]: "diverged"}
                continue
            gaps = (np.array([one["value"] for one in whole]) - least) / (start - least)
            row |= {mark: f"{gap:.2g}" for mark, gap in zip(marks, np.median(gaps, 0), strict=True)}
            row |= {"least": f"{gaps[:, -1].min():.2g}", "largest": f"{gaps[:, -1].max():.2g}"}
            speed = np.median([one["steps"][-1] / one["seconds"][-1] for one in whole])
            yield row | {"steps/s": f"{speed:.0f}", "passes": f"{whole[0]['passes'][-1]:.0f}"}


def write(report: Report) -> None:
    """The table of all problems whose records are in the folder."""
    found = {
        path.stem.removeprefix("single_block_"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(report.folder.glob("single_block_*.json"))
    }
    for name, record in found.items():
        report.fact(f"{name}: h", {key: record[key] for key in ("start", "least", "reference")})
    note = (
        f"Batches of {BATCH} rows. Gap: (h(x) − h*)/(h(x₀) − h*) after seconds of one core, the median over "
        "seeds; least and largest: over seeds, in the end. η, τ, rarity: chosen in shorter runs."
    )
    rows = [row for name, record in found.items() for row in rows_of(name, record)]
    report.table("single_block", rows, "One block, like for like", note)


def speeds(
    case: Case, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Microseconds of a step, the least of several turns of 2,000 steps; turns of methods alternate.

    Steps that look at all rows are left out, as how often they come is a choice: "pass" is the time of one.
    """
    found: dict[str, dict[str, float]] = {}
    setting = {"kind": options.kinds[-1], "upper_step": case.adam_steps[0], "lower_step": case.lower_steps[0]}
    methods = [method for method in options.methods if skipped(method, case) is None]

    def begun(method: str, rarity: float) -> Any:
        made = PeerRun if method in PEERS else OurRun
        return made(case, method, setting | {"rarity": rarity}, 0)

    running = {(method, "step"): begun(method, 1e9) for method in methods}
    running |= {(method, "pass"): begun(method, 1e-9) for method in methods if method in PASSES}
    for _ in range(6):
        for (method, what), one in running.items():
            count = 2000 if what == "step" else 50
            tick = clock()
            one.advance(count)
            took = 1e6 * (clock() - tick) / count
            kept = found.setdefault(method, {})
            kept[what] = min(kept.get(what, np.inf), took)
    return found


def compare(
    case: Case,
    options: argparse.Namespace,
    clock: Callable[[], float],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All methods with all kinds of steps on a problem; what there is, is saved seed by seed."""
    record: dict[str, Any] = {"seconds": options.seconds, "clock": options.clock, "methods": {}}
    record |= {"start": case.value(case.x0, case.y0), "reference": np.inf}
    record |= {"least": record["start"], "best": np.asarray(case.x0).tolist()}
    methods = [method for method in options.methods if skipped(method, case) is None]
    for kind in options.kinds:
        found = record["methods"].setdefault(kind, {})
        for method in methods:
            best_point, tried = tune(case, method, kind, options.tune_seconds, clock)
            setting = {name: one for name, one in best_point.items() if name != "value"}
            found[method] = {"setting": setting, "tried": tried, "runs": []}
            record["least"] = min([record["least"], *(one["value"] for one in tried)])
            print(kind, method, setting, flush=True)
        for seed in range(options.seeds):
            for method in methods:
                one = run(case, method, found[method]["setting"], options.seconds, seed, clock)
                h = [case.value(x, y) for x, y in zip(one.x, one.y, strict=True)]
                if h and h[-1] < record["least"]:
                    record["best"] = np.asarray(one.x[-1]).tolist()
                record["least"] = min([record["least"], *h])
                kept = {"seconds": one.seconds, "steps": one.steps, "passes": one.passes, "value": h}
                found[method]["runs"].append(kept)
            save(record)
    return record


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several of a problem, with different methods or kinds of steps."""
    best = min(records, key=lambda one: one["least"])
    methods: dict[str, Any] = {}
    for kind, found in (item for one in records for item in one["methods"].items()):
        methods.setdefault(kind, {}).update(found)
    return best | {"methods": {kind: methods[kind] for kind in KINDS if kind in methods}}


def solve(case: Case, record: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """The record with h* as L-BFGS finds it, if that is less than what the runs found."""
    reference = case.least(evaluations, np.array(record["best"])) if evaluations else np.inf
    return record | {"reference": reference, "least": float(min(record["least"], reference))}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], choices=[*CASES, []])
    parser.add_argument("--methods", nargs="*", default=[*DEFAULT], choices=METHODS)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of the reported runs")
    parser.add_argument("--tune-seconds", type=float, default=1.0, help="duration of the runs of the search")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=300, help="of h by L-BFGS, per start")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="cpu: of all threads")
    parser.add_argument("--speed", action="store_true", help="only the time of a step, and of a pass")
    parser.add_argument(
        "--join", type=Path, nargs="*", default=[], help="folders of runs with --evaluations 0, to join"
    )
    parser.add_argument("--out", type=Path, default=Path("results/single_block"))
    options = parser.parse_args(arguments)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    if options.clock == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores
    report = Report(
        options.out, {name: one for name, one in vars(options).items() if name not in ("out", "join")}
    )
    fastest: list[dict[str, Any]] = []
    for name in options.cases:
        try:
            case = CASES[name](Path(os.environ.get("BILEVAX_DATA", "data")))
        except FileNotFoundError as error:
            print(f"skipped {name}: {error}. Set BILEVAX_DATA to the folder of the data.")
            continue
        if options.speed:
            for method, times in speeds(case, options, clock).items():
                row = {f"µs of a {what}": f"{took:.1f}" for what, took in times.items()}
                fastest.append({"problem": name, "method": method} | row)
            continue
        file = f"single_block_{name}.json"

        def save(record: dict[str, Any], file: str = file) -> None:
            (options.out / file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

        paths = [folder / file for folder in options.join if (folder / file).exists()]
        if options.join and not paths:
            continue
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        record = joined(parts) if parts else compare(case, options, clock, save)
        save(solve(case, record, options.evaluations))
        write(report)
    if fastest:
        note = "Microseconds of one core, the least of six turns; a pass looks at all rows."
        report.table("speed", fastest, "Time of a step at one block", note)
    report.finish()


if __name__ == "__main__":
    main()
