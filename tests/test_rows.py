"""Rows: packing loses nothing, and slots of one's own are tracked as they should be."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import grouped
from closed_forms import Quadratic

import bilevax as bx
from bilevax._problem import bits


def draws(data):
    return data.draw(bx.Stream.start(jax.random.key(0)), jnp.arange(5), 7).rows


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.0, 1.0], jnp.uint32),
        ([-128.0, 127.0], jnp.int8),
        ([0.0, 2.0], jnp.int8),
        ([0.0, -1.0], jnp.int8),
        ([0.0, 128.0], jnp.float32),
        ([0.0, 0.5], jnp.float32),
        ([0.0, -0.0], jnp.float32),
        ([0.0, np.nan], jnp.float32),
        ([0.0, np.inf], jnp.float32),
    ],
)
@pytest.mark.parametrize("shape", [(60,), (64,), (3, 25), (3,)])
def test_large_arrays_of_small_integers_are_kept_in_bits_or_bytes_and_come_back_the_same(values, kept, shape):
    array = np.random.default_rng(0).choice(values, (40_000, *shape)).astype(np.float32)
    data = bx.Shared({"row": array, "label": array.reshape(40_000, -1)[:, 0]})
    stored = data.packed.stored["row"]
    if kept == jnp.uint32 and shape != (3,):
        assert stored.shape == (40_000, -(-array[0].size // 32))
    else:  # a row takes a word of bits at least, which is more than three bytes
        assert stored.dtype == (jnp.int8 if kept == jnp.uint32 else kept)
    assert data.rows["row"].dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(data.rows["row"]).view(np.uint32), array.view(np.uint32))


def test_packed_rows_give_the_same_batches(monkeypatch):
    array = np.random.default_rng(0).integers(0, 2, (2000, 60)).astype(np.float32)
    offsets = np.arange(6) * 400
    packed = [draws(bx.Shared(array)), draws(bx.PerBlock(array, offsets))]
    monkeypatch.setattr(bits, "LARGE", 10**9)
    plain = [draws(bx.Shared(array)), draws(bx.PerBlock(array, offsets))]
    for one, other in zip(packed, plain, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_the_first_estimators_come_from_all_rows_on_request():
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3)
    init = functools.partial(
        eqx.filter_jit(bx.BSVRBv2(upper_step=0.1, lower_step=0.1).init), case.problem, case.x0, case.y0
    )
    arguments = {"key": jax.random.key(0), "blocks_per_step": 2, "batch_size": 2}
    state = init(**grouped(initial_batch_size="all", **arguments))
    slope = -(case.B @ np.ones(3) + case.shifts.mean(1))  # ∇_y g at y = 0
    np.testing.assert_allclose(state.levels["lower"].y.slope, slope, atol=1e-5)
    np.testing.assert_allclose(state.levels["lower"].v.slope, case.targets.mean(1), atol=1e-5)
    np.testing.assert_allclose(state.z, case.ridge * np.ones(3), atol=1e-6)
    empty = init(**grouped(initial_batch_size=0, **arguments))
    assert not np.any(empty.levels["lower"].y.slope)
    assert not np.any(empty.z)
    rough = init(**arguments)
    assert np.max(np.abs(rough.levels["lower"].y.slope - slope)) > 1e-3


class Pairs(bx.Rows):
    """Each block owns `per_block` slots, and draws `size` distinct ones."""

    values: jax.Array
    per_block: int = eqx.field(static=True)

    def draw(self, random, blocks, size):
        order = jnp.argsort(random.bits((blocks.shape[0], self.per_block)), axis=1)[:, :size]
        slots = blocks[:, None] * self.per_block + order
        return bx.Batch({"slot": slots, "value": self.values[slots]})


def pair_problem(m=6, per_block=5):
    values = np.random.default_rng(0).normal(size=m * per_block).astype(np.float32)

    def upper(x, y, block, batch):
        return jnp.mean((y["pair"] - 1) ** 2) + (y["whole"] - x) ** 2

    levels = {
        "pair": bx.mean(
            lambda x, block, batch: batch["value"] * x,
            slots=lambda block, batch: batch["slot"],
            count=m * per_block,
        ),
        "whole": bx.argmin(lambda x, y, block, batch: 0.5 * (y - 2 * x) ** 2),
    }
    return bx.Problem(upper, levels, m, None, Pairs(jnp.asarray(values), per_block)), values


@pytest.mark.parametrize("method", [bx.BSVRBv1, bx.BSVRBv2, bx.KSONG, bx.MMBO, bx.SOBA])
def test_slots_of_ones_own_reach_the_closed_form_solution(method):
    problem, values = pair_problem()
    y0 = {"pair": jnp.zeros(30), "whole": jnp.zeros(6)}
    result = bx.minimize(
        problem,
        jnp.asarray(0.0),
        y0,
        solver=method(upper_step=0.02),
        steps=4000,
        blocks_per_step=3,
        batch_size=2,
        key=jax.random.key(0),
        progress=None,
    )
    # F(x) = mean (value x − 1)² + x²
    solution = values.mean() / (np.mean(values**2) + 1)
    np.testing.assert_allclose(result.x, solution, atol=0.03)
    np.testing.assert_allclose(result.y["pair"], values * float(result.x), atol=0.1)
    np.testing.assert_allclose(result.y["whole"], 2 * np.full(6, result.x), atol=0.1)


def test_a_level_with_slots_needs_a_start():
    problem, _ = pair_problem()
    with pytest.raises(ValueError, match=r"y0\['pair'\] must be given for a level with slots"):
        bx.BSVRBv2(upper_step=0.1).init(
            problem,
            jnp.asarray(0.0),
            {"pair": None, "whole": jnp.zeros(6)},
            key=jax.random.key(0),
            batch_size=2,
        )


def test_a_vmapped_state_is_read_run_by_run():
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3)

    def run(step):
        solver = bx.BSVRBv2(upper_step=0.1, lower_step=step, inverse_step=step)
        state = solver.init(
            case.problem, case.x0, case.y0, key=jax.random.key(0), blocks_per_step=2, batch_size=3
        )
        return bx.advance(case.problem, solver, state, 20)

    for count in (6, 4, 3):
        states = jax.jit(jax.vmap(run))(jnp.linspace(0.01, 0.1, count))
        np.testing.assert_allclose(states.y, jax.vmap(lambda state: state.y)(states), rtol=1e-6)
        np.testing.assert_allclose(states.v, jax.vmap(lambda state: state.v)(states), rtol=1e-6)
        before = jax.vmap(lambda state: state.x_before)(states)
        np.testing.assert_allclose(states.x_before, before, rtol=1e-6)


@pytest.mark.parametrize("upper_step", [0.1, lambda step: 0.1 / (1 + step), optax.adam(0.1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_x_before_is_the_x_of_the_step_before(upper_step, dtype):
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3)
    solver = bx.Restart(bx.BSVRBv2(upper_step=upper_step, lower_step=0.1), first=2, stages=3)
    start = {"key": jax.random.key(0), "blocks_per_step": 2, "batch_size": 3}
    state = solver.init(case.problem, case.x0.astype(dtype), case.y0, **grouped(**start))
    np.testing.assert_array_equal(state.x_before, state.x)
    step = jax.jit(solver.step)
    for _ in range(5):
        x = state.x
        state, _ = step(case.problem, state)
        kept = dtype == jnp.float16 or isinstance(upper_step, optax.GradientTransformation)
        np.testing.assert_allclose(state.x_before, x, rtol=0 if kept else 1e-6)
        assert not np.array_equal(state.x, x)


def test_rows_of_blocks_one_after_the_other():
    parts = [{"row": np.full((n, 2), float(n)), "target": np.arange(n)} for n in (3, 1, 2)]
    found = bx.PerBlock.from_blocks(parts)
    assert found.lengths.tolist() == [3, 1, 2]
    assert np.asarray(found.rows["row"])[:, 0].tolist() == [3, 3, 3, 1, 2, 2]
    stacked = bx.PerBlock.from_blocks(zip(np.zeros((4, 5, 2)), np.ones((4, 5)), strict=True))
    assert stacked.lengths.tolist() == [5] * 4
    arrays = {"row": np.arange(24.0).reshape(4, 3, 2), "target": np.arange(12).reshape(4, 3)}
    stacked = bx.PerBlock.from_blocks(arrays)
    assert stacked.lengths.tolist() == [3] * 4
    np.testing.assert_array_equal(stacked.rows["row"], np.arange(24.0).reshape(12, 2))
    np.testing.assert_array_equal(stacked.rows["target"], np.arange(12))


def test_rows_in_any_order_are_sorted_by_their_block():
    owners = np.array([2, 0, 1, 2, 0])
    found = bx.PerBlock.from_owners({"row": jnp.arange(5.0)}, owners)
    assert np.asarray(found.rows["row"]).tolist() == [1, 4, 2, 0, 3]
    assert found.lengths.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bx.PerBlock.from_blocks([]), "at least one block"),
        (lambda: bx.PerBlock.from_blocks({"a": np.zeros((2, 3)), "b": np.zeros((2, 4))}), "the same m and n"),
        (lambda: bx.PerBlock.from_blocks({"a": np.zeros(2)}), r"the same m and n, got shapes \[\(2,\)\]"),
        (lambda: bx.PerBlock({"a": np.zeros((2, 3))}), "needs offsets"),
        (lambda: bx.PerBlock.from_blocks([np.zeros((2, 3)), np.zeros((2, 4))]), "the same form"),
        (lambda: bx.PerBlock.from_blocks([{"a": np.zeros(2)}, {"b": np.zeros(2)}]), "the same form"),
        (lambda: bx.PerBlock.from_blocks([np.zeros(2), np.zeros(0)]), "rows of block 1 must hold"),
        (lambda: bx.PerBlock.from_owners(np.zeros(3), [0, 1]), "each of the 3 rows, got shape"),
        (lambda: bx.PerBlock.from_owners(np.zeros(2), [0.0, 1.0]), "dtype float64"),
        (lambda: bx.PerBlock.from_owners(np.zeros(2), [-1, 0]), "from 0, got -1"),
        (lambda: bx.PerBlock.from_owners(np.zeros(2), [0, 2]), "none for block 1"),
    ],
)
def test_rows_of_blocks_that_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
