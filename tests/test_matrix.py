"""Every kind of problem by every method: it is taken and followed by a transcription, or refused by name.

What a method takes is asked of it (`every_kind`). So a new method or a new kind fails here until some test
follows it by hand, and until the table in docs/choosing.md has it. The transcriptions move all blocks in
every step, so that to follow them also proves that lazy blocks are eager ones.
"""

import dataclasses
import functools
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kinds_transcription as kinds
import test_lower_transformation as transformation
import test_nested_transcription as nested
import test_random_and_common as random
import test_risks as risks
import test_streamed as streamed
import test_transcription as plain
from every_kind import BATCH, KINDS, METHODS, PER_STEP, every_kind, refusal, takes
from test_checkpoint import same_bits

import bilevax as bx
from bilevax._run import memory_estimate
from bilevax._run.checkpoint_store import CheckpointStore
from bilevax._step.slot_table import pack

CHOOSING = Path(__file__).parent.parent / "docs" / "choosing.md"


def solvers(*lists):
    """The methods of lists of tests, without restarts and variants."""
    return {name for one in lists for name in one if name in METHODS}


def with_kind(kind):
    return [method for method, (levels, *_) in nested.METHODS.items() if kind in levels.values()]


MIXED = [name.split()[0] for name in plain.MIXED]
FOLLOWED = {
    "argmin": solvers(plain.ARGMIN, plain.FINITE),
    "argmin, bounds": solvers(kinds.BOUNDED),
    "argmin, set": solvers(kinds.IN_SETS),
    "saddle": solvers(kinds.SADDLE),
    "mean": solvers(plain.MEAN, MIXED, plain.FINITE, with_kind("mean")),
    "minimum": solvers(kinds.METHODS),
    "maximum": solvers(kinds.METHODS),
    "reads": solvers(nested.METHODS),
    "risk": solvers(risks.METHODS),
    "keys": solvers(random.METHODS, random.OTHERS),
    "common rows": solvers(random.METHODS, random.OTHERS, random.WITHOUT_KEYS),
    "streamed rows": solvers(streamed.METHODS),
    "optax below": solvers(transformation.VISITED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_methods_that_take_a_kind_are_followed_by_hand_and_others_refuse_by_name(kind):
    taken = {method for method in METHODS if takes(method, kind)}
    assert FOLLOWED[kind] == taken
    for method in METHODS.keys() - taken:
        assert method in refusal(method, kind), (method, refusal(method, kind))


def test_the_table_of_methods_and_kinds_is_what_methods_say():
    lines = CHOOSING.read_text(encoding="utf-8").splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("| method | argmin |")]
    titles = [cell.strip() for cell in lines[first].strip("|").split("|")][1:]
    assert titles == list(KINDS)
    shown = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for method in re.findall(r"`(\w+)`", cells[0]):
            shown[method] = {kind for kind, cell in zip(titles, cells[1:], strict=True) if cell == "yes"}
    assert shown == {method: {kind for kind in KINDS if takes(method, kind)} for method in METHODS}


PLAN = bx.Sampling(PER_STEP, BATCH)
OPTIONS = {"sampling": PLAN, "key": jax.random.key(0), "progress": None, "every": 8}
OPTIONS |= {"stop": bx.Stop(verify=False, recover=False)}


def filled(shapes, seed=0, calm=False):
    """A state of such shapes with numbers drawn at random; nothing is compiled for it. A calm one is near
    enough to one that a run could reach to take a step from."""
    random = np.random.default_rng(seed)

    def one(leaf):
        if not calm:
            return jnp.asarray(random.normal(0, 9, leaf.shape), leaf.dtype)
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        drawn = random.uniform(0.1, 0.2, leaf.shape) if is_float else random.integers(0, 2, leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    state = jax.tree.map(one, shapes)
    return dataclasses.replace(state, levels={n: definite(one) for n, one in state.levels.items()})


def definite(level):
    """The memory of a level with tracked Hessians that can be inverted."""
    if getattr(level, "hessian", None) is None:
        return level
    memory, unit = level.memory, jnp.eye(level.hessian.shape[-1], dtype=level.hessian.dtype)
    raised = {n: getattr(memory, n) for n in ("hessian", "previous")}
    return pack(
        dataclasses.replace(memory, **{n: one if one is None else one + unit for n, one in raised.items()})
    )


def stacked(*states):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)  # NumPy's: nothing is compiled for it


def outline(tree, axes=0):
    return jax.tree.structure(tree), [(leaf.shape[axes:], leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.usefixtures("x64")  # in which what is not of the precision of its inputs shows
@pytest.mark.parametrize("method", METHODS)
def test_with_all_kinds_steps_batch_keep_shapes_and_dtypes_and_a_checkpoint_all_bits(
    method, tmp_path, monkeypatch
):
    """Lower variables are trees. What a step returns is a state of the same shapes and dtypes, so that one
    program takes all steps; in a batch of runs each takes the step that it takes at any other place, to the
    bit; all that it depends on is in the checkpoint; and the estimate knows its memory."""
    problem, x0, y0, solver = every_kind(method)
    programs, traced = [], []

    def compiled(program, *arguments, **_):
        programs.append(arguments)
        return types.SimpleNamespace(temp_size_in_bytes=0)

    monkeypatch.setattr(memory_estimate, "_compiled", compiled)
    estimate = bx.memory_estimate(problem, x0, y0, solver=solver, sampling=PLAN)
    shapes = programs[-1][1]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def step(problem, state):
        traced.append(method)
        return solver.step(problem, state)

    one, other = (filled(shapes, seed, calm=True) for seed in (0, 1))
    (here, info), (there, _) = (step(problem, stacked(*pair)) for pair in ((one, other), (other, one)))
    assert len(traced) == 1
    assert outline(here, axes=1) == outline(shapes)
    assert {info.objective.dtype, info.gradient_norm.dtype} == {np.dtype(np.float32)}
    for a, b in zip(*map(jax.tree.leaves, (here, there)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b[::-1])
    assert (
        here.x != stacked(one, other).x
    ).any()  # under a risk, blocks that a step visits may weigh nothing
    state = filled(shapes)
    store = CheckpointStore(tmp_path, {})
    store.save(state, (), {})
    store.wait()
    read = store.restore(jax.tree.map(jnp.zeros_like, state), ()).state
    store.close()
    assert outline(read) == outline(state)
    for a, b in zip(*map(jax.tree.leaves, (read, state)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    held = jax.tree.leaves((state.levels, state.blocks, state.store))
    assert estimate.slots == sum(leaf.nbytes for leaf in held)


# These programs take long to compile: one method stands for all, whose memory is made of the same parts.
@pytest.mark.parametrize("method", ["F3SA"])
def test_with_all_that_a_method_takes_a_run_resumes_and_its_memory_is_known(method, tmp_path):
    problem, x0, y0, solver = every_kind(method)
    found = bx.minimize(problem, x0, y0, solver=solver, steps=24, **OPTIONS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found.x, found.y)))
    bx.minimize(problem, x0, y0, solver=solver, steps=16, checkpoint=tmp_path, **OPTIONS)
    resumed = bx.Checkpoint(tmp_path, resume=True)
    again = bx.minimize(problem, x0, y0, solver=solver, steps=24, checkpoint=resumed, **OPTIONS)
    same_bits(found, again)
    estimate = bx.memory_estimate(problem, x0, y0, solver=solver, sampling=PLAN)
    held = jax.tree.leaves((found.state.levels, found.state.blocks, found.state.store))
    assert estimate.slots == sum(leaf.size * leaf.dtype.itemsize for leaf in held)
