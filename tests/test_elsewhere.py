"""Exact steps look elsewhere where F hardly depends on an entry of x."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._run import elsewhere as elsewhere_module
from bilevax._run.descent import Exact, Units
from bilevax._run.elsewhere import Elsewhere
from bilevax._run.finish import Effort, Finished, finish

B = jnp.asarray(1 + np.arange(6.0) / 10, jnp.float32)


def shrunk():
    """A prior mean and a log-penalty, whose best values are 0.5 and 0, from a penalty that leaves no y."""
    problem = bx.Problem(
        upper=lambda x, y, block, batch: (y[0] - 0.5) ** 2 + (y[1] - block / 2) ** 2,
        lower=lambda x, y, block, batch: (
            (y[0] - x["mean"]) ** 2 + (y[1] - block) ** 2 + jnp.exp(x["pen"]) * y[1] ** 2
        ),
        blocks=B,
    )
    return problem, {"mean": jnp.zeros(()), "pen": jnp.full((), 17.0)}, jnp.zeros((6, 2))


def wave():
    """F is flat but for a basin at 2, where neither the run nor its start is."""
    problem = bx.Problem(
        upper=lambda x, y, block, batch: -jnp.exp(-((y[0] - 2) ** 2)) + (y[1] - 1) ** 2,
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=6,
    )
    return problem, jnp.array([8.0, 0.0]), jnp.zeros((6, 2))


def stuck(make, x):
    problem, x0, y0 = make()
    state = bx.BlockNewton().init(problem, x0, y0, key=jax.random.key(0))
    return problem, x0, state if x is None else eqx.tree_at(lambda one: one.x, state, x)


@pytest.mark.parametrize(
    ("make", "x", "least"), [(shrunk, None, 0.0), (wave, jnp.array([60.0, 0.0]), -0.999)]
)
def test_entries_on_a_plateau_are_tried_elsewhere(make, x, least, monkeypatch):
    given = stuck(make, x)
    found = finish(given[0], given[2], given[1], Effort(6, 5000))
    monkeypatch.setattr(elsewhere_module, "_groups", lambda leaves: [])
    without = finish(given[0], given[2], given[1], Effort(6, 5000))
    assert isinstance(found, Finished)
    assert isinstance(without, Finished)
    assert without.report.after > found.report.after + 0.1
    assert not found.report.doubt(500)
    np.testing.assert_allclose(found.report.after, least, atol=0.01)


def test_a_plateau_that_there_is_no_time_to_leave_is_named():
    problem, x0, state = stuck(wave, jnp.array([60.0, 1.0]))
    exact = Exact(problem, state, np.arange(6), 1000)
    best, first = (exact(exact.flat(x), exact.tracked) for x in (state.x, x0))
    assert best is not None
    assert first is not None
    for left, flat in ((1000, False), (6, True)):
        exact.left = left
        looked = Elsewhere(exact, exact.flat(x0), [1, 1], first.value - best.value)
        looked.run(best, Units(first, best))
        assert looked.is_flat == flat
