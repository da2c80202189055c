"""Every kind of problem by every method: it is taken and followed by a transcription, or refused by name.

What a method takes is asked of it (`every_kind`). So a new method or a new kind fails here until some test
follows it by hand, and until the table in docs/choosing.md has it. The transcriptions move all blocks in
every step, so that to follow them also proves that lazy blocks are eager ones.
"""

import re
import types
from pathlib import Path

import equinox as eqx
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


def filled(shapes):
    """A state of such shapes with numbers drawn at random; nothing is compiled for it."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 9, leaf.shape), leaf.dtype), shapes)


@pytest.mark.parametrize("method", METHODS)
def test_with_all_kinds_a_step_keeps_the_states_shape_and_a_checkpoint_its_bits(
    method, tmp_path, monkeypatch
):
    """What a step returns is a state of the same shapes, so that one program takes all steps and runs are
    batched; all that it depends on is in the checkpoint, bit by bit; and the estimate knows its memory."""
    problem, x0, y0, solver = every_kind(method)
    programs = []

    def compiled(program, *arguments, **_):
        programs.append(arguments)
        return types.SimpleNamespace(temp_size_in_bytes=0)

    monkeypatch.setattr(memory_estimate, "_compiled", compiled)
    estimate = bx.memory_estimate(problem, x0, y0, solver=solver, sampling=PLAN)
    shapes = programs[-1][1]
    after = eqx.filter_eval_shape(lambda state: solver.step(problem, state)[0], shapes)
    assert jax.tree.structure(after) == jax.tree.structure(shapes)
    outlines = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(one)] for one in (shapes, after)]
    assert outlines[0] == outlines[1]
    state = filled(shapes)
    store = CheckpointStore(tmp_path, {})
    store.save(state, (), {})
    store.wait()
    read = store.restore(jax.tree.map(jnp.zeros_like, state), ()).state
    store.close()
    assert jax.tree.structure(read) == jax.tree.structure(state)
    for one, other in zip(*map(jax.tree.leaves, (read, state)), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
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
