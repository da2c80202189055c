"""Every method follows its plain transcription on levels that read others (`reference.nested`)."""

import functools
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import algorithms, nested
from test_kinds_transcription import FLOOR, PLAIN, SETTINGS, make_solver, source

import bilevax as bx

STEPS, TOLERANCE = 40, 1e-9
BOX = (-0.2, 0.3)
ALL = {"a": "argmin", "m": "mean", "b": "argmin"}
CURVED, MEANS = {"a": "argmin", "b": "argmin"}, {"a": "mean", "m": "mean", "b": "mean"}

tracked = functools.partial(functools.partial, nested.steps_of)
# The kinds of the levels, what the reference is given, and the coefficients that are part of the method.
METHODS = {
    "BSVRBv1": (ALL, tracked(corrected=True, everyone=True, curvature="H", lam=FLOOR), {}),
    "BSVRBv2": (ALL, tracked(corrected=True, everyone=True, curvature="v"), {}),
    "KSONG": (ALL, tracked(corrected=False, everyone=False, curvature="H", lam=FLOOR), {}),
    "MMBO": (ALL, tracked(corrected=False, everyone=False, curvature="v"), {}),
    "SOBA": (ALL, tracked(corrected=False, everyone=False, curvature="v"), PLAIN),
    "MASOBA": (ALL, tracked(corrected=False, everyone=False, curvature="v"), PLAIN | {"beta": 0.25}),
    "F2SA": (CURVED, tracked(corrected=False, everyone=False, curvature="w"), PLAIN),
    "F3SA": (CURVED, tracked(corrected=True, everyone=True, curvature="w"), {}),
    "BlockPAGE": (
        ALL,
        tracked(corrected=True, everyone=True, curvature="v", refresh=True),
        {"alpha": 0.0, "alpha_bar": 0.0, "beta": 0.0},
    ),
    "MSVR": (MEANS, tracked(corrected=True, everyone=False, curvature=None), {}),
    "SONG": (MEANS, tracked(corrected=False, everyone=False, curvature=None), {}),
    "BlockSAGA": (CURVED, functools.partial(nested.saga_steps_of, size=3), {}),
    "BlockNewton": (ALL, nested.newton_steps_of, {}),
}

pytestmark = pytest.mark.usefixtures("x64")


def as_library(blocks):
    lower = {}
    for name in blocks.names:
        given = {"reads": tuple(blocks.reads[name])}
        if name == "a" and name in blocks.curved and np.isfinite(blocks.box).all():
            given["project"] = blocks.box
        level = bx.argmin if name in blocks.curved else bx.mean
        lower[name] = level(blocks.function(name), **given)
    upper_data, lower_data = (
        source(rows, offsets)
        for rows, offsets in (
            (blocks.upper_rows, blocks.upper_offsets),
            (blocks.lower_rows, blocks.lower_offsets),
        )
    )
    return bx.Problem(blocks.upper, lower, blocks.blocks, upper_data, lower_data)


def read(state):
    """The state by the reference's names, all blocks caught up."""
    out = {"x": state.x, "z": state.z} | {f"y.{name}": y for name, y in state.y.items()}
    for name, memory in state.levels.items():
        if not hasattr(memory.y, "slope"):
            continue
        out[f"s.{name}"] = memory.y.slope
        if memory.v is not None:
            v = memory.v.at(state.clocks[name].v.now)
            out |= {f"u.{name}": memory.v.slope, f"v.{name}": v}
        if memory.hessian is not None:
            out[f"H.{name}"] = memory.hessian
    return out


@eqx.filter_jit
def run(solver, problem, x0, y0):
    """What a run starts from, what its steps leave, and what they see."""
    first = {} if isinstance(solver, bx.BlockSAGA) else {"initial_batch_size": "all", "shuffle": False}
    plan = bx.Sampling(blocks_per_step=2, batch_size=3, **first)
    state = solver.init(problem, x0, y0, key=jax.random.key(0), sampling=plan)

    def places(batch):
        rows = batch.rows["place"]
        return rows if batch.weight is None else jnp.where(batch.weight > 0, rows, -1)

    def step(state, _):
        sample = solver.draw(problem, state)
        seen = {"blocks": sample.blocks, "upper": places(sample.upper), "lower": places(sample.lower["a"])}
        if isinstance(solver, bx.BlockPAGE):
            seen["refresh"] = solver.refreshes(problem, state.sampler, state.step)
        state, _ = solver.step(problem, state)
        return state, (read(state), seen)

    _, (states, seen) = jax.lax.scan(step, state, length=STEPS)
    return read(state), states, seen


@pytest.mark.parametrize("method", METHODS)
def test_levels_that_read_others(method):
    kinds, reference, fixed = METHODS[method]
    blocks = nested.Nested(kinds, BOX if kinds["a"] == "argmin" else (-np.inf, np.inf))
    x0 = 0.5 * np.random.default_rng(1).normal(size=blocks.dx)
    y0 = {name: np.zeros((blocks.m, blocks.dy)) if name in blocks.curved else None for name in blocks.names}
    first, states, seen = jax.tree.map(np.asarray, run(make_solver(method), as_library(blocks), x0, y0))
    check_start(blocks, nested.namespace(first))
    if method == "F3SA":  # w, which is projected when it is read
        states["v.a"] = np.clip(states["v.a"], *blocks.box)
    samples = [SimpleNamespace(**{name: one[t] for name, one in seen.items()}) for t in range(STEPS)]
    for sample in samples:
        sample.upper = [rows[rows >= 0] for rows in sample.upper]
        sample.lower = [rows[rows >= 0] for rows in sample.lower]
    coefficients = algorithms.constant(**(SETTINGS | fixed))
    for t, after in enumerate(reference(blocks, samples, nested.namespace(first), coefficients)):
        for name in states:
            letter, _, level = name.partition(".")
            wanted = getattr(after, letter)[level] if level else getattr(after, letter)
            if method == "BlockNewton" and letter in ("s", "u"):
                continue  # what its Newton steps do not use
            assert np.abs(wanted).max() < 30, f"{name} diverges"
            message = f"{name} after {t + 1} steps"
            np.testing.assert_allclose(states[name][t], wanted, rtol=0, atol=TOLERANCE, err_msg=message)
    if "a" in blocks.curved:
        assert 0.2 < blocks.free("a", states["y.a"]).mean() < 0.95


def check_start(blocks, start):
    """Means start from what they read, in order; slopes from all rows."""
    for name in blocks.names:
        for i in range(blocks.m):
            pull = blocks.pull(name, i, start.x, start.y, blocks.lower_of(i))
            if name in blocks.curved:
                slope = blocks.hessian(name, i, blocks.lower_of(i)) @ start.y[name][i] - pull
                np.testing.assert_allclose(start.s[name][i], slope, atol=TOLERANCE)
            else:
                np.testing.assert_allclose(start.y[name][i], pull, atol=TOLERANCE)
