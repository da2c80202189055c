"""Time per step on a8a and w8a (m = 100, I = 10, B = 32), compared with a hand-written kernel.

`python -m benchmarks.step` alternates between every method and the sparse one-core numba kernel within one
process, and reports the best of several turns; compilation is timed separately. If BILEVAX_DATA is unset, it
uses generated rows of the same shape, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import jax

import bilevax as bx
from benchmarks import hyperopt, kernel
from bilevax.experiments.report import Report, command_line

BLOCKS, BLOCKS_PER_STEP, BATCH = 100, 10, 32
METHODS = {"BSVRBv2": bx.BSVRBv2, "BSVRBv1": bx.BSVRBv1, "KSONG": bx.KSONG, "RSVRB": bx.RSVRB}
STEPS = {"kernel": 2000, "BSVRBv2": 2000, "BSVRBv1": 50, "KSONG": 50, "RSVRB": 2}
TARGETS = {
    ("a8a", "BSVRBv2", "kernel"): 0.5,
    ("w8a", "BSVRBv2", "kernel"): 0.7,
    ("a8a", "BSVRBv1", "BSVRBv2"): 40.0,
}


class CompiledKernel:
    """The kernel, compiled, with its state."""

    def __init__(self, split: hyperopt.SparseSplit):
        chance = BLOCKS_PER_STEP / BLOCKS
        gamma = (1 / chance - 1) / 0.9 + 0.9
        self.coefficients = kernel.Coefficients(
            0.1, 0.02, 0.02, 0.1, 0.1, gamma, hyperopt.REGULARIZATION, BLOCKS_PER_STEP, BATCH
        )
        self.train = kernel.as_rows(split.train, split.labels)
        self.held = kernel.as_rows(split.held, split.held_labels)
        self.state = kernel.start(self.train, split.train.shape[1], BLOCKS, self.coefficients)
        began = time.perf_counter()
        self.advance(1)
        self.compile_seconds = time.perf_counter() - began

    def advance(self, steps: int) -> None:
        """Takes steps."""
        temperatures = hyperopt.temperatures(BLOCKS)
        kernel.advance(self.state, self.coefficients, self.train, self.held, temperatures, steps)


def measure(data: str, methods: list[str], turns: int) -> dict[str, dict[str, float]]:
    """The best time per step of the kernel and the methods, measured in turns."""
    split = hyperopt.load(data)
    compiled: dict[str, Any] = {"kernel": CompiledKernel(split)}
    for name in methods:
        solver = METHODS[name](upper_step=0.1)
        compiled[name] = hyperopt.CompiledSteps(solver, split, BLOCKS, BLOCKS_PER_STEP, BATCH)
    best = dict.fromkeys(compiled, float("inf"))
    for _ in range(turns):
        for name, one in compiled.items():
            began = time.perf_counter()
            one.advance(STEPS[name])
            best[name] = min(best[name], (time.perf_counter() - began) / STEPS[name])
    return {
        n: {"microseconds": 1e6 * best[n], "compile_seconds": r.compile_seconds} for n, r in compiled.items()
    }


def markdown(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """A table of results, then the ratios that have a target."""
    lines = [
        "| data | method | µs per step | ratio to kernel | compile s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for data, rows in results.items():
        for name, row in rows.items():
            time_per_step, compile_seconds = row["microseconds"], row["compile_seconds"]
            ratio = time_per_step / rows["kernel"]["microseconds"]
            lines.append(f"| {data} | {name} | {time_per_step:.1f} | {ratio:.2f} | {compile_seconds:.1f} |")
    lines.append("")
    for (data, name, base), target in TARGETS.items():
        rows = results.get(data, {})
        if name in rows and base in rows:
            ratio = rows[name]["microseconds"] / rows[base]["microseconds"]
            lines.append(f"- {data}: {name} / {base} = {ratio:.2f} (target: at most {target})")
    return "\n".join(lines)


def csv_rows(results: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """The lines of the table of times."""
    return [
        {
            "data": data,
            "method": name,
            "microseconds": f"{row['microseconds']:.2f}",
            "ratio": f"{row['microseconds'] / rows['kernel']['microseconds']:.3f}",
        }
        for data, rows in results.items()
        for name, row in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["a8a", "w8a"], choices=sorted(hyperopt.WIDTHS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    results = {}
    for data in options.data:
        # RSVRB's Jacobians on w8a take 4.8 GB: it runs by itself.
        methods = [name for name in options.methods if (name, data) != ("RSVRB", "w8a")]
        results[data] = measure(data, methods, options.turns)
        if len(methods) < len(options.methods):
            results[data] |= {k: v for k, v in measure(data, ["RSVRB"], 2).items() if k == "RSVRB"}
    text = markdown(results)
    source = "BILEVAX_DATA" if os.environ.get("BILEVAX_DATA") else "generated rows of the same shape"
    text += f"\n\nData: {source}; device: {jax.devices()[0].device_kind}; best of {options.turns} turns.\n"
    print(text)
    (options.out / "step.json").write_text(json.dumps(results, indent=2))
    (options.out / "step.md").write_text(text)
    report.csv("step", csv_rows(results))
    report.finish()


if __name__ == "__main__":
    main()
