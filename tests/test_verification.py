"""A few blocks are solved exactly at the end of a run: no wrong answer passes in silence."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import LinearMean, Quadratic

import bilevax as bx
from bilevax.testing import ridge_blocks


def lagging(weak):
    """Two blocks whose y follows x slowly in its second entry if that is weak."""
    curvature = jnp.array([1.0, weak])
    return bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lower=lambda x, y, block, batch: curvature @ (y - x) ** 2,
        blocks=jnp.array([[1.0, 1.0], [3.0, 3.0]]),
    )


@pytest.mark.parametrize("family", [Quadratic, LinearMean])
def test_a_good_answer_is_verified_without_a_warning(family):
    case = family(m=12, rows=10, d_y=3, d_x=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bx.AccuracyWarning)
        result = bx.minimize(case.problem, case.x0, case.y0, steps=1500, progress=None)
    found = result.verification
    assert found.blocks == 12
    assert found.objective < found.start
    assert found.y_error < 1e-2


def test_the_exact_values_are_those_of_the_diagnostics():
    case = Quadratic(m=5, rows=10, d_y=3, d_x=3)
    result = bx.minimize(case.problem, case.x0, case.y0, steps=20, progress=None)
    found = bx.verify(case.problem, result.state, case.x0)
    assert found.blocks == 5
    expected = [float(bx.objective(case.problem, x, case.y0)) for x in (result.state.x, case.x0)]
    np.testing.assert_allclose([found.objective, found.start], expected, rtol=1e-4)


def test_lower_variables_that_lag_behind_are_noticed():
    problem, x0 = lagging(1e-3), jnp.zeros(2)
    solver = bx.SOBA(upper_step=0.1, lower_step=0.3)
    with pytest.warns(bx.AccuracyWarning, match=r"(the objective in the history is not F|x is worse)"):
        result = bx.minimize(problem, x0, jnp.zeros((2, 2)), solver=solver, steps=500, progress=None)
    assert result.outcome is bx.Outcome.FINISHED
    assert result.verification.y_error > 0.1


def test_an_x_that_is_worse_than_the_start_is_noticed():
    problem, x0 = lagging(1e-3), jnp.array([1.5, 1.5])
    solver = bx.SOBA(upper_step=lambda t: -0.005)  # uphill
    with pytest.warns(bx.AccuracyWarning, match="x is worse than x0"):
        bx.minimize(
            problem, x0, jnp.full((2, 2), 1.5), solver=solver, steps=600, progress=None,
            stop=bx.Stop(recover=False),
        )  # fmt: skip


def test_the_message_names_what_to_try():
    case = Quadratic(m=40, rows=10, d_y=3, d_x=3)
    common = {"blocks_per_step": 2, "batch_size": 1, "progress": None, "stop": bx.Stop(verify=True)}
    solver = bx.SOBA(upper_step=0.1, lower_step=1e-3)
    with pytest.warns(bx.AccuracyWarning) as caught:
        bx.minimize(case.problem, case.x0, case.y0, solver=solver, steps=1, **common)
    message = str(caught[0].message)
    assert "the objective in the history is not F" in message
    assert (
        "try solver=bx.BlockNewton(), blocks_per_step=8 instead of 2, batch_size=4 instead of 1, steps=4 "
        "instead of 1, or" in message
    )
    assert "upper_step=0.03 instead of 0.1" in message


def test_a_block_that_cannot_be_solved_is_explained():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(y**2),
        lower=lambda x, y, block, batch: -jnp.sum((y - x) ** 2),  # has no minimum
        blocks=2,
    )
    state = bx.SOBA(upper_step=0.0, lower_step=1e-6).init(
        problem, jnp.ones(2), jnp.zeros((2, 2)), key=jax.random.key(0)
    )
    assert "g is not convex in y" in bx.verify(problem, state, jnp.ones(2)).message


def test_short_runs_are_not_verified_unless_asked():
    case = Quadratic(m=4, rows=10, d_y=3, d_x=3)

    def run(steps, verify=None):
        stop = bx.Stop(verify=verify, finish=False)
        return bx.minimize(case.problem, case.x0, case.y0, steps=steps, progress=None, stop=stop).verification

    assert run(10) is None
    assert run(500, verify=False) is None
    assert run(500) is not None
    with pytest.warns(bx.AccuracyWarning):
        assert run(1, verify=True) is not None


def test_levels_with_slots_of_their_own_are_refused():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(y) + x @ x,
        lower=bx.mean(
            lambda x, block, batch: jnp.sum(x) * jnp.ones(1),
            slots=lambda block, batch: jnp.zeros(1, jnp.int32),
            count=3,
        ),
        blocks=2,
    )
    x0, y0 = jnp.ones(2), jnp.ones(3)
    result = bx.minimize(problem, x0, y0, steps=600, solver=bx.SONG(0.01), progress=None)
    assert result.verification is None
    with pytest.raises(ValueError, match="slots of its own"):
        bx.verify(problem, result.state, x0)


@pytest.mark.parametrize("size", [6, 80])  # by a dense Hessian, and by products with it
def test_lower_problems_in_very_different_units_are_solved(size):
    units = np.geomspace(1e-3, 1e3, size).astype(np.float32)
    random = np.random.default_rng(0)
    basis = np.linalg.qr(random.normal(size=(size, size)))[0]
    matrix = (basis * np.linspace(1, 20, size)) @ basis.T
    hessian, target = (units[:, None] * matrix * units).astype(np.float32), random.normal(size=size) / units
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((units * y - x) ** 2),
        lower=lambda x, y, block, batch: (y - target) @ hessian @ (y - target) / 2 - x @ (units * y),
        blocks=2,
    )
    x = np.full(size, 0.3, np.float32)
    solver = bx.SOBA(upper_step=0.0, lower_step=1e-9)
    state = solver.init(problem, jnp.asarray(x), jnp.zeros((2, size)), key=jax.random.key(0))
    found = bx.verify(problem, state, x)
    best = units * target + np.linalg.solve(matrix, x.astype(float))
    np.testing.assert_allclose(found.objective, np.sum((best - x) ** 2), rtol=2e-3)
    assert "could not be verified" not in found.message


def test_a_wrong_multiplier_is_noticed():
    """y is right, but v never moves: x stays where it is, and nothing else shows that."""
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.array([[1.0, 1.0], [3.0, 3.0]]),
    )
    solver = bx.SOBA(upper_step=0.1, lower_step=0.3, inverse_step=0.0)
    with pytest.warns(bx.AccuracyWarning, match="x was moved along a wrong gradient"):
        result = bx.minimize(
            problem, jnp.zeros(2), jnp.zeros((2, 2)), solver=solver, steps=600, progress=None
        )
    assert result.verification.gradient_error == pytest.approx(1.0)


def test_a_start_where_the_gradient_is_zero_is_named():
    random = np.random.default_rng(0)
    rows, targets = random.normal(size=(60, 3)), random.normal(size=60)
    data = bx.Shared({"row": jnp.asarray(rows, jnp.float32), "target": jnp.asarray(targets, jnp.float32)})

    def loss(x, y, batch):  # both factors are zero at the start
        return jnp.mean((batch["row"] @ (x @ y) - batch["target"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(x, y, batch),
        lower=lambda x, y, block, batch: loss(x, y, batch) + 0.1 * y @ y,
        blocks=4,
        upper_data=data,
        lower_data=data,
    )
    with pytest.warns(bx.AccuracyWarning, match="x did not move"):
        bx.minimize(
            problem, jnp.zeros((3, 2)), jnp.zeros((4, 2)), steps=50, progress=None, stop=bx.Stop(verify=True)
        )


def test_entries_of_y_may_have_curvatures_of_any_size():
    """Strengths that x has moved far, on features in their own units: in float32 only scaling helps."""
    random = np.random.default_rng(0)
    rows = np.concatenate([random.normal(100, 10, (80, 3)), np.ones((80, 1))], 1)
    targets = rows[:, 0] - 2 * rows[:, 1] + 50 + random.normal(size=80)
    data = {"row": rows.astype(np.float32), "target": targets.astype(np.float32)}
    x = np.array([-16.0, -41.0, 77.0], np.float32)

    def error(y, batch):
        return jnp.mean((batch["row"] @ y - batch["target"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(y, batch),
        lower=lambda x, y, block, batch: error(y, batch) + jnp.exp(x) @ y[:3] ** 2,
        blocks=1,
        upper_data=bx.Shared({name: array[:40] for name, array in data.items()}),
        lower_data=bx.Shared({name: array[40:] for name, array in data.items()}),
    )
    gram = rows[40:].T @ rows[40:] / 40 + np.diag([*np.exp(x.astype(float)), 0.0])
    y = np.linalg.solve(gram, rows[40:].T @ targets[40:] / 40)
    expected = np.mean((rows[:40] @ y - targets[:40]) ** 2)
    y0 = jnp.zeros((1, 4))
    np.testing.assert_allclose(bx.objective(problem, jnp.asarray(x), y0), expected, rtol=1e-2)
    state = bx.BlockNewton().init(problem, jnp.asarray(x), y0, key=jax.random.key(0))
    np.testing.assert_allclose(bx.verify(problem, state, jnp.asarray(x)).objective, expected, rtol=1e-2)


def test_a_run_that_visited_blocks_too_rarely_to_get_anywhere_says_so():
    targets = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2) + 1.0,
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.asarray(targets) + 3.0,
    )
    with pytest.warns(bx.AccuracyWarning, match=r"still on its way.*blocks_per_step=40 instead of 10"):
        bx.minimize(
            problem, jnp.zeros(2), jnp.zeros((400, 2)), steps=500, blocks_per_step=10, progress=None,
            stop=bx.Stop(finish=False),
        )  # fmt: skip


def test_a_run_too_short_for_x_to_begin_to_move_says_so():
    case = Quadratic(m=6, rows=5, d_y=2, d_x=2)
    with pytest.warns(bx.AccuracyWarning, match=r"x has not moved yet.*30 steps.*try steps=1000 or more"):
        result = bx.minimize(case.problem, case.x0, case.y0, steps=30, progress=None)
    np.testing.assert_array_equal(result.x, case.x0)


def test_a_lower_problem_without_a_unique_solution_is_noticed():
    random = np.random.default_rng(0)
    rows, targets = random.normal(size=(2, 6, 10)), random.normal(size=(2, 6))

    def error(y, part):
        return jnp.mean((jnp.asarray(rows[part], jnp.float32) @ y - targets[part]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(y, 1),
        lower=lambda x, y, block, batch: error(y, 0) + jnp.exp(x) * jnp.sum(y[:3] ** 2),
        blocks=1,
    )
    with pytest.warns(bx.AccuracyWarning, match="g has no unique minimum in y"):
        bx.minimize(problem, jnp.zeros(()), jnp.zeros((1, 10)), steps=600, progress=None)


def chosen_steps(upper_step, steps=1500):
    case = ridge_blocks(m=20, d_x=4, d_y=4, rows=20, conditioning=3.0)
    solver = bx.SOBA(upper_step=upper_step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bx.minimize(
            case.problem, case.x0, case.y0, solver=solver, steps=steps, blocks_per_step="all", progress=None
        )
    said = [str(one.message) for one in caught if one.category is bx.AccuracyWarning]
    return (case.value(result.x) - case.least) / (case.value(case.x0) - case.least), said


@pytest.mark.parametrize("step", [3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4])
def test_a_chosen_step_that_is_too_short_is_never_silent(step):
    gap, said = chosen_steps(step)
    assert said or gap < 0.1
    if said:
        assert "still on its way" in said[0]
        assert f"upper_step={3 * step:g} instead of {step:g} (or leave it out), or steps=6000" in said[0]
        assert gap > 0.01
