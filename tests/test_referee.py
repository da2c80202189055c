"""A few blocks are solved during a run: where F has risen, the run goes back with a shorter upper step."""

import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import Quadratic
from test_checkpoint import same_bits
from test_verification import lagging

import bilevax as bx
from bilevax._run import referee as referee_module
from bilevax._run.chunks import work_of_a_step
from bilevax._run.referee import Referee

pytestmark = pytest.mark.filterwarnings("ignore::bilevax.RecoveryWarning", "ignore::bilevax.AccuracyWarning")
ZEROS = jnp.zeros(2), jnp.zeros((2, 2))


def run(steps=1500, upper_step=0.03, **options):
    """y follows x so slowly in its second entry that x swings farther and farther, while f stays small."""
    options = {"stop": bx.Stop(verify=True), "progress": None} | options
    solver = bx.SOBA(upper_step=upper_step, lower_step=0.3)
    return bx.minimize(lagging(3e-3), *ZEROS, solver=solver, steps=steps, **options)


def distance(result):
    return float(
        jnp.linalg.norm(result.x - 2.0)
    )  # the least F is 2 at x = (2, 2), where f is tracked to be it


def test_a_run_that_got_worse_goes_back():
    result = run()
    assert result.outcome is bx.Outcome.FINISHED
    assert {one.why for one in result.recoveries} == {"F rose"}
    assert all(one.back_to < one.step for one in result.recoveries)
    factors = [one.factor for one in result.recoveries]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == 0.25
    assert float(result.state.restraint.upper) == factors[-1]
    assert distance(result) < distance(run(stop=bx.Stop(verify=True, recover=False))) / 5
    assert list(result.history["step"]) == sorted(set(result.history["step"]))


@pytest.mark.parametrize("stop", [bx.Stop(verify=False), bx.Stop(verify=True, recover=False)])
def test_it_can_be_switched_off(stop):
    assert not any(one.why == "F rose" for one in run(stop=stop).recoveries)


def test_a_run_that_goes_well_is_left_alone():
    case = Quadratic(m=12, rows=10, d_y=3, d_x=3)
    both = [
        bx.minimize(case.problem, case.x0, case.y0, steps=900, progress=None, stop=bx.Stop(verify=verify))
        for verify in (True, False)
    ]
    assert not both[0].recoveries
    same_bits(*both)


@pytest.mark.parametrize("cut", [400, 700])
def test_a_resumed_run_has_the_same_bits(tmp_path, cut):
    whole = run(every=50)
    assert any(one.step > cut for one in whole.recoveries)
    looked = []

    def stops(problem, state):
        looked.append(int(state.step))
        if looked[-1] == cut and looked.count(cut) == 1:
            raise RuntimeError("cut")
        return 0.0

    with pytest.raises(RuntimeError, match="cut"):
        run(every=50, checkpoint=bx.Checkpoint(tmp_path, steps=50), metrics={"cut": stops})
    again = bx.Checkpoint(tmp_path, steps=50, resume=True)
    resumed = run(every=50, checkpoint=again, metrics={"cut": lambda *_: 0.0})
    same_bits(whole, resumed)
    assert resumed.recoveries == whole.recoveries


def test_a_run_may_be_resumed_with_and_without_looks(tmp_path):
    case = Quadratic(m=12, rows=10, d_y=3, d_x=3)
    common = {"every": 50, "progress": None, "checkpoint": bx.Checkpoint(tmp_path, resume=True)}
    start = case.problem, case.x0, case.y0
    bx.minimize(*start, steps=300, **common)  # too short to be looked at
    longer = bx.minimize(*start, steps=600, **common)
    assert longer.verification is not None
    assert bx.minimize(*start, steps=700, stop=bx.Stop(verify=False), **common).history["step"][-1] == 700


def test_looks_are_a_small_part_of_the_work_and_the_last_changes_nothing():
    case = Quadratic(m=12, rows=10, d_y=3, d_x=3)
    state = bx.minimize(case.problem, case.x0, case.y0, steps=10, progress=None).state
    step = work_of_a_step(case.problem, state)
    referee = Referee(case.problem, case.x0, state, step)
    assert not referee.is_due(249)
    assert not referee.has_risen(state, final=True)
    assert (referee.last, referee.values.size) == (0, 0)
    assert not referee.has_risen(state)
    assert (referee.last, referee.values.size) == (10, 12)
    exact = float(bx.objective(case.problem, state.x, case.y0))
    np.testing.assert_allclose(np.mean(referee.values), min(exact, referee.start), rtol=1e-4)
    rare = Referee(case.problem, case.x0, state, step)
    dense = Referee(case.problem, case.x0, state, 1e6 * step)
    assert [one.is_due(260) for one in (rare, dense)] == [False, True]


@pytest.mark.parametrize("method", [bx.BlockNewton, bx.BSVRBv2, bx.MMBO, bx.F2SA])
def test_an_objective_that_begins_at_zero_is_no_blow_up(method):
    """f(y0) = 0: it rises by any factor while y comes nearer to y(x0)."""
    draws = np.random.default_rng(0).normal(size=(400, 5)).astype(np.float32)
    rows = bx.PerBlock(draws, np.arange(11) * 40)
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.mean((batch @ y) ** 2),
        lambda x, y, block, batch: jnp.mean((batch @ y - 1) ** 2) + jnp.exp(x) @ y**2,
        10, rows, rows,
    )  # fmt: skip
    result = bx.minimize(
        problem, jnp.zeros(5), jnp.zeros((10, 5)), solver=method(), steps=100, progress=None,
        blocks_per_step=5, batch_size=8,
    )  # fmt: skip
    assert not result.recoveries


def test_a_run_that_was_cut_short_says_so():
    case = Quadratic(m=12, rows=10, d_y=3, d_x=3)
    state = bx.minimize(case.problem, case.x0, case.y0, steps=10, progress=None).state
    referee = Referee(case.problem, case.x0, state, work_of_a_step(case.problem, state))
    assert referee.still_falls(1000, 3.0) == ""
    referee.start, referee.seen = 10.0, [(100, 9.0), (600, 5.0), (900, 3.5)]
    said = referee.still_falls(1000, 3.0)
    assert "29% of the decrease of F came after step 600 of 1000" in said
    assert said.endswith("try steps=4000 instead of 1000")
    assert referee.still_falls(1000, 4.9) == ""


def test_lower_problems_that_cannot_be_solved_are_looked_at_as_seldom_as_others(monkeypatch):
    case, solve, looks = Quadratic(m=12, rows=10, d_y=3, d_x=3), referee_module.solve_at, []

    def unsolved(*given):
        looks.append(1)
        found = solve(*given)
        return found._replace(left=found.left + jnp.nan)

    monkeypatch.setattr(referee_module, "solve_at", unsolved)
    every = {"steps": 1000, "every": 10, "progress": None}
    bx.minimize(case.problem, case.x0, case.y0, **every)
    assert 3 <= len(looks) <= 1 + 4 + 1  # x0, after each 250 steps at the most, and at the end


def test_blocks_that_are_hard_to_solve_are_looked_at_more_seldom(monkeypatch):
    case, solve = Quadratic(m=12, rows=10, d_y=3, d_x=3), referee_module.solve_at
    state = bx.minimize(case.problem, case.x0, case.y0, steps=10, progress=None).state
    hard = lambda *given: solve(*given)._replace(steps=jnp.asarray(100_000))  # noqa: E731
    monkeypatch.setattr(referee_module, "solve_at", hard)
    referee, resumed = (
        Referee(case.problem, case.x0, state, work_of_a_step(case.problem, state)) for _ in range(2)
    )
    before = referee.pause
    referee.has_risen(state)
    assert referee.pause > 100 * before
    resumed.take(referee.notes())
    assert resumed.pause == referee.pause
