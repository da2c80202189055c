"""The table of a level's slots: nothing but another place for the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax._step.clocks import Clock, Clocks, CompensatedSum
from bilevax._step.slot_table import WIDEST, pack
from bilevax._step.slots import Memory, Moving, gather, scatter


def memory(slots=5, width=3, seed=0, dtype=jnp.float32):
    """A memory with everything in it: a tree, stamps, matrices, whole numbers."""
    keys = iter(jax.random.split(jax.random.key(seed), 20))

    def numbers(*shape):
        return jax.random.normal(next(keys), (slots, *shape), dtype)

    def moving():
        tree = [{"a": numbers(width), "b": numbers()} for _ in range(2)]
        return Moving(*tree, CompensatedSum(numbers(), numbers()))

    square = numbers(width, width)
    return Memory(moving(), moving(), square, 2 * square, jnp.arange(slots, dtype=jnp.int32))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("width", [1, 3, WIDEST + 1])
def test_what_is_packed_can_be_read_again(slots, width):
    plain = memory(slots, width)
    table = pack(plain)
    same(table.memory, plain)
    for name in ("y", "v", "hessian"):
        same(getattr(table, name), getattr(plain, name))


def test_narrow_numbers_of_a_dtype_are_one_array():
    table = pack(memory(slots=5, width=3))
    assert {name: array.shape for name, array in table.tables.items()} == {"float32": (5, 2 * 10 + 2 * 9)}
    assert [array.shape for array in table.apart] == [(5,)]  # visits: the only whole numbers


def test_wide_ones_stay_by_themselves():
    wide = pack(memory(slots=2, width=WIDEST + 1))
    assert wide.tables["float32"].shape == (2, 8)  # stamps, and the b of each tree


def test_the_layout_does_not_depend_on_the_number_of_slots():
    assert pack(memory(slots=1)).columns == pack(memory(slots=7)).columns


def test_dtypes_are_not_mixed():
    with jax.enable_x64(True):
        plain = memory(dtype=jnp.float64)
        plain = Memory(plain.y, jax.tree.map(lambda a: a.astype(jnp.float32), plain.v), visit=plain.visit)
        table = pack(plain)
        assert {name: array.shape[1] for name, array in table.tables.items()} == {
            "float64": 10,
            "float32": 10,
        }
        same(table.memory, plain)


@pytest.mark.parametrize("slots", [[3], [0, 4, 1], [[0, 1], [2, 3]]])
def test_slots_are_taken_and_put_as_from_plain_arrays(slots):
    slots = jnp.asarray(slots)
    plain, table = memory(seed=1), pack(memory(seed=1))
    same(table.take(slots), gather(plain, slots))
    rows = jax.tree.map(lambda a: 3 * a, gather(plain, slots))
    same(table.put(slots, rows).memory, scatter(plain, slots, rows))


def test_tables_of_many_runs_are_read_run_by_run():
    plain = [memory(seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain)
    table = jax.vmap(pack)(stacked)
    same(table.memory, stacked)
    same(table.y, stacked.y)


def test_squares_are_summed_over_slots():
    plain = memory()
    found = pack(plain).squares
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b[0], jnp.sum(a**2, 0), rtol=1e-6), plain, found)


def test_clocks_give_back_their_readings():
    one = Clock.start(jnp.float32).advance(jnp.float32(0.25)).advance(jnp.float32(0.5))
    other = Clock.start(jnp.float32).advance(jnp.float32(3.0))
    clocks = Clocks(one, other)
    assert clocks.readings.shape == (2, 4)
    same(clocks.y, one)
    same(clocks.v, other)
    several = jax.vmap(Clocks)(*jax.tree.map(lambda a: jnp.stack([a, 2 * a]), (one, other)))
    np.testing.assert_array_equal(several.v.now.high, [3.0, 6.0])
