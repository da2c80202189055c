"""An upper step that keeps x in a box: against projected gradient descent on an exact ∇F, and bad bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevax as bx
import bilevax.testing

BOX = (-0.2, 0.3)


@pytest.fixture(scope="module")
def family():
    return bilevax.testing.quadratic_blocks(m=4, d_x=3, d_y=3, rows=4, noise=0.0)


def run(family, upper_step, restart=False):
    solver = bx.SOBA(upper_step=upper_step)
    solver = bx.Restart(solver, first=100, stages=2) if restart else solver
    return bx.minimize(
        family.problem,
        family.x0,
        family.y0,
        solver=solver,
        steps=300,
        blocks_per_step="all",
        batch_size="all",
        key=jax.random.key(0),
        progress=None,
        every=1,
        metrics={"least": lambda _, state: jnp.min(state.x), "most": lambda _, state: jnp.max(state.x)},
    )


@pytest.mark.parametrize("upper_step", [0.3, optax.adam(0.02)], ids=["plain", "adam"])
def test_a_run_stays_in_the_box_and_ends_where_projected_descent_does(family, upper_step):
    exact = np.clip(np.asarray(family.x0, float), *BOX)
    for _ in range(2000):
        exact = np.clip(exact - 0.3 * family.gradient(exact), *BOX)
    assert np.linalg.norm(exact - family.solution) > 0.1  # the box matters
    found = run(family, bx.bounded(upper_step, *BOX))
    np.testing.assert_allclose(found.x, exact, atol=2e-3)
    assert found.history["least"][1:].min() >= BOX[0] - 1e-6
    assert found.history["most"][1:].max() <= BOX[1] + 1e-6


def test_the_stages_of_a_restart_stay_in_the_box(family):
    found = run(family, bx.bounded(0.3, upper=0.1), restart=True)
    assert found.history["most"][1:].max() <= 0.1 + 1e-6


def test_bounds_may_differ_between_entries_and_leave_a_wide_box_without_effect():
    x, z = (
        {"a": jnp.array([0.0, 1.0]), "b": jnp.array(2.0)},
        {"a": jnp.array([1.0, -4.0]), "b": jnp.array(3.0)},
    )
    step = bx.bounded(0.5, lower={"a": np.array([-0.2, -9.0]), "b": 1.0}, upper=2.5)
    update, _ = step.update(z, step.init(x), x)
    np.testing.assert_allclose(x["a"] + update["a"], [-0.2, 2.5], rtol=1e-6)
    np.testing.assert_allclose(x["b"] + update["b"], 1.0)
    wide, plain = bx.bounded(optax.adam(0.1), -9.0, 9.0), optax.adam(0.1)
    found = [one.update(z, one.init(x), x)[0] for one in (wide, plain)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0.1,), ValueError, "lower or upper must be given"),
        ((0.1, 2.0, 1.0), ValueError, "lower must not exceed upper"),
        ((0.1, float("nan")), ValueError, "lower must be a number or a tree of arrays without nan"),
        ((None, 0.0), TypeError, "upper_step must be a number or an optax transformation"),
        ((lambda step: 0.1, 0.0), TypeError, "write a schedule as optax.sgd"),
    ],
)
def test_bad_bounds_and_steps_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        bx.bounded(*arguments)


def test_bounds_of_two_structures_that_cross_are_named():
    step = bx.bounded(0.1, lower=0.0, upper={"a": np.array([1.0, -1.0])})
    with pytest.raises(ValueError, match=r"bounded: lower must not exceed upper, got lower = 0.0 and upper"):
        step.init({"a": jnp.zeros(2)})


def test_a_bound_of_another_shape_is_named(family):
    with pytest.raises(ValueError, match=r"upper of bounded must be a number or fit x of shapes \[\(3,\)\]"):
        run(family, bx.bounded(0.1, upper=np.zeros(2)))
