"""How near a run comes to the least F with nothing given, beside the best of a grid of upper steps.

`python -m benchmarks.defaults` runs every case of `benchmarks.defaults_cases` with nothing given but the
number of steps. `--few` gives the few blocks and rows per step of the case, which makes it harder. `--methods
BSVRBv2 MMBO` runs methods without arguments instead of the default one; `--units` multiplies x, y and F by
1e-3 and 1e3; `--grid` adds the method with 15 upper steps, at equal steps and sampling. It prints the
relative gap (F − F_best)/(F_0 − F_best) with F exact; F_best is the least that any run or L-BFGS reached. A
gap above one is worse than the start. "off" counts the runs whose tracked f is off by more than 2% of F (and
by more than a thousandth of its decrease), "silent" those of them that did not warn. "to 90%" is after which
share of the steps nine tenths of the way were done, by default and with the best upper step of the grid.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize as scipy_minimize

import bilevax as bx
from benchmarks.defaults_cases import CASES, Case, scaled

GRID = np.geomspace(1e-5, 1e2, 15)
TRACKED = 20  # points of a run at which F is computed


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
    case: Case, solver: bx.AbstractSolver | None, seed: int, few: bool, verify: bool = True
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
            stop=bx.Stop(throw=False, verify=verify, raise_on_interrupt=True),
        )
    found, seen = value(case, result.x), result.verification
    error = 0.0 if seen is None else abs(seen.tracked - seen.objective)
    off = seen is not None and error > max(
        0.02 * abs(seen.objective), 0.001 * abs(seen.start - seen.objective)
    )
    warned = any(issubclass(one.category, bx.AccuracyWarning) for one in caught)
    return {
        "F": found,
        "diverged": result.outcome is bx.Outcome.DIVERGED,
        "off": off,
        "silent": off and not warned,
        "recovered": len(result.recoveries),
        "steps per second": result.steps_per_second,
        "way": way,
    }


def steps_to(case: Case, way: list[Any], level: float) -> float | None:
    """After which share of the steps F was below a level; None if never."""
    for place, x in enumerate(way):
        if value(case, x) <= level:
            return (place + 1) / len(way)
    return None


def lbfgs(case: Case, evaluations: int) -> float:
    """The least F that L-BFGS finds with exact gradients."""
    assert case.value_and_gradient is not None
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


def fits(method: str, case: Case) -> bool:
    """Whether a method takes the levels of a case."""
    hessians = {level.has_hessian for level in case.problem.levels.values()}
    if method in ("MSVR", "SONG"):
        return hessians == {False}
    return True not in hessians or method != "KSONG" or hessians == {True}


def measure(
    name: str, method: str | None, seeds: int, with_grid: bool, few: bool, units: dict[str, float]
) -> Any:
    """The gaps of one case; None if the method does not take it."""
    case = CASES[name]()
    best = np.inf if case.value_and_gradient is None else lbfgs(case, case.evaluations)
    if units:
        case, best = scaled(case, **units), best * units.get("value", 1.0)
    make = (lambda: None) if method is None else getattr(bx, method)
    if method is not None and not fits(method, case):
        return None
    first = value(case, case.x0)
    runs = [run(case, make(), seed, few) for seed in range(seeds)]
    grid: dict[float, dict[str, Any]] = {}
    if with_grid:
        base = bx.BSVRBv2 if method is None else make
        grid = {float(step): run(case, base(upper_step=float(step)), 0, few, False) for step in GRID}
    best = min([best, *(one["F"] for one in (*grid.values(), *runs))])

    def gap(found: float) -> float:
        return float((found - best) / (first - best))

    best_step = min(grid, key=lambda step: grid[step]["F"]) if grid else None
    level = best + 0.1 * (first - best)
    return {
        "case": name,
        "method": method,
        "units": units,
        "F at the start": first,
        "F best": best,
        "gaps": [gap(one["F"]) for one in runs],
        **{what: sum(one[what] for one in runs) for what in ("diverged", "off", "silent")},
        "recovered": sum(one["recovered"] for one in runs),
        "best of the grid": gap(min(one["F"] for one in grid.values())) if grid else None,
        "best step": best_step,
        "to 90%": steps_to(case, runs[0]["way"], level),
        "to 90%, best step": steps_to(case, grid[best_step]["way"], level) if grid else None,
    }


def job(task: tuple[str, str | None, dict[str, float]], seeds: int, with_grid: bool, few: bool) -> Any:
    name, method, units = task
    return measure(name, method, seeds, with_grid, few, units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="parts of the names of cases")
    parser.add_argument("--methods", nargs="*", default=[None], help="methods; left out, the default one")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid", action="store_true", help="run the grid of upper steps as well")
    parser.add_argument("--few", action="store_true", help="few blocks and rows per step")
    parser.add_argument("--units", action="store_true", help="run with x, y and F times 1e-3 and 1e3 as well")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    names = [name for name in CASES if any(part in name for part in options.cases)]
    units: list[dict[str, float]] = [{}]
    if options.units:
        units += [{what: by} for what in ("x", "y", "value") for by in (1e-3, 1e3)]
    tasks = [(name, method, unit) for name in names for method in options.methods for unit in units]
    rows = []
    print(
        "| case | method | worst gap | median gap | diverged | recovered | off | silent | to 90% | "
        "best of the grid | its step | to 90% |"
    )
    print("|" + " --- |" * 12)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        look = functools.partial(job, seeds=options.seeds, with_grid=options.grid, few=options.few)
        for row in pool.imap(look, tasks):
            if row is None:
                continue
            rows.append(row)
            grid = " | | "
            if row["best step"] is not None:
                grid = f"{row['best of the grid']:.4f} | {row['best step']:.0e} | {row['to 90%, best step']}"
            scaling = "".join(f", {what} × {by:g}" for what, by in row["units"].items())
            counts = " | ".join(str(row[what]) for what in ("diverged", "recovered", "off", "silent"))
            print(
                f"| {row['case']}{scaling} | {row['method'] or 'default'} | {max(row['gaps']):.4f} | "
                f"{np.median(row['gaps']):.4f} | {counts} | {row['to 90%']} | {grid} |",
                flush=True,
            )
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "defaults.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
