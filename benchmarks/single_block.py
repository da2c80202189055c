"""One block: compares methods on three finite problems, by seconds and by passes over the data.

    python -m benchmarks.single_block a8a w8a mnist --seconds 6 --out results

a8a, w8a: a strength of l2 regularisation per feature, for logistic regression,

    min_x h(x) = mean over a8a.t of softplus(−label row·y(x)),
    y(x) = argmin_y mean over a8a of softplus(−label row·y) + ½ Σ_j exp(x_j) y_j²

mnist: a weight for each of 20,000 training rows, half of whose labels are wrong, for softmax regression,

    min_x h(x) = mean over 5,000 clean rows of the cross-entropy of y(x),
    y(x) = argmin_y mean over the rows of sigmoid(x_j) cross-entropy_j + ½ 0.01 ‖y‖²

The gap is (h(x) − h*)/(h(x₀) − h*). h is computed exactly, by solving for y(x) outside the measured time. h*
is the smallest value of all runs and of L-BFGS on h with exact gradients, from several starts. Every method,
ours and those of others (`single_block_peers.py`), has the same start, and is run with both kinds of upper
steps: plain ones, and Adam with a falling step; both in the same box. The steps, and how often a method looks
at all rows, are chosen by the same search, in shorter runs on another seed. Seconds are the processor time of
one core, to which the process is pinned: with more of them XLA hands small operations from thread to thread,
which doubles the time of a step. The methods take turns seed by seed.

Data: the folder BILEVAX_DATA, with libsvm/a8a, a8a.t, w8a, w8a.t, and mnist.npz.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
from benchmarks.single_block_peers import PEERS, Data, Peer, peer_advance, peer_start
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax._step.oracles import count_rows
from bilevax.solvers.block_page import default_chance

BATCH = 64
OURS: dict[str, Callable[..., Any]] = {
    "BlockSAGA": bx.BlockSAGA,
    "BlockPAGE": bx.BlockPAGE,
    "BSVRBv2": bx.BSVRBv2,
    "MMBO": bx.MMBO,
    "our SOBA": bx.SOBA,
    "BSVRBv1": bx.BSVRBv1,
    "KSONG": bx.KSONG,
    "RSVRB": bx.RSVRB,
}
METHODS = (*OURS, *PEERS)
DEFAULT = ("BlockSAGA", "BlockPAGE", "BSVRBv2", "MMBO", "our SOBA", *PEERS)
TRACKS_MATRICES = {"BSVRBv1", "KSONG", "RSVRB"}
PASSES = {"BlockPAGE", "SRBA"}  # look at all rows now and then
RARITIES = (1.0, 4.0)  # of these looks: as many rows as the steps between them read, or a quarter
MOST_MATRIX = 500  # the largest d_y for methods that track d_y × d_y matrices
MARKS = (0.05, 1 / 6, 0.5, 1.0)  # the shares of the time at which x is recorded
KINDS = ("plain", "adam")


def _decay(step: Any) -> Any:
    """A schedule for Adam, whose steps do not shrink with the gradient."""
    return (1 + step / 20_000) ** -0.5


def _inside(lowest: Any, highest: Any) -> optax.GradientTransformation:
    """`bx.bounded` with bounds that may be traced, as hyper-parameters in the state are."""
    return optax.stateless(
        lambda updates, x: jax.tree.map(lambda u, x: jnp.clip(x + u, lowest, highest) - x, updates, x)
    )


def _plain(learning_rate: Any, lowest: Any, highest: Any) -> optax.GradientTransformation:
    return optax.chain(optax.sgd(learning_rate), _inside(lowest, highest))


def _adam(learning_rate: Any, lowest: Any, highest: Any) -> optax.GradientTransformation:
    scheduled = optax.chain(optax.adam(learning_rate), optax.scale_by_schedule(_decay))
    return optax.chain(scheduled, _inside(lowest, highest))


# Their hyper-parameters are in the state, so that all steps of a kind share one compiled program.
UPPER = {
    name: optax.inject_hyperparams(kind)(learning_rate=1.0, lowest=0.0, highest=0.0)
    for name, kind in zip(KINDS, (_plain, _adam), strict=True)
}


@dataclasses.dataclass
class Run:
    """x and y of a run at some times."""

    seconds: list[float]
    steps: list[int]
    passes: list[float]
    x: list[Any]
    y: list[Any]


class OurRun:
    """A run of one of our solvers."""

    def __init__(self, case: Case, method: str, setting: dict[str, Any], seed: int):
        options: dict[str, Any] = {"beta": 0.01} if method == "RSVRB" else {}
        sampler = bx.Sampling(batch_size=BATCH).sampler(case.problem, jax.random.key(seed))
        if method == "BlockPAGE":
            chance = default_chance(case.problem, sampler) / setting["rarity"]
            options["refresh_chance"] = min(1.0, max(chance, 1e-9))
        step = setting["lower_step"]
        self.case = case
        self.solver = OURS[method](UPPER[setting["kind"]], lower_step=step, **options)
        self.state = compiled_start(self.solver, case.problem, case.x0, case.y0, sampler)
        self.state.optimizer.hyperparams.update(_hyperparameters(case, setting))
        self.inputs = (numbers_as_arrays(self.solver), case.problem)
        self.advance(0)

    def advance(self, steps: int) -> bool:
        """Takes some steps; whether all is finite."""
        self.state, total = compiled_chunk(self.inputs, self.state, steps)
        self.state = jax.block_until_ready(self.state)
        return bool(np.isfinite(float(total.high)))

    def note(self, run: Run) -> None:
        """Records where the run is."""
        run.steps.append(int(self.state.step))
        run.passes.append(passes(self.case, self.solver, self.state))
        run.x.append(jax.tree.map(np.array, self.state.x))
        run.y.append(jax.tree.map(np.array, self.state.y))


class PeerRun:
    """A run of a method of others."""

    def __init__(self, case: Case, method: str, setting: dict[str, Any], seed: int):
        self.data = dense(case)
        (level,) = case.problem.levels.values()
        whole = sum(len(jax.tree.leaves(rows)[0]) for rows in self.data)
        period = max(1, round(min(setting["rarity"], 1e4) * whole / (4 * BATCH)))
        self.peer = Peer(
            method,
            _Of(case.problem.upper),
            _Of(level.function),
            UPPER[setting["kind"]],
            BATCH,
            period,
            case.upper_sees_x,
        )
        self.seed = jnp.uint32(seed)
        self.step = jnp.float32(setting["lower_step"])
        now = peer_start(self.peer, self.data, case.x0, jax.tree.map(lambda a: a[0], case.y0))
        now.optimizer.hyperparams.update(_hyperparameters(case, setting))
        self.now = now
        self.advance(0)

    def advance(self, steps: int) -> bool:
        """Takes some steps; whether all is finite."""
        now = peer_advance(self.peer, self.data, self.seed, self.step, self.now, steps)
        self.now = jax.block_until_ready(now)
        return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves((now.x, now.y)))

    def note(self, run: Run) -> None:
        """Records where the run is."""
        steps, whole = int(self.now.step), sum(len(jax.tree.leaves(rows)[0]) for rows in self.data)
        run.steps.append(steps)
        run.passes.append(self.peer.rows(self.data, steps) / whole)
        run.x.append(jax.tree.map(np.array, self.now.x))
        run.y.append(jax.tree.map(lambda a: np.array(a)[None], self.now.y))


@dataclasses.dataclass(frozen=True)
class _Of:
    """A function of (x, y, rows) that is compared by the one it calls, so that runs share a program."""

    function: Callable[..., Any]

    def __call__(self, x: Any, y: Any, rows: Any) -> Any:
        return self.function(x, y, 0, rows)


@functools.cache
def dense(case: Case) -> Data:
    """The rows as dense arrays."""
    problem = case.problem
    return Data(*(jax.tree.map(jnp.asarray, one.rows) for one in (problem.upper_data, problem.lower_data[0])))


def _hyperparameters(case: Case, setting: dict[str, Any]) -> dict[str, Any]:
    lowest, highest = case.box(setting["lower_step"])
    found = {"learning_rate": setting["upper_step"], "lowest": lowest, "highest": highest}
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def skipped(method: str, case: Case) -> str | None:
    """Why a method is skipped; None if it is run."""
    d_y = sum(leaf[0].size for leaf in jax.tree.leaves(case.y0))
    if method in TRACKS_MATRICES and d_y > MOST_MATRIX:
        return f"tracks a {d_y} × {d_y} matrix"
    return None


def run(
    case: Case, method: str, setting: dict[str, Any], seconds: float, seed: int, clock: Callable[[], float]
) -> Run:
    """Runs for some time, without compilation and initialisation; passes include those of initialisation."""
    running = (PeerRun if method in PEERS else OurRun)(case, method, setting, seed)
    out, spent, chunk = Run([], [], [], [], []), 0.0, 8
    for mark in MARKS:
        while spent < mark * seconds:
            tick = clock()
            finite = running.advance(chunk)
            spent += (took := max(clock() - tick, 1e-6))
            chunk = int(max(1, min(4 * chunk, 0.02 * seconds * chunk / took)))
            if not finite:
                return out
        out.seconds.append(spent)
        running.note(out)
    return out


def passes(case: Case, solver: bx.AbstractSolver, state: bx.State) -> float:
    """Passes over all rows: rows drawn, times the points at which they are evaluated."""
    steps = int(state.step)
    drawn = solver.count_oracles(case.problem, state.sampler, steps)
    one_point = isinstance(solver, bx.Recipe) and not solver.corrected
    twice = 0 if one_point else 2 * BATCH * steps
    return (drawn.rows + twice) / count_rows(case.problem, None, 1).rows


def tune(
    case: Case, method: str, kind: str, seconds: float, clock: Callable[[], float]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The point of a grid of steps with the smallest h after some time; and all points."""
    tried = []
    uppers = case.adam_steps if kind == "adam" else case.upper_steps
    rarities = RARITIES if method in PASSES else (1.0,)
    for upper, lower, rarity in itertools.product(uppers, case.lower_steps, rarities):
        setting = {"kind": kind, "upper_step": upper, "lower_step": lower, "rarity": rarity}
        found = run(case, method, setting, seconds, 1000, clock)
        value = case.value(found.x[-1], found.y[-1]) if len(found.x) == len(MARKS) else np.inf
        tried.append(setting | {"value": value})
    return min(tried, key=lambda one: one["value"]), tried


def table(name: str, kind: str, record: dict[str, Any]) -> list[str]:
    """Markdown: the gap over seconds, as the median over seeds, and the passes at the end."""
    start, least = record["start"], record["least"]
    lines = [f"## {name}, {kind} steps", "", f"h(x₀) = {start:.6f}, h* = {least:.6f}", ""]
    marks = [f"{mark * record['seconds']:.2g} s" for mark in MARKS]
    lines += [
        f"| method | steps | {' | '.join(marks)} | least to largest | steps/s | passes |",
        "| --- " * (len(marks) + 5) + "|",
    ]
    for method, found in record["methods"].get(kind, {}).items():
        setting = found["setting"]
        steps = f"{setting['upper_step']:g}, {setting['lower_step']:g}"
        steps += f", rarity {setting['rarity']:g}" if method in PASSES else ""
        whole = [one for one in found["runs"] if len(one["value"]) == len(MARKS)]
        if not whole:
            lines.append(f"| {method} | {steps} | diverged {'| ' * (len(marks) + 2)}|")
            continue
        gaps = (np.array([one["value"] for one in whole]) - least) / (start - least)
        speed = np.median([one["steps"][-1] / one["seconds"][-1] for one in whole])
        shown = " | ".join(f"{gap:.2g}" for gap in np.median(gaps, 0))
        spread = f"{gaps[:, -1].min():.2g} to {gaps[:, -1].max():.2g}"
        lines.append(
            f"| {method} | {steps} | {shown} | {spread} | {speed:,.0f} | {whole[0]['passes'][-1]:,.0f} |"
        )
    return [*lines, ""]


def speeds(
    case: Case, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Microseconds of a step, the least of several turns of 2,000 steps; turns of methods alternate.

    Steps that look at all rows are left out, as how often they come is a choice: "pass" is the time of one.
    """
    found: dict[str, dict[str, float]] = {}
    setting = {"kind": options.kinds[-1], "upper_step": case.adam_steps[0], "lower_step": case.lower_steps[0]}
    methods = [method for method in options.methods if skipped(method, case) is None]

    def begun(method: str, rarity: float) -> Any:
        made = PeerRun if method in PEERS else OurRun
        return made(case, method, setting | {"rarity": rarity}, 0)

    running = {(method, "step"): begun(method, 1e9) for method in methods}
    running |= {(method, "pass"): begun(method, 1e-9) for method in methods if method in PASSES}
    for _ in range(6):
        for (method, what), one in running.items():
            count = 2000 if what == "step" else 50
            tick = clock()
            one.advance(count)
            took = 1e6 * (clock() - tick) / count
            kept = found.setdefault(method, {})
            kept[what] = min(kept.get(what, np.inf), took)
    return found


def compare(name: str, case: Case, options: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    """All methods with all kinds of steps on a problem."""
    record: dict[str, Any] = {"seconds": options.seconds, "clock": options.clock, "methods": {}}
    record["start"] = case.value(case.x0, case.y0)
    methods = [method for method in options.methods if skipped(method, case) is None]
    values, best = [], case.x0
    for kind in options.kinds:
        found = record["methods"].setdefault(kind, {})
        for method in methods:
            best_point, tried = tune(case, method, kind, options.tune_seconds, clock)
            setting = {name: one for name, one in best_point.items() if name != "value"}
            found[method] = {"setting": setting, "tried": tried, "runs": []}
            values += [one["value"] for one in tried]
            print(name, kind, method, setting, flush=True)
        for seed, method in itertools.product(range(options.seeds), methods):
            one = run(case, method, found[method]["setting"], options.seconds, seed, clock)
            h = [case.value(x, y) for x, y in zip(one.x, one.y, strict=True)]
            if h and h[-1] < min(values):
                best = one.x[-1]
            values += h
            kept = {"seconds": one.seconds, "steps": one.steps, "passes": one.passes, "value": h}
            found[method]["runs"].append(kept)
    reference = case.least(options.evaluations, best) if options.evaluations else np.inf
    record |= {"reference": reference, "least": float(min(*values, reference))}
    (options.out / f"single_block_{name}.json").write_text(json.dumps(record, indent=1))
    return record


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], choices=[*CASES, []])
    parser.add_argument("--methods", nargs="*", default=[*DEFAULT], choices=METHODS)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=KINDS)
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of the reported runs")
    parser.add_argument("--tune-seconds", type=float, default=1.0, help="duration of the runs of the search")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=300, help="of h by L-BFGS, per start")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="cpu: of all threads")
    parser.add_argument("--speed", action="store_true", help="only the time of a step, and of a pass")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    if options.clock == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores
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
        if options.speed:
            for method, times in speeds(case, options, clock).items():
                print(name, method, *(f"{what} {took:.1f} µs" for what, took in times.items()), flush=True)
            continue
        record = compare(name, case, options, clock)
        lines += [line for kind in options.kinds for line in table(name, kind, record)]
        print("\n".join(lines), flush=True)
    if not options.speed:
        (options.out / "single_block.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
