"""What a history says about F: its value, its error, and whether it still improves."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevax as bx
from bilevax._run.history import History
from bilevax._run.progress import Bar, Lines, describe
from bilevax._run.trend import estimate, rise, still_falls

ENTRIES = np.arange(100)


def noise(seed, size=100):
    return np.random.default_rng(seed).normal(size=size)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_falling_history_improves_and_a_rising_one_rises(seed, scale):
    falling = 2 - 0.01 * ENTRIES + 0.05 * noise(seed)
    assert estimate(scale * falling).trend == "improving"
    assert estimate(scale * falling[::-1]).trend == "rising"
    assert estimate(scale * (falling - 5)).trend == "improving"
    assert estimate(scale * falling).advice == ""


@pytest.mark.parametrize("size", [16, 100])
def test_flat_noise_is_at_its_noise_floor_and_the_mean_is_within_its_error(size):
    found = [estimate(3 + 0.1 * noise(seed, size)) for seed in range(500)]
    at_floor = [one for one in found if one.trend == "no longer improving"]
    assert len(at_floor) >= 0.98 * len(found)
    assert all("batch_size" in one.advice for one in at_floor)
    window = max(8, size // 4)
    assert np.mean([one.error for one in found]) == pytest.approx(0.1 / window**0.5, rel=0.3)
    assert np.mean([abs(one - 3) < 3 * one.error for one in found]) >= 0.97


def test_a_history_that_fell_and_is_flat_now_is_at_its_noise_floor():
    assert estimate(100 * np.exp(-ENTRIES / 5) + 1 + 0.05 * noise(0)).trend == "no longer improving"


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_steep_fall_with_swings_still_improves(scale):
    swings = 8 * np.exp(-(((ENTRIES - 82) / 3) ** 2)) + 4 * np.exp(-(((ENTRIES - 73) / 2) ** 2))
    falling = 28 - 0.2 * ENTRIES
    assert estimate(scale * (falling + swings)).trend == "improving"
    assert estimate(scale * swings).trend == "no longer improving"


@pytest.mark.parametrize("fallen", [0.1, 1.0, 10.0])
def test_a_history_that_fell_long_ago_rarely_seems_to_improve(fallen):
    found = [estimate(fallen * (ENTRIES < 40) + 0.1 * noise(seed)) for seed in range(300)]
    assert np.mean([one.trend == "no longer improving" for one in found]) >= 0.95


def test_a_fall_without_noise_improves_even_if_it_is_fast():
    assert estimate(2.0**-ENTRIES).trend == "improving"
    assert estimate(1 / (1 + ENTRIES)).trend == "improving"


def test_what_does_not_change_in_four_digits_is_steady():
    assert estimate(np.full(100, 2.0)).trend == "steady"
    assert estimate(2 + 1e-6 * noise(0)).trend == "steady"
    assert estimate(np.zeros(100)).trend == "steady"


@pytest.mark.parametrize("values", [[], [1.0], [3.0, 2.0, 1.0], np.arange(15.0)])
def test_a_short_history_says_nothing(values):
    found = estimate(values)
    assert found.trend == found.advice == ""
    assert "," not in str(found)


@pytest.mark.parametrize("where", [-1, -30])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_history_that_is_not_finite_says_nothing(where, value):
    values = 2 - 0.01 * ENTRIES
    values[where] = value
    assert estimate(values).trend == ""


def test_neighbours_that_are_alike_make_the_error_larger():
    alike = np.convolve(noise(0, 109), np.ones(10) / 10**0.5, "valid")
    assert estimate(alike).error > 1.5 * np.std(alike[-25:]) / 5


def test_it_prints_with_its_error_and_its_trend():
    assert str(estimate(3 + 0.1 * noise(1))) == "2.988 ± 0.02, no longer improving"
    assert describe({"F": estimate([1.0, 2.0]), "loss": 0.5}) == "F 1.5  loss 0.5"
    history = History([{"step": step, "objective": 3 - 0.01 * step} for step in range(100)])
    assert str(history.estimate()) == f"{3 - 0.01 * 87:.4g} ± {history.estimate().error:.1g}, improving"


@pytest.mark.parametrize("make", [Lines, Bar])
def test_the_advice_comes_once_at_the_end(make, capsys):
    flat = estimate(3 + 0.1 * noise(1))
    with make(20) as shown:
        shown.update(10, 5.0, {"F": flat})
        shown.update(20, 5.0, {"F": flat})
    assert capsys.readouterr().err.count("F is no longer improving: it is at a minimum, or") == 1
    with make(20) as shown:
        shown.update(20, 5.0, {"F": estimate(2 - 0.01 * ENTRIES)})
    assert "no longer improving" not in capsys.readouterr().err


def test_a_run_shows_f_and_whether_it_improves(capsys):
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.arange(8.0).reshape(4, 2),
    )
    result = bx.minimize(
        problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=bx.BSVRBv2(0.001), steps=100, progress="lines"
    )
    assert result.history.estimate().trend == "improving"
    assert f"F {result.history.estimate()}  objective" in capsys.readouterr().err


def test_a_rise_to_the_end_is_told_from_noise_and_from_a_fall():
    noise = np.random.default_rng(0).normal(size=100)
    falling = np.exp(-np.arange(100) / 20) + 0.01 * noise
    assert rise(falling) is None
    assert rise(1 + 0.3 * noise) is None
    assert rise(falling[:12]) is None
    entry, least, latest = rise(np.concatenate([falling, 0.5 + 0.01 * noise[:30]]))
    assert 80 < entry < 105
    assert least < 0.1
    assert latest == pytest.approx(0.5, abs=0.02)
    assert rise(np.append(falling, np.nan)) is None


def test_a_run_that_is_not_verified_says_that_f_has_risen():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.arange(8.0).reshape(4, 2),
    )
    rises = optax.chain(
        bx.automatic_step(), optax.scale_by_schedule(lambda step: jnp.where(step < 600, 1.0, -9.0))
    )

    def run(steps):
        stop = bx.Stop(verify=False, recover=False)
        solver = bx.SOBA(upper_step=rises)
        bx.minimize(
            problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=solver, steps=steps, progress=None, stop=stop
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", bx.AccuracyWarning)
        run(600)
    with pytest.warns(bx.AccuracyWarning, match="f has risen from .*Try solver=bx.BlockNewton"):
        run(900)


def test_a_fall_that_goes_on_to_the_end_is_told_from_one_that_has_ended():
    noise, times = np.random.default_rng(1).normal(size=200), np.arange(200)
    settled = np.exp(-times / 20) + 0.01 * noise
    assert still_falls(settled) == 0
    assert still_falls(1 + 0.3 * noise) == 0
    assert still_falls(np.exp(-times[:20] / 20)) == 0  # too few
    assert still_falls(np.append(settled, np.nan)) == 0
    late = np.maximum(0, 1 - np.maximum(0, times - 100) / 90) + 0.01 * noise  # x waits for half of the run
    assert still_falls(late) > 0.3
    assert still_falls(1 / (1 + times / 50) + 0.001 * noise) > 0.02  # slowly, but for long
    assert still_falls(100 + 5 * late) == pytest.approx(still_falls(late), rel=0.2)


def test_a_run_that_is_not_verified_says_that_f_still_falls():
    random = np.random.default_rng(0)
    rows = random.normal(size=(400, 20, 3)).astype(np.float32)

    def fetch(step, blocks, size):
        return rows[blocks[:, None], np.random.default_rng(step).integers(0, 20, (len(blocks), size))]

    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.mean((y - 50) ** 2),
        lower=lambda x, y, block, batch: jnp.mean(jnp.sum((y - x - batch) ** 2, 1)),
        blocks=400,
        lower_data=bx.Streamed(fetch, np.zeros(3, np.float32)),
    )
    given = {"blocks_per_step": 40, "batch_size": 8, "progress": None}
    with pytest.warns(bx.AccuracyWarning, match="x is still on its way: .* of the decrease of f"):
        bx.minimize(problem, jnp.zeros(3), jnp.zeros((400, 3)), steps=900, **given)
