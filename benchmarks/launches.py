"""Time per step on an accelerator (a8a, m = 100), and the kernels that a step launches.

`python -m benchmarks.launches` times small and large steps of several methods, with a8a's indicators, which
are stored as bits, and with as many float features; `--trace` also lists the kernels of a step with their
times. On a CPU it works, but lists no kernels.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from benchmarks import hyperopt
from bilevax._problem import row_kernels
from bilevax.experiments.report import Report, command_line

BLOCKS = 100
SIZES = {"small": (10, 32), "large": (100, 1024)}  # I and B
METHODS = {"BSVRBv2": bx.BSVRBv2, "SOBA": bx.SOBA, "MMBO": bx.MMBO, "BSVRBv1": bx.BSVRBv1}
TARGETS = {  # µs, on one H200
    ("BSVRBv2", "small", "indicators"): 23.0,
    ("BSVRBv2", "large", "indicators"): 60.0,
    ("BSVRBv2", "large", "floats"): 100.0,
}
ROWS = ("indicators", "floats")
TRACED = 64  # steps


def timed(compiled: hyperopt.CompiledSteps, steps: int) -> float:
    """The seconds of a number of steps."""
    began = time.perf_counter()
    compiled.advance(steps)
    return time.perf_counter() - began


def best(compiled: hyperopt.CompiledSteps, turns: int, seconds: float) -> float:
    """The best seconds per step of several turns, each of at least `seconds`."""
    steps = 32
    while timed(compiled, steps) < seconds:
        steps *= 2
    return min(timed(compiled, steps) for _ in range(turns)) / steps


def kernels(compiled: Any) -> list[dict[str, Any]]:
    """The kernels of a step, by decreasing time: name, launches, µs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            compiled.advance(TRACED)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and "Stream" in event["args"]["name"]
    }
    launches, micro = collections.Counter(), collections.Counter()
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            launches[event["name"]] += 1
            micro[event["name"]] += event["dur"]
    return [
        {"kernel": name, "launches": launches[name] / TRACED, "microseconds": total / TRACED}
        for name, total in micro.most_common()
    ]


def with_floats(split: hyperopt.SparseSplit) -> hyperopt.SparseSplit:
    """The same split, with features that neither bits nor bytes can hold."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.5, 1.5, split.train.shape[1]).astype(np.float32)
    return split._replace(
        train=split.train.multiply(scales).tocsr(), held=split.held.multiply(scales).tocsr()
    )


def measure(
    methods: list[str],
    sizes: list[str],
    kinds: list[str],
    turns: int,
    seconds: float,
    trace: bool,
    lower_step: float | None = None,
) -> list[dict]:
    """A row for every method, size and kind of rows."""
    rows, loaded = [], hyperopt.load("a8a")
    for size, kind in itertools.product(sizes, kinds):
        split = loaded if kind == "indicators" else with_floats(loaded)
        for method in methods:
            solver = METHODS[method](upper_step=0.1, lower_step=lower_step)
            compiled = hyperopt.CompiledSteps(solver, split, BLOCKS, *SIZES[size])
            row: dict[str, Any] = {"method": method, "size": size, "rows": kind}
            row["microseconds"] = 1e6 * best(compiled, turns, seconds)
            if trace:
                row["kernels"] = kernels(compiled)
            rows.append(row)
            print(f"{method}, {size}, {kind}: {row['microseconds']:.1f} µs", flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    """A table of times, then the kernels if they were traced."""
    lines = ["| method | rows | I | B | µs per step | target on an H200 |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        blocks, batch = SIZES[row["size"]]
        target = TARGETS.get((row["method"], row["size"], row["rows"]), "")
        lines.append(
            f"| {row['method']} | {row['rows']} | {blocks} | {batch} | {row['microseconds']:.1f} | {target} |"
        )
    for row in rows:
        if row.get("kernels"):
            lines += [
                "",
                f"{row['method']}, {row['size']}, {row['rows']}:",
                "",
                "| kernel | launches | µs |",
                "| --- | --- | --- |",
            ]
            lines += [
                f"| {one['kernel']} | {one['launches']:.1f} | {one['microseconds']:.2f} |"
                for one in row["kernels"]
            ]
    return "\n".join(lines)


def csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table of times."""
    blocks, batch = SIZES[row["size"]]
    head = {"method": row["method"], "rows": row["rows"], "I": blocks, "B": batch}
    return head | {"microseconds": f"{row['microseconds']:.2f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="minimum time of a turn")
    parser.add_argument("--lower-step", type=float, help="given: the curvature is not looked at in the run")
    parser.add_argument("--plain", action="store_true", help="products as sums, whatever their size")
    parser.add_argument("--trace", action="store_true", help="list the kernels of a step")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    if options.plain:
        row_kernels.MANY = 2**62
    report = Report(options.out, command_line(options))
    kinds = options.methods, options.sizes, options.rows
    rows = measure(*kinds, options.turns, options.seconds, options.trace, options.lower_step)
    text = markdown(rows) + f"\n\nDevice: {jax.devices()[0].device_kind}; best of {options.turns} turns.\n"
    print(text)
    (options.out / "launches.json").write_text(json.dumps(rows, indent=2))
    (options.out / "launches.md").write_text(text)
    report.csv("launches", [csv_row(row) for row in rows])
    report.finish()


if __name__ == "__main__":
    main()
