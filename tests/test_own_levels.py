"""Variables that minimise or maximise f itself: the truth, runs with nothing given, sets, slots, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

M, ROWS, SHARE = 30, 20, 0.25


def quadratic(**levels):
    """f = ½|p − b − x|² − ½|q − b|² + ½|x|² of the levels that there are."""

    def upper(x, y, block, batch):
        down = jnp.sum((y["p"] - block - x) ** 2) if "p" in y else 0.0
        return 0.5 * (down - (jnp.sum((y["q"] - block) ** 2) if "q" in y else 0.0) + x @ x)

    return bx.Problem(upper, levels, jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32))


# --- the truth ----------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("level", "name"), [(bx.minimum, "p"), (bx.maximum, "q")])
def test_without_bounds_the_optimum_is_found_from_any_start_and_may_be_left_out(level, name):
    problem, x = quadratic(**{name: level()}), np.array([0.5, -1.0])
    expected = np.asarray(problem.blocks) + (x if name == "p" else 0)
    for start in (None, {name: np.full((6, 2), 7.0)}):
        np.testing.assert_allclose(bx.solve_lower(problem, x, start)[name], expected, atol=1e-9)


def test_a_stationary_point_that_is_no_optimum_is_refused():
    """f is convex in q, which has no maximum; and the middle of a box is where −|p|² is largest."""
    both = {"p": jnp.ones((1, 2)), "q": jnp.ones((1, 2))}
    cases = [
        (lambda y: jnp.sum(y["p"] ** 2 + y["p"] * y["q"] + y["q"] ** 2), {"q": bx.maximum()}, both),
        (lambda y: -jnp.sum((y["p"] - 0.2) ** 2), {}, {"p": jnp.full((1, 2), 0.2)}),
    ]
    for f, more, y in cases:
        levels = {"p": bx.minimum(project=(-1.0, 1.0)), **more}
        problem = bx.Problem(lambda x, y, block, batch, f=f: f(y) + x @ x, levels, jnp.zeros((1, 1)))
        with pytest.raises(RuntimeError, match="f must be convex in the variables of a `minimum`"):
            bx.objective(problem, jnp.ones(2), y)


def test_residuals_and_verification_know_variables_that_optimise_f():
    problem = quadratic(p=bx.minimum(project=(-0.5, None)), q=bx.maximum())
    y0 = {"p": jnp.ones((6, 2)), "q": jnp.ones((6, 2))}
    result = bx.minimize(problem, jnp.ones(2), y0, steps=600, progress=None)
    left = bx.residuals(problem, result.state)
    assert left.v == {"p": None, "q": None}
    assert max(map(float, [*left.y.values(), *left.gradient.values()])) < 1e-3
    assert bx.verify(problem, result.state, jnp.ones(2)).message == ""


# --- runs with nothing given ----------------------------------------------------


def thresholds(scale, offset):
    """CVaR regressions: f has a kink in the threshold of a block at every row."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(M * ROWS, 3)).astype(np.float32)
    target = (rows @ [1.0, -2.0, 0.5] + rng.standard_t(4, size=M * ROWS)).astype(np.float32)

    def losses(x, batch):
        return scale * (batch["row"] @ x - batch["target"]) ** 2

    def upper(x, y, block, batch):
        return y + jnp.mean(jax.nn.relu(losses(x, batch) - y)) / SHARE + offset

    data = {"row": rows, "target": target}

    def exact(x):
        worst = np.sort(np.asarray(losses(np.asarray(x), data)).reshape(M, ROWS), 1)[:, ::-1]
        return worst[:, : int(SHARE * ROWS)].mean() + offset

    offsets = np.arange(0, M * ROWS + 1, ROWS)
    return bx.Problem(upper, bx.minimum(), M, bx.PerBlock(data, offsets)), exact


@pytest.mark.parametrize(("scale", "offset"), [(1e3, 0.0), (1e-3, 1.0)])
def test_thresholds_are_found_across_kinks_whatever_the_units(scale, offset):
    problem, exact = thresholds(scale, offset)
    plan = {"blocks_per_step": 6, "batch_size": 10, "progress": None}
    result = bx.minimize(problem, jnp.zeros(3), jnp.zeros(M), steps=1500, **plan)
    best = min(exact(x) for x in ([1.0, -2.0, 0.5], result.x))
    assert exact(result.x) - best < 0.02 * (exact(np.zeros(3)) - best)
    np.testing.assert_allclose(bx.objective(problem, result.x, jnp.zeros(M)), exact(result.x), rtol=1e-5)


def in_a_ball(p):
    return p / jnp.maximum(jnp.linalg.norm(p) / 0.7, 1)


@pytest.mark.parametrize("method", [bx.BSVRBv2, bx.MSVR])
def test_methods_reach_the_optimum_with_nothing_given(method):
    """min over x and p, max over q: p is nearest to b + x in a ball, q = b, ∇F = x − mean (p − b − x)."""
    problem = quadratic(p=bx.minimum(project=in_a_ball), q=bx.maximum())
    y0, plan = {"p": jnp.zeros((6, 2)), "q": jnp.ones((6, 2))}, {"blocks_per_step": 2, "progress": None}
    result = bx.minimize(problem, jnp.ones(2), y0, solver=method(), steps=1000, **plan)
    aim = problem.blocks + result.x
    p = jax.vmap(in_a_ball)(aim)
    assert float(jnp.linalg.norm(result.x - jnp.mean(p - aim, 0))) < 0.05
    assert float(jnp.max(jnp.linalg.norm(aim, axis=1))) > 0.8  # some are out of the ball
    np.testing.assert_allclose(result.y["p"], p, atol=0.05)
    assert float(jnp.max(jnp.linalg.norm(result.y["p"], axis=1))) < 0.7 + 1e-5
    np.testing.assert_allclose(result.y["q"], problem.blocks, atol=0.05)


# --- slots, checkpoints, precision ------------------------------------------------


def test_slots_that_are_blocks_make_the_same_run():
    def upper(x, y, block, batch):
        return 0.5 * jnp.sum((y - block["b"] - x) ** 2) + 0.5 * x @ x

    blocks = {"b": jnp.arange(12.0).reshape(6, 2), "slot": jnp.arange(6)[::-1]}
    own = bx.Problem(upper, bx.minimum(project=(0.0, 9.0)), blocks)
    there = bx.minimum(project=(0.0, 9.0), slots=lambda block, batch: block["slot"], count=6)
    solver, plan = bx.BSVRBv2(0.1, lower_step=0.1), {"steps": 40, "blocks_per_step": 2, "progress": None}
    one = bx.minimize(own, jnp.ones(2), jnp.ones((6, 2)), solver=solver, **plan)
    other = bx.minimize(
        bx.Problem(upper, there, blocks), jnp.ones(2), jnp.ones((6, 2)), solver=solver, **plan
    )
    np.testing.assert_allclose(one.y, other.y[::-1], rtol=1e-6)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-6)


def test_a_resumed_run_has_the_same_bits(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    problem = quadratic(p=bx.minimum(project=(-0.5, None)), q=bx.maximum())
    y0, plan = {"p": jnp.ones((6, 2)), "q": jnp.ones((6, 2))}, {"blocks_per_step": 2, "progress": None}

    def run(steps, **given):
        solver = bx.BSVRBv2()
        return bx.minimize(problem, jnp.ones(2), y0, solver=solver, steps=steps, **plan, **given).state

    whole = run(60)
    run(30, checkpoint=bx.Checkpoint(tmp_path, resume=True))
    resumed = run(60, checkpoint=bx.Checkpoint(tmp_path, resume=True))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("solver", [bx.BSVRBv2(0.1), bx.MSVR(0.1), bx.BlockNewton(0.1)])
def test_every_leaf_keeps_its_precision(solver):
    problem = jax.tree.map(lambda a: a.astype(jnp.float32), quadratic(p=bx.minimum(project=(-0.5, None))))

    def start(problem, x, y):
        state = solver.init(problem, x, y, key=jax.random.key(0), blocks_per_step=2)
        return state, solver.step(problem, state)[0], (state.y,)

    shapes = jax.eval_shape(start, problem, jnp.ones(2, jnp.float32), {"p": jnp.ones((6, 2), jnp.float32)})
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])
    floating = [leaf for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floating} == {np.dtype(np.float32)}


def test_a_vmapped_state_projects_its_variables_too():
    problem = quadratic(p=bx.minimum(project=(-0.1, 0.1)))

    def one(key):
        solver = bx.BSVRBv2(0.1, lower_step=0.5)
        state = solver.init(problem, jnp.ones(2), {"p": jnp.zeros((6, 2))}, key=key, blocks_per_step=2)
        return bx.advance(problem, solver, state, 10)

    states = jax.vmap(one)(jax.random.split(jax.random.key(0), 3))
    assert states.y["p"].shape == (3, 6, 2)
    assert float(jnp.max(jnp.abs(states.y["p"]))) == pytest.approx(0.1)


# --- bad input ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"project": (1.0, 0.0)}, ValueError, "project: lower must not exceed upper"),
        ({"project": (None, None)}, ValueError, "at least one bound"),
        ({"project": 3.0}, TypeError, r"bounds \(lower, upper\) or a function of y, got float"),
        ({"project": (float("nan"), None)}, ValueError, "the lower bound of project must be a number"),
        ({"slots": lambda block, batch: 0}, ValueError, "slots and count go together"),
    ],
)
@pytest.mark.parametrize("level", [bx.minimum, bx.maximum])
def test_a_level_that_makes_no_sense_is_refused(level, given, error, words):
    with pytest.raises(error, match=words):
        level(**given)


WRONG = {
    "must be given for a minimum level": (bx.minimum(), None),
    "must start in the set that project= gives, .* slot 0": (
        bx.minimum(project=(0.0, 1.0)),
        jnp.full((6, 2), -3.0),
    ),
    "the lower bound of project of the minimum level 'p'": (
        bx.minimum(project=(jnp.zeros(3), None)),
        jnp.ones((6, 2)),
    ),
    "project of the minimum level 'p' must return what y is": (
        bx.minimum(project=lambda p: p[0]),
        jnp.ones((6, 2)),
    ),
    "project of the minimum level 'p' must be a projection, .* got .* which it had returned for": (
        bx.minimum(project=lambda p: -p),  # at zero it looks like one
        jnp.zeros((6, 2)),
    ),
    r"project of the minimum level 'p' must return finite numbers, got \[nan nan\] for": (
        bx.minimum(project=lambda p: p / jnp.linalg.norm(p)),
        jnp.zeros((6, 2)),
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_start_that_does_not_fit_is_refused(words):
    level, y0 = WRONG[words]
    with pytest.raises(ValueError, match=words):
        bx.minimize(quadratic(p=level), jnp.ones(2), {"p": y0}, steps=1, progress=None)


def test_methods_refuse_what_they_cannot_serve_by_name():
    problem = quadratic(p=bx.minimum())
    with pytest.raises(ValueError, match=r"RSVRB takes one argmin lower level .* 'minimum'"):
        bx.RSVRB().init(problem, jnp.ones(2), {"p": jnp.ones((6, 2))}, key=jax.random.key(0))
    mean = bx.Problem(lambda x, y, b, r: jnp.sum(y), bx.mean(lambda x, b, r: x), 3)
    with pytest.raises(ValueError, match="F2SA takes argmin, minimum and maximum lower"):
        bx.F2SA().init(mean, jnp.ones(2), key=jax.random.key(0))


def test_a_known_start_within_bounds_is_checked_inside_a_program():
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum((y - x) ** 2), bx.minimum(project=(0.0, 1.0)), 3)
    solver, x0 = bx.MMBO(0.1, lower_step=0.1), jnp.ones(2)

    def shapes(y0):
        return jax.eval_shape(lambda: solver.init(problem, x0, y0, key=jax.random.key(0)).x)

    assert shapes(jnp.ones((3, 2))).shape == (2,)
    with pytest.raises(ValueError, match=r"y0 must start in the set that project= gives, .* slot 0"):
        shapes(jnp.full((3, 2), 2.0))


def test_messages_about_unsolved_problems_speak_of_the_kinds_that_there_are():
    """Of f where its own variables have no optimum, and of g where there is a g."""
    problem = bx.Problem(lambda x, y, b, r: x @ x + y["q"], {"q": bx.minimum()}, 3)
    with pytest.warns(
        bx.AccuracyWarning, match=r"not be verified.*solved; f must be convex in the variables"
    ):
        bx.minimize(
            problem,
            jnp.ones(2),
            {"q": jnp.zeros(3)},
            solver=bx.SOBA(0.1, lower_step=0.1),
            steps=100,
            stop=bx.Stop(verify=True),
            progress=None,
        )
    own = "f must be convex in the variables of a `minimum`, and concave in those of a `maximum`"
    assert problem.assumptions == own
    assert quadratic(p=bx.minimum(), q=bx.maximum()).assumptions == own
    level = bx.argmin(lambda x, y, b, r: jnp.sum((y - x) ** 2))
    both = bx.Problem(lambda x, y, b, r: jnp.sum(y["y"]) + y["q"], {"y": level, "q": bx.minimum()}, 3)
    assert both.assumptions == f"g must be smooth and strongly convex in y; {own}"


def test_new_blocks_without_rows_of_f_are_not_solved_for_what_optimises_f():
    problem = quadratic(p=bx.minimum())
    with pytest.raises(
        ValueError, match=r"adapt .* the minimum level 'p', which optimises f: call solve_lower"
    ):
        bx.adapt(problem, jnp.ones(2), {}, blocks=problem.blocks)
