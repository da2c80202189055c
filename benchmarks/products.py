"""Products of drawn rows with a few vectors per block, in several forms: right, and how fast.

`python -m benchmarks.products` does what a large step does with its rows, and nothing else: I blocks draw B
rows of the upper and of the lower data, and multiply them with the vectors of both points, or the
transposed rows with coefficients. Every form is compared with float64 first. µs for both data sets, rows
drawn anew in every turn; a loop that does nothing else takes some of them.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem import row_kernels
from bilevax.experiments.report import Report, command_line

VECTORS = 2  # both points
KINDS = ("bits", "floats", "bytes")
INTERPRET = False
TURN = 32


class Form(NamedTuple):
    """Two functions of (stored rows, index (I, B), …): (I, k, d) → (I, k, B), and (I, k, B) → (I, k, d)."""

    forward: Callable[..., Array]
    transposed: Callable[..., Array]


# ---- data


def stored_rows(kind: str, count: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as they are stored, and in float64."""
    rng = np.random.default_rng(seed)
    if kind == "floats":
        rows = rng.normal(size=(count, width)).astype(np.float32)
        return rows, rows.astype(np.float64)
    if kind == "bytes":
        rows = rng.integers(-100, 100, (count, width)).astype(np.int8)
        return rows, rows.astype(np.float64)
    rows = (rng.random((count, width)) < 0.113).astype(np.uint32)
    padded = np.pad(rows, ((0, 0), (0, -width % 32))).reshape(count, -1, 32)
    words = (padded << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return words, rows.astype(np.float64)


def unpacked(stored: Array, index: Array, width: int, dtype: Any, barrier: bool) -> Array:
    """The drawn rows (I, B, d)."""
    rows = stored.at[index].get(mode="promise_in_bounds")
    if stored.dtype != jnp.uint32:
        return rows.astype(dtype)
    rows = jax.lax.optimization_barrier(rows) if barrier else rows
    bits = (rows[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.astype(jnp.int32).astype(dtype).reshape((*rows.shape[:-1], -1))[..., :width]


# ---- forms in XLA


def sums(width: int, barrier: bool = True) -> Form:
    """As `bx.dot` is now."""

    def forward(stored: Array, index: Array, vectors: Array) -> Array:
        rows = unpacked(stored, index, width, jnp.float32, barrier)
        return jnp.sum(rows[:, None] * vectors[:, :, None], axis=-1)

    def transposed(stored: Array, index: Array, coefficients: Array) -> Array:
        rows = unpacked(stored, index, width, jnp.float32, barrier)
        return jnp.sum(rows[:, None] * coefficients[..., None], axis=2)

    return Form(forward, transposed)


def kept(form: Form) -> Form:
    """A form whose results are not merged with what reads them."""

    def of(function: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *given: jax.lax.optimization_barrier(function(*given))

    return Form(of(form.forward), of(form.transposed))


def products(width: int, precision: Any, kept: bool, barrier: bool = True) -> Form:
    """Batched matrix products in float32."""

    def rows_of(stored: Array, index: Array) -> Array:
        rows = unpacked(stored, index, width, jnp.float32, barrier)
        return jax.lax.optimization_barrier(rows) if kept else rows

    def forward(stored: Array, index: Array, vectors: Array) -> Array:
        return jnp.einsum("ibd,ikd->ikb", rows_of(stored, index), vectors, precision=precision)

    def transposed(stored: Array, index: Array, coefficients: Array) -> Array:
        return jnp.einsum("ibd,ikb->ikd", rows_of(stored, index), coefficients, precision=precision)

    return Form(forward, transposed)


def split(array: Array, parts: int = 3) -> list[Array]:
    """bfloat16 parts whose sum is the array."""
    out = []
    for _ in range(parts):
        # Not the cast back and forth itself, which the compiler may take for the identity.
        part = jax.lax.reduce_precision(array, 8, 7)
        out.append(part.astype(jnp.bfloat16))
        array = array - part
    return out


def narrow(width: int, kept: bool, barrier: bool = True, padded: bool = False) -> Form:
    """Rows exact in bfloat16, vectors in three parts: one product with 3k columns."""
    wide = width + (-width % 32 if padded else 0)

    def rows_of(stored: Array, index: Array) -> Array:
        rows = unpacked(stored, index, wide, jnp.bfloat16, barrier)
        return jax.lax.optimization_barrier(rows) if kept else rows

    def summed(parts: Array, k: int) -> Array:
        return parts[:, :k] + (parts[:, k : 2 * k] + parts[:, 2 * k :])

    def forward(stored: Array, index: Array, vectors: Array) -> Array:
        parts = jnp.concatenate(split(vectors), 1)
        parts = jnp.pad(parts, ((0, 0), (0, 0), (0, wide - width)))
        out = jnp.einsum("ibd,ikd->ikb", rows_of(stored, index), parts, preferred_element_type=jnp.float32)
        return summed(out, vectors.shape[1])

    def transposed(stored: Array, index: Array, coefficients: Array) -> Array:
        parts = jnp.concatenate(split(coefficients), 1)
        out = jnp.einsum("ibd,ikb->ikd", rows_of(stored, index), parts, preferred_element_type=jnp.float32)
        return summed(out, coefficients.shape[1])[..., :width]

    return Form(forward, transposed)


# ---- the library's kernels


def kernels(width: int, tiling: row_kernels.Tiling, unroll: int, fallback: Form) -> Form:
    """As `bx.dot` on an NVIDIA GPU."""

    def forward(stored: Array, index: Array, vectors: Array) -> Array:
        if stored.dtype != jnp.uint32:
            return fallback.forward(stored, index, vectors)
        drawn = row_kernels.Drawn(stored, index, width)
        return row_kernels.packed_kernel(drawn, vectors, tiling, INTERPRET, unroll)

    def transposed(stored: Array, index: Array, coefficients: Array) -> Array:
        drawn = row_kernels.Drawn(stored, index, width)
        return row_kernels.transposed_kernel(drawn, coefficients, tiling, INTERPRET)

    return Form(forward, transposed)


def forms(kind: str, width: int) -> dict[str, Form]:
    """All forms for a kind of rows."""
    plain = sums(width)
    out = {"sums": plain, "sums, kept": kept(plain)}
    for rows, warps, unroll, parts, together in (
        (256, 4, 32, 16, 4),
        (512, 4, 32, 16, 8),
        (128, 4, 32, 32, 4),
        (256, 2, 8, 32, 8),
        (256, 8, 32, 8, 4),
        (512, 4, 8, 64, 4),
    ):
        tiling = row_kernels.Tiling(rows, warps, parts, together)
        name = f"kernels, {rows} rows, {warps} warps, {unroll} bits; {parts} parts, {together} rows"
        out[name] = kernels(width, tiling, unroll, kept(plain))
    if kind == "bits":
        out["bf16 in 3 parts"] = narrow(width, False, padded=True)
    elif kind == "bytes":
        out["bf16 in 3 parts"] = narrow(width, False)
    else:
        out["tf32 x 3"] = products(width, jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, False)
    return out


# ---- right, and how fast


def error(form: Form, kind: str, blocks: int, batch: int, width: int) -> tuple[float, float]:
    """The relative errors of both directions against float64."""
    rng = np.random.default_rng(7)
    stored, exact = stored_rows(kind, 5000, width, 1)
    index = rng.integers(0, 5000, (blocks, batch)).astype(np.int32)
    k = VECTORS
    vectors = rng.normal(size=(blocks, k, width)).astype(np.float32)
    coefficients = rng.normal(size=(blocks, k, batch)).astype(np.float32)
    drawn = exact[index]
    wanted = np.einsum("ibd,ikd->ikb", drawn, vectors), np.einsum("ibd,ikb->ikd", drawn, coefficients)

    @jax.jit
    def both(stored: Array, index: Array, vectors: Array, coefficients: Array) -> tuple[Array, Array]:
        return form.forward(stored, index, vectors), form.transposed(stored, index, coefficients)

    found = both(stored, index, vectors, coefficients)
    return tuple(  # pyright: ignore[reportReturnType]
        float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for a, b in zip(found, wanted, strict=True)
    )


def drawn(turn: Array, blocks: int, batch: int, count: int, salt: int) -> Array:
    """Hashed row numbers."""
    number = jnp.arange(blocks * batch, dtype=jnp.uint32).reshape(blocks, batch)
    bits = (number + turn.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(salt)) * jnp.uint32(
        0x85EBCA6B
    )
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0xC2B2AE35)
    return ((bits ^ (bits >> 13)) % jnp.uint32(count)).astype(jnp.int32)


def seconds(
    form: Form, kind: str, blocks: int, batch: int, width: int, counts: tuple[int, int], least: float
) -> dict[str, float]:
    """Seconds per turn of each direction and of both, and those of compilation."""
    stored = [jnp.asarray(stored_rows(kind, count, width, seed)[0]) for seed, count in enumerate(counts)]
    found: dict[str, float] = {"compile": 0.0}
    columns = np.arange(batch) % width

    def one(what: str, rows: Array, index: Array, vectors: Array) -> Array:
        """New vectors, from the product or products in question."""
        if what == "transposed":
            return form.transposed(rows, index, jnp.tanh(vectors[:, :, columns]))
        scores = form.forward(rows, index, vectors)
        if what == "both":
            return form.transposed(rows, index, jnp.tanh(scores))
        return jnp.zeros_like(vectors).at[:, :, columns].add(scores)

    for what in ("forward", "transposed", "both"):

        def run(stored: Any, carry: Any, turns: Array, what: str = what) -> Any:
            def body(turn: Array, carry: Any) -> Any:
                return [
                    0.9 * vectors
                    + 1e-3 * one(what, rows, drawn(turn, blocks, batch, counts[place], place), vectors)
                    for place, (rows, vectors) in enumerate(zip(stored, carry, strict=True))
                ]

            def many(number: Array, carry: Any) -> Any:
                return jax.lax.fori_loop(0, TURN, lambda i, c: body(number * TURN + i, c), carry)

            return jax.lax.fori_loop(0, turns, many, carry)

        carry = [jnp.full((blocks, VECTORS, width), 0.1) for _ in counts]
        program = jax.jit(run)
        began = time.perf_counter()
        jax.block_until_ready(program(stored, carry, 1))
        found["compile"] += time.perf_counter() - began
        turns = 2
        while (taken := timed(program, stored, carry, turns)) < least:
            turns *= 2
        taken = min(taken, *(timed(program, stored, carry, turns) for _ in range(3)))
        found[what] = taken / (turns * TURN)
    return found


def timed(program: Any, *given: Any) -> float:
    """The seconds of a call."""
    began = time.perf_counter()
    jax.block_until_ready(program(*given))
    return time.perf_counter() - began


def csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table: µs, and the errors of both directions."""
    micro = {what: f"{1e6 * row[what]:.2f}" for what in ("forward", "transposed", "both")}
    errors = (f"{one:.2e}" for one in row["errors"])
    head = {"rows": row["kind"], "form": row["form"], "vectors": VECTORS}
    return head | micro | dict(zip(("forward error", "transposed error"), errors, strict=True))


def main() -> None:
    global INTERPRET
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, default=123)
    parser.add_argument("--only", default="", help="forms whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.02, help="least time of a measurement")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds in all")
    parser.add_argument("--interpret", action="store_true", help="kernels by Pallas's interpreter")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    INTERPRET, began, rows = options.interpret, time.perf_counter(), []
    report = Report(options.out, command_line(options))
    for kind in options.kinds:
        for name, form in forms(kind, options.width).items():
            if options.only not in name:
                continue
            row: dict[str, Any] = {"kind": kind, "form": name}
            rows.append(row)
            if time.perf_counter() - began > options.budget:
                row["failed"] = "no time left"
                continue
            try:
                row["errors"] = error(form, kind, 3, options.batch, options.width)
                sizes = options.blocks, options.batch, options.width, (4540, 18156)
                row |= seconds(form, kind, *sizes, options.seconds)
            except Exception as failure:
                row["failed"] = f"{type(failure).__name__}: {failure}"[:160].replace("\n", " ")
                (options.out / f"products_{len(rows)}.txt").write_text(traceback.format_exc()[-6000:])
            print(row, flush=True)
            (options.out / "products.json").write_text(json.dumps(rows, indent=2))
    lines = ["| rows | form | forward µs | transposed µs | both µs | compile s | errors |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        head = f"| {row['kind']} | {row['form']} "
        if "failed" in row:
            lines.append(head + f"| {row['failed'][:60]} | | | | |")
        else:
            errors = ", ".join(f"{one:.1e}" for one in row["errors"])
            micro = " | ".join(f"{1e6 * row[what]:.1f}" for what in ("forward", "transposed", "both"))
            lines.append(head + f"| {micro} | {row['compile']:.1f} | {errors} |")
    text = "\n".join(lines) + f"\n\nDevice: {jax.devices()[0].device_kind}, JAX {jax.__version__}.\n"
    print(text)
    (options.out / "products.md").write_text(text)
    report.csv("products", [csv_row(row) for row in rows if "failed" not in row])
    report.finish()


if __name__ == "__main__":
    main()
