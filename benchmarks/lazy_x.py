"""Steps whose x is a table: time over d_x, and on w8a beside the hand-written kernel.

`python -m benchmarks.lazy_x` first takes steps with BSVRB v2 on problems with one weight per row, for 10⁴ to
10⁸ rows and the same batch, declared as a table (`Problem(tables=…)`) and not. Then it does so on w8a, beside
the one-core numba kernel of `benchmarks.step`. All programs of a part take turns, and the best turn of each
counts. On a busy machine `--processor` counts seconds of the processor; run it on one core then (`taskset`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from benchmarks import hyperopt
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax.experiments.report import Report, command_line

SIZES = (10**4, 10**6, 10**7, 10**8)
BLOCKS, BLOCKS_PER_STEP, BATCH = 100, 10, 32
FEATURES = 4096
STEPS = 2000


class Drawn(bx.Rows):
    """Any number of rows, of which none is stored: each has one of a few feature vectors."""

    features: jax.Array
    count: int

    def draw(self, random: bx.Stream, blocks: jax.Array, size: int | None) -> bx.Batch:
        index = random.integers((blocks.shape[0], size or FEATURES), self.count)
        return bx.Batch({"index": index, "row": self.features[index % FEATURES]})


def loss(y: Any, block: Any, batch: Any) -> Any:
    return jax.nn.softplus(-bx.dot(batch["row"], y - block))


def upper(x: Any, y: Any, block: Any, batch: Any) -> Any:
    return jnp.mean(loss(y, block, batch))


def lower(weights: Any, y: Any, block: Any, batch: Any) -> Any:
    return jnp.mean(jax.nn.sigmoid(weights) * loss(y, block, batch)) + 0.05 * y @ y


class Steps:
    """BSVRB v2 on a problem with so many weights, compiled, with its state."""

    def __init__(self, rows: int, table: bool, width: int):
        key = jax.random.key(0)
        features = jax.random.normal(key, (FEATURES, width)) / width**0.5
        given: dict[str, Any] = {
            "lower": lambda x, y, block, batch: lower(x[batch["index"]], y, block, batch)
        }
        if table:
            given = {"lower": lower, "tables": lambda block, batch: batch.get("index")}
        problem = bx.Problem(
            upper=upper,
            blocks=jax.random.normal(key, (BLOCKS, width)),
            upper_data=bx.Shared({"row": features}),
            lower_data=Drawn(features, rows),
            **given,
        )
        self.inputs = numbers_as_arrays(bx.BSVRBv2(upper_step=0.1, lower_step=0.05)), problem
        sampling = bx.Sampling(BLOCKS_PER_STEP, BATCH, initial_batch_size=0)
        start = jnp.zeros(rows), jnp.zeros((BLOCKS, width))
        self.state = compiled_start(*self.inputs, *start, sampling.sampler(problem, jax.random.key(1)))
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Takes steps, and waits for them."""
        self.state, _ = compiled_chunk(self.inputs, self.state, steps)
        jax.block_until_ready(self.state)


def best_of(
    programs: dict[str, Any], turns: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """The best microseconds per step of every program, in turns of about so many seconds each."""
    best, steps = dict.fromkeys(programs, np.inf), dict.fromkeys(programs, 20)
    for turn in range(turns + 1):
        for name, program in programs.items():
            began = clock()
            program.advance(steps[name])
            taken = (clock() - began) / steps[name]
            if turn > 0:
                best[name] = min(best[name], 1e6 * taken)
            else:  # only to see how long a step takes
                steps[name] = int(np.clip(seconds / taken, 5, STEPS))
    return {name: float(value) for name, value in best.items()}


def on_w8a() -> dict[str, Any]:
    """Steps on w8a with x as a table and not, and the kernel, which needs numba."""
    from benchmarks.step import CompiledKernel

    split, solver = hyperopt.load("w8a"), bx.BSVRBv2(upper_step=0.1)
    sizes = (BLOCKS, BLOCKS_PER_STEP, BATCH)
    return {
        "kernel": CompiledKernel(split),
        "dense": hyperopt.CompiledSteps(solver, split, *sizes),
        "table": hyperopt.CompiledSteps(solver, split, *sizes, table=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=float, default=1e8, help="the largest table")
    parser.add_argument("--width", type=int, default=16, help="d_y: the entries of y, and of a row")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn of one program")
    parser.add_argument("--processor", action="store_true", help="count seconds of the processor")
    parser.add_argument("--growth", action="store_true", help="leave w8a out")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    clock = time.process_time if options.processor else time.perf_counter
    sizes = [rows for rows in SIZES if rows <= options.most]
    programs = {f"table {rows:.0e}": Steps(rows, True, options.width) for rows in sizes}
    programs |= {f"dense {rows:.0e}": Steps(rows, False, options.width) for rows in sizes if rows <= 10**7}
    growth = best_of(programs, options.turns, options.seconds, clock)
    del programs
    w8a = {} if options.growth else best_of(on_w8a(), options.turns, options.seconds, clock)
    report = Report(options.out, command_line(options))
    report.csv("growth", growth_rows(sizes, growth))
    text = f"d_y = {options.width}, m = {BLOCKS}, I = {BLOCKS_PER_STEP}, B = {BATCH}:\n\n"
    text += markdown(sizes, growth, w8a)
    counted = "the processor" if options.processor else "the clock"
    text += f"\n\nDevice: {jax.devices()[0].device_kind}; best of {options.turns} turns, by {counted}.\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        part: {name: {"microseconds": value} for name, value in rows.items()}
        for part, rows in (("growth", growth), ("w8a", w8a))
    }
    (options.out / "lazy_x.json").write_text(json.dumps(found, indent=2))
    (options.out / "lazy_x.md").write_text(text)
    report.finish()


def growth_rows(sizes: list[int], growth: dict[str, float]) -> list[dict[str, Any]]:
    """µs per step by d_x."""
    return [
        {"d_x": rows, "table": growth[f"table {rows:.0e}"], "dense": growth.get(f"dense {rows:.0e}", "")}
        for rows in sizes
    ]


def markdown(sizes: list[int], growth: dict[str, float], w8a: dict[str, float]) -> str:
    """Both tables, and the growth."""
    lines = ["| d_x | table, µs per step | dense, µs per step |", "| --- | --- | --- |"]
    for rows in sizes:
        dense = growth.get(f"dense {rows:.0e}")
        lines.append(
            f"| {rows:,} | {growth[f'table {rows:.0e}']:.1f} | {'–' if dense is None else f'{dense:.1f}'} |"
        )
    ratio = growth[f"table {sizes[-1]:.0e}"] / growth[f"table {sizes[0]:.0e}"]
    lines += [
        "",
        f"- d_x from {sizes[0]:,} to {sizes[-1]:,}: {ratio:.2f} times the time (target: at most 1.3)",
    ]
    if w8a:
        lines += ["", "| w8a | µs per step | ratio to kernel |", "| --- | --- | --- |"]
    lines += [f"| {name} | {value:.1f} | {value / w8a['kernel']:.2f} |" for name, value in w8a.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
