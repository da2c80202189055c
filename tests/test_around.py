"""Variables stored as offsets from a(x): the same problem, the same words, and y follows x at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevax as bx

pytestmark = pytest.mark.usefixtures("steps_alone")

M, D = 12, 3
rng = np.random.default_rng(5)
ROWS = bx.PerBlock(
    {
        "row": rng.normal(size=(M * 6, D)).astype(np.float32),
        "y": rng.normal(size=M * 6).astype(np.float32),
    },
    np.arange(M + 1) * 6,
)
X0 = jnp.asarray(rng.normal(size=D), jnp.float32)
Y0 = jnp.asarray(rng.normal(size=(M, D)), jnp.float32)
METHODS = [
    bx.BSVRBv2(upper_step=0.05),
    bx.BSVRBv1(upper_step=0.05),
    bx.SOBA(upper_step=0.05),
    bx.KSONG(upper_step=optax.adam(0.01)),
    bx.F2SA(upper_step=0.01),
    bx.RSVRB(upper_step=0.01),
    bx.BlockPAGE(upper_step=0.05),
    bx.BlockSAGA(upper_step=0.05),
]
NAMES = [type(one).__name__ for one in METHODS]


def centre(x):
    return 2 * x + 1


def upper(x, y, block, batch):
    return jnp.mean((batch["row"] @ y - batch["y"]) ** 2) + 0.1 * x @ x


def lower(x, y, block, batch):
    return jnp.mean((batch["row"] @ y - batch["y"]) ** 2) + 0.5 * jnp.sum((y - jnp.sin(x)) ** 2)


def shifted(function):
    return lambda x, y, block, batch: function(x, centre(x) + y, block, batch)


PLAIN = bx.Problem(upper, lower, M, ROWS, ROWS)
AROUND = bx.Problem(upper, bx.argmin(lower, around=centre), M, ROWS, ROWS)
BY_HAND = bx.Problem(shifted(upper), shifted(lower), M, ROWS, ROWS)


def run(problem, solver, y0, steps=40, **more):
    common = {"blocks_per_step": 4, "batch_size": 3, "progress": None, "key": jax.random.key(1)}
    return bx.minimize(problem, X0, y0, solver=solver, steps=steps, **common, **more)


@pytest.mark.parametrize("solver", METHODS, ids=NAMES)
def test_a_run_is_that_of_the_problem_rewritten_by_hand(solver):
    ours, by_hand = run(AROUND, solver, Y0), run(BY_HAND, solver, Y0 - centre(X0))
    np.testing.assert_allclose(ours.x, by_hand.x, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(ours.y, by_hand.y + centre(ours.state.x), rtol=2e-4, atol=1e-4)
    for name in ("objective", "gradient_norm", "lower_residual"):
        np.testing.assert_allclose(ours.history[name], by_hand.history[name], rtol=5e-3)


def test_a_state_starts_at_y0_and_its_y_follows_x_at_once():
    state = bx.BSVRBv2(upper_step=0.1).init(AROUND, X0, Y0, key=jax.random.key(0), batch_size=3)
    np.testing.assert_allclose(state.y, Y0, atol=1e-6)
    moved = dataclasses.replace(state, x=state.x + 1)
    np.testing.assert_allclose(moved.y, Y0 + 2, atol=1e-6)


def test_the_truth_is_that_of_the_problem_without_a_centre():
    for look in (bx.objective, bx.hypergradient, bx.solve_lower, bx.value_and_hypergradient):
        ours, plain = look(AROUND, X0, Y0), look(PLAIN, X0, Y0)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), ours, plain)


def test_the_gradient_by_x_contains_the_way_through_the_centre():
    """One deterministic step from the exact y and v: z is ∇F by the closed form of a quadratic."""
    problem = bx.Problem(
        lambda x, y, block, batch: 0.5 * jnp.sum((y - block) ** 2),
        bx.argmin(lambda x, y, block, batch: jnp.sum((y - 3 * x) ** 2), around=lambda x: x),
        Y0,
    )
    solver = bx.BSVRBv1(upper_step=0.1)  # y_i = 3 x, ∇F = 3 (3 x − mean of the blocks)
    state = solver.init(problem, X0, jnp.broadcast_to(3 * X0, (M, D)), key=jax.random.key(0))
    np.testing.assert_allclose(state.z, 3 * (3 * X0 - Y0.mean(0)), rtol=1e-4)
    assert float(bx.residuals(problem, state).y) < 1e-5


def test_residuals_of_a_run_are_those_of_its_y():
    result = run(AROUND, bx.BSVRBv2(upper_step=0.02), Y0, steps=400)
    found = bx.residuals(AROUND, result.state)
    truth = bx.solve_lower(PLAIN, result.state.x, Y0)
    assert float(found.y) == pytest.approx(float(jnp.linalg.norm(result.y - truth)) / M**0.5, rel=1e-3)


def test_a_sweep_and_a_checkpoint_speak_of_y(tmp_path):
    found = bx.sweep(
        AROUND,
        X0,
        Y0,
        solver=bx.BSVRBv2,
        settings=bx.grid(upper_step=[0.01, 0.05]),
        steps=40,
        blocks_per_step=4,
        batch_size=3,
        keys=jax.random.split(jax.random.key(0), 2),
        progress=None,
    )
    assert found.y.shape == (2, 2, M, D)
    whole = run(AROUND, bx.BSVRBv2(upper_step=0.05), Y0)
    run(AROUND, bx.BSVRBv2(upper_step=0.05), Y0, steps=20, checkpoint=tmp_path / "run")
    resumed = run(
        AROUND, bx.BSVRBv2(upper_step=0.05), Y0, checkpoint=bx.Checkpoint(tmp_path / "run", resume=True)
    )
    np.testing.assert_array_equal(resumed.y, whole.y)


def test_y_of_a_state_that_came_out_of_a_vmap_is_centred_run_by_run():
    solver = bx.BSVRBv2(upper_step=0.05)
    keys = jax.random.split(jax.random.key(0), 3)
    states = jax.vmap(lambda key: solver.init(AROUND, X0, Y0, key=key, batch_size=3))(keys)
    assert states.y.shape == (3, M, D)
    np.testing.assert_allclose(states.y[1], Y0, atol=1e-6)


def test_trees_and_several_levels_can_be_centred():
    levels = {
        "near": bx.argmin(
            lambda x, y, block, batch: jnp.sum((y["w"] - x["w"]) ** 2) + (y["b"] - 1) ** 2,
            around=lambda x: {"w": x["w"], "b": jnp.zeros(())},
        ),
        "mean": bx.mean(lambda x, block, batch: x["w"] * block),
    }
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y["near"]["w"] - 1) ** 2) + y["near"]["b"] + jnp.sum(y["mean"]),
        levels,
        jnp.arange(4.0),
    )
    x0, y0 = {"w": jnp.ones(2)}, {"near": {"w": jnp.zeros((4, 2)), "b": jnp.zeros(4)}, "mean": None}
    state = bx.BSVRBv2(upper_step=0.1).init(problem, x0, y0, key=jax.random.key(0))
    np.testing.assert_allclose(state.y["near"]["w"], 0, atol=1e-6)
    np.testing.assert_allclose(state.y["mean"][2], 2.0)
    state = bx.advance(problem, bx.BSVRBv2(upper_step=0.0, lower_step=0.1), state, 200)
    np.testing.assert_allclose(state.y["near"]["w"], 1, atol=1e-4)


def test_a_centre_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="around of the lower level 'lower' must return what y is"):
        run(bx.Problem(upper, bx.argmin(lower, around=lambda x: x[:2]), M, ROWS, ROWS), METHODS[0], Y0)
    with pytest.raises(TypeError, match="around must be a function of x"):
        bx.argmin(lower, around=X0)


class Forgetful(bx.BSVRBv2):
    """A method whose state does not say that it holds offsets."""

    def start(self, problem, x0, y0, sampler):
        return dataclasses.replace(super().start(problem, x0, y0, sampler), centres=())


def test_a_method_that_knows_nothing_of_offsets_is_refused():
    with pytest.raises(TypeError, match="Forgetful cannot store y as offsets"):
        run(AROUND, Forgetful(upper_step=0.1), Y0)
