"""BSVRB v2 compared with existing libraries: implicit differentiation and optax.

The problem is that of `benchmarks.step`: weights of a8a's training rows, m = 100 temperatures. A peer solves
the lower problems with optimistix (BFGS, warm-started, all blocks under one vmap), differentiates F through
the solutions by the implicit function theorem, and updates x with optax's Adam:

- "all": all blocks and all rows in every step;
- "blocks": 10 blocks, all their rows;
- "mini-batch": 10 blocks, 2,048 training rows and 512 validation rows.

`benchmarks.torch_peers` has more peers, which need PyTorch; `--fast` takes the fastest of both, as far as
they are installed.

The steps of each method are tuned with the same effort. F is computed afterwards, outside the measured time,
exactly and for every tenth block (all blocks would take minutes per point). On a busy machine `--processor`
counts seconds of the processor, all threads together.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
from jax import Array

import bilevax as bx
from benchmarks import hyperopt
from benchmarks.track import Clock, Track, follow
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax.experiments.report import Report, command_line

BLOCKS, TENTH = 100, 10
PEERS = {"all": (BLOCKS, None, None), "blocks": (10, None, None), "mini-batch": (10, 2048, 512)}
TORCH_PEERS = ("torch-blocks", "torch-mini-batch", "torch-unrolled")
FAST = ("blocks", "torch-blocks", "torch-mini-batch")  # the others are far slower
PEER_STEPS = (0.1, 0.3, 1.0, 3.0)  # of Adam


class Ours(NamedTuple):
    """Settings of BSVRB v2: I, η of the first step, which grows by as much in 50 steps, τ, γ, α and β."""

    blocks: int
    upper_step: float
    lower_step: float
    gamma: float
    alpha: float = 0.2
    beta: float = 0.2

    def __str__(self) -> str:
        return f"I = {self.blocks}, η = {self.upper_step:g}, τ = {self.lower_step:g}"


OUR_SETTINGS = (
    Ours(20, 5000.0, 0.0025, 5.0),
    Ours(20, 6000.0, 0.006, 5.0),
    Ours(50, 10000.0, 0.006, 2.0),
    Ours(50, 10000.0, 0.012, 2.0),
)


def entry_scales(split: hyperopt.SparseSplit) -> np.ndarray:
    """About the inverse diagonal of the lower Hessians at x0 = 0 and y0 = 0, for all blocks alike."""
    squares = np.asarray(split.train.multiply(split.train).mean(axis=0)).ravel()
    curvature = 0.125 * squares * np.mean(hyperopt.temperatures(BLOCKS) ** -2.0)
    return (1 / (curvature + hyperopt.REGULARIZATION)).astype(np.float32)


def run_ours(
    split: hyperopt.SparseSplit,
    problem: bx.Problem,
    x0: Array,
    y0: Array,
    ours: Ours,
    budget: float,
    clock: Clock,
) -> Track:
    """BSVRB v2 with B = 32, and a lower step with a scale for every entry of y."""

    def start() -> tuple[Any, Any]:
        solver = bx.BSVRBv2(
            upper_step=_Growing(jnp.asarray(ours.upper_step)),
            lower_step=bx.PerEntry(ours.lower_step, entry_scales(split)),
            alpha=ours.alpha,
            gamma=ours.gamma,
            beta=ours.beta,
        )
        inputs = (numbers_as_arrays(solver), problem)
        sampler = bx.Sampling(ours.blocks, 32).sampler(problem, jax.random.key(0))
        return inputs, jax.block_until_ready(compiled_start(*inputs, x0, y0, sampler))

    began = clock()
    inputs, state = start()
    jax.block_until_ready(compiled_chunk(inputs, state, 0))
    track = Track("BSVRB v2", str(ours), [], [], clock() - began)
    began = clock()
    inputs, state = start()  # again, compiled
    spent, steps = clock() - began, 20
    while spent < budget:
        began = clock()
        state, _ = compiled_chunk(inputs, state, steps)
        jax.block_until_ready(state)
        spent += clock() - began
        track.seconds.append(spent)
        track.xs.append(np.asarray(state.x))
        steps = int(steps * 1.15) + 1
    return track


def solve_seconds(problem: bx.Problem, x0: Array, y0: Array, clock: Clock) -> float:
    """What it takes to solve all lower problems on all rows, compiled, as a start might do."""
    seconds = 0.0
    for _ in range(2):  # the first time it compiles
        began = clock()
        jax.block_until_ready(bx.solve_lower(problem, x0, y0=y0))
        seconds = clock() - began
    return seconds


class _Growing(eqx.Module):
    """η (1 + t / 50): what is left of the gradient shrinks as the weights leave the middle of the sigmoid."""

    first: Array

    def __call__(self, t: Array) -> Array:
        return self.first * (1 + t / 50)


def run_peer(
    problem: bx.Problem, x0: Array, y0: Array, name: str, rate: float, budget: float, clock: Clock
) -> Track:
    """A peer: lower solves, the implicit gradient, Adam."""
    step, start = _peer(problem, name, rate)
    keys = jax.random.split(jax.random.key(0), 100_000)
    return follow(f"implicit, {name}", f"Adam {rate:g}", lambda: start(x0, y0), step, keys, budget, clock)


def implicit_gradient(
    x: Array, y: Array, blocks: Any, batch: Any, judges: Any, tolerance: float = 1e-4
) -> tuple[Array, Array]:
    """The gradient of the mean upper function of some blocks, and their lower solutions, solved from y."""
    solver = optx.BFGS(rtol=tolerance, atol=tolerance)

    def one(x: Array, y: Array, block: Any) -> tuple[Array, Array]:
        lower = lambda y, x: hyperopt.lower(x, y, block, batch)  # noqa: E731
        found = optx.minimise(lower, solver, y, args=x, max_steps=500, throw=False).value
        return hyperopt.upper(x, found, block, judges), found

    def value(x: Array) -> tuple[Array, Array]:
        losses, found = jax.vmap(one, in_axes=(None, 0, 0))(x, y, blocks)
        return jnp.mean(losses), found

    return jax.grad(value, has_aux=True)(x)


def _peer(problem: bx.Problem, name: str, rate: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    count, train_rows, held_rows = PEERS[name]
    optimizer = optax.adam(rate)
    train, held = problem.lower_data[0], problem.upper_data
    assert isinstance(train, bx.Shared)
    assert isinstance(held, bx.Shared)

    def some(rows: Any, size: int | None, key: Array) -> Any:
        if size is None:
            return rows
        places = jax.random.randint(key, (size,), 0, rows["label"].shape[0])
        return jax.tree.map(lambda a: a[places], rows)

    @eqx.filter_jit
    def compiled(carry: tuple[Array, Array, Any], key: Array) -> tuple[Array, Array, Any]:
        x, y, state = carry
        for_blocks, for_train, for_held = jax.random.split(key, 3)
        blocks = jax.random.permutation(for_blocks, BLOCKS)[:count]
        batch, judges = some(train.rows, train_rows, for_train), some(held.rows, held_rows, for_held)

        constants = jax.tree.map(lambda a: a[blocks], problem.blocks)
        gradient, found = implicit_gradient(x, y[blocks], constants, batch, judges)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(x, updates), y.at[blocks].set(found), state

    step = lambda carry, key: jax.block_until_ready(compiled(carry, key))  # noqa: E731
    return step, lambda x, y: (x, y, optimizer.init(x))


@functools.partial(jax.jit, static_argnames="turns")
def exact(problem: bx.Problem, x: Array, y: Array, turns: int = 12) -> tuple[Array, Array]:
    """F(x) of every tenth block, and its lower solutions, by Newton's method from y."""
    train, held = problem.lower_data[0], problem.upper_data
    assert isinstance(train, bx.Shared)
    assert isinstance(held, bx.Shared)

    def one(pair: Any) -> tuple[Array, Array]:
        block, y = pair
        weight, row = jax.nn.sigmoid(x), train.rows["row"].astype(jnp.float32)

        def turn(_: Any, y: Array) -> Array:
            slope = jax.grad(lambda y: hyperopt.lower(x, y, block, train.rows))(y)
            chance = jax.nn.sigmoid(row @ y / block["temperature"])
            bend = weight * chance * (1 - chance) / block["temperature"] ** 2 / row.shape[0]
            hessian = (row * bend[:, None]).T @ row + hyperopt.REGULARIZATION * jnp.eye(y.shape[0])
            return y - jnp.linalg.solve(hessian, slope)

        y = jax.lax.fori_loop(0, turns, turn, y)
        return hyperopt.upper(x, y, block, held.rows), y

    judged = jax.tree.map(lambda a: a[::TENTH], problem.blocks)
    losses, y = jax.lax.map(one, (judged, y))
    return jnp.mean(losses), y


def judge(problem: bx.Problem, tracks: list[Track], y0: Array) -> float:
    """Adds F to every track; returns F at the start."""
    start, y_start = exact(problem, jnp.zeros(tracks[0].xs[0].shape), y0[::TENTH])
    for track in tracks:
        y = y_start
        for x in track.xs:
            value, y = exact(problem, jnp.asarray(x), y, turns=5)
            track.losses.append(float(value))
    return float(start)


def table(tracks: list[Track], start: float, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """For each method: its best time to each share of the way from F(x0) to the smallest F of all."""
    least = min(min(track.losses) for track in tracks)
    rows = []
    for method in dict.fromkeys(track.method for track in tracks):
        mine = [track for track in tracks if track.method == method]
        row: dict[str, Any] = {"method": method, "least F": min(min(track.losses) for track in mine)}
        for share in shares:
            goal = start - share * (start - least)
            best = min(mine, key=lambda track: track.seconds_to(goal))
            row[f"seconds to {share:.0%}"] = best.seconds_to(goal)
            row[f"settings, {share:.0%}"] = best.settings if np.isfinite(best.seconds_to(goal)) else ""
        rows.append(row)
    return rows


def check_torch(split: hyperopt.SparseSplit, blocks: int = 3) -> float:
    """The relative difference between the gradients of PyTorch and JAX at a random x.

    Raises:
      ImportError: if torch or torchopt is missing.
      RuntimeError: if it is larger than 0.001.
    """
    from benchmarks import torch_peers

    problem, x, y = hyperopt.problem(split, blocks)
    train, held = problem.lower_data[0], problem.upper_data
    assert isinstance(train, bx.Shared)
    assert isinstance(held, bx.Shared)
    x = jax.random.normal(jax.random.key(0), x.shape)
    with jax.enable_x64(True):  # in single precision BFGS has an error of 0.01
        start = (jnp.asarray(x, jnp.float64), jnp.zeros(y.shape, jnp.float64))
        ours, _ = jax.jit(implicit_gradient)(*start, problem.blocks, train.rows, held.rows, 1e-6)
        ours = np.asarray(ours)
    theirs = torch_peers.exact_gradient(split, np.array(x), blocks)
    apart = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))
    if apart > 1e-3:
        raise RuntimeError(f"the gradients of PyTorch and JAX differ by {apart:.1e}, expected at most 1e-3")
    return apart


def fastest_installed() -> list[str]:
    """The fastest peers, as far as they are installed; says which are not."""
    missing = [name for name in ("torch", "torchopt") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"without the peers that need {' and '.join(missing)}: pip install 'bilevax[torch]'")
    return [name for name in FAST if name not in TORCH_PEERS or not missing]


def run_torch(split: hyperopt.SparseSplit, name: str, budget: float, clock: Clock) -> list[Track]:
    """A PyTorch peer, with each of its settings."""
    from benchmarks import torch_peers

    settings = torch_peers.PEERS[name].settings
    return [torch_peers.run(split, BLOCKS, name, one, budget, clock) for one in settings]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="time of a peer's run; ours have a tenth of it"
    )
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=[*PEERS, *TORCH_PEERS])
    parser.add_argument("--fast", action="store_true", help="the fastest peers that are installed")
    parser.add_argument("--solve", action="store_true", help="time the exact solution of y at the start only")
    parser.add_argument("--processor", action="store_true", help="count seconds of the processor")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    if options.fast:
        options.peers = fastest_installed()
    clock = time.process_time if options.processor else time.perf_counter
    split = hyperopt.load("a8a")
    if set(options.peers) & set(TORCH_PEERS):
        print(f"the gradients of PyTorch and JAX differ by {check_torch(split):.1e}", flush=True)
    problem, x0, y0 = hyperopt.problem(split, BLOCKS)
    if options.solve:
        print(f"solving y at x0 takes {solve_seconds(problem, x0, y0, clock):.1f} s")
        return
    tracks = [run_ours(split, problem, x0, y0, ours, options.seconds / 10, clock) for ours in OUR_SETTINGS]
    for name in options.peers:
        if name in TORCH_PEERS:
            tracks += run_torch(split, name, options.seconds, clock)
        else:
            tracks += [run_peer(problem, x0, y0, name, rate, options.seconds, clock) for rate in PEER_STEPS]
        print(f"{name}: {len(tracks)} runs so far", flush=True)
    start = judge(problem, tracks, y0)
    shares = (0.5, 0.9, 0.98)
    rows = table(tracks, start, shares)
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    for share in shares:
        ours, *peers = [row[f"seconds to {share:.0%}"] for row in rows]
        best = min(peers)
        faster = f"{best / ours:.1f}" if np.isfinite(best) else f"over {options.seconds / ours:.1f}"
        lines.append(f"\n{share:.0%} of the way: {faster} times faster than the best peer (target: 3).")
    text = "\n".join(lines) + f"\n\nF(x0) = {start:.4f}; device: {jax.devices()[0].device_kind}.\n"
    print(text)
    report = Report(options.out, command_line(options))
    report.csv("peers", rows)
    (options.out / "peers.md").write_text(text)
    runs = [{k: v for k, v in dataclasses.asdict(track).items() if k != "xs"} for track in tracks]
    (options.out / "peers.json").write_text(
        json.dumps({"start": start, "rows": rows, "runs": runs}, indent=1)
    )
    report.finish()


if __name__ == "__main__":
    main()
