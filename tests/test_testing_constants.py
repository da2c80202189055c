"""The constants of every family bound the derivatives of single rows at sampled points."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._problem.levels import Mean
from bilevax.testing import FAMILIES

SMALL = {"m": 3, "d_x": 2, "d_y": 3, "rows": 4}
POINTS = 40
SOLVED = 2  # the point at which y is y(x)
SLACK = 1 + 1e-9
CASES = [(name, {}) for name in sorted(FAMILIES)]
CASES += [(name, {"nonconvexity": 1.5, "noise": 0.5}) for name in ("quadratic", "mean")]
CASES += [
    ("logistic", {"coupling": 0.3, "conditioning": 20.0}),
    ("pl", {"coupling": 0.4, "nonconvexity": 4.5}),
    ("curved", {"bend": 5.0, "nonconvexity": 1.5, "noise": 0.5}),
]
IDS = [f"{name}-{'-'.join(settings) or 'default'}" for name, settings in CASES]


def row_functions(problem, d_y):
    """f and g of one row, with the levels of y stacked; a mean level as the argmin of ½‖y − c‖²."""

    def split(y):
        return problem.split("y", {"argmin": y[:d_y], "mean": y[d_y:]} if problem.named else y)

    def f(x, y, block, row):
        return problem.upper(x, problem.view(split(y)), block, jax.tree.map(lambda a: a[None], row))

    def g(x, y, block, row):
        row, total = jax.tree.map(lambda a: a[None], row), 0.0
        for name, part in split(y).items():
            level = problem.levels[name]
            if isinstance(level, Mean):
                total += 0.5 * jnp.sum((part - level.function(x, block, row)) ** 2)
            else:
                total += level.function(x, part, block, row)
        return total

    return f, g


@cache
def sampled(name, settings):
    """A family, points in its region (half of them on its edge), and the derivatives of all rows there."""
    with jax.enable_x64(True):
        family = FAMILIES[name](**(SMALL | dict(settings)), dtype=np.float64)
        m, rows = SMALL["m"], SMALL["rows"]
        d = family.stacked_solution(np.zeros(SMALL["d_x"])).shape[1]
        rng = np.random.default_rng(7)

        def in_ball(radius, *shape):
            drawn = rng.normal(size=shape)
            size = np.where(rng.random((*shape[:-1], 1)) < 0.5, 1, rng.random((*shape[:-1], 1)))
            return radius * size * drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)

        x = in_ball(family.region.x_radius, POINTS, SMALL["d_x"])
        y = in_ball(family.region.y_radius, POINTS, m, d)
        x[0], y[SOLVED] = family.x0, family.stacked_solution(x[SOLVED])
        # Close pairs find the steepest slopes, distant ones the largest differences.
        x[1::4], y[1::4] = x[::4] * (1 - 1e-4), y[::4] * (1 - 1e-4)
        f, g = row_functions(family.problem, SMALL["d_y"])

        def derivatives(x, y, block, upper_row, lower_row):
            g_y = jax.grad(g, 1)
            return {
                "f_x": jax.grad(f)(x, y, block, upper_row),
                "f_y": jax.grad(f, 1)(x, y, block, upper_row),
                "g_y": g_y(x, y, block, lower_row),
                "g_yx": jax.jacfwd(g_y)(x, y, block, lower_row),
                "g_yy": jax.jacfwd(g_y, 1)(x, y, block, lower_row),
            }

        by_row = jax.vmap(derivatives, (None, None, None, 0, 0))
        by_block = jax.vmap(by_row, (None, 0, 0, 0, 0))
        by_point = jax.jit(jax.vmap(by_block, (0, 0, None, None, None)))
        data = [
            jax.tree.map(lambda a: a.reshape(m, rows, *a.shape[1:]), source.rows)
            for source in (family.problem.upper_data, family.problem.lower_data[0])
        ]
        found = by_point(jnp.asarray(x), jnp.asarray(y), family.problem.blocks, *data)
        return family, x, y, {key: np.asarray(value) for key, value in found.items()}


def case(name, settings):
    return sampled(name, tuple(settings.items()))


def spectral(array, matrix):
    return np.linalg.norm(array, 2, axis=(-2, -1)) if matrix else np.linalg.norm(array, axis=-1)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_lower_and_inverse_solutions_solve_their_equations(name, settings):
    family, x, _, found = case(name, settings)
    mean = {key: value[SOLVED].mean(1) for key, value in found.items()}
    v = np.concatenate(jax.tree.leaves(family.inverse_solution(x[SOLVED])), -1)
    np.testing.assert_allclose(mean["g_y"], 0, atol=1e-11)
    np.testing.assert_allclose(np.einsum("mij,mj->mi", mean["g_yy"], v), mean["f_y"], atol=1e-11)
    expected = (mean["f_x"] - np.einsum("mij,mi->mj", mean["g_yx"], v)).mean(0)
    np.testing.assert_allclose(family.gradient(x[SOLVED]), expected, atol=1e-11)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_eigenvalues_and_bounds_of_the_mean_hold(name, settings):
    family, _, _, found = case(name, settings)
    c, mean = family.constants, {key: value.mean(2) for key, value in found.items()}
    eigenvalues = np.linalg.eigvalsh(mean["g_yy"])
    assert eigenvalues.min() * SLACK >= c.strong_convexity
    assert eigenvalues.max() <= min(c.lower_smoothness, c.mean_hessian_bound) * SLACK
    assert spectral(found["g_yy"], True).max() <= c.hessian_bound * SLACK
    assert spectral(mean["g_yx"], True).max() <= c.jacobian_bound * SLACK
    assert spectral(mean["f_x"], False).max() <= c.upper_x_bound * SLACK + 1e-12
    assert spectral(mean["f_y"], False).max() <= c.upper_y_bound * SLACK


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_lipschitz_constants_of_a_row_hold(name, settings):
    family, x, y, found = case(name, settings)
    c = family.constants
    limits = {
        "f_x": c.upper_x_lipschitz,
        "f_y": c.upper_y_lipschitz,
        "g_y": c.lower_lipschitz,
        "g_yx": c.jacobian_lipschitz,
        "g_yy": c.hessian_lipschitz,
    }
    moved = np.sqrt(np.sum((x[1:] - x[:-1]) ** 2, -1)[:, None] + np.sum((y[1:] - y[:-1]) ** 2, -1))
    for key, limit in limits.items():
        change = spectral(found[key][1:] - found[key][:-1], key in ("g_yx", "g_yy"))
        assert (change <= limit * moved[..., None] * (1 + 1e-6) + 1e-10).all(), key


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_variances_of_a_row_are_within_the_noise(name, settings):
    family, _, _, found = case(name, settings)
    for key, value in found.items():
        deviation = (value - value.mean(2, keepdims=True)).reshape(*value.shape[:3], -1)
        assert np.sqrt(np.sum(deviation**2, -1).mean(2)).max() <= family.constants.noise * SLACK, key
    calm = FAMILIES[name](**(SMALL | settings | {"noise": 0.0}))
    assert calm.constants.noise == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_constants_of_the_hyper_objective_hold(name, settings):
    family, x, _, _ = case(name, settings)
    c = family.constants
    solutions = [family.stacked_solution(one) for one in x]
    gradients, values = [family.gradient(one) for one in x], [family.value(one) for one in x]
    assert max(np.linalg.norm(y, axis=-1).max() for y in solutions) <= family.region.y_radius
    for k in range(POINTS - 1):
        moved = np.linalg.norm(x[k + 1] - x[k]) * (1 + 1e-6) + 1e-12
        assert np.linalg.norm(solutions[k + 1] - solutions[k], axis=-1).max() <= c.solution_lipschitz * moved
        assert np.linalg.norm(gradients[k + 1] - gradients[k]) <= c.upper_smoothness * moved
    assert values[0] - min(values) <= c.gap
    if family.least is not None:
        assert c.gap == pytest.approx(values[0] - family.least)
    if c.pl is not None and family.least is not None:
        for value, gradient in zip(values, gradients, strict=True):
            assert c.pl * (value - family.least) <= gradient @ gradient * SLACK + 1e-12


@pytest.mark.parametrize("name", ["quadratic", "mixture", "pl"])
def test_the_spectrum_follows_the_conditioning(name):
    c = FAMILIES[name](**SMALL, conditioning=50.0).constants
    assert c.strong_convexity == pytest.approx(1)
    assert c.lower_smoothness == pytest.approx(50)
    assert c.upper_y_lipschitz > 0


@pytest.mark.parametrize("name", ["quadratic", "mean", "mixture", "pl"])
def test_exact_constants_are_attained(name):
    """L_y, L_F and μ equal the values computed from the matrices and from finite differences."""
    family = FAMILIES[name](**SMALL)
    c = family.constants
    slopes = np.linalg.norm(np.linalg.solve(family.A, family.B), 2, axis=(-2, -1))
    assert c.solution_lipschitz == pytest.approx(slopes.max())
    at, eye = np.asarray(family.solution), 1e-4 * np.eye(SMALL["d_x"])
    hessian = np.array([(family.gradient(at + e) - family.gradient(at - e)) / 2e-4 for e in eye])
    assert c.upper_smoothness == pytest.approx(np.linalg.norm(hessian, 2), rel=1e-5)
    if name != "pl":
        assert c.pl == pytest.approx(2 * np.linalg.eigvalsh(hessian)[0], rel=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_constants_fit_the_theorems(name):
    c = FAMILIES[name](**SMALL).constants
    parameters = bx.theory.theorem_1(c, 0.1, SMALL["m"], 2, 4)
    assert parameters.radius == pytest.approx(c.upper_y_bound / c.strong_convexity)
    assert (c.pl is None) == (name in ("ridge", "logistic", "curved"))
    if c.pl is not None:
        assert bx.theory.theorem_2(c, 0.1, SMALL["m"], 2, 4)
