"""The cost of `minimize` around the steps: time with all features on, and memory over a million steps.

`python -m benchmarks.runner overhead` runs BSVRB v2 on a8a (m = 100, I = 10, B = 32; generated rows of the
same shape if BILEVAX_DATA is unset), once bare, and once with a metric, a history of 100 entries, a log in
JSON lines, TensorBoard, progress lines and a checkpoint every ten seconds. It alternates between the two and
reports the ratio of the best times, that of the medians, and the time spent outside the compiled steps: the
last one is steady where the machine is not.

`python -m benchmarks.runner soak` takes a million steps with metrics, history, log and 100 checkpoints, and
reports the growth of resident memory after the first tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from benchmarks import hyperopt
from bilevax.experiments.report import Report, command_line

SOLVER = bx.BSVRBv2(upper_step=0.1)
ARGUMENTS = {"blocks_per_step": 10, "batch_size": 32, "key": jax.random.key(0)}


def resident() -> float:
    """Resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def everything(folder: str, steps: int) -> dict:
    return {
        "metrics": {"size": jax.jit(lambda problem, state: jnp.linalg.norm(state.x))},
        "every": steps // 100,
        "log": [Path(folder) / "log.jsonl", bx.TensorBoard(Path(folder) / "board")],
        "checkpoint": bx.Checkpoint(Path(folder) / "run", seconds=10.0),
        "progress": "lines",
    }


def overhead(steps: int, turns: int) -> dict[str, float]:
    """Seconds of a bare run and of one with all features, the best and the median of several turns."""
    problem, x0, y0 = hyperopt.problem(hyperopt.load("a8a"))
    seconds: dict[str, list[float]] = {"bare": [], "everything": []}
    outside: dict[str, list[float]] = {"bare": [], "everything": []}
    for turn in range(turns + 1):
        for name in seconds:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
                options = {"progress": None, "every": steps}
                if name == "everything":
                    options = everything(folder, steps)
                options["stop"] = bx.Stop(verify=False)  # what both would pay alike
                began = time.perf_counter()
                result = bx.minimize(problem, x0, y0, solver=SOLVER, steps=steps, **ARGUMENTS, **options)
                elapsed = time.perf_counter() - began
                if turn > 0:  # the first one compiles
                    seconds[name].append(elapsed)
                    outside[name].append(elapsed - steps / result.steps_per_second)
    found: dict[str, float] = {"steps": steps, "turns": turns}
    for name in seconds:
        found[name] = min(seconds[name])
        found[f"{name}, median"] = float(np.median(seconds[name]))
        found[f"{name}, outside the steps"] = min(outside[name])
    found["ratio"] = found["everything"] / found["bare"]
    found["ratio of medians"] = found["everything, median"] / found["bare, median"]
    return found


def soak(steps: int) -> dict[str, float]:
    """Resident memory after every hundredth of a long run."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(100, 50, 8)).astype(np.float32)
    problem = bx.Problem(
        upper=lambda x, y, block, batch: 0.5 * jnp.mean(jnp.sum((y - batch) ** 2, -1)) + 0.05 * x @ x,
        lower=lambda x, y, block, batch: 0.5 * y @ y - y @ (x + jnp.mean(batch, 0)),
        blocks=100,
        upper_data=bx.PerBlock(targets.reshape(-1, 8), np.arange(101) * 50),
        lower_data=bx.PerBlock(targets.reshape(-1, 8), np.arange(101) * 50),
    )
    seen: list[float] = []

    def memory(problem: bx.Problem, state: bx.State) -> float:
        if int(state.step) % (steps // 100) == 0:
            gc.collect()
            seen.append(resident())
        return seen[-1] if seen else resident()

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        bx.minimize(
            problem,
            jnp.zeros(8),
            jnp.zeros((100, 8)),
            solver=bx.BSVRBv2(upper_step=0.01),
            steps=steps,
            metrics={"memory": memory},
            every=steps // 1000,
            log=Path(folder) / "log.jsonl",
            progress=None,
            checkpoint=bx.Checkpoint(Path(folder) / "run", steps=steps // 100),
            **ARGUMENTS,
        )
        seconds = time.perf_counter() - began
    tenth = seen[len(seen) // 10 - 1]
    return {
        "steps": steps,
        "seconds": seconds,
        "after a tenth, MB": tenth,
        "at the end, MB": seen[-1],
        "most, MB": max(seen),
        "growth": seen[-1] / tenth - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["overhead", "soak"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    if options.what == "overhead":
        found = overhead(options.steps or 240_000, options.turns)
        print(f"everything on / bare = {found['ratio']:.3f} (target: at most 1.05)")
        print(
            f"by medians {found['ratio of medians']:.3f}; outside the compiled steps "
            f"{found['everything, outside the steps']:.2f} s"
        )
    else:
        found = soak(options.steps or 1_000_000)
        print(f"memory grows by {found['growth']:.2%} after the first tenth (target: less than 2%)")
    print(json.dumps(found, indent=2))
    report.csv(f"runner_{options.what}", [found])
    report.finish()


if __name__ == "__main__":
    main()
