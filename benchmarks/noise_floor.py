"""Constant steps on finite problems with a known solution: ‖∇F‖ in the end, with and without a noise floor.

    python -m benchmarks.noise_floor

4 of 12 blocks and 8 of 30 rows per step, in float64; all but the upper step is left to the methods.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.experiments.report import Report
from bilevax.testing import FAMILIES

STEPS = {"quadratic": 0.05, "ridge": 0.2, "logistic": 0.5, "mean": 0.02, "mixture": 0.03, "pl": 0.01}


def floor(name: str, method: Any, steps: int, seed: int) -> float:
    """‖∇F‖ at the last x of a run."""
    family = FAMILIES[name](m=12, d_x=3, d_y=4, rows=30, noise=0.5, dtype=np.float64)
    result = bx.minimize(
        family.problem,
        family.x0,
        family.y0,
        solver=method(upper_step=STEPS[name]),
        steps=steps,
        blocks_per_step=4,
        batch_size=8,
        key=jax.random.key(seed),
        stop=bx.Stop(verify=False),
        progress=None,
    )
    return float(np.linalg.norm(family.gradient(result.x)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/noise_floor"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    report = Report(options.out, {name: one for name, one in vars(options).items() if name != "out"})
    rows = []
    for name, upper_step in STEPS.items():
        noisy = bx.MSVR if name == "mean" else bx.BSVRBv2
        row: dict[str, Any] = {"family": name, "η": upper_step}
        for column, method in (
            ("BSVRBv2 or MSVR", noisy),
            ("BlockPAGE", bx.BlockPAGE),
            ("BlockSAGA", bx.BlockSAGA),
        ):
            row[column] = f"{floor(name, method, options.steps, options.seed):.1e}"
        rows.append(row)
    note = f"‖∇F‖ after {options.steps} steps, one seed. MSVR: on the family mean."
    report.table("noise_floor", rows, "Constant steps on finite problems", note)
    report.finish()


if __name__ == "__main__":
    main()
