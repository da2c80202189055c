"""One block: compares methods on three finite problems, by seconds and by passes over the data.

    python -m benchmarks.single_block a8a w8a mnist --seconds 6 --out results

a8a, w8a: a strength of l2 regularisation per feature, for logistic regression,

    min_x h(x) = mean over a8a.t of softplus(−label row·y(x)),
    y(x) = argmin_y mean over a8a of softplus(−label row·y) + ½ Σ_j exp(x_j) y_j²

mnist: a weight for each of 20,000 training rows, half of whose labels are wrong, for softmax regression,

    min_x h(x) = mean over 5,000 clean rows of the cross-entropy of y(x),
    y(x) = argmin_y mean over the rows of sigmoid(x_j) cross-entropy_j + ½ 0.01 ‖y‖²

The gap is (h(x) − h*)/(h(x₀) − h*). h is computed exactly, by solving for y(x) outside the measured time. h*
is the smallest value of all runs and, for a8a and w8a, of L-BFGS on h with exact gradients. The steps of
every method are chosen by the same search, in shorter runs on another seed.

Data: the folder BILEVAX_DATA, with libsvm/a8a, a8a.t, w8a, w8a.t, and mnist.npz.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx
from benchmarks.single_block_cases import CASES, Case
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax._step.oracles import count_rows

BATCH = 64
METHODS: dict[str, Callable[..., Any]] = {
    "BlockSAGA": bx.BlockSAGA,
    "BlockPAGE": bx.BlockPAGE,
    "BSVRBv2": bx.BSVRBv2,
    "MMBO": bx.MMBO,
    "SOBA": bx.SOBA,
    "BSVRBv1": bx.BSVRBv1,
    "KSONG": bx.KSONG,
    "RSVRB": bx.RSVRB,
}
TRACKS_MATRICES = {"BSVRBv1", "KSONG", "RSVRB"}
MOST_MATRIX = 500  # the largest d_y for methods that track d_y × d_y matrices
MARKS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # the shares of the time at which x is recorded


def inside(lowest: Any, highest: Any) -> optax.GradientTransformation:
    """Keeps every x_j between two bounds; see `Case.box`."""
    return optax.stateless(
        lambda updates, x: jax.tree.map(lambda u, x: jnp.clip(x + u, lowest, highest) - x, updates, x)
    )


def _plain(learning_rate: Any, lowest: Any, highest: Any) -> optax.GradientTransformation:
    return optax.chain(optax.sgd(learning_rate), inside(lowest, highest))


def _decay(step: Any) -> Any:
    """A schedule for Adam, whose steps do not shrink with the gradient."""
    return (1 + step / 20_000) ** -0.5


def _adam(learning_rate: Any, lowest: Any, highest: Any) -> optax.GradientTransformation:
    scheduled = optax.chain(optax.adam(learning_rate), optax.scale_by_schedule(_decay))
    return optax.chain(scheduled, inside(lowest, highest))


# Plain steps, and Adam. Their hyper-parameters are in the state, so that all share one compiled program.
UPPER = [
    optax.inject_hyperparams(kind)(learning_rate=1.0, lowest=0.0, highest=0.0) for kind in (_plain, _adam)
]


@dataclasses.dataclass
class Run:
    """x and y of a run at some times."""

    seconds: list[float]
    steps: list[int]
    passes: list[float]
    x: list[Any]
    y: list[Any]


def skipped(method: str, case: Case) -> str | None:
    """Why a method is skipped; None if it is run."""
    d_y = sum(leaf[0].size for leaf in jax.tree.leaves(case.y0))
    if method in TRACKS_MATRICES and d_y > MOST_MATRIX:
        return f"tracks a {d_y} × {d_y} matrix"
    return None


def make(method: str, lower_step: float, upper_step: float, adam: bool) -> tuple[Any, float]:
    """A solver whose inverse step equals its lower step; and its upper step, which belongs to its state."""
    options = {"beta": 0.01} if method == "RSVRB" else {}
    return METHODS[method](UPPER[adam], lower_step=lower_step, **options), upper_step


def run(case: Case, made: tuple[Any, float], seconds: float, seed: int, clock: Callable[[], float]) -> Run:
    """Runs for some time, without compilation and initialisation; passes include those of initialisation."""
    solver, upper_step = made
    state = compiled_start(
        solver,
        case.problem,
        case.x0,
        case.y0,
        bx.Sampling(batch_size=BATCH).sampler(case.problem, jax.random.key(seed)),
    )
    lowest, highest = case.box(solver.lower_step)
    hyperparameters = {"learning_rate": upper_step, "lowest": lowest, "highest": highest}
    state.optimizer.hyperparams.update({n: jnp.asarray(v, jnp.float32) for n, v in hyperparameters.items()})
    inputs = (numbers_as_arrays(solver), case.problem)
    state, _ = compiled_chunk(inputs, state, 0)
    state = jax.block_until_ready(state)
    out, spent, chunk = Run([], [], [], [], []), 0.0, 8
    for mark in MARKS:
        while spent < mark * seconds:
            tick, before = clock(), int(state.step)
            state, total = compiled_chunk(inputs, state, chunk)
            state = jax.block_until_ready(state)
            spent += (took := max(clock() - tick, 1e-6))
            chunk = int(max(1, min(4 * chunk, 0.02 * seconds * (int(state.step) - before) / took)))
            if not np.isfinite(float(total.high)):
                return out
        out.seconds.append(spent)
        out.steps.append(int(state.step))
        out.passes.append(passes(case, solver, state))
        out.x.append(jax.tree.map(np.array, state.x))
        out.y.append(jax.tree.map(np.array, state.y))
    return out


def passes(case: Case, solver: bx.AbstractSolver, state: bx.State) -> float:
    """Passes over all rows: rows drawn, times the points at which they are evaluated."""
    steps = int(state.step)
    drawn = solver.count_oracles(case.problem, state.sampler, steps)
    one_point = isinstance(solver, bx.Recipe) and not solver.corrected
    twice = 0 if one_point else 2 * BATCH * steps
    return (drawn.rows + twice) / count_rows(case.problem, None, 1).rows


def tune(case: Case, method: str, seconds: float, clock: Callable[[], float]) -> tuple[dict, list[dict]]:
    """The point of a grid of steps with the smallest h after some time; and all points."""
    tried = []
    for adam, lower_step in itertools.product((False, True), case.lower_steps):
        for upper_step in case.adam_steps if adam else case.upper_steps:
            setting = {"upper_step": upper_step, "lower_step": lower_step, "adam": adam}
            found = run(case, make(method, **setting), seconds, 1000, clock)
            value = case.value(found.x[-1], found.y[-1]) if len(found.x) == len(MARKS) else np.inf
            tried.append(setting | {"value": value})
    return min(tried, key=lambda one: one["value"]), tried


def measure(case: Case, method: str, options: argparse.Namespace, clock: Callable[[], float]) -> dict:
    """The best steps of a method, and h over time for several seeds."""
    setting, tried = tune(case, method, options.tune_seconds, clock)
    chosen = {name: setting[name] for name in ("upper_step", "lower_step", "adam")}
    runs = []
    for seed in range(options.seeds):
        found = run(case, make(method, **chosen), options.seconds, seed, clock)
        values = [case.value(x, y) for x, y in zip(found.x, found.y, strict=True)]
        runs.append({"seconds": found.seconds, "steps": found.steps, "passes": found.passes, "value": values})
    return {"setting": chosen, "tried": tried, "runs": runs}


def table(name: str, record: dict) -> list[str]:
    """Markdown: the gap over seconds, as the median over seeds, and the passes at the end."""
    start, least = record["start"], record["least"]
    lines = [f"## {name}", "", f"h(x₀) = {start:.6f}, h* = {least:.6f}", ""]
    marks = [f"{mark * record['seconds']:.2g} s" for mark in MARKS]
    lines += [
        f"| method | steps | {' | '.join(marks)} | steps/s | passes |",
        "| --- " * (len(marks) + 4) + "|",
    ]
    for method, found in record["methods"].items():
        if "skipped" in found:
            lines.append(f"| {method} | {found['skipped']} {'| ' * (len(marks) + 2)}|")
            continue
        whole = [one for one in found["runs"] if len(one["value"]) == len(MARKS)]
        setting = found["setting"]
        steps = f"{'Adam ' if setting['adam'] else ''}{setting['upper_step']:g}, {setting['lower_step']:g}"
        if not whole:
            lines.append(f"| {method} | {steps} | diverged {'| ' * (len(marks) + 1)}|")
            continue
        gaps = (np.median([one["value"] for one in whole], 0) - least) / (start - least)
        speed = np.median([one["steps"][-1] / one["seconds"][-1] for one in whole])
        shown = " | ".join(f"{gap:.2g}" for gap in gaps)
        lines.append(f"| {method} | {steps} | {shown} | {speed:,.0f} | {whole[0]['passes'][-1]:,.0f} |")
    return [*lines, ""]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], choices=[*CASES, []])
    parser.add_argument("--methods", nargs="*", default=[*METHODS], choices=METHODS)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of the reported runs")
    parser.add_argument("--tune-seconds", type=float, default=1.0, help="duration of the runs of the search")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: processor time of all threads, for a busy machine",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [
        f"Batch {BATCH}, {options.seconds:g} s ({options.clock} clock), {options.seeds} seeds, median gap.",
        "",
    ]
    for name in options.cases:
        try:
            case = CASES[name](Path(os.environ.get("BILEVAX_DATA", "data")))
        except FileNotFoundError as error:
            print(f"skipped {name}: {error}. Set BILEVAX_DATA to the folder of the data.")
            continue
        record: dict[str, Any] = {"seconds": options.seconds, "clock": options.clock, "methods": {}}
        for method in options.methods:
            why = skipped(method, case)
            record["methods"][method] = {"skipped": why} if why else measure(case, method, options, clock)
            seen = [v for m in record["methods"].values() for one in m.get("runs", []) for v in one["value"]]
            seen += [one["value"] for m in record["methods"].values() for one in m.get("tried", [])]
            record["start"] = case.value(case.x0, case.y0)
            record["least"] = float(min([*seen, case.least()]))
            (options.out / f"single_block_{name}.json").write_text(json.dumps(record, indent=1))
            print("\n".join(table(name, record)), flush=True)
        lines += table(name, record)
    (options.out / "single_block.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
