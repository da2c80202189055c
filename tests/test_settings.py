"""A result says what was chosen for its run, and the same can be asked for again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_forms import LinearMean, Quadratic

import bilevax as bx

ARGMIN, MEAN = Quadratic(m=12, rows=8, d_y=3, d_x=3), LinearMean(m=12, rows=8, d_y=3, d_x=3)
METHODS = [
    getattr(bx, name) for name in bx.solvers.__all__ if name not in ("AbstractSolver", "Recipe", "Restart")
]


def restarted(**given):
    return bx.Restart(bx.BSVRBv2(**given), first=20, stages=2)


def run(case=ARGMIN, **given):
    plan = {} if "sampling" in given else {"blocks_per_step": 3, "batch_size": 2}
    return bx.minimize(case.problem, case.x0, case.y0, progress=None, **plan, **({"steps": 60} | given))


def case_of(method):
    return MEAN if method in (bx.MSVR, bx.SONG) else ARGMIN


def lines(result):
    return {line.name: (line.value, line.chosen) for line in result.settings.lines}


def same_bits(one, other):
    pairs = zip(jax.tree.leaves((one.x, one.y)), jax.tree.leaves((other.x, other.y)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("method", [*METHODS, restarted])
def test_settings_given_back_are_settled_and_give_the_same_bits(method):
    first = run(case_of(method), solver=method(upper_step=0.05))
    again = run(case_of(method), **first.settings.arguments())
    assert eqx.tree_equal(again.settings.solver, first.settings.solver)
    assert again.settings.sampling == first.settings.sampling
    third = run(case_of(method), **again.settings.arguments())
    assert same_bits(third, again)
    left_out = {name for name, (value, _) in lines(again).items() if value == "left out"}
    as_y = {"inverse_step", "solver.inverse_step"}
    no_value = {"radius", "solver.radius", "initial_batch_size", "seed"}  # left out, they are not used
    assert left_out <= no_value | as_y


@pytest.mark.parametrize("method", [bx.BSVRBv1, bx.BlockPAGE, bx.RSVRB])
def test_settings_reproduce_a_run_in_which_nothing_is_estimated_anew(method):
    given = {"upper_step": 0.05, "lower_step": 0.1} | ({"floor": 0.5} if hasattr(method, "floor") else {})
    first = run(solver=method(**given))
    again = run(**first.settings.arguments())
    np.testing.assert_allclose(again.x, first.x, atol=1e-5)
    np.testing.assert_allclose(again.y, first.y, atol=1e-5)


@pytest.mark.parametrize("case", [ARGMIN, MEAN])
def test_settings_reproduce_a_run_with_nothing_given(case):
    first = run(case, steps=400)
    assert lines(first)["solver"] == ("BlockNewton", "automatic")
    assert lines(first)["alpha"][0].startswith("min(0.3, 3/√visits), now 0.2")
    assert float(jnp.max(jnp.abs(first.x - case.x0))) > 0
    assert same_bits(run(case, **first.settings.arguments()), first)


def test_the_table_says_what_was_chosen_and_by_whom():
    result = run(solver=bx.SOBA(upper_step=0.1, lower_step=lambda step: 0.2), key=jax.random.key(7))
    assert str(result.settings) == "\n".join(
        [
            "solver              SOBA               given",
            "upper_step          0.1                given",
            "lower_step          <lambda>, now 0.2  given",
            "inverse_step        0.2                automatic",
            "radius              left out           default",
            "blocks_per_step     3 of 12            given",
            "batch_size          2                  given",
            "shuffle             True               default",
            "initial_batch_size  left out           default",
            "strata              1                  automatic",
            "key                 [0, 7]             given",
            "steps               60                 given",
        ]
    )
    assert repr(result.settings) == str(result.settings)


def test_the_estimated_curvature_and_the_steps_from_it_are_shown():
    found = run(solver=bx.BSVRBv2(), steps=400)
    known = found.state.smoothness["lower"]
    assert lines(found)["curvature"] == (f"{float(known.bound):.4g}", "automatic")
    steps = found.settings.solver.lower_step
    assert steps.step == pytest.approx(2 / (3 * float(known.value)) * 3 / 12, rel=1e-6)
    np.testing.assert_array_equal(steps.scales, known.scales)
    text = f"{steps.step:.4g} · scales of {known.scales.min():.3g} to {known.scales.max():.3g}"
    assert lines(found)["lower_step"] == (text, "automatic")
    scale = float(found.state.optimizer.scale)
    assert scale > 0
    assert lines(found)["upper_step"] == (f"automatic_step(), r = {scale:.4g}", "automatic")


def test_the_solver_inside_a_restart_is_filled_in_for_its_first_stage():
    found = run(solver=bx.Restart(bx.BSVRBv2(upper_step=optax.adam(1e-3)), first=20, stages=3))
    named = lines(found)
    assert named["solver"] == ("Restart(BSVRBv2)", "given")
    assert named["first"] == ("20", "given")
    assert named["solver.upper_step"] == ("optax transformation", "given")
    assert named["solver.alpha"] == ("0.1", "default")
    assert named["solver.alpha_bar"] == ("0.1", "automatic")
    assert found.settings.solver.solver.gamma == pytest.approx(9 / (3 * 0.9) + 0.9)


def test_levels_have_lines_of_their_own_and_keep_what_was_given():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y["near"] - block) ** 2) + jnp.sum(y["mean"] ** 2),
        lower={
            "near": lambda x, y, block, batch: jnp.sum((y - x) ** 2),
            "mean": bx.mean(lambda x, block, batch: x * block),
        },
        blocks=jnp.arange(8.0).reshape(4, 2),
    )
    y0 = {"near": jnp.zeros((4, 2)), "mean": None}
    solver = bx.BSVRBv2(0.01, alpha_bar={"near": 0.5}, gamma={"mean": 1.0})
    given = {"steps": 20, "progress": None}
    first = bx.minimize(problem, jnp.ones(2), y0, solver=solver, blocks_per_step=2, **given)
    found, named = first.settings.solver, lines(first)
    assert found.alpha_bar == {"near": 0.5, "mean": pytest.approx(0.1)}
    assert named["alpha_bar[near]"] == ("0.5", "given")
    assert named["alpha_bar[mean]"] == ("0.1", "automatic")
    assert found.gamma["mean"] == 1.0
    assert set(found.lower_step) == {"near"}
    assert named["curvature[near]"] == ("2", "automatic")
    again = bx.minimize(problem, jnp.ones(2), y0, **first.settings.arguments(), progress=None)
    assert eqx.tree_equal(again.settings.solver, found)


class Still(bx.AbstractSolver):
    """A solver of a user's own: another one, slower."""

    inside: bx.AbstractSolver
    size: float = 2.0
    how: object = eqx.field(static=True, default=max)
    missing: float | None = None

    def start(self, problem, x0, y0, sampler):
        return self.inside.start(problem, x0, y0, sampler)

    def step(self, problem, state, stage=0):
        return self.inside.step(problem, state, stage)


def test_a_solver_of_ones_own_reports_its_fields():
    found = run(solver=Still(bx.SOBA(upper_step=0.1)))
    named = lines(found)
    assert named["solver"] == ("Still(SOBA)", "given")
    assert named["inside.lower_step"][1] == "automatic"
    assert named["size"] == ("2", "default")
    assert named["how"] == ("max", "default")
    assert named["missing"] == ("left out", "default")
    assert same_bits(run(**found.settings.arguments()), run(**found.settings.arguments()))


def test_settings_under_a_mesh_are_those_without_one():
    alone = run(solver=bx.BSVRBv2(upper_step=0.05))
    together = run(solver=bx.BSVRBv2(upper_step=0.05), mesh=jax.make_mesh((1,), ("blocks",)))
    assert str(together.settings) == str(alone.settings)
    strata = run(solver=bx.SOBA(0.1), sampling=bx.Sampling(4, 2, strata=2), steps=5)
    assert strata.settings.sampling == bx.Sampling(4, 2, strata=2)


def test_settings_after_a_resume_are_those_of_one_run(tmp_path):
    whole = run(solver=bx.BSVRBv2())
    run(solver=bx.BSVRBv2(), steps=30, checkpoint=tmp_path / "run")
    resumed = run(solver=bx.BSVRBv2(), checkpoint=bx.Checkpoint(tmp_path / "run", resume=True))
    assert str(resumed.settings) == str(whole.settings)


def test_steps_that_were_left_out_are_those_that_were_taken():
    stop = bx.Stop(patience=2, watch="always", verify=False)
    found = run(steps=None, stop=stop, metrics={"always": lambda *_: 1.0})
    assert found.settings.steps == int(found.state.step) == 300
    assert lines(found)["steps"] == ("300", "automatic")


def test_a_run_that_diverged_has_settings_that_can_be_given():
    found = run(solver=bx.BSVRBv2(upper_step=1e30), stop=bx.Stop(throw=False, recover=False))
    assert found.outcome is bx.Outcome.DIVERGED
    values = jax.tree.leaves(found.settings.solver)
    assert np.isfinite([value for value in values if isinstance(value, float)]).all()
    assert lines(found)["upper_step"] == ("1e+30", "given")
