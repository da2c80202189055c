"""Products of drawn rows with a few vectors per block, in several forms: right, and how fast.

`python -m benchmarks.products` is what a large step does with its rows and nothing else: I blocks draw B rows of
the upper and of the lower data, multiply them with the vectors of both points (y; y and v), and multiply the
transposed rows with as many coefficients. Every form is compared with float64 first. µs for both data sets,
forward and transposed, rows drawn anew in every turn.
"""

from __future__ import annotations

import argparse
import functools
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
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu = None

VECTORS = (2, 4)  # of the upper and of the lower data: y at both points; y and v at both
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


# ---- forms in Pallas


def _load(ref: Any, place: Any, mask: Any = None, other: Any = 0) -> Array:
    if INTERPRET:
        value = ref[place]
        return value if mask is None else jnp.where(mask, value, jnp.asarray(other, value.dtype))
    return plgpu.load(ref.at[place], mask=mask, other=other if mask is not None else None)


def _tile(stored: Any, index: Array, width: int, wide: int) -> Array:
    """Drawn rows (R, wide) inside a kernel: bfloat16 from bits and bytes, else float32; zeros beyond `width`."""
    column = jnp.arange(wide)
    if stored.dtype == jnp.uint32:
        words = _load(stored, (index[:, None], jnp.broadcast_to(column // 32, (1, wide))))
        bits = (words >> (column % 32).astype(jnp.uint32)[None, :]) & 1
        return bits.astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
    inside = jnp.broadcast_to((column < width)[None, :], (index.shape[0], wide))
    # Within bounds even where the mask hides what is read: the interpreter has no masked loads.
    place = jnp.minimum(column, width - 1)[None, :] if INTERPRET else column[None, :]
    rows = _load(stored, (index[:, None], place), inside)
    return rows.astype(jnp.float32).astype(jnp.bfloat16) if stored.dtype == jnp.int8 else rows


def _in_parts(array: Array) -> list[Array]:
    out = []
    for _ in range(3):
        part = array.astype(jnp.bfloat16)
        out.append(part)
        array = array - part.astype(jnp.float32)
    return out


def _multiply(rows: Array, matrix: Array, trans: bool) -> Array:
    """rows (or their transposed) times a float32 matrix, with the precision of float32."""
    numbers = (((0 if trans else 1,), (0,)), ((), ()))
    dot = functools.partial(
        jax.lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32
    )
    if rows.dtype == jnp.bfloat16:
        high, middle, low = (dot(rows, part) for part in _in_parts(matrix))
        return high + (middle + low)
    (a, b, c), (p, q, r) = _in_parts(rows), _in_parts(matrix)
    return dot(a, p) + ((dot(a, q) + dot(b, p)) + (dot(b, q) + dot(a, r) + dot(c, p)))


def kernels(width: int, tile: int, warps: int, splits: int, stages: int = 2, fma: bool = False) -> Form:
    """One kernel per direction that draws the rows itself; on the tensor cores, or (`fma`) in registers."""
    wide = max(32, 1 << (width - 1).bit_length())
    # The tensor cores need 16 columns.
    columns_of = (lambda k: k) if fma else (lambda k: max(16, k))

    def call(kernel: Any, grid: Any, shape: Any, *arguments: Any) -> Array:
        options = {} if INTERPRET else {"compiler_params": plgpu.CompilerParams(warps, stages)}
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        return pl.pallas_call(kernel, grid=grid, out_shape=out, interpret=INTERPRET, **options)(*arguments)

    def store(ref: Any, place: Any, value: Array, mask: Array, k: int) -> None:
        if INTERPRET:  # which has no masked stores
            for j in range(k):
                ref[(*place[:-2], j, place[-1][:, 0])] = value[:, j]
        else:
            plgpu.store(ref.at[place], value, mask=mask)

    def forward(stored: Array, index: Array, vectors: Array) -> Array:
        blocks, k = vectors.shape[:2]
        batch = index.shape[1]
        columns = columns_of(k)

        def kernel(stored: Any, index: Any, vectors: Any, out: Any) -> None:
            block, first = pl.program_id(0), pl.program_id(1) * tile
            place = first + jnp.arange(tile)
            rows = _tile(stored, index[block, pl.ds(first, tile)], width, wide)
            entry = jnp.arange(wide)
            if fma:
                for j in range(k):
                    at = jnp.minimum(entry, width - 1) if INTERPRET else entry
                    vector = _load(vectors, (block, j, at), entry < width)
                    total = jnp.sum(rows.astype(jnp.float32) * vector[None, :], axis=1)
                    out[block, j, pl.ds(first, tile)] = total
                return
            column = jnp.arange(columns)
            mask = (entry < width)[:, None] & (column < k)[None, :]
            at = (block, jnp.minimum(column, k - 1)[None, :], jnp.minimum(entry, width - 1)[:, None])
            found = _multiply(rows, _load(vectors, at, mask), False)
            mask = jnp.broadcast_to((column < k)[None, :], (tile, columns))
            store(out, (block, jnp.minimum(column, k - 1)[None, :], place[:, None]), found, mask, k)

        return call(kernel, (blocks, batch // tile), (blocks, k, batch), stored, index, vectors)

    def transposed(stored: Array, index: Array, coefficients: Array) -> Array:
        blocks, k, batch = coefficients.shape
        columns, turns = columns_of(k), batch // (tile * splits)

        def kernel(stored: Any, index: Any, coefficients: Any, out: Any) -> None:
            block, part = pl.program_id(0), pl.program_id(1)
            column, entry = jnp.arange(columns), jnp.arange(wide)

            def turn(number: Any, total: Any) -> Any:
                first = (part * turns + number) * tile
                rows = _tile(stored, index[block, pl.ds(first, tile)], width, wide)
                if fma:
                    wide_rows = rows.astype(jnp.float32)
                    return tuple(
                        one + wide_rows * coefficients[block, j, pl.ds(first, tile)][:, None]
                        for j, one in enumerate(total)
                    )
                mask = jnp.broadcast_to((column < k)[None, :], (tile, columns))
                at = (block, jnp.minimum(column, k - 1)[None, :], (first + jnp.arange(tile))[:, None])
                return total + _multiply(rows, _load(coefficients, at, mask), True)

            if fma:
                zero = tuple(jnp.zeros((tile, wide), jnp.float32) for _ in range(k))
                for j, one in enumerate(jax.lax.fori_loop(0, turns, turn, zero)):
                    out[block, part, j, :] = jnp.sum(one, axis=0)
                return
            total = jax.lax.fori_loop(0, turns, turn, jnp.zeros((wide, columns), jnp.float32))
            mask = jnp.broadcast_to((column < k)[None, :], (wide, columns))
            store(out, (block, part, jnp.minimum(column, k - 1)[None, :], entry[:, None]), total, mask, k)

        out = call(kernel, (blocks, splits), (blocks, splits, k, wide), stored, index, coefficients)
        return jnp.sum(out, axis=1)[..., :width]

    return Form(forward, transposed)


def forms(kind: str, width: int) -> dict[str, Form]:
    """All forms for a kind of rows."""
    preset, highest = jax.lax.DotAlgorithmPreset, jax.lax.Precision.HIGHEST
    out = {"sums, as bx.dot": sums(width)}
    if INTERPRET or plgpu is not None:
        for tile, warps, splits in ((128, 4, 1), (64, 4, 4)):
            out[f"tensor-core kernel {tile}/{warps}/{splits}"] = kernels(width, tile, warps, splits)
        for tile, warps, splits in ((16, 4, 4), (32, 8, 4)):
            out[f"register kernel {tile}/{warps}/{splits}"] = kernels(width, tile, warps, splits, fma=True)
    if kind != "floats":
        out["bf16 in 3 parts, rows kept"] = narrow(width, True)
        out["bf16 in 3 parts"] = narrow(width, False)
    if kind == "bits":
        out["bf16 in 3 parts, rows kept, padded"] = narrow(width, True, padded=True)
        out["bf16 in 3 parts, padded"] = narrow(width, False, padded=True)
    if kind != "bytes":
        out["float32 product, rows kept"] = products(width, highest, True)
        out["bf16 x 6, rows kept"] = products(width, preset.BF16_BF16_F32_X6, True)
        out["tf32 x 3, rows kept"] = products(width, preset.TF32_TF32_F32_X3, True)
        out["float32 product"] = products(width, highest, False)
    if INTERPRET or plgpu is not None:
        for tile, warps, splits in ((64, 4, 2), (32, 4, 4), (128, 8, 2)):
            out[f"tensor-core kernel {tile}/{warps}/{splits}"] = kernels(width, tile, warps, splits)
        out["register kernel 8/2/8"] = kernels(width, 8, 2, 8, fma=True)
    return out


# ---- right, and how fast


def error(form: Form, kind: str, blocks: int, batch: int, width: int) -> tuple[float, float]:
    """The relative errors of both directions against float64."""
    rng = np.random.default_rng(7)
    stored, exact = stored_rows(kind, 5000, width, 1)
    index = rng.integers(0, 5000, (blocks, batch)).astype(np.int32)
    k = VECTORS[1]
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
) -> tuple[float, float]:
    """Seconds per turn, and those of compilation."""
    stored = [jnp.asarray(stored_rows(kind, count, width, seed)[0]) for seed, count in enumerate(counts)]

    def body(turn: Array, carry: Any) -> Any:
        out = []
        for place, (rows, vectors) in enumerate(zip(stored_here, carry, strict=True)):
            index = drawn(turn, blocks, batch, counts[place], place)
            scores = form.forward(rows, index, vectors)
            slopes = form.transposed(rows, index, jnp.tanh(scores))
            out.append(0.9 * vectors + 1e-3 * slopes)
        return out

    stored_here: list[Array] = []

    @jax.jit
    def run(stored: Any, carry: Any, turns: Array) -> Any:
        stored_here[:] = stored

        def many(number: Array, carry: Any) -> Any:
            return jax.lax.fori_loop(0, TURN, lambda i, c: body(number * TURN + i, c), carry)

        return jax.lax.fori_loop(0, turns, many, carry)

    carry = [jnp.ones((blocks, k, width)) * 0.1 for k in VECTORS]
    began = time.perf_counter()
    jax.block_until_ready(run(stored, carry, 1))
    compiling, turns = time.perf_counter() - began, 4
    while True:
        began = time.perf_counter()
        jax.block_until_ready(run(stored, carry, turns))
        if (taken := time.perf_counter() - began) > least:
            break
        turns *= 2
    times = [taken]
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(run(stored, carry, turns))
        times.append(time.perf_counter() - began)
    return min(times) / (turns * TURN), compiling


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
    options.out.mkdir(parents=True, exist_ok=True)
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
                row["seconds"], row["compile"] = seconds(form, kind, *sizes, options.seconds)
            except Exception as failure:
                row["failed"] = f"{type(failure).__name__}: {failure}"[:160].replace("\n", " ")
                (options.out / f"products_{len(rows)}.txt").write_text(traceback.format_exc()[-6000:])
            print(row, flush=True)
            (options.out / "products.json").write_text(json.dumps(rows, indent=2))
    lines = ["| rows | form | µs | compile s | errors |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        head = f"| {row['kind']} | {row['form']} "
        if "failed" in row:
            lines.append(head + f"| {row['failed'][:60]} | | |")
        else:
            errors = ", ".join(f"{one:.1e}" for one in row["errors"])
            lines.append(head + f"| {1e6 * row['seconds']:.1f} | {row['compile']:.1f} | {errors} |")
    text = "\n".join(lines) + f"\n\nDevice: {jax.devices()[0].device_kind}, JAX {jax.__version__}.\n"
    print(text)
    (options.out / "products.md").write_text(text)


if __name__ == "__main__":
    main()
