"""One block: compares methods on three finite problems, by seconds and by passes over the data.

    python -m benchmarks.single_block a8a w8a mnist --processes 8

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
at all rows, are chosen by the same search: short runs of all points of a grid on one seed, then runs of full
length of the best few on two others, in which the least mean of h over the marks wins. Seconds are the
processor time of one core, to which a process is pinned: with more of them XLA hands small operations from
thread to thread, which doubles the time of a step. With `--processes` several methods run at a time, each on
its own core. Every result is kept as it comes; `--resume` computes what is missing.

Data: the folder BILEVAX_DATA, with libsvm/a8a, a8a.t, w8a, w8a.t, and mnist.npz.
"""

from __future__ import annotations

import argparse
import functools
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
from bilevax.experiments.kept import Kept, Task
from bilevax.experiments.report import Report

RARITIES = (1.0, 4.0, 16.0)  # of looks at all rows: as many rows as the steps between them read, or fewer
FINALISTS = 3  # points that the search runs for the full time


def tune(
    case: Case, method: str, kind: str, options: argparse.Namespace, clock: Callable[[], float]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The point of a grid of steps with the smallest h, and all points.

    h after a short run on one seed chooses finalists; of these the least mean over two other seeds and the
    marks of a full run wins.
    """
    uppers = case.adam_steps if kind == "adam" else case.upper_steps
    rarities = RARITIES if method in PASSES else (1.0,)
    names = ("upper_step", "lower_step", "rarity")
    points = [
        {"kind": kind} | dict(zip(names, values, strict=True))
        for values in itertools.product(uppers, case.lower_steps, rarities)
    ]

    def values(point: dict[str, Any], seconds: float, seed: int, marks: int) -> list[float]:
        found = run(case, method, point, seconds, seed, clock)
        if len(found.x) < len(MARKS):
            return [np.inf]
        return [case.value(x, y) for x, y in list(zip(found.x, found.y, strict=True))[-marks:]]

    tried = [point | {"value": values(point, options.tune_seconds, 1000, 1)[0]} for point in points]
    tried.sort(key=lambda one: one["value"])
    for one in tried[:FINALISTS]:
        point = {name: one[name] for name in ("kind", *names)}
        seen = [v for seed in (1001, 1002) for v in values(point, options.seconds, seed, len(MARKS) - 1)]
        one["full runs"], one["least"] = float(np.mean(seen)), float(np.min(seen))
    return min(tried[:FINALISTS], key=lambda one: one["full runs"]), tried


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


def write(report: Report, found: dict[str, dict[str, Any]]) -> None:
    """The table of problems, from their records by name."""
    for name, record in found.items():
        report.fact(f"{name}: h", {key: record[key] for key in ("start", "least", "reference")})
    note = (
        f"Batches of {BATCH} rows. Gap: (h(x) − h*)/(h(x₀) − h*) after seconds of one core, the median over "
        "seeds; least and largest: over seeds, in the end. η, τ, rarity: chosen by the search."
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


def measure(name: str, kind: str, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """The search and the reported runs of a method with one kind of steps; the least h and its x."""
    case, clock = case_of(name), clock_of(options)
    point, tried = tune(case, method, kind, options, clock)
    setting = {one: point[one] for one in ("kind", "upper_step", "lower_step", "rarity")}
    record: dict[str, Any] = {"setting": setting, "tried": tried, "runs": []}
    record |= {"least": min(one.get("least", one["value"]) for one in tried), "best": None}
    reached = np.inf
    for seed in range(options.seeds):
        one = run(case, method, setting, options.seconds, seed, clock)
        h = [case.value(x, y) for x, y in zip(one.x, one.y, strict=True)]
        if h and h[-1] < reached:
            reached, record["best"] = h[-1], [round(float(v), 6) for v in np.ravel(one.x[-1])]
        record["least"] = min([record["least"], *h])
        kept = {"seconds": one.seconds, "steps": one.steps, "passes": one.passes, "value": h}
        record["runs"].append(kept)
    return record | {"reached": reached}


def reference(name: str, place: int, options: argparse.Namespace) -> float:
    """The least h that L-BFGS finds from one of the starts of a problem."""
    case = case_of(name)
    return case.least(case.starts[place], options.evaluations, options.reference_seconds)


def tasks(name: str, options: argparse.Namespace) -> dict[str, Task]:
    """What computes the results of a problem, by name; the longest first."""
    case = case_of(name)
    found: dict[str, Task] = {}
    if options.evaluations:
        for place in range(len(case.starts)):
            found[f"{name}, reference {place}"] = functools.partial(reference, name, place, options)
    for kind, method in itertools.product(options.kinds, options.methods):
        if skipped(method, case) is None:
            found[f"{name}, {kind}, {method}"] = functools.partial(measure, name, kind, method, options)
    return found


def record_of(name: str, found: dict[str, Any], kept: Kept, options: argparse.Namespace) -> dict[str, Any]:
    """All results of a problem: its runs by kind and method, and h* by all of them."""
    case = case_of(name)
    methods: dict[str, Any] = {kind: {} for kind in options.kinds}
    for kind, method in itertools.product(options.kinds, options.methods):
        if f"{name}, {kind}, {method}" in found:
            methods[kind][method] = found[f"{name}, {kind}, {method}"]
    runs = [one for ones in methods.values() for one in ones.values()]
    best = min(runs, key=lambda one: one["reached"], default=None)
    ends = [found[one] for one in found if one.startswith(f"{name}, reference")]
    if options.evaluations and best is not None and best["best"] is not None:

        def from_best() -> float:
            return case.least(np.array(best["best"]), options.evaluations, options.reference_seconds)

        ends.append(kept.get(f"{name}, reference from {best['reached']:.8f}", from_best))
    return {
        "seconds": options.seconds,
        "start": case.value(case.x0, case.y0),
        "reference": min(ends, default=np.inf),
        "least": float(min([*ends, *(one["least"] for one in runs)])),
        "methods": methods,
    }


def _as_times(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Times in the form that `benchmarks.suite` reads."""
    return {
        name: {
            method: {what: {"microseconds": took} for what, took in times.items()}
            for method, times in methods.items()
        }
        for name, methods in found.items()
    }


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    """The clock of the measurements."""
    return time.perf_counter if options.clock == "wall" else time.process_time


@functools.cache
def case_of(name: str) -> Case:
    """A problem, from the folder of the data."""
    return CASES[name](Path(os.environ.get("BILEVAX_DATA", "data")))


def _is_there(name: str) -> bool:
    try:
        case_of(name)
    except FileNotFoundError as error:
        print(f"skipped {name}: {error}. Set BILEVAX_DATA to the folder of the data.")
        return False
    return True


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], choices=[*CASES, []])
    parser.add_argument("--methods", nargs="*", default=[*DEFAULT], choices=METHODS)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of the reported runs")
    parser.add_argument("--tune-seconds", type=float, default=1.0, help="duration of the runs of the search")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--evaluations", type=int, default=300, help="of h by L-BFGS, per start")
    parser.add_argument("--reference-seconds", type=float, default=120.0, help="of L-BFGS, per start")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="cpu: of all threads")
    parser.add_argument("--speed", action="store_true", help="only the time of a step, and of a pass")
    parser.add_argument("--processes", type=int, default=1, help="methods at a time, each on its own core")
    parser.add_argument("--resume", action="store_true", help="compute only what is missing in the folder")
    parser.add_argument("--out", type=Path, default=Path("results/single_block"))
    options = parser.parse_args(arguments)
    if options.processes == 1 and options.clock == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores
    apart = ("out", "resume", "processes", "speed", "cases", "methods", "kinds")
    shared = {name: one for name, one in vars(options).items() if name not in apart}
    report = Report(
        options.out, {name: one for name, one in vars(options).items() if name not in ("out", "resume")}
    )
    known = [name for name in options.cases if _is_there(name)]
    if options.speed:
        rows: list[dict[str, Any]] = []
        found = {name: speeds(case_of(name), options, clock_of(options)) for name in known}
        for name, methods in found.items():
            for method, times in methods.items():
                row = {f"µs of a {what}": f"{took:.1f}" for what, took in times.items()}
                rows.append({"problem": name, "method": method} | row)
        (options.out / "speed.json").write_text(json.dumps(_as_times(found), indent=2))
        note = "Microseconds of one core, the least of six turns; a pass looks at all rows."
        report.table("speed", rows, "Time of a step at one block", note)
    else:
        kept = Kept(options.out / "kept.json", shared, resume=options.resume)
        asked = {name: tasks(name, options) for name in known}
        every = {one: task for each in asked.values() for one, task in each.items()}
        found = kept.fill(every, options.processes, alone=True)
        each = {name: {one: found[one] for one in names} for name, names in asked.items()}
        write(report, {name: record_of(name, one, kept, options) for name, one in each.items()})
    report.finish()


if __name__ == "__main__":
    main()
