"""Lower solutions in a set: the truth, runs with nothing given, checkpoints, who refuses what."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

M, D_X, D_Y = 6, 3, 4
X = np.array([0.3, -0.4, 0.8])
CENTRE = np.full((M, D_Y), 0.25)


def ball(y):
    return y / jnp.maximum(jnp.linalg.norm(y) / 0.6, 1)


def simplex(y):
    largest = jnp.sort(y)[::-1]
    sums, count = jnp.cumsum(largest), jnp.arange(1, y.size + 1)
    last = jnp.sum(largest * count > sums - 1)
    return jnp.maximum(y - (sums[last - 1] - 1) / last, 0)


SETS = {"bounds": (-0.1, 0.3), "one bound": (0.0, None), "a ball": ball, "a simplex": simplex}


def problem_within(project, dtype=float):
    """g = ½ y'Hy − y'(B sin x + c), f = ½ |y − 1|² + x_1 Σ y + ½ |x|²."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(M, D_Y, D_Y))
    blocks = {
        "H": np.eye(D_Y) + root @ root.transpose(0, 2, 1),
        "B": rng.normal(size=(M, D_Y, D_X)),
        "c": rng.normal(size=(M, D_Y)),
    }

    def upper(x, y, block, batch):
        return 0.5 * jnp.sum((y - 1) ** 2) + x[0] * jnp.sum(y) + 0.5 * x @ x

    def lower(x, y, block, batch):
        return 0.5 * y @ block["H"] @ y - y @ (block["B"] @ jnp.sin(x) + block["c"])

    blocks = {name: jnp.asarray(a, dtype) for name, a in blocks.items()}
    return bx.Problem(upper, bx.argmin(lower, project=project), blocks)


# --- the truth ----------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", SETS)
def test_the_hypergradient_holds_active_bounds_fixed(kind):
    problem = problem_within(SETS[kind])
    found = bx.value_and_hypergradient(problem, X, CENTRE)
    h, differences = 1e-5, []
    for e in np.eye(D_X):
        up, down = (bx.objective(problem, X + sign * h * e, CENTRE) for sign in (1, -1))
        differences.append((up - down) / (2 * h))
    np.testing.assert_allclose(found.gradient, differences, rtol=0, atol=1e-8)
    onto = problem.levels["lower"].bounded
    np.testing.assert_allclose(onto(found.y), found.y, atol=1e-12)
    free = bx.solve_lower(problem_within(None), X, CENTRE)
    assert float(jnp.max(jnp.abs(onto(free) - free))) > 0.1  # the set matters


@pytest.mark.usefixtures("x64")
def test_within_bounds_the_solution_and_its_slope_are_those_of_the_free_entries():
    """A g that has no minimum without its bounds: linear where one holds."""
    pull = np.array([-1.0, 0.2, 3.0])

    def lower(x, y, block, batch):
        return 0.5 * (y[1] - x) ** 2 - jnp.asarray(pull) @ y

    def upper(x, y, block, batch):
        return jnp.sum(y**2) + y[1] * x

    problem = bx.Problem(upper, bx.argmin(lower, project=(-2.0, 2.0)), 2)
    found = bx.value_and_hypergradient(problem, 0.5, np.zeros((2, 3)))
    np.testing.assert_allclose(found.y, [[-2, 0.7, 2]] * 2, atol=1e-9)
    np.testing.assert_allclose(found.gradient, 0.7 + 2 * 0.7 + 0.5, atol=1e-8)  # v is f_y on y_1 alone
    outside = bx.Problem(upper, bx.argmin(lower, project=(None, 2.0)), 2)
    with pytest.raises(RuntimeError, match="was not solved"):
        bx.solve_lower(outside, 0.5, np.zeros((2, 3)))


@pytest.mark.usefixtures("x64")
def test_new_blocks_are_solved_in_their_set():
    rows = np.random.default_rng(1).normal(size=(5, 2))

    def lower(x, y, block, batch):
        return 0.5 * jnp.mean(jnp.sum((y - batch) ** 2, 1)) + 0.5 * jnp.sum((y - x) ** 2)

    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum(y**2),
        bx.argmin(lower, project=(0.1, 0.4)),
        2,
        lower_data=bx.PerBlock(jnp.ones((4, 2)), [0, 2, 4]),
    )
    found = bx.adapt(problem, jnp.zeros(2), bx.PerBlock(jnp.asarray(rows), [0, 2, 5]))
    expected = np.clip(np.stack([rows[:2].mean(0), rows[2:].mean(0)]) / 2, 0.1, 0.4)
    np.testing.assert_allclose(found, expected, atol=1e-9)


# --- runs -----------------------------------------------------------------------


def gap(problem, x):
    """How far F is from its minimum, relative to where x starts."""
    best, scale = jnp.ones(D_X), 0.2
    for _ in range(200):
        best = best - scale * bx.hypergradient(problem, best, CENTRE)
    values = [float(bx.objective(problem, at, CENTRE)) for at in (x, best, jnp.ones(D_X))]
    return (values[0] - values[1]) / (values[2] - values[1])


@pytest.mark.usefixtures("x64", "steps_alone")
@pytest.mark.parametrize(("kind", "solver"), [("bounds", None), ("bounds", bx.BSVRBv2()), ("a ball", None)])
def test_runs_with_nothing_given_reach_the_optimum(kind, solver):
    problem = problem_within(SETS[kind])
    plan = {"steps": 1500, "blocks_per_step": 2, "progress": None}
    result = bx.minimize(problem, jnp.ones(D_X), CENTRE, solver=solver, **plan)
    assert gap(problem, result.x) < 0.02
    assert result.verification is not None
    assert result.verification.message == ""
    left = bx.residuals(problem, result.state)
    assert max(float(left.y), float(left.gradient)) < 0.01
    if kind == "bounds":
        assert result.verification.gradient_error < 0.1
        held = jnp.isclose(result.y, -0.1) | jnp.isclose(result.y, 0.3)
        assert 0.2 < float(held.mean()) < 0.8
        np.testing.assert_array_equal(np.asarray(result.state.v)[np.asarray(held)], 0)


@pytest.mark.usefixtures("x64")
def test_steps_of_different_lengths_do_not_bend_a_projection():
    """f is curved a thousand times more in one entry: with a scale for each, y ends elsewhere on the ball."""
    aim, curvature = jnp.asarray([3.0, 2.0]), jnp.asarray([1.0, 1e3])

    def upper(x, y, block, batch):
        return 0.5 * jnp.sum(curvature * (y - aim) ** 2) + 0.5 * x**2

    problem = bx.Problem(upper, bx.minimum(project=ball), 4)
    plan = {"solver": bx.BSVRBv2(0.1), "steps": 400, "progress": None}
    result = bx.minimize(problem, jnp.ones(()), jnp.zeros((4, 2)), **plan)
    expected = bx.solve_lower(problem, result.x, jnp.zeros((4, 2)))
    np.testing.assert_allclose(result.y, expected, atol=1e-4)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    problem = problem_within((-0.1, 0.3), np.float32)

    def run(steps, **given):
        plan = {"solver": bx.BSVRBv2(), "steps": steps, "blocks_per_step": 2, "progress": None}
        return bx.minimize(problem, jnp.ones(D_X), jnp.zeros((M, D_Y)), **plan, **given).state

    whole = run(60)
    run(30, checkpoint=bx.Checkpoint(tmp_path, resume=True))
    resumed = run(60, checkpoint=bx.Checkpoint(tmp_path, resume=True))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_slots_that_are_blocks_make_the_same_run():
    problem = problem_within((-0.1, 0.3), np.float32)
    lower = problem.levels["lower"].function
    blocks = problem.blocks | {"slot": jnp.arange(M)[::-1]}
    there = bx.argmin(lower, project=(-0.1, 0.3), slots=lambda block, batch: block["slot"], count=M)
    solver, plan = bx.BSVRBv2(0.1, lower_step=0.1), {"steps": 40, "blocks_per_step": 2, "progress": None}
    y0 = jnp.zeros((M, D_Y))
    one = bx.minimize(problem, jnp.ones(D_X), y0, solver=solver, **plan)
    other = bx.minimize(bx.Problem(problem.upper, there, blocks), jnp.ones(D_X), y0, solver=solver, **plan)
    np.testing.assert_allclose(one.y, other.y[::-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-5)


# --- bad input ------------------------------------------------------------------


def g(x, y, block, batch):
    return jnp.sum((y - x) ** 2)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"project": (1.0, 0.0)}, ValueError, "project: lower must not exceed upper"),
        (
            {"project": (np.zeros(2), np.ones(3))},
            ValueError,
            r"fit one another, got shapes \(2,\) and",
        ),
        ({"project": (None, None)}, ValueError, "at least one bound"),
        ({"project": "positive"}, TypeError, r"bounds \(lower, upper\) or a function of y, got str"),
        ({"project": (0.0, 1.0), "around": lambda x: x}, ValueError, "around and project do not go together"),
    ],
)
def test_a_set_that_makes_no_sense_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        bx.argmin(g, **given)


WRONG = {
    "y0 must start in the set that project= gives, .* slot 2": ((0.0, 1.0), np.array([[0.5], [0.0], [-3.0]])),
    "the upper bound of project of the argmin level 'lower'": ((None, np.ones(3)), np.zeros((3, 2))),
    r"'lower' must be a number or a tree like one block's y, with shapes \(2,\), got shapes {'w': \(2,\)}": (
        ({"w": np.zeros(2)}, None),
        np.zeros((3, 2)),
    ),
    "project of the argmin level 'lower' must return what y is": (lambda y: y[0], np.zeros((3, 2))),
    "project of the argmin level 'lower' must be a projection": (lambda y: y / 2, np.zeros((3, 2))),
    "project of the argmin level 'lower': lower must not exceed upper, got lower = 0.0": (
        (0.0, (1.0, -1.0)),
        (np.zeros(3), np.zeros(3)),
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_start_that_does_not_fit_is_refused_before_a_step_is_compiled(words, monkeypatch):
    begun = []
    monkeypatch.setattr("bilevax._run.minimize.prepare", lambda *given: begun.append(given))
    project, y0 = WRONG[words]
    level = bx.argmin(lambda x, y, *rest: g(x, sum(jax.tree.leaves(y)), *rest), project=project)
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(jax.tree.leaves(y)[0]), level, 3)
    with pytest.raises(ValueError, match=words):
        bx.minimize(problem, jnp.ones(()), jax.tree.map(jnp.asarray, y0), steps=1, progress=None)
    assert not begun


ALL = (
    bx.BSVRBv1,
    bx.BSVRBv2,
    bx.KSONG,
    bx.MMBO,
    bx.SOBA,
    bx.MASOBA,
    bx.BlockPAGE,
    bx.BlockSAGA,
    bx.BlockNewton,
)


@pytest.mark.parametrize("method", ALL)
def test_methods_that_need_bounds_refuse_other_sets_by_name(method):
    problem, y0 = problem_within(ball, np.float32), jnp.zeros((M, D_Y))
    with pytest.raises(
        ValueError, match=f"{method.__name__} needs bounds .* level 'lower': use F2SA or F3SA"
    ):
        method().init(problem, jnp.ones(D_X), y0, key=jax.random.key(0))


@pytest.mark.parametrize("method", [bx.MSVR, bx.SONG, bx.RSVRB])
def test_methods_without_sets_name_those_that_take_the_set_at_hand(method):
    """Where a set is no bounds, most methods that take bounds would refuse it, too."""
    for project, others in ((ball, "F2SA or F3SA"), ((0.0, 1.0), "BlockNewton, MMBO or BSVRBv2")):
        problem, y0 = problem_within(project, np.float32), jnp.zeros((M, D_Y))
        with pytest.raises(ValueError, match=f"{method.__name__} .* argmin level 'lower': use {others}$"):
            method().init(problem, jnp.ones(D_X), y0, key=jax.random.key(0))


def test_rsvrb_refuses_bounds_by_name():
    problem, y0 = problem_within((0.0, 1.0), np.float32), jnp.zeros((M, D_Y))
    with pytest.raises(ValueError, match="RSVRB does not take project= of the argmin level 'lower'"):
        bx.RSVRB().init(problem, jnp.ones(D_X), y0, key=jax.random.key(0))


@pytest.mark.parametrize("method", [None, bx.F2SA, bx.BSVRBv2, bx.MSVR])
@pytest.mark.parametrize("kind", ["mean", "saddle"])
def test_what_no_method_takes_together_is_said_and_solved_exactly(method, kind):
    """A method must not send to another, which sends back."""

    plain, start = problem_within(ball, np.float32), jnp.zeros((M, D_Y))
    own = plain.levels["lower"].function

    def pair(x, y, *rest):
        return own(x, y[0], *rest) - own(x, y[1], *rest)

    beside = bx.saddle(pair) if kind == "saddle" else bx.mean(lambda x, block, batch: x)
    levels = {"a": plain.levels["lower"], "b": beside}
    problem = bx.Problem(lambda x, y, *rest: jnp.sum((y["a"] - 1) ** 2) + x @ x, levels, plain.blocks)
    y0, x0 = {"a": start, "b": (start, start) if kind == "saddle" else None}, jnp.ones(D_X)
    words = f"no method takes 'a' in a set that is no bounds beside the {kind} level 'b': give it bounds"
    with pytest.raises(ValueError, match=f"{(method or bx.F2SA).__name__} .*{words}"):
        bx.minimize(problem, x0, y0, solver=method and method(), steps=1, progress=None)
    if method is None:
        assert jnp.isfinite(bx.value_and_hypergradient(problem, x0, y0).gradient).all()
