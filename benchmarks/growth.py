"""How time per step and memory grow with m, I, B, d_x and d_y.

`python -m benchmarks.growth` runs BSVRB v2 on quadratic blocks, varies one size at a time, and fits an
exponent to each curve. `--most 100_000_000 --width 8` goes up to 10⁸ blocks, for a large accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax.experiments import figures
from bilevax.experiments.report import Report, command_line


@dataclasses.dataclass(frozen=True)
class ProblemSizes:
    """m, I, B, d_x and d_y."""

    m: int = 100_000
    I: int = 16  # noqa: E741
    B: int = 32
    d_x: int = 1000
    d_y: int = 16


RANGES: dict[str, tuple[int, ...]] = {
    "m": (100, 1000, 10_000, 100_000, 1_000_000, 10_000_000),
    "I": (1, 4, 16, 64, 256, 1024),
    "B": (1, 4, 16, 64, 256, 1024),
    "d_x": (100, 1000, 10_000, 100_000, 1_000_000, 10_000_000),
    "d_y": (1, 4, 16, 64, 256),
}
ROWS = 4096


def upper(x: Any, y: Any, block: Any, batch: Any) -> Any:
    return 0.5 * jnp.mean((bx.dot(batch["row"], y - block)) ** 2) + 0.5e-3 * jnp.sum(x**2)


def lower(x: Any, y: Any, block: Any, batch: Any) -> Any:
    width = min(x.shape[0], y.shape[0])
    pull = jnp.mean(bx.dot(batch["row"], y)) * 0.01
    return 0.5 * jnp.sum((y[:width] - x[:width]) ** 2) + 0.5 * jnp.sum(y**2) + pull


def problem(sizes: ProblemSizes) -> tuple[bx.Problem, jax.Array, jax.Array]:
    """Blocks that pull y towards their own points; and the start of x and y."""
    key = jax.random.key(0)
    rows = jax.random.normal(key, (ROWS, sizes.d_y)) / sizes.d_y**0.5
    built = bx.Problem(
        upper=upper,
        lower=lower,
        blocks=jax.random.normal(key, (sizes.m, sizes.d_y)),
        upper_data=bx.Shared({"row": rows}),
        lower_data=bx.Shared({"row": rows}),
    )
    return built, jnp.zeros(sizes.d_x), jnp.zeros((sizes.m, sizes.d_y))


def measure(sizes: ProblemSizes, turns: int, seconds: float) -> dict[str, float]:
    """The best time per step, the bytes of state and data, and the time to compile."""
    built, x0, y0 = problem(sizes)
    solver = bx.BSVRBv2(upper_step=0.01, lower_step=0.3 * min(1.0, sizes.I / sizes.m))
    inputs = (numbers_as_arrays(solver), built)
    sampling = bx.Sampling(min(sizes.I, sizes.m), sizes.B, initial_batch_size=0)
    began = time.perf_counter()
    state = compiled_start(*inputs, x0, y0, sampling.sampler(inputs[1], jax.random.key(1)))
    del y0
    state, _ = compiled_chunk(inputs, state, 0)
    jax.block_until_ready(state)
    compiled = time.perf_counter() - began
    steps, taken = 10, 0.0
    while taken < seconds:  # until there are enough steps to time
        steps *= 2
        taken, state = _time(inputs, state, steps)
    best = taken / steps
    for _ in range(turns - 1):
        taken, state = _time(inputs, state, steps)
        best = min(best, taken / steps)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, built)) if isinstance(leaf, jax.Array))
    if not bool(jnp.all(jnp.isfinite(state.x))):
        raise FloatingPointError(f"the run diverged at {sizes}")
    return {"microseconds": 1e6 * best, "bytes": float(held), "compile_seconds": compiled}


def _time(inputs: Any, state: Any, steps: int) -> tuple[float, Any]:
    began = time.perf_counter()
    state, _ = compiled_chunk(inputs, state, steps)
    jax.block_until_ready(state)
    return time.perf_counter() - began, state


def exponent(values: list[int], times: list[float]) -> float:
    """The slope of log time over log size in the upper half of the sizes."""
    half = len(values) // 2
    return float(np.polyfit(np.log(values[half:]), np.log(times[half:]), 1)[0])


@figures.styled
def plot(results: dict[str, dict[int, dict[str, float]]]) -> Any:
    """Time over each size, on logarithmic axes."""
    figure, axes = figures.panels(1, len(results))
    color, marker = figures.style_of("BSVRB v2")
    for axis, (name, rows) in zip(axes[0], results.items(), strict=True):
        axis.loglog(list(rows), [row["microseconds"] for row in rows.values()], f"{marker}-", color=color)
        axis.set(xlabel=name, ylabel="µs per step")
    return figure


def markdown(results: dict[str, dict[int, dict[str, float]]]) -> str:
    """A table of all sizes, then the exponents."""
    lines = ["| size | value | µs per step | MB | compile s |", "| --- | --- | --- | --- | --- |"]
    for name, rows in results.items():
        for value, row in rows.items():
            lines.append(
                f"| {name} | {value:,} | {row['microseconds']:.1f} | {row['bytes'] / 1e6:,.1f} | "
                f"{row['compile_seconds']:.1f} |"
            )
    lines.append("")
    for name, rows in results.items():
        times = [row["microseconds"] for row in rows.values()]
        if len(rows) >= 4:
            lines.append(
                f"- {name}: time grows as {name}^{exponent(list(rows), times):.2f} (upper half of the range)"
            )
    blocks = results.get("m", {})
    if {1000, 1_000_000} <= set(blocks):
        ratio = blocks[1_000_000]["microseconds"] / blocks[1000]["microseconds"]
        lines.append(f"- m from 10³ to 10⁶: {ratio:.2f} times the time (target: at most 1.2)")
    return "\n".join(lines)


def csv_rows(results: dict[str, dict[int, dict[str, float]]]) -> list[dict[str, Any]]:
    """The lines of the table."""
    return [
        {
            "size": name,
            "value": value,
            "microseconds": f"{row['microseconds']:.2f}",
            "megabytes": f"{row['bytes'] / 1e6:.1f}",
        }
        for name, rows in results.items()
        for value, row in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(RANGES), choices=list(RANGES))
    parser.add_argument("--most", type=int, default=10_000_000, help="the largest m and d_x")
    parser.add_argument("--width", type=int, default=ProblemSizes.d_y, help="d_y, where it does not vary")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="minimum time of a turn")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    base = ProblemSizes(d_y=options.width)
    results: dict[str, dict[int, dict[str, float]]] = {}
    for name in options.sizes:
        values = [value for value in RANGES[name] if value <= options.most]
        if name == "m" and options.most not in values:
            values.append(options.most)
        results[name] = {}
        for value in values:
            results[name][value] = measure(
                dataclasses.replace(base, **{name: value}), options.turns, options.seconds
            )
            print(f"{name} = {value:,}: {results[name][value]['microseconds']:.1f} µs", flush=True)
    text = markdown(results)
    text += f"\n\nDevice: {jax.devices()[0].device_kind}; {base}; best of {options.turns} turns.\n"
    print(text)
    (options.out / "growth.json").write_text(json.dumps(results, indent=2))
    (options.out / "growth.md").write_text(text)
    report.csv("growth", csv_rows(results))
    sizes = ", ".join(f"{field} = {value:,}" for field, value in dataclasses.asdict(base).items())
    caption = f"Time per step of BSVRB v2 over {', '.join(results)}; {sizes} where they do not vary."
    report.figure("growth", plot(results), f"{caption} Best of {options.turns} turns.")
    report.finish()


if __name__ == "__main__":
    main()
