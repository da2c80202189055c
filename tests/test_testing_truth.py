"""The exact values of every family agree with the diagnostics, finite differences and each other."""

from __future__ import annotations

import inspect

import jax
import numpy as np
import pytest

import bilevax as bx
from bilevax.testing import FAMILIES, pl_constant

SMALL = {"m": 3, "d_x": 2, "d_y": 3, "rows": 4}
NAMES = sorted(FAMILIES)


def points(family, count, seed=1):
    """x0, and random points within the region."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(count, family.settings.d_x))
    scale = family.region.x_radius * rng.random((count, 1)) / np.linalg.norm(drawn, axis=-1, keepdims=True)
    return [np.asarray(family.x0, float), *(drawn * scale)]


def stacked(tree):
    return np.concatenate(jax.tree.leaves(tree), -1)


@pytest.mark.parametrize("name", NAMES)
def test_exact_values_agree_with_the_diagnostics(name, x64):
    family = FAMILIES[name](**SMALL, dtype=np.float64)
    for x in points(family, 2):
        found = bx.solve_lower(family.problem, x, family.y0)
        np.testing.assert_allclose(stacked(family.lower_solution(x)), stacked(found), atol=1e-8)
        np.testing.assert_allclose(family.value(x), bx.objective(family.problem, x, family.y0), rtol=1e-8)
        gradient = bx.hypergradient(family.problem, x, family.y0)
        np.testing.assert_allclose(family.gradient(x), gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_gradient_is_the_slope_of_the_value(name, noise):
    family = FAMILIES[name](**SMALL, noise=noise, seed=3)
    for x in points(family, 3):
        steps = 1e-5 * np.eye(len(x))
        slope = [(family.value(x + step) - family.value(x - step)) / 2e-5 for step in steps]
        np.testing.assert_allclose(family.gradient(x), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_solution_is_the_minimum_where_it_is_known(name, noise):
    family = FAMILIES[name](**SMALL, noise=noise)
    if name in ("logistic", "curved"):
        assert family.least is None
        assert family.solution is None
        return
    np.testing.assert_allclose(family.gradient(family.solution), 0, atol=1e-12)
    np.testing.assert_allclose(family.value(family.solution), family.least, atol=1e-12)
    for x in points(family, 30):
        assert family.value(x) >= family.least
    assert family.value(family.x0) > family.least


@pytest.mark.parametrize("name", ["quadratic", "mean", "mixture"])
def test_the_minimum_is_unknown_if_waves_are_added(name):
    family = FAMILIES[name](**SMALL, nonconvexity=2.0)
    assert family.solution is None
    assert family.least is None
    assert family.constants.pl is None
    lowest = min(family.value(x) for x in points(family, 200))
    assert family.value(family.x0) - lowest <= family.constants.gap


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_equal_without_noise_and_differ_with_it(name):
    for noise in (0.0, 0.5):
        problem = FAMILIES[name](**SMALL, noise=noise).problem
        for source in (problem.upper_data, *problem.lower_data):
            for array in jax.tree.leaves(source.rows):
                rows = np.asarray(array).reshape(SMALL["m"], SMALL["rows"], -1)
                assert (np.ptp(rows, axis=1) > 0).any() == (noise > 0)


@pytest.mark.parametrize("name", ["quadratic", "mean", "mixture", "pl", "curved"])
def test_noise_moves_neither_the_lower_solutions_nor_the_minimum(name):
    calm, noisy = (FAMILIES[name](**SMALL, noise=noise) for noise in (0.0, 2.0))
    x = points(calm, 1)[1]
    np.testing.assert_allclose(stacked(calm.lower_solution(x)), stacked(noisy.lower_solution(x)), atol=1e-12)
    if calm.solution is not None:
        np.testing.assert_allclose(calm.solution, noisy.solution, atol=1e-12)
    np.testing.assert_allclose(calm.gradient(x), noisy.gradient(x), atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_and_sizes_of_one_work(name):
    x = np.full(1, 0.3)
    tiny = {"m": 1, "d_x": 1, "d_y": 1, "rows": 1}
    first, again, other = (FAMILIES[name](**tiny, seed=seed) for seed in (0, 0, 5))
    assert first.value(x) == again.value(x) != other.value(x)
    assert np.isfinite(first.gradient(x)).all()
    assert first.constants.noise == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_takes_the_common_arguments(name):
    taken = set(inspect.signature(FAMILIES[name]).parameters)
    common = {"m", "d_x", "d_y", "rows", "noise", "conditioning", "coupling", "seed", "dtype"}
    assert common <= taken


def test_pl_family_is_not_convex_but_has_no_other_stationary_point():
    family = FAMILIES["pl"](m=2, d_x=1, d_y=1, rows=3, nonconvexity=4.0)
    line = np.linspace(-12, 12, 2001)
    slopes = np.array([family.gradient(family.solution + t)[0] for t in line])
    assert (np.diff(slopes) < 0).any()
    assert (np.sign(slopes) == np.sign(line)).all()


@pytest.mark.parametrize("kappa", [0.0, 0.1, 1.0, 3.0, 4.5])
def test_pl_constant_is_the_largest_that_holds(kappa):
    t = np.linspace(1e-3, 300, 1_000_000)
    ratio = (2 * t + kappa * np.sin(2 * t)) ** 2 / (t**2 + kappa * np.sin(t) ** 2)
    assert pl_constant(kappa) <= ratio.min()
    assert pl_constant(kappa) == pytest.approx(ratio.min(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("quadratic", {"m": 0}, "m must be"),
        ("quadratic", {"noise": -1.0}, "noise must lie in"),
        ("mean", {"conditioning": 0.5}, "conditioning must lie in"),
        ("mixture", {"dtype": np.int32}, "dtype must be float32 or float64"),
        ("quadratic", {"dtype": np.float64}, "x64 mode"),
        ("quadratic", {"nonconvexity": float("nan")}, "nonconvexity must lie in"),
        ("ridge", {"d_x": 4}, "d_x must be at most d_y = 3"),
        ("logistic", {"d_x": 4}, "d_x must be at most d_y = 3"),
        ("pl", {"nonconvexity": 4.6}, "nonconvexity must lie in"),
        ("pl", {"coupling": 0.0}, "coupling must be positive"),
        ("ridge", {"coupling": 0.0}, "coupling must be positive"),
        ("curved", {"bend": -1.0}, "bend must lie in"),
    ],
)
def test_invalid_arguments_are_named(name, arguments, match):
    with pytest.raises(ValueError, match=match):
        FAMILIES[name](**(SMALL | arguments))


def test_a_point_of_the_wrong_length_is_rejected():
    with pytest.raises(ValueError, match="x must be a vector of length 2"):
        FAMILIES["quadratic"](**SMALL).value(np.ones(3))
