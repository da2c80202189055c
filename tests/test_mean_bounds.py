"""A tracked mean stays where f is defined: within given bounds, or on the side of zero where c is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._problem.levels import on_one_side
from bilevax._problem.signs import signs

M, ROWS = 100, 50
rng = np.random.default_rng(3)
CENTRES = rng.normal(size=(M, 1, 10))
DATA = bx.PerBlock(
    (CENTRES + rng.normal(size=(M, ROWS, 10))).reshape(-1, 10).astype(np.float32), np.arange(M + 1) * ROWS
)
LEAST = np.repeat([-1.0, 0.0], 5)
METHODS = [bx.MSVR, bx.BSVRBv1, bx.BSVRBv2]


def exponential(x, block, batch):
    return jnp.mean(jnp.exp(jnp.mean((batch - x) ** 2, -1)))


def share(x, block, batch):
    return jnp.mean(jax.nn.sigmoid(0.7 * batch @ x + 3))


def run(level, upper, method=bx.MSVR, step=0.1, steps=300, **more):
    problem = bx.Problem(upper, level, M, lower_data=DATA)
    common = {"blocks_per_step": 5, "batch_size": 8, "progress": None, "key": jax.random.key(0)}
    solver = method(upper_step=step)
    return bx.minimize(problem, jnp.ones(10), solver=solver, steps=steps, **common, **more)


def log(x, y, block, batch):
    return jnp.log(y)


@pytest.mark.parametrize("method", METHODS)
def test_a_mean_under_a_log_stays_positive_without_bounds(method):
    result = run(bx.mean(exponential), log, method)
    assert result.outcome is bx.Outcome.FINISHED
    assert jnp.all(result.y > 0)
    with pytest.raises(bx.DivergedError, match="tracked mean of lower level 'lower'"):
        run(bx.mean(exponential, lower=-jnp.inf), log, method)


@pytest.mark.parametrize("method", METHODS)
def test_given_bounds_hold_at_every_step(method):
    def upper(x, y, block, batch):
        return jnp.log(1 - y)

    with pytest.raises(bx.DivergedError) as caught:
        run(bx.mean(share), upper, method, step=3.0)
    message = str(caught.value)
    assert "tracked mean of lower level 'lower'" in message
    assert "give bx.mean the bounds that f needs" in message
    outside = []
    run(
        bx.mean(share, lower=0.01, upper=0.99),
        upper,
        method,
        step=3.0,
        every=1,
        metrics={"outside": lambda problem, state: outside.append(float(jnp.ptp(state.y))) or 0.0},
    )
    assert 0 < max(outside) <= 0.98 + 1e-6


def test_bounds_may_be_trees_and_also_hold_at_the_start():
    level = bx.mean(
        lambda x, block, batch: {"a": jnp.mean(batch @ x), "b": jnp.mean(batch, 0)},
        lower={"a": 0.5, "b": LEAST},
        upper=2.0,
    )
    problem = bx.Problem(lambda x, y, block, batch: y["a"] + jnp.sum(y["b"]), level, M, lower_data=DATA)
    y0 = {"a": jnp.full(M, -7.0), "b": jnp.full((M, 10), 7.0)}
    for sampling in (bx.Sampling(5, 8), bx.Sampling(5, 8, initial_batch_size=0)):
        state = bx.MSVR(upper_step=0.1).init(
            problem, jnp.ones(10), y0, key=jax.random.key(0), sampling=sampling
        )
        np.testing.assert_array_equal(state.y["a"], 0.5)
        np.testing.assert_array_equal(state.y["b"], 2.0)
        state = bx.advance(problem, bx.MSVR(upper_step=0.1), state, 50)
        assert jnp.all(state.y["a"] >= 0.5)
        assert jnp.all(state.y["b"] >= LEAST)
        assert jnp.all(state.y["b"] <= 2.0)


def test_a_mean_that_keeps_its_sign_comes_no_nearer_to_zero_than_what_was_seen():
    y, old = jnp.array([-1.0, 0.1, 0.9, 5.0, 1.0]), jnp.array([1.0, 1.0, 1.0, 1.0, -1.0])
    now, before = jnp.array([2.0, 2.0, 2.0, 2.0, 2.0]), jnp.array([0.5, 3.0, 3.0, 3.0, 3.0])
    kept = on_one_side({"a": y}, [{"a": old}, {"a": now}, {"a": before}], {"a": 1})
    np.testing.assert_allclose(kept["a"], [0.4, 0.8, 0.9, 5.0, 1.0])
    np.testing.assert_allclose(on_one_side(-y, [-old, -now, -before], -1), -kept["a"])
    np.testing.assert_array_equal(on_one_side(y, [old, now, before], 0), y)


SIGNS = {
    "exponentials": (lambda x, b: jnp.mean(jnp.exp(b @ x)), 1),
    "squares": (lambda x, b: jnp.mean((b @ x) ** 2, 0) / 3, 1),
    "softplus": (lambda x, b: jnp.mean(jax.nn.softplus(b @ x)), 1),
    "hinge": (lambda x, b: jnp.mean(jnp.maximum(1 - b @ x, 0) ** 2), 1),
    "softmax": (lambda x, b: jnp.mean(jax.nn.softmax(b * x), 0), 1),
    "norms of rows": (lambda x, b: jnp.mean(jnp.linalg.norm(b - x, axis=-1)), 1),
    "row by row": (lambda x, b: jnp.mean(jax.vmap(lambda row: jnp.exp(row @ x))(b)), 1),
    "log-likelihoods": (lambda x, b: jnp.mean(jax.nn.log_sigmoid(b @ x)), -1),
    "minus a square": (lambda x, b: -2 * jnp.mean((b @ x) ** 2), -1),
    "linear": (lambda x, b: jnp.mean(b @ x), 0),
    "a difference of squares": (lambda x, b: jnp.mean(b**2) - jnp.sum(x**2), 0),
    "a log": (lambda x, b: jnp.mean(jnp.log(1 + jnp.exp(b @ x))), 0),
}


@pytest.mark.parametrize("kind", SIGNS)
def test_the_sign_of_a_function_is_read_off_its_program(kind):
    function, sign = SIGNS[kind]
    assert signs(function, jnp.ones(4), jnp.ones((3, 4))) == sign


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="lower must not exceed upper"):
        bx.mean(exponential, lower=1.0, upper=0.0)
    with pytest.raises(ValueError, match="lower must be a number"):
        bx.mean(exponential, lower=jnp.nan)
    with pytest.raises(ValueError, match="upper of the mean level 'lower' must be a number or a tree like"):
        run(bx.mean(exponential, upper=[1.0, 2.0]), log)
    with pytest.raises(ValueError, match="lower of the mean level 'lower' must be a number or a tree like"):
        run(bx.mean(exponential, lower={"a": 1.0}), log)
