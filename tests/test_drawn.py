"""Products with drawn rows: the kernels, and how a product finds out where its rows come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._problem import bits, row_kernels
from bilevax._problem.bits import CompactRows
from bilevax._problem.row_kernels import Drawn, Tiling

SMALL = Tiling(rows=8, warps=1, parts=2, together=2)
KINDS = ("bits", "bytes", "floats")


def make_rows(kind, count=40, width=37):
    rng = np.random.default_rng(0)
    made = {
        "bits": rng.random((count, width)) < 0.3,
        "bytes": rng.integers(-100, 100, (count, width)),
        "floats": rng.normal(size=(count, width)),
    }
    return made[kind].astype(np.float32)


@pytest.fixture
def accelerator(monkeypatch):
    """As on an accelerator, where few rows already count as many."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(row_kernels, "MANY", 1)
    monkeypatch.setattr(row_kernels, "TILING", SMALL)
    monkeypatch.setattr(bits, "LARGE", 1)


def case(kind, blocks=3, batch=16, vectors=2):
    rng = np.random.default_rng(1)
    rows = make_rows(kind)
    index = rng.integers(0, len(rows), (blocks, batch)).astype(np.int32)
    return (
        rows,
        index,
        rng.normal(size=(blocks, vectors, rows.shape[1])).astype(np.float32),
        rng.normal(size=(blocks, vectors, batch)).astype(np.float32),
    )


def assert_close(found, wanted):
    error = np.linalg.norm(np.asarray(found, float) - wanted) / np.linalg.norm(wanted)
    assert error < 3e-7


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_have_the_precision_of_float32(kind, monkeypatch):
    monkeypatch.setattr(bits, "LARGE", 1)
    rows, index, vectors, coefficients = case(kind)
    drawn = Drawn(CompactRows(rows).stored, jnp.asarray(index), rows.shape[1])
    assert drawn.stored.dtype == {"bits": np.uint32, "bytes": np.int8, "floats": np.float32}[kind]
    exact = rows[index].astype(float)
    forward, transposed = (
        np.einsum("ibd,ikd->ikb", exact, vectors),
        np.einsum("ibd,ikb->ikd", exact, coefficients),
    )
    assert_close(row_kernels.plain(drawn, vectors), forward)
    assert_close(row_kernels.plain_transposed(drawn, coefficients), transposed)
    assert_close(row_kernels.transposed_kernel(drawn, coefficients, SMALL, interpret=True), transposed)
    if kind == "bits":
        assert_close(row_kernels.packed_kernel(drawn, vectors, SMALL, interpret=True), forward)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_what_an_nvidia_gpu_runs(kind, monkeypatch):
    monkeypatch.setattr(bits, "LARGE", 1)
    rows, index, vectors, coefficients = case(kind, batch=1024)
    stored = CompactRows(rows).stored

    def both(stored, index, vectors, coefficients):
        drawn = Drawn(stored, index, rows.shape[1])
        return row_kernels.forward(drawn, vectors), row_kernels.transposed(drawn, coefficients)

    traced = jax.jit(both).trace(stored, index, vectors, coefficients)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == (2 if kind == "bits" else 1)


def gradients(stored, index, y, v):
    """What a step asks for: ∂ℓ/∂y and ∂ℓ/∂v of all blocks, at two points at once."""
    rows = stored.take(index)

    def one(rows, y, v):
        def g(y):
            return jnp.mean(jax.nn.softplus(bx.dot(rows, y)))

        return g(y) - jax.jvp(g, (y,), (v,))[1]

    def total(y, v):
        return jnp.sum(jax.vmap(one)(rows, y, v))

    return jax.vmap(jax.grad(total, argnums=(0, 1)))(y, v)


def points(vectors):
    vectors = 0.01 * vectors  # rows of bytes are large
    return np.stack([vectors[:, 0], vectors[:, 1]]), np.stack([vectors[:, 1], vectors[:, 0]])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_blocks_are_products_with_drawn_rows(kind, accelerator, monkeypatch):
    rows, index, vectors, _ = case(kind)
    stored = CompactRows(rows)
    found = jax.jit(gradients)(stored, index, *points(vectors))
    program = str(jax.make_jaxpr(gradients)(stored, index, *points(vectors)))
    assert program.count(" product_with_drawn_rows") == 3  # of y for the value and its derivative, and of v
    assert program.count("transposed_product_with_drawn_rows") == 3
    assert "product_with_rows" not in program
    monkeypatch.undo()
    wanted = gradients(CompactRows(rows), index, *points(vectors))
    for mine, plain in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)


def test_few_rows_are_summed(accelerator, monkeypatch):
    rows, index, vectors, _ = case("bits")
    monkeypatch.setattr(row_kernels, "MANY", index.size + 1)
    program = str(
        jax.make_jaxpr(lambda *given: gradients(*given))(CompactRows(rows), index, *points(vectors))
    )
    assert "drawn_rows" not in program
    assert "product_with_rows" not in program


def test_rows_that_were_changed_have_no_origin(accelerator):
    rows, index, vectors, _ = case("floats")

    def changed(index, y):
        return jax.vmap(bx.dot)(2 * CompactRows(rows).take(index), y)

    assert "drawn_rows" not in str(jax.make_jaxpr(changed)(index, vectors[:, 0]))
    wanted = np.einsum("ibd,id->ib", 2.0 * rows[index], vectors[:, 0])
    assert_close(changed(index, vectors[:, 0]), wanted)


@pytest.mark.parametrize("both", [False, True])
def test_runs_side_by_side_are_more_blocks(both, accelerator):
    rows, index, vectors, _ = case("bits")
    runs = np.stack([index, index[::-1], index])
    y = np.stack([vectors, 2 * vectors, -vectors])[:, :, 0]

    def of_run(index, y):
        return jax.vmap(bx.dot)(CompactRows(rows).take(index), y)

    given = (runs, y if both else y[0])
    function = jax.vmap(of_run, in_axes=(0, 0 if both else None))
    assert " product_with_drawn_rows" in str(jax.make_jaxpr(function)(*given))
    wanted = np.einsum("ribd,rid->rib" if both else "ribd,id->rib", rows[runs].astype(float), given[1])
    assert_close(function(*given), wanted)


def test_stored_rows_of_several_runs_and_their_gradients(accelerator):
    rows, index, vectors, _ = case("floats")
    several = jnp.stack([rows, 2 * rows])

    def total(rows, y):
        packed = CompactRows(rows)
        return jnp.sum(jnp.tanh(jax.vmap(bx.dot)(packed.take(index), y)))

    def plain(rows, y):
        return jnp.sum(jnp.tanh(jnp.einsum("ibd,id->ib", rows[index], y)))

    y = vectors[:, 0]
    for of in (
        lambda f: jax.vmap(f, (0, None))(several, y),
        lambda f: jax.vmap(jax.grad(f, 1), (0, None))(several, y),
    ):
        np.testing.assert_allclose(of(total), of(plain), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        jax.jvp(lambda rows: total(rows, y), (jnp.asarray(rows),), (jnp.ones_like(rows),))[1],
        jax.jvp(lambda rows: plain(rows, y), (jnp.asarray(rows),), (jnp.ones_like(rows),))[1],
        rtol=1e-4,
    )


def test_origins_are_forgotten_with_the_rows(accelerator):
    from bilevax._problem.drawn import _noted

    before = len(_noted)
    rows, index, _, _ = case("bits")
    taken = CompactRows(rows).take(jnp.asarray(index))
    assert len(_noted) == before + 1
    del taken
    assert len(_noted) == before
