"""Finite sums: the noise of blocks and of rows vanishes, and the tables are what they should be."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import grouped

import bilevax as bx
from bilevax._problem.groups import Groups
from bilevax.solvers import block_page, gradient_table, whole_pass
from bilevax.testing import quadratic_blocks, ridge_blocks

KEY = jax.random.key(0)


def end(family, solver, steps, **plan):
    """‖∇F‖ at the end of a run."""
    given = {"steps": steps, "key": KEY, "progress": None} | plan
    result = bx.minimize(family.problem, family.x0, family.y0, solver=solver, **grouped(**given))
    return np.linalg.norm(family.gradient(result.x))


@pytest.mark.usefixtures("x64")
def test_constant_steps_go_below_any_noise_floor_where_bsvrb_stalls():
    family = ridge_blocks(m=12, d_x=3, d_y=4, rows=30, noise=0.5, dtype=np.float64)
    plan = {"blocks_per_step": 4, "batch_size": 8}
    assert end(family, bx.BlockPAGE(upper_step=0.2), 4000, **plan) <= 1e-8
    assert end(family, bx.BlockSAGA(upper_step=0.2), 4000, **plan) <= 1e-8
    assert end(family, bx.BSVRBv2(upper_step=0.2), 4000, **plan) > 1e-4


@pytest.mark.parametrize("method", [bx.BlockPAGE, bx.BlockSAGA])
@pytest.mark.usefixtures("x64")
def test_a_single_block_converges_too(method):
    family = quadratic_blocks(m=1, d_x=3, d_y=4, rows=30, dtype=np.float64)
    assert end(family, method(upper_step=0.1), 4000, batch_size=8) <= 1e-8


# --- row groups ---------------------------------------------------------------------

LENGTHS = [7, 3, 9, 1]
OFFSETS = np.r_[0, np.cumsum(LENGTHS)]


@pytest.mark.parametrize("size", [1, 3, 4, 9, 50, None])
@pytest.mark.parametrize("shared", [True, False])
def test_the_groups_of_a_block_are_its_rows_cut_in_order(shared, size):
    rows = np.arange(OFFSETS[-1]) + 0.5
    groups = Groups.of(bx.Shared(rows) if shared else bx.PerBlock(rows, OFFSETS), size)
    for block in range(len(LENGTHS)):
        own = rows if shared else rows[OFFSETS[block] : OFFSETS[block + 1]]
        step = len(own) if size is None else size
        expected = [own[first : first + step] for first in range(0, len(own), step)]
        for number, one in enumerate(expected):
            at = jnp.asarray([block])
            drawn, batch = groups.look_up(at, jnp.asarray([number])), groups.take(at, jnp.asarray([number]))
            values = np.asarray(batch.rows).reshape(-1)
            if batch.weight is not None:
                weight = np.asarray(batch.weight)[0]
                np.testing.assert_allclose(weight[weight > 0], 1 / len(one), rtol=1e-6)
                values = values[weight > 0]
            np.testing.assert_array_equal(values, one.astype(np.float32))
            assert int(drawn.number[0]) == number
            assert int(drawn.count[0]) == len(expected)
            np.testing.assert_allclose(drawn.share[0], len(one) / len(own), rtol=1e-6)
        beyond = groups.look_up(at, jnp.asarray([len(expected)]))
        assert float(beyond.share[0]) == 0
        assert int(beyond.number[0]) == len(expected) - 1


def test_groups_are_drawn_uniformly_among_those_a_block_has():
    groups = Groups.of(bx.PerBlock(np.zeros(OFFSETS[-1]), OFFSETS), 3)
    random = bx.Stream.start(KEY)
    draw = jax.jit(jax.vmap(lambda k: groups.draw(random.at(k), jnp.arange(4)).number))
    numbers = np.asarray(draw(jnp.arange(300)))
    for block, length in enumerate(LENGTHS):
        count = -(-length // 3)
        seen = np.bincount(numbers[:, block], minlength=count)
        assert len(seen) == count
        assert (abs(seen - 300 / count) < 5 * np.sqrt(300 / count)).all()


class Endless(bx.Rows):
    """Rows that cannot be numbered."""

    width: int = eqx.field(static=True, default=2)

    def draw(self, random, blocks, size):
        return bx.Batch(jnp.zeros((blocks.shape[0], 4, self.width)))


def plain(upper_sees_x=True, upper_data=None):
    return bx.Problem(
        lambda x, y, block, batch: jnp.sum(y**2) + (x @ x if upper_sees_x else 0.0),
        lambda x, y, block, batch: 0.5 * jnp.sum((y - x - jnp.mean(batch, 0)) ** 2),
        4,
        upper_data,
        bx.Shared(np.ones((10, 3), np.float32)),
    )


def test_rows_without_numbers_are_refused():
    with pytest.raises(TypeError, match=r"bilevax.Shared or bilevax.PerBlock, got Endless"):
        saga_state(plain(upper_data=Endless()))


# --- the table ----------------------------------------------------------------------


def saga_state(problem, **plan):
    plan = {"batch_size": 4, "blocks_per_step": 2} | plan
    init = eqx.filter_jit(bx.BlockSAGA(0.1).init)
    return init(problem, jnp.ones(3), jnp.zeros((4, 3)), key=KEY, **grouped(**plan))


def test_no_gradients_by_x_are_stored_of_a_function_that_does_not_look_at_it():
    assert saga_state(plain()).store["f"].stored.x.shape == (4, 3)  # no rows: one group per block
    state = saga_state(plain(upper_sees_x=False))
    assert state.store["f"].stored.x is None
    assert state.store["lower 0"].stored.x.shape == (4 * 3, 3)


def test_a_table_may_start_from_zero():
    state = saga_state(plain(), initial_batch_size=0)
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.store))
    assert any(leaf.any() for leaf in jax.tree.leaves(saga_state(plain()).store))


def test_a_table_that_does_not_fit_is_refused_with_its_bytes(monkeypatch):
    # By y of f; by x, y and v of g in 3 groups; 4 blocks of 3 numbers of 4 bytes.
    need = 4 * (1 + 3 * 3) * 3 * 4
    monkeypatch.setattr(gradient_table, "available_bytes", lambda: need - 1)
    with pytest.raises(MemoryError, match=f"need {need} bytes, the device has {need - 1}"):
        saga_state(plain(upper_sees_x=False))
    monkeypatch.setattr(gradient_table, "available_bytes", lambda: need)
    saga_state(plain(upper_sees_x=False))


# --- refreshes ------------------------------------------------------------------------


def test_refreshes_are_spread_evenly_and_in_the_same_steps_for_every_key():
    solver = bx.BlockPAGE(0.1, refresh_chance=0.02)
    problem, init, steps = plain(), eqx.filter_jit(solver.init), jnp.arange(20_000)
    states = [init(problem, jnp.ones(3), jnp.zeros((4, 3)), key=jax.random.key(seed)) for seed in (0, 1)]
    one, other = (np.asarray(solver.refreshes(problem, state.sampler, steps)) for state in states)
    np.testing.assert_array_equal(one, other)
    assert abs(one.sum() - 400) <= 4
    assert not one[0]  # the start has looked at all rows already


@pytest.mark.parametrize("chance", [0.5, 0.1, 0.03, 0.0077, 0.001])
def test_no_refresh_is_late_and_those_of_a_smaller_share_are_among_them(chance):
    problem, steps = plain(), jnp.arange(20_000)
    sampler = bx.Sampling(batch_size=2).sampler(problem, KEY)
    often, seldom = (
        np.flatnonzero(bx.BlockPAGE(0.1, refresh_chance=share).refreshes(problem, sampler, steps))
        for share in (chance, chance / 3)
    )
    assert np.diff(np.concatenate([[-1], often])).max() <= 2 / chance
    assert set(seldom) <= set(often)


def test_by_default_refreshes_read_as_many_rows_as_the_steps_between_them():
    family = quadratic_blocks(m=20, d_x=2, d_y=2, rows=50)
    plan = {"blocks_per_step": 4, "batch_size": 5, "key": KEY}
    solver = bx.BlockPAGE(0.1, lower_step=0.1)
    state = eqx.filter_jit(solver.init)(family.problem, family.x0, family.y0, **plan)
    share = np.mean(np.asarray(solver.refreshes(family.problem, state.sampler, jnp.arange(50_000))))
    assert abs(share * 20 * 100 / (2 * 4 * 10) - 1) < 0.1


@pytest.mark.parametrize("kind", ["argmin", "mean", "risk", "mean that is read"])
@pytest.mark.usefixtures("x64")
def test_a_refresh_piece_by_piece_is_that_of_all_rows(kind, monkeypatch):
    rng = np.random.default_rng(0)
    tables = [bx.Shared(rng.normal(size=(rows, 3))) for rows in (23, 31)]

    def upper(x, y, block, batch):
        return jnp.mean(jnp.sin(batch @ y + block)) + jnp.sum(x**2 * y)

    def lower(x, y, block, batch):
        return jnp.mean((batch @ y - x[0] + block) ** 2) + jnp.sum(jnp.exp(x) * y**2)

    def inner(x, block, batch):
        return jnp.mean(jnp.tanh(batch * x + block), 0)

    def outer(x, y, block, batch):
        return jnp.mean(jnp.sin(batch * y["read"]), 0)

    level, y0, risk = lower, np.zeros((4, 3)), bx.cvar(0.5) if kind == "risk" else None
    if kind in ("mean", "mean that is read"):
        level, y0 = bx.mean(inner), None
    if kind == "mean that is read":
        level = {"read": level, "own": bx.mean(outer, reads="read")}
    f = upper if kind != "mean that is read" else lambda x, y, *rest: upper(x, y["own"], *rest)
    problem = bx.Problem(f, level, np.arange(4.0), tables[0], tables[1], risk=risk)
    solver = bx.BlockPAGE(0.1, lower_step=0.1, refresh_chance=1.0)

    slopes = whole_pass.whole_slopes

    def end():
        plan = {"blocks_per_step": 2, "batch_size": 3, "key": KEY, "progress": None}
        found = bx.minimize(problem, np.ones(3), y0, solver=solver, steps=7, **plan)
        return jax.tree.leaves((found.x, found.y, found.state.z))

    whole, parts = end(), []
    monkeypatch.setattr(whole_pass, "PIECE", 7)
    monkeypatch.setattr(block_page, "whole_slopes", lambda *given: parts.append(given[1]) or slopes(*given))
    jax.clear_caches()
    for one, other in zip(whole, end(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)
    assert set(parts) == (set() if kind == "mean that is read" else {"f", "lower 0"})
