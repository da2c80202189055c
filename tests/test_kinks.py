"""Exact steps along the kinks of a risk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bilevax as bx
from bilevax._problem.smooth_risk import smooth_value
from bilevax._run import finish as finish_module
from bilevax._run.finish import Effort, Finished, finish

D = np.sqrt(10.0 ** np.linspace(0, 1.5, 6))
A = np.random.default_rng(5).normal(size=(12, 6))
GROUPS = np.arange(12) % 4


def values(x):
    return ((D * (x - A)) ** 2).sum(-1)


def least(constraints, size, objective):
    """The minimum of a risk by its linear constraints, from SciPy."""
    start, options = np.r_[np.zeros(6), np.full(size, 50.0)], {"maxiter": 500, "ftol": 1e-10}
    found = minimize(objective, start, constraints=constraints, method="SLSQP", options=options)
    assert found.success
    return found.fun


def least_worst():
    means = lambda x: np.bincount(GROUPS, values(x)) / 3  # noqa: E731
    return least([{"type": "ineq", "fun": lambda z: z[6] - means(z[:6])}], 1, lambda z: z[6])


def least_tail():
    above = {"type": "ineq", "fun": lambda z: z[7:] - values(z[:6]) + z[6]}
    positive = {"type": "ineq", "fun": lambda z: z[7:]}
    return least([above, positive], 13, lambda z: z[6] + z[7:].sum() / 3)


@pytest.mark.parametrize(
    ("risk", "truth"), [(bx.worst_group(GROUPS), least_worst), (bx.cvar(0.25), least_tail)]
)
def test_the_minimum_at_a_kink_is_found(risk, truth, monkeypatch):
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((D * (y - block)) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.asarray(A),
        risk=risk,
    )
    x0 = jnp.zeros(6)
    state = bx.BlockNewton().init(problem, x0, jnp.zeros((12, 6)), key=jax.random.key(0))
    found = finish(problem, state, x0, Effort(12, 4000))
    assert isinstance(found, Finished)
    fallen = found.report.before - truth()
    assert abs(found.report.after - truth()) < 2e-4 * fallen
    assert not found.report.is_steep
    assert not found.report.was_cut
    cut = finish(problem, state, x0, Effort(12, 400))
    assert isinstance(cut, Finished)
    assert cut.report.was_cut
    monkeypatch.setattr(finish_module, "along_kinks", lambda *given: ([], False))
    without = finish(problem, state, x0, Effort(12, 4000))
    assert isinstance(without, Finished)
    assert without.report.after > truth() + 0.01 * fallen


@pytest.mark.parametrize(
    ("risk", "far"), [(bx.cvar(0.25), 1e-5), (bx.worst_group(GROUPS), 1e-5), (bx.soft_maximum(0.1), None)]
)
def test_a_smooth_risk_is_near_the_risk_and_its_weights_are_its_gradient(risk, far):
    values = jnp.asarray(np.random.default_rng(0).normal(size=12), jnp.float32)
    for width in (0.3, 3.0):
        smooth = risk.smoothed(width)
        assert abs(float(smooth_value(smooth, values) - risk.of(values))) < 6 * width
        slope = jax.grad(lambda one, smooth=smooth: smooth_value(smooth, one))(values)
        np.testing.assert_allclose(smooth.weights_of(values), 12 * slope, atol=2e-3)
    if far is None:
        assert risk.smoothed(0.05) is None
    else:
        near = risk.smoothed(1e-6)
        np.testing.assert_allclose(smooth_value(near, values), risk.of(values), rtol=far)
        np.testing.assert_allclose(near.weights_of(values), risk.weights_of(values), atol=1e-3)


def test_risks_that_are_smooth_have_no_other():
    assert bx.cvar(1.0).smoothed(0.1) is None
    assert bx.worst_group(GROUPS, temperature=1.0).smoothed(0.1) is None
    assert bx.worst_group(GROUPS, temperature=1.0).smoothed(2.0) is not None
