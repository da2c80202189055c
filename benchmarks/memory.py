"""Memory of a run: estimated and measured, with each run in its own process.

`python -m benchmarks.memory` prints, for every method, `bx.memory_estimate` and the peak memory of a run: on
an accelerator the allocator's peak, on a CPU the growth of the resident set. On a CPU the run is repeated,
and only the second one counts, so that compiled programs are left out. With a large `--width`, x
dominates the memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx

METHODS: dict[str, Any] = {
    "BSVRBv2": lambda: bx.BSVRBv2(upper_step=0.1, lower_step=1e-6),
    "BSVRBv2 with Adam": lambda: bx.BSVRBv2(upper_step=optax.adam(1e-3), lower_step=1e-6),
    "BSVRBv1": lambda: bx.BSVRBv1(upper_step=0.1, lower_step=1e-6, floor=0.1),
    "MMBO": lambda: bx.MMBO(upper_step=0.1, lower_step=0.1),
    "BlockSAGA": lambda: bx.BlockSAGA(upper_step=0.1, lower_step=0.1),
}
BLOCKS, MOST = 1_000_000, {"BlockSAGA": 20_000}  # BlockSAGA stores a gradient per block and row group
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
        key = jax.random.key(0)
        bx.minimize(problem, x0, y0, solver=solver, steps=50, key=key, every=50, progress=None, **sampling)

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
    return {"estimate": estimate.total, "peak": peak, "step": estimate.step, "state": estimate.state}


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--blocks", type=int, help=f"default: {BLOCKS:,}, or fewer if that needs too much memory"
    )
    parser.add_argument("--width", type=int, default=1000, help="d_x")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--one", choices=list(METHODS), help="measure only this method, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.blocks, options.width)))
        return
    results, lines = (
        {},
        [
            "| method | m | estimate MB | measured MB | ratio | x-sized arrays of a step's working set |",
            "| --- | --- | --- | --- | --- | --- |",
        ],
    )
    print(*lines, sep="\n")
    for method in options.methods:
        blocks = options.blocks or MOST.get(method, BLOCKS)
        sizes = ["--blocks", str(blocks), "--width", str(options.width)]
        command = [sys.executable, "-m", "benchmarks.memory", "--one", method, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        estimate, peak, width = found["estimate"], found["peak"], found["step"] / (4 * options.width)
        results[method] = {"blocks": blocks, **found}
        megabytes = f"{estimate / 1e6:.0f} | {peak / 1e6:.0f} | {estimate / peak:.2f}"
        lines.append(f"| {method} | {blocks:,} | {megabytes} | {width:.2f} |")
        print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "memory.json").write_text(json.dumps(results, indent=2))
    (options.out / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
