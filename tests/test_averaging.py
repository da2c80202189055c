"""An upper step that keeps an average of x: against a loop in NumPy, through runs, restarts, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import grouped

import bilevax as bx
from bilevax._step.averaging import average_of

PLAN = {"blocks_per_step": 2, "batch_size": 3, "progress": None}


def problem():
    rows = bx.PerBlock(jax.random.normal(jax.random.key(3), (30, 2)), np.arange(0, 31, 5))
    return bx.Problem(
        upper=lambda x, y, block, batch: jnp.mean((batch @ y["w"] - 1.0) ** 2) + jnp.sum(x["a"] ** 2),
        lower={
            "w": bx.argmin(
                lambda x, y, block, batch: jnp.mean((batch @ y - block) ** 2) + jnp.sum((y - x["a"]) ** 2)
            )
        },
        blocks=jnp.arange(6.0),
        upper_data=rows,
        lower_data=rows,
    )


def run(upper_step, steps=40, solver=bx.BSVRBv2, restart=None, **options):
    made = solver(upper_step=upper_step)
    made = made if restart is None else bx.Restart(made, first=restart, stages=2)
    x0, y0 = {"a": jnp.ones(2)}, {"w": jnp.zeros((6, 2))}
    return bx.minimize(
        problem(), x0, y0, solver=made, steps=steps, key=jax.random.key(0), **grouped(**(PLAN | options))
    )


def iterates(upper_step, steps, **options):
    """x before every step."""
    seen = [np.ones(2)]

    def keep(problem, state):
        seen.append(np.asarray(state.x["a"], np.float64))
        return 0.0

    run(upper_step, steps, metrics={"seen": keep}, every=1, **options)
    return seen[:steps]


def naive_average(xs, window):
    mean = np.zeros_like(xs[0])
    for place, x in enumerate(xs):
        share = max(1 / window, 1 / (1 + place / 10))
        mean = (1 - share) * mean + share * x
    return mean


@pytest.mark.parametrize("restart", [None, 5])
@pytest.mark.parametrize("window", [1, 1.5, 100])
def test_the_average_is_that_of_a_loop(window, restart):
    xs = iterates(optax.adam(0.05), 25, restart=restart)
    found = run(bx.averaged(optax.adam(0.05), window), 25, restart=restart)
    np.testing.assert_allclose(found.x["a"], naive_average(xs, window), rtol=1e-5)


def test_the_steps_are_the_same_with_and_without():
    plain, found = run(optax.adam(0.05)), run(bx.averaged(optax.adam(0.05), 10))
    # Two programs, which may round differently.
    np.testing.assert_allclose(plain.x["a"], found.state.x["a"], rtol=1e-5)
    np.testing.assert_allclose(plain.y["w"], found.y["w"], rtol=1e-4, atol=1e-5)
    assert np.abs(plain.x["a"] - found.x["a"]).max() > 1e-4
    np.testing.assert_array_equal(found.x["a"], found.state.average["a"])
    np.testing.assert_array_equal(plain.x["a"], plain.state.average["a"])


def test_before_the_first_step_the_average_is_x():
    np.testing.assert_array_equal(run(bx.averaged(optax.adam(0.05), 10), 0).x["a"], 1.0)


def test_an_average_is_closer_than_the_iterates_of_a_noisy_run():
    noise = jax.random.normal(jax.random.key(1), (400, 64))  # the slope of x²/2, in 64 runs of 400 steps

    def go(step, x):
        state = step.init(x)
        for one in noise:
            updates, state = step.update(x + one, state, x)
            x = x + updates
        return np.asarray(x), np.asarray(state.average)

    x, average = go(bx.averaged(optax.sgd(0.3), 40), jnp.ones(64))
    # Iterates have the variance η/(2 − η) = .18; their average over the window about 1/(2 · 40) = .012.
    assert np.mean(x**2) == pytest.approx(0.18, rel=0.4)
    assert np.mean(average**2) == pytest.approx(0.0125, rel=0.4)


def test_the_best_iterate_is_an_average():
    seen = {}

    def measure(problem, state):
        seen[int(state.step)] = np.asarray(state.average["a"])
        return float(jnp.sum(state.average["a"] ** 2))

    options = {"metrics": {"size": measure}, "watch": "size", "patience": 100, "every": 5}
    result = run(bx.averaged(optax.adam(0.05), 8), **options)
    np.testing.assert_array_equal(result.best.x["a"], seen[result.best.step])


def test_a_run_that_was_stopped_goes_on_with_its_average(tmp_path):
    step = bx.averaged(optax.adam(0.05), 30)
    whole = run(step, 30)
    run(step, 12, checkpoint=tmp_path)
    found = run(step, 30, checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(found.x["a"], whole.x["a"])


def test_half_precision_is_averaged_in_single():
    x = jnp.ones((), jnp.bfloat16)
    step = bx.averaged(optax.sgd(0.0), 1000)
    state = step.init(x)
    for place in range(400):  # 1 and 1 + 2⁻⁷ in turn: nothing between them is a bfloat16
        _, state = step.update(jnp.zeros_like(x), state, x + (place % 2) * 2.0**-7)
    assert state.average.dtype == jnp.float32
    assert float(state.average) == pytest.approx(1 + 2.0**-8, abs=1e-4)
    assert average_of(state, x).dtype == jnp.bfloat16


@pytest.mark.parametrize("chain", [False, True])
def test_an_average_is_found_in_a_chain(chain):
    step = bx.averaged(optax.adam(0.05), 10)
    found = run(optax.chain(optax.clip(1e9), step) if chain else step)
    assert np.abs(found.x["a"] - found.state.x["a"]).max() > 1e-4
    np.testing.assert_array_equal(found.x["a"], run(step).x["a"])


def test_a_sweep_returns_averages():
    key = jax.random.key(0)
    x0, y0 = {"a": jnp.ones(2)}, {"w": jnp.zeros((6, 2))}
    plan = {key: value for key, value in PLAN.items() if key != "progress"}

    def make(rate):
        return bx.BSVRBv2(upper_step=bx.averaged(optax.adam(rate), 10))

    found = bx.sweep(
        problem(),
        x0,
        y0,
        solver=make,
        settings=bx.grid(rate=[0.05]),
        steps=40,
        keys=key[None],
        progress=None,
        **plan,
    )
    np.testing.assert_allclose(found.x["a"][0, 0], run(bx.averaged(optax.adam(0.05), 10)).x["a"], rtol=1e-5)


def test_a_checkpoint_of_other_numbers_inside_of_an_average_is_refused(tmp_path):
    def step(rate):
        return bx.averaged(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)), 10)

    run(step(1e-3), 5, checkpoint=tmp_path)
    with pytest.raises(bx.CheckpointError, match="belongs to another run"):
        run(step(5e-3), 10, checkpoint=tmp_path, resume=True)


def test_runs_side_by_side_have_windows_of_their_own():
    def average(window):
        step = bx.averaged(optax.sgd(0.1), window)
        x, state = jnp.ones(2), step.init(jnp.ones(2))
        for _ in range(200):
            updates, state = step.update(x, state, x)
            x = x + updates
        return state.average

    found = jax.vmap(average)(jnp.array([1.0, 15.0]))
    assert float(found[1, 0]) > 10 * float(found[0, 0])


def test_bad_arguments():
    with pytest.raises(TypeError, match="upper_step must be an optax transformation, got float"):
        bx.averaged(0.1, 10)
    with pytest.raises(ValueError, match="window must lie in"):
        bx.averaged(optax.adam(0.1), 0.5)
    with pytest.raises(TypeError, match="window must be a number, got function"):
        bx.averaged(optax.adam(0.1), lambda step: 5.0)
    with pytest.raises(TypeError, match=r"window must be a number, got shape \(2,\)"):
        bx.averaged(optax.adam(0.1), np.ones(2))
    step = bx.averaged(optax.sgd(0.1), 10)
    with pytest.raises(ValueError, match="averaged needs params"):
        step.update(jnp.ones(2), step.init(jnp.ones(2)))
