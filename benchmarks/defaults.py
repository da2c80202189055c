"""How near a run comes to the least F with nothing given, beside the best of a grid of upper steps.

`python -m benchmarks.defaults` runs every case of `benchmarks.defaults_cases` with no hyper-parameter at all;
`--grid` adds the same method with 15 upper steps, at equal steps. It prints the relative gap
(F − F_best)/(F_0 − F_best) with F exact; F_best is the least that any run or L-BFGS reached. A gap above one
is worse than the start.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize as scipy_minimize

import bilevax as bx
from benchmarks.defaults_cases import CASES, Case

GRID = np.geomspace(1e-5, 1e2, 15)


def value(case: Case, x: Any) -> float:
    """F(x); infinite where x or the lower solutions are not finite."""
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(x)):
        return np.inf
    try:
        found = case.value(x)
    except RuntimeError:  # a lower problem that cannot be solved there
        return np.inf
    return found if np.isfinite(found) else np.inf


def run(case: Case, solver: bx.AbstractSolver | None, seed: int) -> tuple[float, bool]:
    """F at the end of a run, and whether the run said that something is wrong."""
    result = bx.minimize(
        case.problem,
        case.x0,
        case.y0,
        solver=solver,
        steps=case.steps,
        key=jax.random.key(seed),
        blocks_per_step=case.blocks_per_step,
        batch_size=case.batch_size,
        progress=None,
        stop=bx.Stop(throw=False),
    )
    return value(case, result.x), result.outcome is bx.Outcome.DIVERGED


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


def measure(name: str, seeds: int, with_grid: bool) -> dict[str, Any]:
    """The gaps of one case."""
    case = CASES[name]()
    first = value(case, case.x0)
    best = lbfgs(case, 200)
    defaults = [run(case, None, seed) for seed in range(seeds)]
    grid = {}
    if with_grid:
        grid = {float(step): run(case, bx.BSVRBv2(upper_step=float(step)), 0)[0] for step in GRID}
    best = min([best, *grid.values(), *(found for found, _ in defaults)])

    def gap(found: float) -> float:
        return float((found - best) / (first - best))

    return {
        "case": name,
        "F at the start": first,
        "F best": best,
        "gaps": [gap(found) for found, _ in defaults],
        "diverged": sum(diverged for _, diverged in defaults),
        "best of the grid": gap(min(grid.values())) if grid else None,
        "best step": min(grid, key=lambda step: grid[step]) if grid else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="parts of the names of cases")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid", action="store_true", help="run the grid of upper steps as well")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    rows = []
    print("| case | worst gap | median gap | diverged | best of the grid | its step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in [name for name in CASES if any(part in name for part in options.cases)]:
        row = measure(name, options.seeds, options.grid)
        rows.append(row)
        grid = "" if row["best step"] is None else f"{row['best of the grid']:.4f} | {row['best step']:.0e}"
        print(
            f"| {name} | {max(row['gaps']):.4f} | {np.median(row['gaps']):.4f} | {row['diverged']} | "
            f"{grid or ' | '} |",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "defaults.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
