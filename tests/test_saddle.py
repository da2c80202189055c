"""Lower levels that are min-max problems: the truth, runs with nothing given, and who refuses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import kinds
from test_kinds_transcription import as_library

import bilevax as bx
from bilevax.testing import kinds_blocks

M = 8


def strongly_coupled(coupling, scale=1.0):
    """g = ½|p − x|² + c p'Rq − ½|q − b|²: y circles around the saddle point if c is large."""
    turn = jnp.asarray([[0.6, -0.8], [0.8, 0.6]])

    def lower(x, y, block, batch):
        p, q = y[0], y[1] / scale
        return 0.5 * jnp.sum((p - x) ** 2) + coupling * p @ turn @ q - 0.5 * jnp.sum((q - block) ** 2)

    def upper(x, y, block, batch):
        return 0.5 * jnp.sum((y[0] - 1.0) ** 2) + 0.5 * jnp.sum((y[1] / scale - block) ** 2) + 0.05 * x @ x

    aims = np.random.default_rng(0).normal(size=(M, 2)).astype(np.float32)
    return bx.Problem(upper, bx.saddle(lower), jnp.asarray(aims))


PAIR = jnp.zeros((M, 2)), jnp.zeros((M, 2))


# --- the truth ----------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_the_exact_side_solves_every_kind_of_level_and_differentiates_it():
    """a is a saddle point of g, and p and q that of f within bounds, some of which bind."""
    blocks, x = kinds.Kinds(saddle=True), np.array([0.3, -0.4, 0.2])
    problem, expected = as_library(blocks, bx.saddle), kinds.lower_solution(blocks, x)
    start = {"a": (np.ones((5, 2)), np.ones((5, 2))), "p": np.zeros((5, 2)), "q": np.zeros((5, 3))}
    found = bx.value_and_hypergradient(problem, x, start)
    solution = found.y | {"a": jnp.concatenate(found.y["a"], -1)}
    for name, y in solution.items():
        np.testing.assert_allclose(y, getattr(expected, name), rtol=0, atol=1e-8, err_msg=name)
    at_bound = [np.isclose(expected.p, kinds.LEAST), np.isclose(expected.q, kinds.MOST)]
    assert all(one.any() and not one.all() for one in at_bound)
    np.testing.assert_allclose(found.gradient, kinds.hypergradient(blocks, x), rtol=0, atol=1e-8)
    h, differences = 1e-5, []
    for e in np.eye(3):
        up, down = (bx.objective(problem, x + sign * h * e, start) for sign in (1, -1))
        differences.append((up - down) / (2 * h))
    np.testing.assert_allclose(found.gradient, differences, rtol=0, atol=1e-7)


@pytest.mark.usefixtures("x64")
def test_a_point_that_is_no_saddle_is_not_returned():
    wrong = bx.saddle(lambda x, y, block, batch: jnp.sum((y[0] - x) ** 2) + jnp.sum((y[1] - x) ** 2))
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(y[0]), wrong, 3)
    with pytest.raises(RuntimeError, match="strongly concave in what maximises it"):
        bx.solve_lower(problem, jnp.ones(2), (jnp.zeros((3, 2)), jnp.zeros((3, 2))))


def test_saddle_points_are_found_from_anywhere_in_units_that_differ():
    """Exact steps at the end of a run solve its blocks again from elsewhere, in single precision."""
    unit = 100.0

    def steep(x, y, block, batch):
        p, q = unit * y[0], y[1] / unit
        of_p = 0.25 * jnp.sum((p - 1) ** 4) + 0.5 * p @ p
        return of_p + 3 * p @ q - 0.25 * jnp.sum((q - block) ** 4) - 0.5 * q @ q

    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(x), bx.saddle(steep), jnp.ones(1))
    found = []
    for size in (0.0, 1.0, 10.0, 100.0):
        pair = jax.random.normal(jax.random.key(0), (2, 1, 3)) * size
        p, q = bx.solve_lower(problem, jnp.zeros(2), (pair[0] / unit, unit * pair[1]))
        found.append(np.concatenate([unit * p, q / unit]))
        np.testing.assert_allclose(found[-1], found[0], rtol=1e-5, err_msg=str(size))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("bound", [None, 0.5])
def test_the_family_of_all_kinds_agrees_with_the_diagnostics(bound):
    family = kinds_blocks(m=4, d_x=3, d_y=2, rows=5, noise=0.5, bound=bound, dtype=np.float64)
    x = np.array([0.3, -1.0, 0.5])
    found = bx.value_and_hypergradient(family.problem, x, family.y0)
    np.testing.assert_allclose(found.value, family.value(x), rtol=1e-9)
    np.testing.assert_allclose(found.gradient, family.gradient(x), rtol=0, atol=1e-8)
    expected = family.lower_solution(x)
    for a, b in zip(jax.tree.leaves(found.y), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)
    differences = [(family.value(x + 1e-5 * e) - family.value(x - 1e-5 * e)) / 2e-5 for e in np.eye(3)]
    np.testing.assert_allclose(family.gradient(x), differences, rtol=0, atol=1e-7)
    if bound is None:
        np.testing.assert_allclose(family.gradient(family.solution), 0, atol=1e-9)
        assert family.least < family.value(x)
    else:
        at = np.isclose(np.abs([expected["minimum"], expected["maximum"]]), bound)
        assert at.any()
        assert not at.all()


# --- runs -----------------------------------------------------------------------


@pytest.mark.parametrize(("solver", "coupling"), [(None, 5.0), (bx.MMBO(), 5.0), (bx.BSVRBv2(), 0.3)])
def test_runs_with_nothing_given_reach_the_optimum(solver, coupling):
    """Also where p and q are coupled so strongly that steps of 2/(3 L) would diverge."""
    problem, x0 = strongly_coupled(coupling), jnp.zeros(2)
    plan = {"steps": 3000, "blocks_per_step": 4, "progress": None}
    result = bx.minimize(problem, x0, PAIR, solver=solver, **plan)
    first = bx.hypergradient(problem, x0, PAIR)  # F is quadratic
    curvature = [bx.hypergradient(problem, e, PAIR) - first for e in jnp.eye(2)]
    best = bx.objective(problem, -jnp.linalg.solve(jnp.stack(curvature), first), PAIR)
    start, end = (bx.objective(problem, x, PAIR) for x in (x0, result.x))
    assert float((end - best) / (start - best)) < 0.02
    assert result.verification.message == ""


def test_the_default_does_not_mind_the_units_of_what_maximises():
    one, other = (strongly_coupled(1.0, scale) for scale in (1.0, 1e3))
    plan = {"steps": 400, "blocks_per_step": 4, "progress": None}
    a, b = (bx.minimize(problem, jnp.zeros(2), PAIR, **plan) for problem in (one, other))
    np.testing.assert_allclose(a.x, b.x, rtol=1e-3)
    np.testing.assert_allclose(1e3 * a.y[1], b.y[1], rtol=1e-2)


# --- bad input ------------------------------------------------------------------


@pytest.mark.parametrize("method", [bx.BSVRBv1, bx.KSONG, bx.F2SA, bx.F3SA, bx.RSVRB, bx.MSVR, bx.SONG])
def test_methods_that_need_a_positive_definite_hessian_refuse_by_name(method):
    words = (
        rf"{method.__name__} (needs lower levels whose Hessian is positive|takes (one argmin|mean)).*saddle"
    )
    words += "" if method is bx.RSVRB else " level 'lower': use BlockNewton, MMBO or BSVRBv2"
    with pytest.raises(ValueError, match=words):
        method().init(strongly_coupled(1.0), jnp.zeros(2), PAIR, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("y0", "words"),
    [
        (jnp.zeros((M, 2)), r"y0 of the saddle level 'lower' must be a pair \(p, q\)"),
        (None, "y0 must be given for a saddle level"),
        ((PAIR[0],), "must be a pair .* got a tuple of 1"),
    ],
)
def test_a_start_that_is_no_pair_is_refused(y0, words):
    with pytest.raises(ValueError, match=words):
        bx.minimize(strongly_coupled(1.0), jnp.zeros(2), y0, steps=1, progress=None)
