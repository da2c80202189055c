"""Slots that several blocks share, and several visits of one step touch."""

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._step.shared_slots import averaged_over_visits

BLOCKS, SLOTS, EACH = 30, 12, 3
random = np.random.default_rng(0)
TOUCHED = np.stack([random.choice(SLOTS, EACH, replace=False) for _ in range(BLOCKS)])
BEST = 2 * random.normal(size=SLOTS)
FIT, JUDGE = (BEST[TOUCHED] + random.normal(size=(BLOCKS, EACH)) for _ in range(2))
PULL = random.normal(size=(BLOCKS, EACH))
METHODS = [bx.BSVRBv2, bx.MMBO, bx.SOBA, bx.MASOBA]


def shared(distinct=False, touched=TOUCHED):
    def lower(x, y, block, batch):
        return jnp.mean((y - block["fit"] - block["pull"] * x[0]) ** 2 + jnp.exp(x[1]) * y**2)

    return bx.Problem(
        upper=lambda x, y, block, batch: jnp.mean((y - block["judge"]) ** 2),
        lower=bx.argmin(lower, slots=lambda block, batch: block["slot"], count=SLOTS, distinct=distinct),
        blocks={"slot": touched, "fit": FIT, "pull": PULL, "judge": JUDGE},
    )


def truth(x):
    """y(x) and ∇F of `shared`, by hand: a slot's y is the ridge mean of all that is fitted there."""
    visits = np.bincount(TOUCHED.ravel(), minlength=SLOTS)
    total = np.bincount(TOUCHED.ravel(), (FIT + PULL * x[0]).ravel(), SLOTS)
    scale = visits * (1 + np.exp(x[1]))
    y = total / scale
    by_y = np.bincount(TOUCHED.ravel(), 2 * (y[TOUCHED] - JUDGE).ravel(), SLOTS) / JUDGE.size
    by_pull = np.bincount(TOUCHED.ravel(), PULL.ravel(), SLOTS) / scale
    return y, np.array([by_y @ by_pull, by_y @ (-y * np.exp(x[1]) / (1 + np.exp(x[1])))])


def test_every_visit_of_a_slot_sees_the_mean_of_all():
    slots = np.array([[3, 1, 3], [1, 1, 7]])
    seen = random.normal(size=(2, 3, 2)).astype(np.float32)
    expected = np.empty_like(seen)
    for slot in np.unique(slots):
        expected[slots == slot] = seen[slots == slot].mean(0)
    sample = type("Sample", (), {"slots": {"lower": jnp.asarray(slots)}})
    found = averaged_over_visits(shared(), sample, {"lower": {"a": jnp.asarray(seen)}})
    np.testing.assert_allclose(found["lower"]["a"], expected, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("x64")
def test_blocks_that_meet_in_a_slot_find_its_mean(method):
    """At an x that stands still y is y(x), and z the gradient of F."""
    x = np.array([0.7, -0.5])
    solver = method(upper_step=0.0)
    kept = bx.minimize(
        shared(), x, np.zeros(SLOTS), solver=solver, steps=400, progress=None, stop=bx.Stop(verify=False)
    )
    y, gradient = truth(x)
    np.testing.assert_allclose(kept.y, y, atol=1e-9)
    np.testing.assert_allclose(kept.state.z, gradient, atol=1e-9)


def test_a_run_with_nothing_given_minimises_over_shared_slots():
    found = bx.minimize(shared(), jnp.zeros(2), jnp.zeros(SLOTS), steps=1500, progress=None)
    first, last = (np.linalg.norm(truth(np.asarray(x, float))[1]) for x in (np.zeros(2), found.x))
    assert last < 0.01 * first


def test_slots_that_are_promised_to_be_distinct_are_not_compared():
    apart = np.arange(BLOCKS * EACH).reshape(BLOCKS, EACH)
    problems = [shared(distinct, apart % SLOTS) for distinct in (False, True)]
    runs = [
        bx.minimize(p, jnp.zeros(2), jnp.zeros(SLOTS), steps=20, blocks_per_step=4, progress=None)
        for p in problems
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, atol=1e-6)


def test_distinct_says_nothing_without_slots():
    with pytest.raises(ValueError, match="distinct=True without slots"):
        bx.argmin(lambda x, y, block, batch: y @ y, distinct=True)
