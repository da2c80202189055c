"""Levels that read others: the truth, runs with nothing given, checkpoints, slots, who refuses what."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import nested
from test_nested_transcription import ALL, CURVED, MEANS, as_library

import bilevax as bx
from bilevax.testing import nested_blocks

X = np.array([0.3, -0.4, 0.2])


def differences(problem, x, y0, h=1e-5):
    """∇F by differences of F."""
    found = []
    for e in np.eye(x.size):
        up, down = (bx.objective(problem, x + sign * h * e, y0) for sign in (1, -1))
        found.append((up - down) / (2 * h))
    return np.array(found)


# --- the truth ----------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kinds", [ALL, CURVED, MEANS])
def test_levels_are_solved_in_order_and_multipliers_in_reverse(kinds):
    blocks = nested.Nested(kinds)
    problem, (y, gradient) = as_library(blocks), nested.hypergradient(blocks, X)
    y0 = {name: np.ones((5, 3)) if name in blocks.curved else None for name in blocks.names}
    found = bx.value_and_hypergradient(problem, X, y0)
    for name in blocks.names:
        np.testing.assert_allclose(found.y[name], y[name], rtol=0, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.gradient, gradient, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.gradient, differences(problem, X, y0), rtol=0, atol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("bound", [None, 0.5])
def test_the_family_agrees_with_the_diagnostics(bound):
    family = nested_blocks(m=4, d_x=3, d_y=2, rows=5, noise=0.5, bound=bound, dtype=np.float64)
    found = bx.value_and_hypergradient(family.problem, X, family.y0)
    np.testing.assert_allclose(found.value, family.value(X), rtol=1e-9)
    np.testing.assert_allclose(found.gradient, family.gradient(X), rtol=0, atol=1e-8)
    expected = family.lower_solution(X)
    for name, y in expected.items():
        np.testing.assert_allclose(found.y[name], y, rtol=0, atol=1e-8)
    slopes = [(family.value(X + 1e-5 * e) - family.value(X - 1e-5 * e)) / 2e-5 for e in np.eye(3)]
    np.testing.assert_allclose(family.gradient(X), slopes, rtol=0, atol=1e-7)
    if bound is None:
        np.testing.assert_allclose(family.gradient(family.solution), 0, atol=1e-9)
        assert family.least < family.value(X)
    else:
        at = np.isclose(np.abs(expected["first"]), bound)
        assert at.any()
        assert not at.all()
        np.testing.assert_array_equal(family.inverse_solution(X)["first"][at], 0)


def every_kind():
    """An argmin within bounds, a saddle point that reads it, a mean that reads both, and a minimum of f.

    Their names are in the reverse of the alphabet: a jit sorts them.
    """
    rng = np.random.default_rng(3)
    blocks = {
        name: jnp.asarray(rng.normal(size=(4, 2, size))) for name, size in (("B", 3), ("C", 2), ("D", 4))
    }

    def first(x, y, block, batch):
        return jnp.sum((y - block["B"] @ jnp.sin(x)) ** 2) + 0.1 * jnp.sum(y) ** 2

    def second(x, y, block, batch):
        p, q = y["r"]
        pull = block["C"] @ jnp.tanh(y["z"])
        return jnp.sum((p - pull) ** 2) + p @ q - jnp.sum((q - jnp.cos(x[:2])) ** 2)

    def third(x, y, block, batch):
        return block["D"] @ jnp.concatenate([y["z"], y["r"][0] * y["r"][1]]) + x[0]

    def upper(x, y, block, batch):
        fit = jnp.sum((y["c"] - 1) ** 2) + jnp.sum(y["z"] * y["r"][1]) + 0.5 * x @ x
        return fit + jnp.sum((y["a"] - y["c"] * x[1]) ** 2) + 0.1 * jnp.sum(y["a"] ** 2)

    levels = {
        "z": bx.argmin(first, project=(-0.3, 0.2)),
        "r": bx.saddle(second, reads="z"),
        "c": bx.mean(third, reads=("z", "r")),
        "a": bx.minimum(),
    }
    zero = np.zeros((4, 2))
    return bx.Problem(upper, levels, blocks), {"z": zero, "r": (zero, zero), "c": None, "a": zero}


@pytest.mark.usefixtures("x64")
def test_levels_of_every_kind_may_read_those_before_them():
    problem, y0 = every_kind()
    found = bx.value_and_hypergradient(problem, X, y0)
    np.testing.assert_allclose(found.gradient, differences(problem, X, y0), rtol=0, atol=1e-7)
    at = np.isclose(found.y["z"], -0.3) | np.isclose(found.y["z"], 0.2)
    assert at.any()
    assert not at.all()
    resorted = jax.tree.map(lambda leaf: leaf, problem)
    assert list(resorted.levels) == ["a", "c", "r", "z"]
    assert resorted.order == ("a", "z", "r", "c")
    np.testing.assert_array_equal(bx.hypergradient(resorted, X, y0), found.gradient)


@pytest.mark.usefixtures("x64")
def test_the_shapes_of_levels_that_read_others_are_found():
    blocks = nested.Nested(ALL)
    y, _ = nested.hypergradient(blocks, X)
    found = bx.solve_lower(as_library(blocks), X)
    np.testing.assert_allclose(found["b"], y["b"], rtol=0, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_new_blocks_are_solved_in_order():
    blocks = nested.Nested(ALL)
    problem = jax.tree.map(lambda leaf: leaf, as_library(blocks))  # with its levels sorted by name
    y, _ = nested.hypergradient(blocks, X)
    found = bx.adapt(problem, X, problem.lower_data[0], blocks=blocks.blocks)
    for name in blocks.names:
        np.testing.assert_allclose(found[name], y[name], rtol=0, atol=1e-8, err_msg=name)


# --- runs -----------------------------------------------------------------------


@pytest.mark.parametrize("solver", [None, bx.BSVRBv2()])
def test_runs_with_nothing_given_reach_the_optimum(solver):
    family = nested_blocks(m=10, d_x=3, d_y=2, rows=20, noise=0.3)
    plan = {"steps": 1500, "blocks_per_step": 4, "batch_size": 8, "progress": None}
    result = bx.minimize(family.problem, family.x0, family.y0, solver=solver, **plan)
    gap = (family.value(result.x) - family.least) / (family.value(family.x0) - family.least)
    assert gap < 0.02
    assert result.verification is not None
    assert result.verification.message == ""
    left = bx.residuals(family.problem, result.state)
    assert list(left.y) == list(left.gradient) == ["first", "second", "third"]
    assert str(left).splitlines()[0].split() == ["first", "second", "third"]
    assert max(map(float, left.y.values())) < 0.3


@pytest.mark.parametrize("solver", [bx.BSVRBv1(), bx.BSVRBv2(), bx.BlockNewton()])
def test_a_resumed_run_has_the_same_bits(tmp_path, solver):
    pytest.importorskip("orbax.checkpoint")
    if isinstance(solver, bx.BSVRBv1):  # which takes no saddle points
        family = nested_blocks(m=6, d_x=3, d_y=2, rows=5, bound=0.5)
        start = family.problem, family.x0, family.y0
    else:
        problem, y0 = every_kind()
        start = problem, jnp.asarray(X), jax.tree.map(jnp.asarray, y0)

    def run(steps, **given):
        plan = {"solver": solver, "steps": steps, "blocks_per_step": 2, "progress": None}
        return bx.minimize(*start, **plan, **given).state

    whole = run(60)
    run(30, checkpoint=bx.Checkpoint(tmp_path, resume=True))
    resumed = run(60, checkpoint=bx.Checkpoint(tmp_path, resume=True))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


TAKERS = [bx.BSVRBv1, bx.BSVRBv2, bx.KSONG, bx.MMBO, bx.SOBA, bx.MASOBA, bx.BlockPAGE, bx.BlockNewton]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", TAKERS)
def test_every_leaf_keeps_its_precision(method):
    """And the state its structure, also in many runs at once."""
    family = nested_blocks(m=6, d_x=3, d_y=2, rows=5, bound=0.5, dtype=np.float32)
    solver, plan = method(0.1), {"blocks_per_step": 2, "batch_size": 2}

    def start(x, key):
        state = solver.init(family.problem, x, family.y0, key=key, **plan)
        return state, solver.step(family.problem, state)[0], (state.y, state.v)

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = jax.eval_shape(jax.vmap(start, (None, 0)), jnp.asarray(family.x0), keys)
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])
    floating = [leaf for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floating} == {np.dtype(np.float32)}


def test_the_memory_of_a_run_is_known():
    family = nested_blocks(m=200, d_x=3, d_y=2, rows=5, bound=0.5)
    solver, plan = bx.BSVRBv1(), bx.Sampling(blocks_per_step=4, batch_size=2)
    found = bx.memory_estimate(family.problem, family.x0, family.y0, solver=solver, sampling=plan)
    state = solver.init(family.problem, family.x0, family.y0, key=jax.random.key(0), sampling=plan)
    assert found.slots == sum(leaf.nbytes for leaf in jax.tree.leaves(state.levels))


# --- slots ------------------------------------------------------------------------


def with_slots(slots, count):
    """b reads a, whose slots are given."""

    def lower(x, y, block, batch):
        return jnp.sum((y["b"] - y["a"] - block["aim"]) ** 2)

    def upper(x, y, block, batch):
        return jnp.sum((y["b"] - 1) ** 2) + 0.1 * x @ x

    first = bx.argmin(lambda x, y, block, batch: jnp.sum((y - x) ** 2), slots=slots, count=count)
    blocks = {"aim": jnp.arange(12.0).reshape(6, 2) / 12, "slot": jnp.arange(6)[::-1]}
    return bx.Problem(upper, {"a": first, "b": bx.argmin(lower, reads="a")}, blocks)


def test_one_slot_per_block_makes_the_same_run():
    y0, x0 = {"a": jnp.ones((6, 2)), "b": jnp.ones((6, 2))}, jnp.ones(2)
    solver, plan = bx.BSVRBv2(0.1, lower_step=0.1), {"steps": 40, "blocks_per_step": 2, "progress": None}
    one = bx.minimize(with_slots(None, None), x0, y0, solver=solver, **plan)
    other = bx.minimize(with_slots(lambda block, batch: block["slot"], 6), x0, y0, solver=solver, **plan)
    np.testing.assert_allclose(one.y["a"], other.y["a"][::-1], rtol=1e-5)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-5)


def test_several_slots_per_block_are_refused():
    problem = with_slots(lambda block, batch: jnp.stack([block["slot"], block["slot"]]), 6)
    y0 = {"a": jnp.ones((6, 2)), "b": jnp.ones((6, 2))}
    with pytest.raises(ValueError, match=r"need one slot per block, got slots of shape .* level 'a'"):
        bx.minimize(problem, jnp.ones(2), y0, solver=bx.BSVRBv2(), steps=1, progress=None)


# --- bad input ------------------------------------------------------------------


def g(x, y, block, batch):
    return jnp.sum((y["b"] - x) ** 2)


WRONG = {
    "'b' reads 'a', which comes after it: .* so put 'a' first": {"b": bx.argmin(g, reads="a"), "a": g},
    "in a circle: 'a' → 'b' → 'a'": {"a": bx.argmin(g, reads="b"), "b": bx.argmin(g, reads="a")},
    "in a circle: 'a' → 'c' → 'b' → 'a'": {
        "a": bx.argmin(g, reads="c"),
        "b": bx.argmin(g, reads="a"),
        "c": bx.argmin(g, reads=("b",)),
    },
    r"'b' reads 'd', expected one of \['a', 'b'\]": {"a": g, "b": bx.mean(g, reads=("a", "d"))},
    "'b' reads itself": {"b": bx.saddle(g, reads="b")},
    "'b' reads 'p', a minimum level, whose variables optimise f": {
        "p": bx.minimum(),
        "b": bx.argmin(g, reads="p"),
    },
    "'lower' reads 'a', expected named levels, as lower is not a dict": bx.argmin(g, reads="a"),
}


def test_a_level_that_reads_without_saying_so_is_told_how():
    levels = {"a": bx.argmin(lambda x, y, block, batch: jnp.sum((y - x) ** 2)), "b": bx.argmin(g)}
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(y["b"]), levels, 3)
    y0 = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    with pytest.raises(TypeError, match=r"lower level 'b' fails .* if reads=… names others"):
        bx.minimize(problem, jnp.ones(2), y0, steps=1, progress=None)


@pytest.mark.parametrize("words", WRONG)
def test_levels_that_cannot_be_put_in_order_are_refused_by_name(words):
    with pytest.raises(ValueError, match=words):
        bx.Problem(lambda x, y, block, batch: 0.0, WRONG[words], 3)


@pytest.mark.parametrize(
    ("reads", "error", "words"),
    [
        (3, TypeError, "reads must be the name of a level or a tuple of names, got 3"),
        (("a", None), TypeError, "reads must be the name of a level or a tuple of names"),
        (("a", "a"), ValueError, "reads must name every level once"),
    ],
)
@pytest.mark.parametrize("level", [bx.argmin, bx.mean, bx.saddle])
def test_names_that_make_no_sense_are_refused(level, reads, error, words):
    with pytest.raises(error, match=words):
        level(g, reads=reads)


def test_a_function_that_does_not_fit_what_it_reads_is_named():
    levels = {
        "a": lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        "b": bx.argmin(lambda *given: given[1]["a"], reads="a"),
    }
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(y["b"]), levels, 3)
    y0 = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match="lower level 'b' must return"):
        bx.minimize(problem, jnp.ones(2), y0, steps=1, progress=None)


def test_methods_refuse_what_they_cannot_serve_by_name():
    family = nested_blocks(m=4, d_x=3, d_y=2, rows=5)
    refusals = {
        bx.BlockSAGA: "BlockSAGA does not take a mean level that others read, got 'second', which 'third'",
        bx.F2SA: "F2SA takes argmin, minimum and maximum lower levels only, got the mean level 'second'",
        bx.RSVRB: "RSVRB takes one argmin lower level",
    }
    for method, words in refusals.items():
        with pytest.raises(ValueError, match=words):
            method().init(family.problem, family.x0, family.y0, key=jax.random.key(0))
