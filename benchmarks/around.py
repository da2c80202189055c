"""What storing offsets from x is worth where every y_i stays near x: `bx.argmin(g, around=…)`.

`python -m benchmarks.around` runs the proximal prior of `benchmarks.defaults_cases` with several methods,
with y stored as it is and as offsets. It tabulates the relative gap (F − F_best)/(F_0 − F_best) of the worst
seed.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import optax

import bilevax as bx
from benchmarks.defaults import lbfgs, run, value
from benchmarks.defaults_cases import Case, proximal_prior
from bilevax.experiments.report import Report

SOLVERS: dict[str, bx.AbstractSolver] = {
    "`SOBA`, `adam(1e-2)`": bx.SOBA(upper_step=optax.adam(1e-2)),
    "`MMBO`, `adam(1e-2)`": bx.MMBO(upper_step=optax.adam(1e-2)),
    "`BSVRBv2`, `adam(1e-2)`": bx.BSVRBv2(upper_step=optax.adam(1e-2)),
    "`BSVRBv2`, `adam(1e-3)`": bx.BSVRBv2(upper_step=optax.adam(1e-3)),
    "`BSVRBv1`, `adam(1e-3)`": bx.BSVRBv1(upper_step=optax.adam(1e-3)),
}


def stored(case: Case, offsets: bool) -> Case:
    """The same case with y stored as offsets from x, or as it is."""
    problem = case.problem
    level = bx.argmin(problem.levels["lower"].function, around=(lambda x: x) if offsets else False)
    near = bx.Problem(problem.upper, level, problem.blocks, problem.upper_data, problem.lower_data[0])
    return dataclasses.replace(case, problem=near)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/around"))
    options = parser.parse_args()
    report = Report(options.out, {"seeds": options.seeds})
    case = proximal_prior()
    first, best = value(case, case.x0), lbfgs(case, 200)
    rows: list[dict[str, Any]] = []
    for name, solver in SOLVERS.items():
        row: dict[str, Any] = {"method": name}
        for column, offsets in (("y", False), ("offsets from x", True)):
            near = stored(case, offsets)
            worst = max(run(near, solver, seed, few=True)["F"] for seed in range(options.seeds))
            row[column] = f"{(worst - best) / (first - best):.4f}"
        rows.append(row)
        print(row, flush=True)
    note = f"(F − F_best)/(F_0 − F_best), the worst of {options.seeds} seeds."
    report.table("around", rows, "Variables that stay near x", note)
    report.finish()


if __name__ == "__main__":
    main()
