"""The memory of a run: said before it, held during it, and not a byte per block in a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import optax
import pytest
from calls import grouped

import bilevax as bx
from bilevax._run import chunks, recovery

D_X, D_Y, ROWS = 50, 6, 40


def upper(x, y, block, batch):
    return 0.5 * jnp.mean((y - batch["target"]) ** 2) + 1e-3 * jnp.mean(x**2)


def lower(x, y, block, batch):
    return 0.5 * jnp.mean((y - jnp.tanh(x[batch["place"]])[:, None]) ** 2) * D_Y


def inner(x, block, batch):
    return jnp.mean(jnp.tanh(x[batch["place"]])) * jnp.ones(D_Y)


def make(blocks, level=lower, width=D_X):
    target, place = np.ones((ROWS, D_Y), np.float32), np.arange(ROWS) % width
    return bx.Problem(upper, level, blocks, bx.Shared({"target": target}), bx.Shared({"place": place}))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


STEPS = {"upper_step": 0.1, "lower_step": 0.1}
PLAN = {"blocks_per_step": 4, "batch_size": 5}
# Arrays of the size of x that a plain step works with: XLA keeps one more before jaxlib 0.10.2.
PLAIN = 1 if jaxlib.version.__version_info__ >= (0, 10, 2) else 2
SOLVERS = {
    "BSVRBv2": (bx.BSVRBv2(**STEPS), lower),
    "BSVRBv1": (bx.BSVRBv1(upper_step=optax.adam(0.1), lower_step=0.1, floor=0.1), lower),
    "MSVR": (bx.MSVR(upper_step=0.1), bx.mean(inner)),
    "BlockSAGA": (bx.BlockSAGA(**STEPS), lower),
    "minimum": (bx.BSVRBv2(**STEPS), bx.minimum(project=(-1.0, 1.0))),
}


def held(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["BSVRBv2", "BSVRBv1"])
def test_the_estimate_is_what_the_run_holds(name):
    """Its arrays, and what the compiler says of the programs that `minimize` runs."""
    solver, level = SOLVERS[name]
    problem, x0, y0 = make(300, level), np.ones(D_X, np.float32), np.zeros((300, D_Y), np.float32)
    estimate = bx.memory_estimate(problem, x0, y0, solver=solver, **grouped(**PLAN))
    state = chunks.compiled_start(
        solver, problem, x0, y0, bx.Sampling(**PLAN).sampler(problem, jax.random.key(0))
    )
    assert estimate.data == held(problem)
    assert estimate.slots == held(state.levels)
    assert estimate.x == held((state.x, state.back, state.z))
    assert estimate.optimizer == held(state.optimizer)
    assert 0 <= held(state) - estimate.state < 200  # clocks, the step's number, the sampler's words
    steps, total = chunks._numbers(1, (0.0, 0.0))
    inputs = (chunks.numbers_as_arrays(solver), problem)
    compiled = chunks._advance.program(small=False).lower(inputs, state, steps, total, None).compile()
    sizes = compiled.memory_analysis()
    assert estimate.step == pytest.approx(sizes.temp_size_in_bytes, rel=0.1)
    used = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    assert estimate.data + estimate.state + estimate.step == pytest.approx(used, rel=0.1)
    assert estimate.total >= used - 1000


def test_the_states_to_go_back_to_count_where_they_are_kept():
    """A run keeps the latest healthy state and the one with the least F, unless they are large."""

    def estimate(blocks):
        shapes = shape(D_X), shape(blocks, D_Y)
        return bx.memory_estimate(make(blocks), *shapes, solver=bx.MMBO(**STEPS), **grouped(**PLAN))

    small, large = estimate(300), estimate(10**7)
    assert 0 <= small.copies - 2 * small.state < 400  # clocks, the step's number, the sampler's words
    assert small.total == small.data + small.state + max(small.copies + small.step, small.start)
    assert large.state > recovery.MOST_BYTES
    assert large.copies == 0


@pytest.mark.parametrize("per_step", [1, 4])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_needs_no_memory_per_block(name, per_step):
    """All that is remembered of the blocks is changed in place: nothing of it is copied."""
    solver, level = SOLVERS[name]
    blocks, plan = 200_000, PLAN | {"blocks_per_step": per_step}
    estimate = bx.memory_estimate(
        make(blocks, level), shape(D_X), shape(blocks, D_Y), solver=solver, **grouped(**plan)
    )
    assert estimate.slots > blocks * 4 * D_Y
    assert estimate.step < blocks  # not a byte for each of them


@pytest.mark.parametrize(
    ("solver", "kept", "working"),
    [
        (bx.BSVRBv2(**STEPS), 2, PLAIN),  # x and z; and a gradient
        (bx.BSVRBv2(upper_step=optax.adam(0.1), lower_step=0.1), 5, 1),
        (bx.MMBO(**STEPS), 2, PLAIN),
    ],
)
def test_how_many_arrays_of_the_size_of_x_there_are(solver, kept, working):
    width = 200_000
    estimate = bx.memory_estimate(
        make(8, width=width), shape(width), shape(8, D_Y), solver=solver, **grouped(**PLAN)
    )
    assert estimate.x + estimate.optimizer == pytest.approx(kept * 4 * width, abs=100)
    assert estimate.step < (working + 0.1) * 4 * width


def test_nothing_is_allocated_and_the_table_is_readable():
    blocks = 10**8  # their y alone would take 2.4 GB
    problem = jax.eval_shape(lambda: make(blocks))
    before = {id(array) for array in jax.live_arrays()}
    estimate = bx.memory_estimate(
        problem,
        shape(D_X),
        shape(blocks, D_Y),
        solver=bx.BSVRBv2(**STEPS),
        sampling=bx.Sampling(initial_batch_size=0),
        **grouped(**PLAN),
    )
    fresh = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in fresh) < 1000
    assert estimate.slots == blocks * (4 * D_Y + 4) * 4
    assert estimate.step < 10**6
    lines = str(estimate).splitlines()
    assert lines[1].split() == ["memory", "per", "slot", "11.2", "GB"]
    assert lines[-1].startswith("at most ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y0": shape(7, D_Y)}, "leading axis of 300"),
        ({"blocks_per_step": 301}, "blocks_per_step must be between 1 and 300"),
        ({"strata": 7}, "divisible"),
        ({"mesh": 3}, "mesh must be"),
        ({"solver": bx.BSVRBv2}, "solver must be a bilevax solver"),
    ],
)
def test_bad_input_is_refused(change, words):
    given = {"solver": bx.BSVRBv2(**STEPS), "y0": shape(300, D_Y)} | PLAN | change
    with pytest.raises((ValueError, TypeError), match=words):
        bx.memory_estimate(
            make(300), shape(D_X), given.pop("y0"), solver=given.pop("solver"), **grouped(**given)
        )
