"""Memory of a run: estimated and measured, with each run in its own process.

`python -m benchmarks.memory` prints, for every method, `bx.memory_estimate` and the peak memory of a run: on
an accelerator the allocator's peak, on a CPU the growth of the resident set. On a CPU the run is repeated,
and only the second one counts, so that compiled programs are left out. By default there are many blocks, and
then few blocks with an x of ten million entries, which dominates the memory; `--blocks` and `--width` give
both sizes for all methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx
from bilevax.experiments.report import Report, command_line

WITH_ADAM = "BSVRBv2 with Adam"
METHODS: dict[str, Any] = {
    "BSVRBv2": lambda: bx.BSVRBv2(upper_step=0.1, lower_step=1e-6),
    WITH_ADAM: lambda: bx.BSVRBv2(upper_step=optax.adam(1e-3), lower_step=1e-6),
    "BSVRBv1": lambda: bx.BSVRBv1(upper_step=0.1, lower_step=1e-6, floor=0.1),
    "MMBO": lambda: bx.MMBO(upper_step=0.1, lower_step=0.1),
    "BlockSAGA": lambda: bx.BlockSAGA(upper_step=0.1, lower_step=0.1),
}
BLOCKS, MOST = 1_000_000, {"BlockSAGA": 20_000}  # BlockSAGA stores a gradient per block and row group
WIDTH, WIDE = 1000, 10_000_000
ON_WIDE = ("BSVRBv2", WITH_ADAM, "MMBO")
D_Y, ROWS = 16, 8


def upper(x, y, block, batch):
    return 0.5 * jnp.mean((y - batch["target"]) ** 2) + 1e-3 * jnp.mean(x**2)


def lower(x, y, block, batch):
    return 0.5 * jnp.mean((y - jnp.tanh(x[batch["place"]])[:, None]) ** 2) * D_Y


def make(blocks: int, width: int) -> tuple[bx.Problem, Any, Any]:
    """Blocks with their own rows; each row depends on one entry of x."""
    places = (np.arange(blocks * ROWS, dtype=np.int64) * 7919 % width).astype(np.int32)
    problem = bx.Problem(
        upper,
        lower,
        blocks,
        bx.Shared({"target": np.ones((64, D_Y), np.float32)}),
        bx.PerBlock({"place": places}, np.arange(blocks + 1) * ROWS),
    )
    return problem, np.ones(width, np.float32), np.zeros((blocks, D_Y), np.float32)


def measure(method: str, blocks: int, width: int) -> dict[str, int]:
    """The estimated and the measured memory of one run, in this process."""
    problem, x0, y0 = make(blocks, width)
    solver, sampling = METHODS[method](), {"blocks_per_step": 64, "batch_size": 4}
    estimate = bx.memory_estimate(problem, x0, y0, solver=solver, **sampling)

    def run() -> None:
        once: dict[str, Any] = {"steps": 50, "every": 50, "key": jax.random.key(0), "progress": None}
        stop = bx.Stop(recover=False)  # the state to go back to is a further copy
        bx.minimize(problem, x0, y0, solver=solver, stop=stop, **once, **sampling)

    run()
    gc.collect()
    device = jax.devices()[0]
    if device.platform == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS")
        run()
        peak = _resident("VmHWM") - before + estimate.data
    else:
        peak = int((device.memory_stats() or {})["peak_bytes_in_use"])
    estimate = dataclasses.replace(estimate, copies=0)
    return {"estimate": estimate.total, "peak": peak, "step": estimate.step, "state": estimate.state}


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def runs(options: argparse.Namespace) -> list[tuple[int, int, str]]:
    """The d_x, m and method of every run: many blocks, then a wide x that few methods are asked for."""
    if options.blocks or options.width:
        blocks, width = options.blocks or BLOCKS, options.width or WIDTH
        return [(width, blocks, method) for method in options.methods]
    many = [(WIDTH, MOST.get(method, BLOCKS), method) for method in options.methods if method != WITH_ADAM]
    return many + [(WIDE, 1024, method) for method in options.methods if method in ON_WIDE]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, help="m of all runs")
    parser.add_argument("--width", type=int, help="d_x of all runs")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--one", choices=list(METHODS), help="measure only this method, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.blocks, options.width)))
        return
    # The report asks JAX for its devices: this process must not take an accelerator's memory from the others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = Report(options.out, command_line(options))
    rows: list[dict[str, Any]] = []
    results: dict[str, dict[str, int]] = {}
    for width, blocks, method in runs(options):
        sizes = ["--blocks", str(blocks), "--width", str(width)]
        command = [sys.executable, "-m", "benchmarks.memory", "--one", method, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results[f"{method} m={blocks} d_x={width}"] = found
        row = {"method": method, "m": blocks, "d_x": width}
        row |= {"estimate MB": f"{found['estimate'] / 1e6:.0f}", "measured MB": f"{found['peak'] / 1e6:.0f}"}
        row |= {"x-sized arrays of a step": f"{found['step'] / (4 * width):.2f}"}
        rows.append(row)
        print(row, flush=True)
        report.csv("memory", rows)
    report.table("memory", rows, "Memory of a run", f"d_y = {D_Y}, I = 64, B = 4.")
    (options.out / "memory.json").write_text(json.dumps(results, indent=2))
    report.finish()


if __name__ == "__main__":
    main()
