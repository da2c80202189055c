"""Steps where x or y is a wide network: which share of the accelerator's peak they reach.

`python -m benchmarks.networks` times steps of BSVRB v2 (both points) and SOBA (one point) where x is an MLP
of a million weights that all blocks share, and where every block's y is one; the gradient of a plain loss
of the same network on as many rows stands beside them. The share is that of the products that a step cannot
do without, over the rate of one large product with the same precision, measured first.
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
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax.experiments.report import Report, command_line

SIZES = (784, 1024, 256)
CLASSES = 10
METHODS = {"BSVRBv2": (bx.BSVRBv2, 2), "SOBA": (bx.SOBA, 1)}


def weights(key: Any, sizes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """The layers of a network."""
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(one, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for one, a, b in zip(keys[1:], sizes[:-1], sizes[1:], strict=True)
    ]


def network(layers: Any, rows: jax.Array) -> jax.Array:
    """Its output, with rectified layers but for the last."""
    for place, layer in enumerate(layers):
        rows = (jax.nn.relu(rows) if place else rows) @ layer["w"] + layer["b"]
    return rows


def loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropies."""
    return jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def data(count: int, common: bool) -> list[bx.Shared]:
    """Random rows and labels, for f and for g."""
    out = []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(count, SIZES[0])).astype(np.float32)
        given = {"row": rows, "label": rng.integers(0, CLASSES, count).astype(np.int32)}
        out.append(bx.Shared(given | {"index": np.arange(count, dtype=np.int32)}, common=common))
    return out


def upper_network(blocks: int, common: bool) -> tuple[bx.Problem, Any, Any]:
    """x: features; y: a linear classifier of every block."""

    def scores(x: Any, y: Any, batch: Any) -> jax.Array:
        return jax.nn.relu(network(x, batch["row"])) @ y

    def f(x: Any, y: Any, block: Any, batch: Any) -> jax.Array:
        return jnp.mean(loss(block * scores(x, y, batch), batch["label"]))

    def g(x: Any, y: Any, block: Any, batch: Any) -> jax.Array:
        return jnp.mean(loss(block * scores(x, y, batch), batch["label"])) + 0.05 * jnp.sum(y * y)

    rows = data(20_000, common)
    constants = jnp.linspace(0.5, 1.5, blocks)
    problem = bx.Problem(upper=f, lower=g, blocks=constants, upper_data=rows[0], lower_data=rows[1])
    return problem, weights(jax.random.key(0), SIZES), jnp.zeros((blocks, SIZES[-1], CLASSES))


def lower_network(blocks: int, common: bool) -> tuple[bx.Problem, Any, Any]:
    """x: a weight of every row; y: the network of every block."""

    def f(x: Any, y: Any, block: Any, batch: Any) -> jax.Array:
        return jnp.mean(loss(network(y, batch["row"]), batch["label"]))

    def g(x: Any, y: Any, block: Any, batch: Any) -> jax.Array:
        each = jax.nn.sigmoid(x[batch["index"]]) * loss(block * network(y, batch["row"]), batch["label"])
        return jnp.mean(each) + 0.05 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))

    rows = data(20_000, common)
    constants = jnp.linspace(0.5, 1.5, blocks)
    problem = bx.Problem(upper=f, lower=g, blocks=constants, upper_data=rows[0], lower_data=rows[1])
    one = weights(jax.random.key(0), (*SIZES, CLASSES))
    return problem, jnp.zeros(20_000), jax.tree.map(lambda a: jnp.tile(a, (blocks,) + (1,) * a.ndim), one)


def needed(where: str, per_step: int, batch: int, points: int, common: bool) -> float:
    """Floating-point operations of the products of a step: forward, backward, and those of the tangents.

    With W weights a row takes 2 W forward and 4 W backward, less what the first layer need not pass on. ℓ has
    f and a directional derivative of g: where y is the network, g has tangents too, which doubles it.
    """
    first, rest = SIZES[0] * SIZES[1], SIZES[1] * SIZES[2] + SIZES[2] * CLASSES
    plain = 4 * first + 6 * rest  # forward, by weights; and by inputs but for the first layer
    twice = 8 * first + 12 * rest
    rows = batch if common and where == "x" else per_step * batch
    return points * rows * (plain + (plain if where == "x" else twice))


def rate(precision: str, size: int) -> float:
    """Floating-point operations per second of a large product, in this precision."""
    left = jax.random.normal(jax.random.key(0), (size, size))

    @jax.jit
    def many(a: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return jax.lax.fori_loop(0, 16, lambda _, b: (a @ b) * (0.5 / size**0.5), a)

    jax.block_until_ready(many(left))
    return 16 * 2 * size**3 / best(lambda: jax.block_until_ready(many(left)))


def best(work: Callable[[], Any], turns: int = 3) -> float:
    """The least seconds of several calls."""
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def step_seconds(problem: Any, x0: Any, y0: Any, solver: Any, per_step: int, batch: int, steps: int) -> float:
    """Seconds per step, compiled."""
    inputs = (numbers_as_arrays(solver), problem)
    sampler = bx.Sampling(per_step, batch, initial_batch_size=0).sampler(problem, jax.random.key(0))
    state = compiled_start(*inputs, x0, y0, sampler)

    def advance() -> None:
        nonlocal state
        state, _ = compiled_chunk(inputs, state, steps)
        jax.block_until_ready(state)

    advance()
    return best(advance) / steps


def plain_seconds(rows: int, precision: str, steps: int) -> float:
    """Seconds of gradient steps of one network on random rows."""
    held = data(20_000, False)[0].rows

    @jax.jit
    def many(layers: Any, held: Any) -> Any:
        def step(turn: jax.Array, layers: Any) -> Any:
            index = (jnp.arange(rows, dtype=jnp.uint32) + turn.astype(jnp.uint32)) * jnp.uint32(2654435761)
            drawn = jax.tree.map(lambda a: a[(index >> 8) % 20_000], held)

            def total(layers: Any) -> jax.Array:
                return jnp.mean(loss(network(layers, drawn["row"]), drawn["label"]))

            return jax.tree.map(lambda a, b: a - 1e-3 * b, layers, jax.grad(total)(layers))

        with jax.default_matmul_precision(precision):
            return jax.lax.fori_loop(0, steps, step, layers)

    layers = weights(jax.random.key(0), (*SIZES, CLASSES))
    jax.block_until_ready(many(layers, held))
    return best(lambda: jax.block_until_ready(many(layers, held))) / steps


def measure(
    per_step: int,
    batch: int,
    blocks: int,
    steps: int,
    precisions: list[str],
    size: int,
    commons: bool,
    places: list[str],
) -> list[dict[str, Any]]:
    """A row for every method, place of the network and precision."""
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        with jax.default_matmul_precision(precision):
            peak = rate(precision, size)
            plain = (
                (4 * SIZES[0] * SIZES[1] + 6 * (SIZES[1] * SIZES[2] + SIZES[2] * CLASSES)) * per_step * batch
            )
            cases: list[tuple[str, Any, float]] = [
                ("plain gradient", lambda p=precision: plain_seconds(per_step * batch, p, steps), plain)
            ]
            for where, made in {"x": upper_network, "y": lower_network}.items():
                if where not in places:
                    continue
                for common in (False, True) if commons else (False,):
                    for method, (solver, points) in METHODS.items():
                        name = f"network as {where}, {method}" + (", common rows" if common else "")
                        cases.append(
                            (
                                name,
                                lambda made=made, solver=solver, common=common: step_seconds(
                                    *made(blocks, common), solver(upper_step=1e-3), per_step, batch, steps
                                ),
                                needed(where, per_step, batch, points, common),
                            )
                        )
            for name, work, operations in cases:
                row: dict[str, Any] = {"precision": precision, "what": name, "gigaflop": operations / 1e9}
                try:
                    row["microseconds"] = 1e6 * work()
                    row["share"] = operations / (1e-6 * row["microseconds"]) / peak
                except Exception as failure:
                    row["failed"] = f"{type(failure).__name__}: {failure}"[:200]
                row["peak"] = peak / 1e12
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table."""
    lines = ["| precision | what | needed GFLOP | µs | share of a large product's rate |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        head = f"| {row['precision']} ({row['peak']:.0f} TFLOP/s) | {row['what']} | {row['gigaflop']:.1f} "
        tail = row.get("failed") or f"{row['microseconds']:.0f} | {100 * row['share']:.0f}%"
        lines.append(f"{head}| {tail} |")
    return "\n".join(lines)


def csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    return {
        "precision": row["precision"],
        "teraflops of a large product": f"{row['peak']:.2f}",
        "what": row["what"],
        "gigaflop": f"{row['gigaflop']:.2f}",
        "microseconds": f"{row['microseconds']:.1f}",
        "percent": f"{100 * row['share']:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help="m")
    parser.add_argument("--per-step", type=int, default=4, help="I")
    parser.add_argument("--batch", type=int, default=256, help="B")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--precisions", nargs="+", default=["tensorfloat32", "float32"])
    parser.add_argument("--common", action="store_true", help="also with rows that all blocks share")
    parser.add_argument("--places", nargs="+", default=["x", "y"], choices=["x", "y"])
    parser.add_argument("--size", type=int, default=4096, help="width of the large product")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    sizes = options.per_step, options.batch, options.blocks, options.steps
    rows = measure(*sizes, options.precisions, options.size, options.common, options.places)
    text = markdown(rows) + f"\n\nDevice: {jax.devices()[0].device_kind}.\n"
    print(text)
    (options.out / "networks.json").write_text(json.dumps(rows, indent=2))
    (options.out / "networks.md").write_text(text)
    report.csv("networks", [csv_row(row) for row in rows if "failed" not in row])
    report.finish()


if __name__ == "__main__":
    main()
