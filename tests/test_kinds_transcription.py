"""Every method follows its plain transcription on levels of every kind (`reference.kinds`), step by step."""

import dataclasses
import functools
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import algorithms, kinds

import bilevax as bx

STEPS, TOLERANCE = 60, 1e-9
FLOOR, REFRESH = 0.9, 0.2
SETTINGS = {"eta": 0.02, "tau": 0.05, "tau_bar": 0.04, "alpha": 0.3, "alpha_bar": 0.2, "beta": 0.25}
SETTINGS |= {"penalty": 3.0}
NAMES = {"eta": "upper_step", "tau": "lower_step", "tau_bar": "inverse_step"}
PLAIN = {"alpha": 1.0, "alpha_bar": 1.0, "beta": 1.0}

# The method, what its reference is given, and the coefficients that are part of it.
tracked = functools.partial(functools.partial, kinds.steps_of)
METHODS = {
    "BSVRBv1": (bx.BSVRBv1, tracked(corrected=True, everyone=True, curvature="H", lam=FLOOR), {}),
    "BSVRBv2": (bx.BSVRBv2, tracked(corrected=True, everyone=True, curvature="v"), {}),
    "KSONG": (bx.KSONG, tracked(corrected=False, everyone=False, curvature="H", lam=FLOOR), {}),
    "MMBO": (bx.MMBO, tracked(corrected=False, everyone=False, curvature="v"), {}),
    "SOBA": (bx.SOBA, tracked(corrected=False, everyone=False, curvature="v"), PLAIN),
    "MASOBA": (bx.MASOBA, tracked(corrected=False, everyone=False, curvature="v"), PLAIN | {"beta": 0.25}),
    "F2SA": (bx.F2SA, tracked(corrected=False, everyone=False, curvature="w"), PLAIN),
    "F3SA": (bx.F3SA, tracked(corrected=True, everyone=True, curvature="w"), {}),
    "BlockPAGE": (
        bx.BlockPAGE,
        tracked(corrected=True, everyone=True, curvature="v", refresh=True),
        {"alpha": 0.0, "alpha_bar": 0.0, "beta": 0.0},
    ),
    "MSVR": (bx.MSVR, tracked(corrected=True, everyone=False, curvature=None), {}),
    "SONG": (bx.SONG, tracked(corrected=False, everyone=False, curvature=None), {}),
    "BlockSAGA": (bx.BlockSAGA, functools.partial(kinds.saga_steps_of, size=3), {}),
    "BlockNewton": (bx.BlockNewton, kinds.newton_steps_of, {}),
}

pytestmark = pytest.mark.usefixtures("x64")


def source(rows, offsets):
    return bx.PerBlock(rows | {"place": np.arange(offsets[-1])}, offsets)


def as_library(blocks, level=bx.argmin, **given):
    lower = {
        "a": level(blocks.lower, **given),
        "p": bx.minimum(project=(kinds.LEAST, None)),
        "q": bx.maximum(project=(None, kinds.MOST)),
    }
    rows = {"a": source(blocks.lower_rows, blocks.lower_offsets)}
    return bx.Problem(
        blocks.upper, lower, blocks.blocks, source(blocks.upper_rows, blocks.upper_offsets), rows
    )


def without_lower_level(blocks, a):
    """The problem with a given: its levels have no function."""
    lower = {"p": bx.minimum(project=(kinds.LEAST, None)), "q": bx.maximum(project=(None, kinds.MOST))}
    return bx.Problem(
        lambda x, y, block, batch: blocks.upper(x, y | {"a": block["a"]}, block, batch),
        lower,
        blocks.blocks | {"a": a},
        source(blocks.upper_rows, blocks.upper_offsets),
    )


def flat(y):
    return jnp.concatenate(y, -1) if isinstance(y, tuple) else y


def read(state):
    """The state by the reference's names, all blocks caught up."""
    out = {"x": state.x, "z": state.z} | {name: flat(y) for name, y in state.y.items()}
    out |= {f"s_{name}": flat(memory.y.slope) for name, memory in state.levels.items()}
    if "a" not in state.levels:
        return out
    memory, clocks = state.levels["a"], state.clocks["a"]
    if memory.v is not None:
        out |= {"u": flat(memory.v.slope), "v": flat(memory.v.at(clocks.v.now))}
    return out if memory.hessian is None else out | {"H": memory.hessian}


@eqx.filter_jit
def run(solver, problem, x0, y0):
    """What a run starts from, what its steps leave, and what they see."""
    plan = bx.Sampling(blocks_per_step=2, batch_size=3, initial_batch_size="all", shuffle=False)
    if isinstance(solver, bx.BlockSAGA):
        plan = bx.Sampling(blocks_per_step=2, batch_size=3)
    state = solver.init(problem, x0, y0, key=jax.random.key(0), sampling=plan)

    def places(batch):
        rows = batch.rows["place"]
        return rows if batch.weight is None else jnp.where(batch.weight > 0, rows, -1)

    def step(state, _):
        sample = solver.draw(problem, state)
        lower = sample.lower.get("a", sample.upper)
        seen = {"blocks": sample.blocks, "upper": places(sample.upper), "lower": places(lower)}
        if isinstance(solver, bx.BlockPAGE):
            seen["refresh"] = solver.refreshes(problem, state.sampler, state.step)
        state, _ = solver.step(problem, state)
        return state, (read(state), seen)

    _, (states, seen) = jax.lax.scan(step, state, length=STEPS)
    return read(state), states, seen


def make_solver(method, **more):
    solver, _, fixed = METHODS[method]
    values = {NAMES.get(name, name): value for name, value in (SETTINGS | fixed).items()}
    values |= {"floor": FLOOR, "refresh_chance": REFRESH} | more
    has = {field.name for field in dataclasses.fields(solver)}
    return solver(**{name: value for name, value in values.items() if name in has})


def follow(method, blocks, problem, y0, **given):
    x0 = 0.5 * np.random.default_rng(1).normal(size=blocks.dx)
    first, states, seen = jax.tree.map(np.asarray, run(make_solver(method), problem, x0, y0))
    if method == "F3SA":  # w, which is projected when it is read
        states["v"] = np.clip(states["v"], *blocks.box)
    samples = [SimpleNamespace(**{name: one[t] for name, one in seen.items()}) for t in range(STEPS)]
    for sample in samples:
        sample.upper = [rows[rows >= 0] for rows in sample.upper]
        sample.lower = [rows[rows >= 0] for rows in sample.lower]
    _, reference, fixed = METHODS[method]
    expected = reference(blocks, samples, given | first, algorithms.constant(**(SETTINGS | fixed)))
    for t, after in enumerate(expected):
        for name in states:
            wanted = getattr(after, name)
            if method == "BlockNewton" and name in ("s_a", "u"):
                continue  # what its Newton steps do not use
            assert np.abs(wanted).max() < 30, f"{name} diverges"
            message = f"{name} after {t + 1} steps"
            np.testing.assert_allclose(states[name][t], wanted, rtol=0, atol=TOLERANCE, err_msg=message)
    return first, states


def check_own_variables(method, blocks, first, a, states):
    """Their first slopes come from all rows, and their bounds bind, but not everywhere."""
    start = SimpleNamespace(x=first["x"], a=a, p=first["p"], q=first["q"])
    scale = 1.5 if method == "BlockNewton" else 1
    for i in range(blocks.m):
        rows = blocks.upper_of(i)
        np.testing.assert_allclose(first["s_p"][i], blocks.f_p(i, start, rows), atol=TOLERANCE)
        np.testing.assert_allclose(first["s_q"][i], -blocks.f_q(i, start, rows) / scale, atol=TOLERANCE)
    for name, bound in (("p", kinds.LEAST), ("q", kinds.MOST)):
        at = np.isclose(states[name], bound, rtol=0, atol=1e-12)
        assert at.any()
        assert not at.all()


SADDLE = ("BSVRBv2", "MMBO", "SOBA", "MASOBA", "BlockPAGE", "BlockSAGA", "BlockNewton")


@pytest.mark.parametrize("method", SADDLE)
def test_saddle_points(method):
    blocks = kinds.Kinds(saddle=True)
    pair = np.zeros((5, 2)), np.full((5, 2), 0.1)
    y0 = {"a": pair, "p": np.full((5, 2), 0.1), "q": np.full((5, 3), -0.1)}
    first, states = follow(method, blocks, as_library(blocks, bx.saddle), y0)
    check_own_variables(method, blocks, first, first["a"], states)


@pytest.mark.parametrize("method", ["BSVRBv2", *(method for method in METHODS if method not in SADDLE)])
def test_variables_that_minimise_and_maximise_f(method):
    blocks = kinds.Kinds(saddle=False)
    y0 = {"a": np.zeros((5, 4)), "p": np.full((5, 2), 0.1), "q": np.full((5, 3), -0.1)}
    if method in ("MSVR", "SONG"):
        a = np.random.default_rng(2).normal(size=(5, 4))
        problem, y0 = without_lower_level(blocks, a), {"p": y0["p"], "q": y0["q"]}
        first, states = follow(method, blocks, problem, y0, a=a)
    else:
        first, states = follow(method, blocks, as_library(blocks), y0)
        a = first["a"]
    check_own_variables(method, blocks, first, a, states)


BOUNDED = [method for method in METHODS if method not in ("MSVR", "SONG")]


@pytest.mark.parametrize("method", BOUNDED)
def test_lower_solutions_within_bounds(method):
    """v is zero where a bound holds a, in every method."""
    blocks = kinds.Kinds(saddle=False, box=kinds.BOX)
    y0 = {"a": np.zeros((5, 4)), "p": np.full((5, 2), 0.1), "q": np.full((5, 3), -0.1)}
    first, states = follow(method, blocks, as_library(blocks, project=kinds.BOX), y0)
    check_own_variables(method, blocks, first, first["a"], states)
    free = blocks.free(states["a"])
    assert 0.2 < free.mean() < 0.8
    if method not in ("BlockSAGA", "F3SA"):  # with more noise, some entries leave their bound again
        assert (np.diff(free, axis=0) > 0).any()


IN_SETS = ("F2SA", "F3SA")


@pytest.mark.parametrize("method", IN_SETS)
def test_lower_solutions_within_a_set(method):
    """A set is a function that projects: here that of the bounds, which the reference knows."""
    blocks = kinds.Kinds(saddle=False, box=kinds.BOX)
    y0 = {"a": np.zeros((5, 4)), "p": np.full((5, 2), 0.1), "q": np.full((5, 3), -0.1)}
    problem = as_library(blocks, project=lambda y: jnp.clip(y, *kinds.BOX))
    _, states = follow(method, blocks, problem, y0)
    assert 0.2 < blocks.free(states["a"]).mean() < 0.8
