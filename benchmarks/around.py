"""What storing offsets from x is worth where every y_i stays near x: `bx.argmin(g, around=…)`.

`python -m benchmarks.around` runs the proximal prior of `benchmarks.defaults_cases` with several methods,
with y stored as it is and as offsets. It prints the relative gap (F − F_best)/(F_0 − F_best) of the worst
seed.
"""

from __future__ import annotations

import argparse
import dataclasses

import optax

import bilevax as bx
from benchmarks.defaults import lbfgs, run, value
from benchmarks.defaults_cases import Case, proximal_prior

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    case = proximal_prior()
    first, best = value(case, case.x0), lbfgs(case, 200)
    print("| method | y | offsets from x |")
    print("| --- | --- | --- |")
    for name, solver in SOLVERS.items():
        found = [
            max(run(stored(case, offsets), solver, seed, few=True)["F"] for seed in range(options.seeds))
            for offsets in (False, True)
        ]
        gaps = [(one - best) / (first - best) for one in found]
        print(f"| {name} | {gaps[0]:.4f} | {gaps[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
