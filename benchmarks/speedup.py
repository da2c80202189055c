"""Speed-up in blocks (I) and rows (B): steps, and seconds, until the mean of ‖∇F‖² is at most ε².

`python -m benchmarks.speedup` runs BSVRB v2 on quadratic blocks with exact ∇F. The parameters follow Theorem
1, with one constant for all sizes. Steps are the mean ± the standard deviation over seeds side by side; the
time of a step is that of a single run. Speed-ups are relative to the smallest size; the theorem's follow from
m/(I√I) + m/(I√B).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax.experiments import figures
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task
from bilevax.experiments.theorems.scalings import METHODS, Sizes
from bilevax.experiments.theorems.truth import Truth
from bilevax.theory import complexity

METHOD, CONSTANT = METHODS["BSVRB v2"], 0.7  # as `bilevax reproduce rates` tunes it
BLOCKS, DIMENSION, ROWS, COPIES = 20, 5, 100, 4
BASE = Sizes(BLOCKS * COPIES, 4, 4)
FIELDS = {"I": ("blocks_per_step",), "B": ("batch_size",), "I = B": ("blocks_per_step", "batch_size")}


@dataclasses.dataclass(frozen=True)
class Row:
    """The steps and the time for one I and B.

    Attributes:
      steps: until the mean of ‖∇F‖² is at most ε²; the mean over seeds, infinite if one did not reach it.
      sd: their standard deviation over seeds.
      microseconds: time of a step.
      theory: the theorem's steps, up to a factor.
    """

    varied: str
    I: int  # noqa: E741
    B: int
    steps: float
    sd: float
    microseconds: float
    theory: float

    @property
    def seconds(self) -> float:
        return self.steps * self.microseconds * 1e-6


def measure(varied: str, sizes: Sizes, epsilon: float, seeds: int, most: int) -> Row:
    """Steps and time per step for one size."""
    family = make_family("quadratic", BLOCKS, DIMENSION, ROWS, COPIES)
    solver = METHOD.make(CONSTANT, epsilon, sizes, family.constants)
    task = make_task(family, sizes, initial_rows(epsilon))
    keys = jax.random.split(jax.random.key(7), seeds)
    squared = Truth.of(family).squared_gradient
    reached = lanes.steps_until(task, [solver], keys, squared, epsilon**2, most).steps[0]
    theory = complexity(epsilon, sizes.blocks, sizes.blocks_per_step, sizes.batch_size)
    microseconds = 1e6 * time_of_step(task, solver)
    steps, sd = float(reached.mean()), float(figures.deviation(reached))
    return Row(varied, sizes.blocks_per_step, sizes.batch_size, steps, sd, microseconds, theory)


def time_of_step(task: lanes.Task, solver: Any, steps: int = 4000, turns: int = 5) -> float:
    """The best time per step of a single run."""
    inputs = (numbers_as_arrays(solver), task.problem)
    drawn = dataclasses.replace(task.sampling, initial_batch_size=None)
    state = compiled_start(*inputs, task.x0, task.y0, drawn.sampler(inputs[1], jax.random.key(0)))
    state, _ = compiled_chunk(inputs, state, 32)
    best = np.inf
    for _ in range(turns):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, _ = compiled_chunk(inputs, state, steps)
        jax.block_until_ready(state)
        best = min(best, (time.perf_counter() - began) / steps)
    return best


def table(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows, with speed-ups relative to the first one of each group."""
    found: list[dict[str, Any]] = []
    first: dict[str, Row] = {}
    for row in rows:
        start = first.setdefault(row.varied, row)
        found.append(
            {
                "varied": row.varied,
                "I": row.I,
                "B": row.B,
                "steps": f"{row.steps:.0f} ± {row.sd:.0f}",
                "µs per step": f"{row.microseconds:.1f}",
                "seconds": f"{row.seconds:.3f}",
                "speed-up in steps": f"{start.steps / row.steps:.1f}",
                "theory": f"{start.theory / row.theory:.1f}",
                "in seconds": f"{start.seconds / row.seconds:.1f}",
            }
        )
    return found


@figures.styled
def plot(rows: list[Row]) -> Any:
    """Steps, with the theorem's, and seconds over each size."""
    figure, ((left, right),) = figures.panels(1, 2)
    left.loglog()
    for varied, style in zip(FIELDS, figures.shades(len(FIELDS)), strict=True):
        group = [row for row in rows if row.varied == varied]
        if not group:
            continue
        sizes = [row.B if varied == "B" else row.I for row in group]
        steps, sd = [row.steps for row in group], [row.sd for row in group]
        figures.band(left, sizes, steps, sd, style, varied)
        scaled = [row.theory * group[0].steps / group[0].theory for row in group]
        left.plot(sizes, scaled, ":", color=style.colour)
        right.loglog(sizes, [row.seconds for row in group], f"{style.marker}-", color=style.colour)
    left.set(xlabel="size", ylabel="steps (dotted: theory)")
    right.set(xlabel="size", ylabel=f"seconds on {jax.devices()[0].device_kind}")
    figures.legend_of_all(figure)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vary", nargs="+", choices=FIELDS, default=list(FIELDS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--most", type=int, default=1_000_000, help="maximum number of steps of a run")
    parser.add_argument("--out", type=Path, default=Path("results/speedup"))
    options = parser.parse_args()
    report = Report(options.out, {name: one for name, one in vars(options).items() if name != "out"})
    rows = []
    for varied in options.vary:
        for size in options.sizes:
            sizes = dataclasses.replace(BASE, **dict.fromkeys(FIELDS[varied], size))
            rows.append(measure(varied, sizes, options.epsilon, options.seeds, options.most))
            print(rows[-1], flush=True)
            report.csv("speedup", table(rows))
    note = (
        f"BSVRB v2, m = {BASE.blocks}, ε = {options.epsilon}, {options.seeds} seeds, c = {CONSTANT}; I = "
        f"{BASE.blocks_per_step} and B = {BASE.batch_size} where they do not vary."
    )
    report.table("speedup", table(rows), "Speed-up in I and B", note)
    caption = "Steps, and seconds, until the mean of ‖∇F‖² is at most ε²; dotted: the theorem's."
    report.figure("speedup", plot(rows), figures.spread_caption(caption, options.seeds))
    by_size = {f"{row.varied} I={row.I} B={row.B}": dataclasses.asdict(row) for row in rows}
    (options.out / "speedup.json").write_text(json.dumps(by_size, indent=2), encoding="utf-8")
    report.finish()


if __name__ == "__main__":
    main()
