"""What is said of the answer that is returned, after exact steps or without them."""

import os
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._run import ending
from bilevax._run.chunks import work_of_a_step
from bilevax._run.descent import Search
from bilevax._run.finish import Kept
from bilevax._run.work import whole_work_of_a_step
from bilevax.testing import quadratic_blocks

CASE = quadratic_blocks(m=6, d_x=3, d_y=3, rows=10)


def run(**options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bx.minimize(CASE.problem, CASE.x0, CASE.y0, steps=500, progress=None, **options)
    return result, [str(one.message) for one in caught if one.category is bx.AccuracyWarning]


def test_a_doubt_about_the_history_is_no_doubt_about_what_exact_steps_have_found(monkeypatch):
    def doubts(*given, **options):
        return bx.Verification(6, 1.0, 2.0, 3.0, 0.5, 0.5, 0.5, "the objective in the history is not F")

    monkeypatch.setattr(ending, "verify", doubts)
    result, said = run()
    assert (result.verification.message, said) == ("", [])
    result, said = run(stop=bx.Stop(finish=False))
    assert [result.verification.message] == said == ["the objective in the history is not F"]


def test_where_x_is_kept_the_reason_is_said_and_y_is_solved(monkeypatch):
    solved = jnp.full_like(CASE.y0, 7.0)
    monkeypatch.setattr(ending, "finish", lambda *given: Kept("it is best", solved))
    result, _ = run()
    assert result.finish is None
    assert result.message.endswith("no exact steps: it is best")
    np.testing.assert_array_equal(result.y, solved)
    monkeypatch.setattr(ending, "affordable_effort", lambda *given: None)
    assert "no exact steps: they would be too long" in run()[0].message


def test_an_interrupt_of_exact_steps_is_named(monkeypatch):
    finish = ending.finish

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return finish(*given[:-1])

    monkeypatch.setattr(ending, "finish", interrupted)
    result, _ = run()
    assert result.outcome is bx.Outcome.INTERRUPTED
    assert int(result.state.step) == 500
    assert result.message.endswith("exact steps were interrupted")


def test_what_exact_steps_did_is_shown():
    report = bx.Finish(7, 3.0, 2.0, 0.2, 0.0, is_endless=True, was_cut=True, is_flat=True)
    assert str(report) == (
        "7 exact evaluations took F from 3 to 2 "
        "(‖∇F‖ is 0.2 times its largest value, cut, F falls on, F is flat)"
    )
    assert "such as one nearer to zero" in bx.Finish(7, 3.0, 2.0, 0.0, 0.0, is_flat=True).doubt(500)


@pytest.mark.parametrize(
    ("bests", "share"),
    [
        ([1.0] * 8 + [0.1, 0.1], 0.9),
        ([1.0, 0.5, *np.linspace(0.03, 0.0, 98)], 0.015),  # F falls slowly, and on
        ([1.0, 0.5, *np.linspace(0.01, 0.0, 98)], 0.0),
        ([1.0] * 50 + [0.0] * 50, 0.0),  # late, but nothing since
    ],
)
def test_a_search_that_was_cut_knows_how_fast_f_still_falls(bests, share):
    search = object.__new__(Search)
    search._bests, search.was_cut = bests, True
    search.best = type("Point", (), {"value": bests[-1]})
    assert search.falling(1.0) == pytest.approx(share, rel=0.05)
    search.was_cut = False
    assert search.falling(1.0) == 0.0


def test_the_work_of_a_step_counts_its_hessians():
    works = []
    for solver in (bx.BlockNewton(), bx.SOBA()):
        state = solver.init(CASE.problem, CASE.x0, CASE.y0, key=jax.random.key(0))
        one = work_of_a_step(CASE.problem, state)
        works.append(whole_work_of_a_step(solver, CASE.problem, state) / one)
    assert works[0] == pytest.approx(4, rel=0.1)  # y has three entries
    assert works[1] == pytest.approx(1, rel=0.1)
