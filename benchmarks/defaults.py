"""How near a run comes to the least F with nothing given, beside the best of a grid of upper steps.

`python -m benchmarks.defaults` runs every case of `benchmarks.defaults_cases` with nothing given but the
number of steps. `--few` gives the few blocks and rows per step of the case, which makes it harder. `--methods
BSVRBv2 MMBO` runs methods without arguments instead of the default one, `--methods all` all of them;
`--units` multiplies x, y and F by 1e-3 and 1e3; `--steps-alone` leaves out the exact steps at the end, as a
run does whose blocks are too many for them; `--grid` adds the method with 15 upper steps, at equal steps
and sampling. It prints the relative gap (F − F_best)/(F_0 − F_best) with F exact; F_best is the least that
any run of any method or L-BFGS reached. A gap above one is worse than the start. "off" counts the runs whose
tracked f is off by more than 2% of F (and by more than a thousandth of its decrease), "silent" those of them
that did not warn. "exact" is how often all blocks were solved at the ends of the runs. "to 90%" is after
which share of the steps nine tenths of the way were done, by default and with the best upper step of the
grid.

What was measured is kept in `results/defaults.jsonl`, line by line: the same command again does what is
missing. `--table` only makes the table of what is there, in `results/defaults`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize as scipy_minimize

import bilevax as bx
from benchmarks.defaults_cases import CASES, scaled
from benchmarks.solved_case import Case
from bilevax.experiments.report import Report

GRID = np.geomspace(1e-5, 1e2, 15)
TRACKED = 20  # points of a run at which F is computed
NOTE = (
    "Gaps (F − F_best)/(F_0 − F_best). recovered: how often runs went back; exact: how often F and ∇F were "
    "computed exactly at the end; off: runs whose f is off; silent: those of them that did not warn; to 90%: "
    "the share of the steps after which nine tenths of the way were done."
)
METHODS = (
    "BlockNewton", "BSVRBv2", "MMBO", "SOBA", "BSVRBv1", "MASOBA", "KSONG", "RSVRB", "F2SA", "F3SA",
    "BlockSAGA", "BlockPAGE", "MSVR", "SONG",
)  # fmt: skip
MATRICES = ("BlockNewton", "BSVRBv1", "KSONG", "RSVRB")  # store d_y² numbers per block, and factorise them
MOST_ENTRIES = 128  # d_y, up to which they are tried


def value(case: Case, x: Any) -> float:
    """F(x); infinite where x or the lower solutions are not finite."""
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(x)):
        return np.inf
    try:
        found = case.value(x)
    except RuntimeError:  # a lower problem that cannot be solved there
        return np.inf
    return found if np.isfinite(found) else np.inf


def run(
    case: Case,
    solver: bx.AbstractSolver | None,
    seed: int,
    few: bool,
    verify: bool = True,
    finish: bool = True,
) -> dict[str, Any]:
    """How a run ended, and its way there."""
    way: list[Any] = []

    def note(problem: bx.Problem, state: bx.State) -> float:
        way.append(jax.tree.map(np.array, state.average))
        return 0.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bx.minimize(
            case.problem,
            case.x0,
            case.y0,
            solver=solver,
            steps=case.steps,
            key=jax.random.key(seed),
            blocks_per_step=case.blocks_per_step if few else None,
            batch_size=case.batch_size if few else None,
            progress=None,
            metrics={"note": note},
            every=case.steps // TRACKED,
            stop=bx.Stop(throw=False, verify=verify, finish=finish, raise_on_interrupt=True),
        )
    found, seen = value(case, result.x), result.verification
    # What the run says that F is: after exact steps, what these say.
    said, true = (seen.tracked, seen.objective) if seen else (found, found)
    said, true = (result.finish.after, found) if result.finish else (said, true)
    decrease = abs(seen.start - true) if seen else 0.0
    off = abs(said - true) > max(0.02 * abs(true), 0.001 * decrease)
    warned = any(issubclass(one.category, bx.AccuracyWarning) for one in caught)
    return {
        "F": found,
        "diverged": result.outcome is bx.Outcome.DIVERGED,
        "off": off,
        "silent": off and not warned,
        "recovered": len(result.recoveries),
        "exact": 0 if result.finish is None else result.finish.evaluations,
        "steps per second": result.steps_per_second,
        "way": way,
    }


def lbfgs(case: Case, evaluations: int) -> float:
    """The least F that L-BFGS finds with exact gradients; infinite where a case has none."""
    if case.value_and_gradient is None:
        return np.inf
    start, unravel = ravel_pytree(jax.tree.map(np.asarray, case.x0))
    least = [np.inf]

    def both(flat: np.ndarray) -> tuple[float, np.ndarray]:
        try:
            found, gradient = case.value_and_gradient(unravel(flat))  # pyright: ignore[reportOptionalCall]
        except RuntimeError:
            return 1e30, np.zeros_like(flat)
        least[0] = min(least[0], found)
        return found, np.asarray(ravel_pytree(gradient)[0], float)

    scipy_minimize(
        both, np.asarray(start, float), jac=True, method="L-BFGS-B", options={"maxfun": evaluations}
    )
    return least[0]


def fits(method: str | None, case: Case) -> bool:
    """Whether a method takes the levels of a case."""
    hessians = {level.has_hessian for level in case.problem.levels.values()}
    if method in ("MSVR", "SONG"):
        return hessians == {False}
    entries = sum(leaf[0].size for leaf in jax.tree.leaves(case.y0))
    return method not in MATRICES or entries <= MOST_ENTRIES


def without_way(case: Case, runs: list[dict[str, Any]], chosen: int) -> list[dict[str, Any]]:
    """Runs as they are kept: F along the way of one of them, and of no other."""
    ways = [one.pop("way") for one in runs]
    runs[chosen]["F along the way"] = [value(case, x) for x in ways[chosen]]
    return runs


def measure(task: dict[str, Any], seeds: int, few: bool, finish: bool) -> dict[str, Any] | None:
    """One line of what is kept; None if the method does not take the case."""
    case, began = CASES[task["case"]](), time.perf_counter()
    method, units = task["method"], task["units"]
    found: dict[str, Any] = {}
    if task["what"] == "least":
        found = {"least": lbfgs(case, case.evaluations), "start": value(case, case.x0)}
    else:
        case = scaled(case, **units) if units else case
        if not fits(method, case):
            return None
        make = getattr(bx, method) if method else _nothing
        if task["what"] == "nothing":
            runs = [run(case, make(), seed, few, finish=finish) for seed in range(seeds)]
            found = {"runs": without_way(case, runs, 0)}
        else:
            make = bx.BSVRBv2 if method is None else make
            runs = [run(case, make(upper_step=step), 0, few, False) for step in map(float, GRID)]
            found = {"runs": without_way(case, runs, int(np.argmin([one["F"] for one in runs])))}
    return task | found | {"seconds": time.perf_counter() - began}


def guarded(task: dict[str, Any], seeds: int, few: bool, finish: bool) -> tuple[dict[str, Any], Any, str]:
    """A task, what came of it, and what went wrong."""
    try:
        return task, measure(task, seeds, few, finish), ""
    except Exception as error:  # the other tasks go on
        return task, None, f"{type(error).__name__}: {error}"


def table(lines: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """What was measured, a row for every case and method."""
    ends: dict[str, list[float]] = defaultdict(list)  # of F, in the units of the case
    starts: dict[str, float] = {}
    grids: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        name = line["case"]
        if line["what"] == "least":
            ends[name].append(line["least"])
            starts[name] = line["start"]
        else:
            ends[name] += [one["F"] / line["units"].get("value", 1.0) for one in line["runs"]]
        if line["what"] == "grid":
            grids[name, line["method"] or ""] = line["runs"]
    for line in lines:
        name, runs = line["case"], line.get("runs", [])
        if line["what"] != "nothing" or name not in starts:
            continue
        size, best = line["units"].get("value", 1.0), min(ends[name])

        def gap(found: float, size: float = size, name: str = name, best: float = best) -> float:
            return (found / size - best) / (starts[name] - best)

        def arrived(one: dict[str, Any], gap: Any = gap) -> str:
            way = one["F along the way"]
            near = [(place + 1) / len(way) for place, found in enumerate(way) if gap(found) <= 0.1]
            return f"{near[0]:.2f}" if near else "never"

        gaps = [gap(one["F"]) for one in runs]
        scaling = "".join(f", {what} × {by:g}" for what, by in line["units"].items())
        row = {"case": name + scaling, "method": line["method"] or "default", "seeds": str(len(runs))}
        row |= {"worst gap": f"{max(gaps):.4f}", "median gap": f"{np.median(gaps):.4f}"}
        row |= {
            what: str(sum(one[what] for one in runs)) if what in runs[0] else ""
            for what in ("diverged", "recovered", "exact", "off", "silent")
        }
        row["to 90%"] = arrived(runs[0])
        grid = [] if line["units"] else grids.get((name, line["method"] or ""), [])
        if grid:
            place = int(np.argmin([one["F"] for one in grid]))
            row |= {"best of the grid": f"{gap(grid[place]['F']):.4f}", "its step": f"{GRID[place]:.0e}"}
            row["to 90% with it"] = arrived(grid[place])
        yield row


def pin(count: Any) -> None:
    """Gives a worker a processor of its own."""
    with count.get_lock():
        place, count.value = count.value, count.value + 1
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[place % len(allowed)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="parts of the names of cases")
    parser.add_argument("--methods", nargs="*", default=[], help="methods; left out, the default one")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid", action="store_true", help="run the grid of upper steps as well")
    parser.add_argument("--few", action="store_true", help="few blocks and rows per step")
    parser.add_argument("--units", action="store_true", help="run with x, y and F times 1e-3 and 1e3 as well")
    parser.add_argument("--steps-alone", action="store_true", help="without exact steps at the end")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    forms = "_few" * options.few + "_steps_alone" * options.steps_alone
    file = options.out / f"defaults{forms}.jsonl"
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    names = [name for name in CASES if any(part in name for part in options.cases)]
    units: list[dict[str, float]] = [{}]
    if options.units:
        units += [{what: by} for what in ("x", "y", "value") for by in (1e-3, 1e3)]
    methods = [None, *METHODS] if options.methods == ["all"] else options.methods or [None]
    tasks = [{"case": name, "units": {}, "method": None, "what": "least"} for name in names]
    for method in methods:
        if options.grid:
            tasks += [{"case": name, "units": {}, "method": method, "what": "grid"} for name in names]
        for unit in units:
            tasks += [{"case": name, "units": unit, "method": method, "what": "nothing"} for name in names]
    # Those with real data come last: they take minutes, and a run that is cut short should have the others.
    order = {name: place for place, name in enumerate(CASES)}
    tasks = [] if options.table else [task for task in tasks if not _done(task, kept)]
    tasks.sort(key=lambda task: order[task["case"]])
    file.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, pin, (context.Value("i", 0),)) as pool, file.open("a") as out:
        look = functools.partial(
            guarded, seeds=options.seeds, few=options.few, finish=not options.steps_alone
        )
        for place, (task, line, wrong) in enumerate(pool.imap_unordered(look, tasks)):
            words = [task["case"], task["what"], task["method"] or "default", str(task["units"] or "")]
            print(f"{place + 1} of {len(tasks)}: {', '.join(words)} {wrong}", flush=True)
            if line is not None:
                kept.append(line)
                out.write(json.dumps(line) + "\n")
                out.flush()
    kept.sort(key=lambda line: order[line["case"]])
    given = {name: value for name, value in vars(options).items() if name not in ("out", "table")}
    report = Report(options.out / "defaults", given)
    report.table("defaults", list(table(kept)), "With nothing given", NOTE)
    report.finish()


def _nothing() -> None:
    """The solver of a run that is given none."""


def _done(task: dict[str, Any], kept: list[dict[str, Any]]) -> bool:
    return any(all(line[name] == one for name, one in task.items()) for line in kept)


if __name__ == "__main__":
    main()
