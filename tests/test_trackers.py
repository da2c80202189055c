"""Eigenvalues are raised where they are too low, and nothing is decomposed where they are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._step.linear_algebra import (
    flatten_slots,
    positive_part,
    raise_eigenvalues,
    run_if,
    solve,
    unflatten_slots,
)

FLOOR = 0.5


def symmetric(*eigenvalues, seed=0):
    """One symmetric matrix per row of eigenvalues."""
    rng = np.random.default_rng(seed)
    values = np.asarray(eigenvalues, float)
    bases = np.linalg.qr(rng.normal(size=(*values.shape, values.shape[-1])))[0]
    return np.einsum("mij,mj,mkj->mik", bases, values, bases)


def clipped(matrices, floor):
    """S_λ in NumPy: the eigenvalues of the symmetrised matrices, at least `floor`."""
    values, vectors = np.linalg.eigh((matrices + matrices.transpose(0, 2, 1)) / 2)
    return np.einsum("mij,mj,mkj->mik", vectors, np.maximum(values, floor), vectors)


MIXED = symmetric([1, 2, 3], [0.1, 2, 3], [0.6, 0.7, 5], [-4, 0.2, 0.3], [-3, -2, -1], [0.51, 0.51, 0.51])
LOW = 3  # of these have an eigenvalue below the floor
HIGH = symmetric([1, 2, 3], [0.6, 0.7, 100], [0.501, 1, 1])

raised = jax.jit(raise_eigenvalues)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("skewed", [False, True])
def test_eigenvalues_below_the_floor_are_raised_to_it(skewed):
    noise = np.random.default_rng(1).normal(size=MIXED.shape)
    matrices = MIXED + (noise - noise.transpose(0, 2, 1)) * skewed
    found, count = raised(matrices, FLOOR)
    np.testing.assert_allclose(found, clipped(matrices, FLOOR), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found, np.swapaxes(found, 1, 2))
    assert np.linalg.eigvalsh(found).min() > FLOOR - 1e-12
    assert (int(count), count.dtype, found.dtype) == (LOW, np.int32, np.float64)


def test_eigenvalues_are_raised_in_float32():
    found, count = raised(MIXED.astype(np.float32), FLOOR)
    np.testing.assert_allclose(found, clipped(MIXED, FLOOR), rtol=0, atol=1e-5)
    assert (int(count), found.dtype) == (LOW, np.float32)


@pytest.mark.usefixtures("x64")
def test_matrices_above_the_floor_are_only_symmetrised():
    found, count = raised(HIGH, FLOOR)
    np.testing.assert_array_equal(found, (HIGH + HIGH.transpose(0, 2, 1)) / 2)
    assert int(count) == 0


@pytest.mark.usefixtures("x64")
def test_the_floor_may_be_traced_and_differ():
    counts = [int(raised(MIXED, floor)[1]) for floor in (1e-3, 0.5, 0.55, 10.0)]
    assert counts == [2, 3, 4, 6]


@pytest.mark.usefixtures("x64")
def test_numbers_are_raised_without_a_decomposition():
    numbers = np.array([0.2, 0.5, 0.7, -1.0]).reshape(4, 1, 1)
    found, count = raised(numbers, FLOOR)
    np.testing.assert_array_equal(np.ravel(found), [0.5, 0.5, 0.7, 0.5])
    assert int(count) == 2
    assert "eigh" not in names(jax.make_jaxpr(raise_eigenvalues)(numbers, FLOOR).jaxpr)


@pytest.mark.usefixtures("x64")
def test_vmapped_matrices_are_raised_as_single_ones_are():
    many = np.stack([MIXED, MIXED[::-1], np.broadcast_to(HIGH[:1], MIXED.shape)])
    found, counts = jax.jit(jax.vmap(raise_eigenvalues, (0, None)))(many, FLOOR)
    for one, matrices in zip(found, many, strict=True):
        np.testing.assert_allclose(one, clipped(matrices, FLOOR), rtol=0, atol=1e-12)
    assert counts.tolist() == [LOW, LOW, 0]


def test_a_matrix_that_is_not_finite_stays_so_and_harms_no_other():
    broken = MIXED.astype(np.float32)
    broken[1, 0, 0] = np.nan
    found, count = raised(broken, FLOOR)
    assert np.isnan(found[1]).any()
    np.testing.assert_allclose(np.delete(found, 1, 0), np.delete(clipped(MIXED, FLOOR), 1, 0), atol=1e-5)
    assert int(count) == LOW


# --- what runs when -------------------------------------------------------------------


def names(jaxpr, inside_loops=True):
    """The primitives of a program, with those of its loops or without them."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name == "while" and not inside_loops:
            continue
        for part in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                found |= names(part, inside_loops)
    return found


@pytest.mark.parametrize("batch", [False, True])
def test_decompositions_happen_inside_a_loop_over_low_matrices_only(batch):
    """A loop of no passes decomposes nothing, also under vmap, where both branches of a cond would run."""
    function, matrices = raise_eigenvalues, MIXED.astype(np.float32)
    if batch:
        function, matrices = jax.vmap(raise_eigenvalues, (0, None)), matrices[None]
    jaxpr = jax.make_jaxpr(function)(matrices, FLOOR).jaxpr
    assert "eigh" in names(jaxpr)
    assert "eigh" not in names(jaxpr, inside_loops=False)
    assert "cholesky" in names(jaxpr, inside_loops=False)


def problem(least):
    """Lower problems whose Hessians have `least` as their least eigenvalue, on every row."""
    curvature = jnp.asarray(symmetric(*[[least, 1, 2]] * 4), jnp.float32)
    return bx.Problem(
        lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        lambda x, y, block, batch: 0.5 * y @ block @ y - y @ x,
        curvature,
    )


@pytest.mark.parametrize("method", [bx.BSVRBv1, bx.KSONG, bx.RSVRB])
def test_a_method_decomposes_none_while_its_hessians_are_above_the_floor(method):
    solver = method(0.01, lower_step=0.1, floor=FLOOR)

    @jax.jit
    def decomposed(problem):
        state = solver.init(problem, jnp.ones(3), jnp.ones((4, 3)), key=jax.random.key(0), blocks_per_step=2)
        return jax.lax.scan(lambda state, _: solver.step(problem, state), state, length=20)[1].decomposed

    assert decomposed(problem(least=0.9)).sum() == 0
    assert decomposed(problem(least=0.2)).sum() > 0

    state = jax.eval_shape(
        lambda: solver.init(
            problem(0.9), jnp.ones(3), jnp.ones((4, 3)), key=jax.random.key(0), blocks_per_step=2
        )
    )
    jaxpr = jax.make_jaxpr(solver.step)(problem(0.9), state).jaxpr
    assert "eigh" in names(jaxpr)
    assert "eigh" not in names(jaxpr, inside_loops=False)


# --- solving and flattening -------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sides", [1, 2])
def test_systems_are_solved(sides):
    matrices = symmetric([1, 2, 3], [0.01, 1, 100])
    right = np.random.default_rng(0).normal(size=(2, 3, sides))
    np.testing.assert_allclose(jax.jit(solve)(matrices, right), np.linalg.solve(matrices, right), rtol=1e-10)


def test_systems_of_one_unknown_are_divisions():
    matrices, right = np.array([[[2.0]], [[4.0]]]), np.array([[[1.0, 2.0]], [[3.0, 8.0]]])
    np.testing.assert_array_equal(solve(matrices, right), [[[0.5, 1]], [[0.75, 2]]])
    assert "cholesky" not in names(jax.make_jaxpr(solve)(matrices, right).jaxpr)


def test_the_slots_of_a_tree_are_flattened_and_back():
    tree = {"a": jnp.arange(12.0).reshape(3, 2, 2), "b": (jnp.arange(3.0),)}
    flat = flatten_slots(tree)
    np.testing.assert_array_equal(flat[1], [4, 5, 6, 7, 1])
    back = unflatten_slots(flat, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


@pytest.mark.parametrize("condition", [True, False])
def test_run_if_runs_if(condition):
    one = jax.jit(lambda condition, x: run_if(condition, lambda: x + 1, x))
    assert float(one(condition, 2.0)) == (3.0 if condition else 2.0)


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 4e-6), (np.float64, 1e-14)])
def test_the_positive_part_is_had_by_products_alone(dtype, error):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        steep = np.geomspace(1e-9, 1, 30)
        for spectrum in (np.linspace(-1, 1, 30), steep, -steep, np.zeros(30)):
            basis = np.linalg.qr(rng.normal(size=(30, 30)))[0]
            whole = 7.0 * (basis * spectrum) @ basis.T
            expected = 7.0 * (basis * np.maximum(spectrum, 0)) @ basis.T
            found = np.asarray(positive_part(jnp.asarray(whole, dtype)[None])[0], float)
            np.testing.assert_allclose(found, expected, atol=error * np.linalg.norm(whole))
            assert np.linalg.eigvalsh(found).min() >= -1e-7 * error


def test_eigenvalues_are_raised_by_products_as_by_decomposition(monkeypatch):
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(5, 12, 12)).astype(np.float32)
    matrices = jnp.asarray(noise + noise.swapaxes(1, 2)) + 3 * jnp.eye(12)
    matrices = matrices.at[0].set(jnp.eye(12))
    decomposed, counted = raise_eigenvalues(matrices, jnp.asarray(0.5))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    multiplied, also = raise_eigenvalues(matrices, jnp.asarray(0.5))
    assert int(counted) == int(also) > 0
    np.testing.assert_allclose(multiplied, decomposed, atol=1e-4)
    np.testing.assert_array_equal(multiplied[0], matrices[0])


def test_reflected_eigenvalues_are_as_far_above_the_floor_as_they_were_below():
    random = np.random.default_rng(0)
    vectors = np.linalg.qr(random.normal(size=(3, 3)))[0]
    matrix = (vectors * [-2.0, 0.1, 3.0]) @ vectors.T
    expected = (vectors * [3.0, 0.9, 3.0]) @ vectors.T
    found, count = raise_eigenvalues(jnp.asarray(matrix)[None], 0.5, reflected=True)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    assert int(count) == 1
    small, _ = raise_eigenvalues(jnp.array([[[-2.0]]]), 0.5, reflected=True)
    np.testing.assert_allclose(small, [[[3.0]]])
