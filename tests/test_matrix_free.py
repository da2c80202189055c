"""Lower problems of many variables, solved without a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax._truth.matrix_free import USUAL, conjugate_gradients, solve_matrix_free

random = np.random.default_rng(0)
D = 100


def test_conjugate_gradients_solve_and_count():
    matrix = np.diag(np.geomspace(1, 10, D)).astype(np.float32)
    right = random.normal(size=D).astype(np.float32)
    found = conjugate_gradients(lambda v: jnp.asarray(matrix) @ v, jnp.asarray(right))
    np.testing.assert_allclose(matrix @ found.solution, right, atol=2e-2)
    assert bool(found.solved)
    assert 5 < int(found.products) < 40


def test_conjugate_gradients_end_at_negative_curvature_with_a_way_down():
    diagonal = jnp.asarray(np.concatenate([np.linspace(1, 2, D - 1), [-1.0]]), jnp.float32)
    right = jnp.asarray(random.normal(size=D), jnp.float32)
    found = conjugate_gradients(lambda v: diagonal * v, right)
    assert not bool(found.solved)
    assert float(jnp.vdot(found.solution, right)) > 0
    first = conjugate_gradients(lambda v: -v, right)
    np.testing.assert_array_equal(first.solution, right)
    assert (bool(first.solved), int(first.products)) == (False, 1)


@pytest.mark.parametrize("units", [1.0, 1e3])
def test_a_convex_problem_in_odd_units_is_solved(units):
    scales = jnp.asarray(np.where(np.arange(D) % 2, units, 1 / units), jnp.float32)
    rows = jnp.asarray(random.normal(size=(300, D)), jnp.float32)
    true = jnp.asarray(random.normal(size=D), jnp.float32)

    def value(y):
        return jnp.mean(
            jax.nn.softplus(rows @ (scales * y)) - (rows @ (scales * y)) * jax.nn.sigmoid(rows @ true)
        )

    found = solve_matrix_free(value, jnp.zeros(D))
    np.testing.assert_allclose(scales * found.y, true, atol=1e-2)
    assert float(jnp.abs(jnp.vdot(jax.grad(value)(found.y), found.move))) < 1e-7
    right = jnp.asarray(random.normal(size=D), jnp.float32) * scales
    left = jax.hessian(value)(found.y) @ found.inverse(right) - right
    assert float(jnp.linalg.norm(left / scales) / jnp.linalg.norm(right / scales)) < 0.02
    assert float(found.passes) < 3 * USUAL


def test_a_loss_that_is_convex_near_its_minimum_only_is_followed_down_to_it():
    """The sum of double wells, from near the top between them."""
    value = lambda y: jnp.sum((y**2 - 1) ** 2) / 4  # noqa: E731
    start = jnp.asarray(0.02 * random.normal(size=D), jnp.float32)
    found = solve_matrix_free(value, start)
    np.testing.assert_allclose(jnp.abs(found.y), 1.0, atol=1e-4)
    assert bool(jnp.all(jnp.isfinite(found.move)))


def test_what_has_no_minimum_is_not_solved():
    value = lambda y: jnp.sum(y[1:] ** 2) - y[0] ** 2  # noqa: E731
    assert bool(jnp.any(jnp.isnan(solve_matrix_free(value, jnp.full(D, 0.1)).move)))
