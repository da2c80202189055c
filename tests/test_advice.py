"""Runs that go wrong in one known way: the error names what is wrong, what was used, and what to try.

A value to try is taken at its word: with it the same steps must end well.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevax as bx
import bilevax.testing
from bilevax._run.replay import TooLongError

KNOBS = {"upper_step", "lower_step", "inverse_step", "alpha", "alpha_bar", "beta", "gamma", "gamma_bar"}
KNOBS |= {"floor", "radius", "penalty", "refresh_chance"}
FAMILY = {
    "quadratic": bilevax.testing.quadratic_blocks(m=20, d_x=4, d_y=3, rows=10),
    "ridge": bilevax.testing.ridge_blocks(m=20, d_x=3, d_y=3, rows=10),
    "mean": bilevax.testing.mean_blocks(m=20, d_x=4, d_y=3, rows=10),
}


STOP = bx.Stop(recover=False, verify=False)


def diverged(problem, x0, y0, solver, steps=5000, blocks_per_step=5, batch_size=4):
    """The message of a run that must diverge, after a check that it names the solver's own knobs only."""
    common = {"blocks_per_step": blocks_per_step, "batch_size": batch_size, "progress": None}
    with pytest.raises(bx.DivergedError) as caught:
        bx.minimize(problem, x0, y0, solver=solver, steps=steps, key=jax.random.key(0), stop=STOP, **common)
    message = str(caught.value)
    own = getattr(solver, "solver", solver)
    assert {word for word in re.findall(r"\w+", message) if word in KNOBS} <= set(own.coefficients()), message
    tried = dict(re.findall(r"(\w+)=([-\d.e]+) instead of", message.split("; more blocks")[0]))
    if tried:
        better = dataclasses.replace(own, **{name: float(value) for name, value in tried.items()})
        taken = int(caught.value.result.state.step)
        again = bx.minimize(
            problem, x0, y0, solver=better, steps=taken, key=jax.random.key(0), stop=STOP, **common
        )
        assert again.outcome is bx.Outcome.FINISHED, message
    return message


def names(message, knob, used):
    """Whether a message says to look at a knob, the value that was used and another one."""
    return re.search(rf"look at {knob}(, or leave it out)?\W.*{knob}=[-\d.e]+ instead of {used}", message)


# The step, what else is given, and the method; each step is some ten and a hundred times too long.
LAZY = {"upper_step": 0.05, "lower_step": 0.05, "inverse_step": 0.05}
PLAIN = {"upper_step": 0.05, "lower_step": 0.2, "inverse_step": 0.2}
SAME = {"upper_step": 0.05, "lower_step": 0.2}
GIVEN = {
    bx.BSVRBv1: {"upper_step": 0.05, "lower_step": 0.05},
    bx.BSVRBv2: LAZY,
    bx.BlockPAGE: LAZY,
    bx.F3SA: LAZY,
    bx.RSVRB: {"upper_step": 0.05, "lower_step": 0.05},
    bx.MMBO: PLAIN,
    bx.SOBA: PLAIN,
    bx.MASOBA: PLAIN,
    bx.F2SA: PLAIN,
    bx.BlockSAGA: PLAIN,
    bx.KSONG: SAME,
    bx.BlockNewton: {"upper_step": 0.05},
}
TOO_LONG = [
    (family, method, step, factor * given)
    for family, methods in (("quadratic", GIVEN), ("ridge", [bx.BSVRBv2, bx.BSVRBv1, bx.MMBO]))
    for method in methods
    for step, given in GIVEN[method].items()
    if step != "upper_step"
    for factor in (10, 100)
]
# x diverges from where its steps are too long for F, which depends on the method.
TOO_LONG += [
    ("ridge", method, "upper_step", step) for method in (bx.BSVRBv2, bx.MMBO) for step in (5.0, 50.0)
]
TOO_LONG += [
    ("ridge", bx.BlockNewton, "upper_step", 5.0),
    *[
        ("quadratic", method, "upper_step", 50.0)
        for method in (bx.BSVRBv1, bx.BSVRBv2, bx.BlockPAGE, bx.F3SA)
    ],
    *[("quadratic", method, "upper_step", 50.0) for method in (bx.RSVRB, bx.SOBA, bx.F2SA, bx.BlockSAGA)],
    *[("quadratic", method, "upper_step", 5.0) for method in (bx.MMBO, bx.KSONG, bx.MASOBA, bx.BlockNewton)],
]


@pytest.mark.parametrize(("family", "method", "step", "value"), TOO_LONG)
def test_a_step_that_is_too_long_is_named(family, method, step, value):
    case = FAMILY[family]
    message = diverged(case.problem, case.x0, case.y0, method(**(GIVEN[method] | {step: value})))
    assert names(message, step, f"{value:.3g}"), message
    assert ("bx.automatic_step()" in message) == (step == "upper_step")


@pytest.mark.parametrize("value", [5.0, 50.0])
@pytest.mark.parametrize("method", [bx.MSVR, bx.SONG])
def test_the_upper_step_of_a_method_for_means_is_named(method, value):
    case = FAMILY["mean"]
    message = diverged(case.problem, case.x0, None, method(upper_step=value))
    assert names(message, "upper_step", f"{value:.3g}"), message


@pytest.mark.parametrize(("step", "value"), [("upper_step", 50.0), ("lower_step", 5.0)])
def test_a_step_inside_a_restart_is_named(step, value):
    case = FAMILY["quadratic"]
    solver = bx.Restart(bx.BSVRBv2(**(LAZY | {step: value})), first=1000, stages=2)
    assert names(diverged(case.problem, case.x0, case.y0, solver), step, f"{value:.3g}")


def test_two_steps_that_are_too_long_are_both_named():
    case = FAMILY["quadratic"]
    message = diverged(case.problem, case.x0, case.y0, bx.BSVRBv2(50.0, lower_step=5.0, inverse_step=0.05))
    assert "look at lower_step and upper_step, or leave them out" in message


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            lambda t: 50.0,
            r"look at upper_step, or leave it out .* times the schedule upper_step instead of a sch",
        ),
        (
            optax.sgd(50.0),
            r"look at upper_step, or leave it out .* upper_step=optax.chain\(…, optax.scale\(0",
        ),
    ],
)
def test_a_schedule_or_a_transformation_that_is_too_long_is_named(step, words):
    case = FAMILY["quadratic"]
    message = diverged(case.problem, case.x0, case.y0, bx.SOBA(step, lower_step=0.2, inverse_step=0.2))
    assert re.search(words, message), message


def test_a_gamma_that_is_too_large_is_named_with_the_blocks_per_step():
    case = FAMILY["quadratic"]
    message = diverged(case.problem, case.x0, case.y0, bx.BSVRBv2(**LAZY, gamma=100.0))
    assert names(message, "gamma", "100"), message
    assert "blocks_per_step=20 instead of 5" in message
    wide = bilevax.testing.mean_blocks(m=400, d_x=4, d_y=3, rows=10)
    message = diverged(wide.problem, wide.x0, None, bx.MSVR(0.05, gamma=400.0), blocks_per_step=10)
    assert names(message, "gamma", "400"), message
    assert "blocks_per_step=40 instead of 10" in message


def regressions(ridge=1e-4, m=20, rows=20, d_y=5):
    """Least squares whose batches of few rows have singular Hessians but for a small ridge."""
    rng = np.random.default_rng(0)
    data = bx.PerBlock(
        {
            "a": rng.normal(size=(m * rows, d_y)).astype(np.float32),
            "b": rng.normal(size=m * rows).astype(np.float32),
        },
        np.arange(m + 1) * rows,
    )

    def lower(x, y, block, batch):
        return 0.5 * jnp.mean((batch["a"] @ (y - x) - batch["b"]) ** 2) + 0.5 * ridge * y @ y

    problem = bx.Problem(
        lambda x, y, block, batch: jnp.mean((batch["a"] @ y - batch["b"]) ** 2), lower, m, data, data
    )
    return problem, jnp.ones(d_y), jnp.zeros((m, d_y))


@pytest.mark.parametrize(
    ("solver", "knob"),
    [
        (bx.BSVRBv1(0.02, alpha=0.99, lower_step=0.02), "alpha"),
        (bx.BSVRBv1(0.02, alpha_bar=0.99, lower_step=0.02), "alpha_bar"),
        (bx.BlockNewton(1e-4, alpha=1.0), "alpha"),
    ],
)
def test_a_weight_that_is_too_large_is_named(solver, knob):
    message = diverged(*regressions(), solver, batch_size=2)
    assert names(message, knob, f"{solver.coefficients()[knob]:.3g}"), message


@pytest.mark.parametrize("upper_step", [0.01, 0.03])
def test_a_floor_that_is_too_low_is_named(upper_step):
    """The curvature falls with x, and its correction makes tracked Hessians indefinite."""
    problem = bx.Problem(
        lambda x, y, block, batch: 0.5 * jnp.sum((y - 3) ** 2),
        lambda x, y, block, batch: 0.5 * jnp.exp(x) @ y**2 - block * jnp.sum(y),
        jnp.linspace(1.0, 2.0, 40),
    )
    solver = bx.BSVRBv1(upper_step, gamma_bar=60.0, floor=1e-6)
    message = diverged(
        problem, jnp.full(3, 2.0), jnp.zeros((40, 3)), solver, blocks_per_step=2, batch_size=None
    )
    assert names(message, "floor", "1e-06"), message


CURVATURES = {"indefinite": [1.0, 2.0, -0.5], "singular": [1.0, 2.0, 0.0]}
ARGMIN = [bx.BSVRBv1, bx.BSVRBv2, bx.KSONG, bx.MMBO, bx.SOBA, bx.F2SA, bx.RSVRB, bx.BlockNewton]


def simple(upper, curvature=(1.0, 1.0, 1.0), m=20):
    """A problem without rows whose lower Hessian is diagonal."""

    def lower(x, y, block, batch):
        return 0.5 * jnp.asarray(curvature) @ (y - block * x) ** 2

    return bx.Problem(upper, lower, jnp.linspace(1.0, 2.0, m)), jnp.ones(3), jnp.zeros((m, 3))


@pytest.mark.parametrize("method", ARGMIN)
def test_a_lower_problem_that_is_not_convex_is_named(method):
    problem = simple(lambda x, y, block, batch: jnp.sum((y - block) ** 2), CURVATURES["indefinite"])
    message = diverged(*problem, method(0.05), batch_size=None)
    assert "has eigenvalues from -0.5 to 2: g is not convex in y; add a regulariser" in message, message


@pytest.mark.parametrize("method", [bx.MMBO, bx.BlockNewton])
def test_a_lower_problem_without_a_unique_minimum_is_named(method):
    problem = simple(lambda x, y, block, batch: jnp.sum((y - block) ** 2), CURVATURES["singular"])
    message = diverged(*problem, method(0.5), batch_size=None, steps=20_000)
    assert "has eigenvalues from 0 to 2: g has no unique minimum in y" in message, message


@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("method", ARGMIN)
def test_an_upper_function_without_a_bound_is_named(method, power):
    problem = simple(lambda x, y, block, batch: -jnp.sum(y**power))
    message = diverged(*problem, method(0.05), batch_size=None)
    assert "f seems to be unbounded below" in message, message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named(value, monkeypatch):
    monkeypatch.setattr("bilevax._run.minimize.check_finite", lambda *_: None)  # which names it before
    rows = np.ones((20, 3), np.float32)
    rows[13, 1] = value
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.mean((y - batch) ** 2),
        lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        4,
        bx.Shared(rows),
    )
    solver = bx.BSVRBv2(**LAZY)
    message = diverged(problem, jnp.ones(3), jnp.zeros((4, 3)), solver, blocks_per_step=1, batch_size=1)
    assert "row 13 of upper_data is not finite; mend or leave out such rows" in message


@pytest.mark.parametrize("method", [bx.MSVR, bx.BSVRBv2])
def test_a_log_of_a_tracked_mean_is_named(method):
    rng = np.random.default_rng(3)
    data = bx.PerBlock(rng.normal(size=(1000, 10)).astype(np.float32), np.arange(101) * 10)
    level = bx.mean(lambda x, block, batch: jnp.mean(jax.nn.sigmoid(0.7 * batch @ x + 3)))
    problem = bx.Problem(lambda x, y, block, batch: jnp.log(1 - y), level, 100, lower_data=data)
    message = diverged(problem, jnp.ones(10), None, method(3.0), batch_size=8)
    assert "f is not finite at the tracked mean" in message
    assert "give bx.mean the bounds that f needs" in message


def test_a_warning_names_what_can_be_changed_with_values():
    """y lags behind x where lower problems are ill-conditioned; if a step sees all, noise is no cause."""
    curvature = jnp.array([1.0, 1e-3])
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lambda x, y, block, batch: curvature @ (y - x) ** 2,
        jnp.arange(1.0, 7.0),
    )

    def warning(solver, blocks_per_step):
        with pytest.warns(bx.AccuracyWarning) as caught:
            bx.minimize(
                problem, jnp.zeros(2), jnp.zeros((6, 2)), solver=solver, steps=500, progress=None,
                blocks_per_step=blocks_per_step,
            )  # fmt: skip
        return next(str(one.message) for one in caught if issubclass(one.category, bx.AccuracyWarning))

    message = warning(bx.SOBA(upper_step=0.1, lower_step=0.3), None)
    assert "upper_step=0.03 instead of 0.1" in message
    assert "blocks_per_step" not in message
    assert "batch_size" not in message
    message = warning(bx.SOBA(upper_step=optax.sgd(0.1), lower_step=0.3), 1)
    assert "blocks_per_step=4 instead of 1" in message
    assert "shorter steps of the optax transformation" in message


def test_advice_that_cannot_be_found_out_falls_back_on_what_is_not_finite(monkeypatch):
    monkeypatch.setattr("bilevax._run.advice._Advice.__init__", lambda *given: 1 / 0)
    case = FAMILY["quadratic"]
    message = diverged(case.problem, case.x0, case.y0, bx.BlockNewton(upper_step=5.0))
    assert re.search(r"look at \w+ \(", message), message


@pytest.mark.parametrize(
    ("step", "value", "words"),
    [
        ("lower_step", 5.0, r"diverge even while x rests: try a tenth of lower_step \(5\) or inverse_step"),
        ("upper_step", 50.0, r"stable at x0 while x rests: try a tenth of upper_step \(50\)"),
    ],
)
def test_advice_after_a_long_run_says_what_was_learnt(step, value, words, monkeypatch):
    taken = []

    def reserve(replays, steps):
        taken.append(steps)
        if len(taken) > 1:
            raise TooLongError

    monkeypatch.setattr("bilevax._run.replay.Replays._reserve", reserve)
    case = FAMILY["quadratic"]
    message = diverged(case.problem, case.x0, case.y0, bx.BSVRBv2(**(LAZY | {step: value})))
    assert re.search(words, message), message
