"""How many blocks and rows a step sees where a user leaves it out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.solvers.default import chosen_solver


def mean_square(x, y, block, batch):
    return jnp.mean((batch - y) ** 2) + jnp.sum((y - x) ** 2)


def per_block(m, rows):
    lengths = np.broadcast_to(rows, m)
    values = np.random.default_rng(0).normal(size=int(lengths.sum())).astype(np.float32)
    return bx.PerBlock(values, np.concatenate([[0], np.cumsum(lengths)]))


def problem(m, lower=None, upper=None, **given):
    upper_function = mean_square if upper is not None else lambda x, y, block, batch: jnp.sum(y**2)
    lower_function = mean_square if lower is not None else lambda x, y, block, batch: jnp.sum((y - x) ** 2)
    return bx.Problem(upper_function, lower_function, m, upper, lower, **given)


def sizes(problem, *given, **others):
    sampler = bx.Sampling(*given, **others).sampler(problem, jax.random.key(0))
    return sampler.per_step, sampler.batch_size


@pytest.mark.parametrize(
    ("m", "lower", "upper", "expected"),
    [
        (8, 10, 10, (8, None)),  # small: everything
        (400, 20, 20, (400, None)),
        (16384, 1, None, (16384, None)),
        (2000, 400, 100, (128, 32)),  # large: a share of both
        (30, 1000, None, (30, 136)),  # few blocks: all of them
        (4, 10_000, None, (4, 1024)),
        (1, 60_000, None, (1, 4096)),
        (1000, 20, None, (128, None)),  # few rows: all of them
        (5000, 200, None, (250, 32)),
        (20_000, 100, None, (512, 32)),
        (20_000, 4, None, (1000, None)),  # many blocks of few rows: more blocks
        (200_000, 8, None, (2048, None)),
        (100_000, None, None, (5000, None)),  # no rows at all
    ],
)
def test_small_problems_are_seen_whole_and_large_ones_in_part(m, lower, upper, expected):
    rows = {"lower": None if lower is None else per_block(m, lower)}
    rows["upper"] = None if upper is None else per_block(m, upper)
    assert sizes(problem(m, **rows)) == expected


def test_what_is_given_is_kept_and_the_rest_is_chosen_for_it():
    large = problem(2000, per_block(2000, 500))
    assert sizes(large, "all", "all") == (2000, None)
    assert sizes(large, "all") == (2000, 32)
    assert sizes(large, None, "all") == (128, None)
    assert sizes(large, 20) == (20, None)  # 10,000 rows are cheap
    assert sizes(large, 40) == (40, 102)
    assert sizes(large, None, 8) == (2000, 8)  # 16,000 rows
    assert sizes(large, None, 9) == (128, 9)
    assert sizes(large, np.int64(7), np.int64(5)) == (7, 5)


def test_the_longest_block_counts_for_a_step_pads_all_blocks_to_it():
    ragged = np.full(100, 5)
    assert sizes(problem(100, per_block(100, ragged))) == (100, None)
    ragged[3] = 5000
    assert sizes(problem(100, per_block(100, ragged))) == (100, 40)


def test_shared_rows_count_for_every_block():
    shared = bx.Shared(np.ones(1000, np.float32))
    assert sizes(problem(10, shared)) == (10, None)
    assert sizes(problem(100, shared)) == (100, 40)


def test_a_chosen_number_of_blocks_is_divisible_by_the_strata():
    large = problem(2000, per_block(2000, 50))
    assert sizes(large, strata=100) == (200, None)
    assert sizes(large, strata=500) == (500, 32)


def test_rows_are_not_chosen_where_they_change_the_problem():
    large = problem(2000, per_block(2000, 500), means_over_rows=False)
    assert sizes(large) == (128, None)


class Endless(bx.Rows):
    """Rows without an end."""

    def draw(self, random, blocks, size):
        if size is None:
            raise ValueError("batch_size must be given: these rows have no end")
        return bx.Batch(random.bits((blocks.shape[0], size)).astype(float))


class Whole(bx.Rows):
    """Rows of a user's own, all of which can be drawn."""

    rows: jax.Array
    name: str = eqx.field(static=True, default="")

    def draw(self, random, blocks, size):
        return bx.Batch(self.rows[blocks][:, :size])


def test_rows_of_ones_own_are_counted_or_say_what_they_need():
    assert sizes(problem(2000, Whole(jnp.zeros((2000, 500))))) == (128, 32)
    endless = problem(20, Endless())
    assert sizes(endless) == (20, None)
    with pytest.raises(ValueError, match="these rows have no end"):
        bx.minimize(endless, jnp.zeros(()), jnp.zeros(20), steps=2, progress=None)


@pytest.mark.parametrize("word", ["some", "ALL", ""])
@pytest.mark.parametrize("name", ["blocks_per_step", "batch_size"])
def test_other_words_than_all_are_refused(name, word):
    with pytest.raises(TypeError, match=f"{name} must be an integer .* got {word!r}"):
        sizes(problem(4), **{name: word})


def test_all_may_be_given_directly_but_not_twice():
    given = {"steps": 5, "progress": None}
    x0, y0, small = jnp.zeros(()), jnp.zeros(6), problem(6, per_block(6, 4))
    direct = bx.minimize(small, x0, y0, blocks_per_step="all", batch_size="all", **given)
    assert (direct.state.sampler.per_step, direct.state.sampler.batch_size) == (6, None)
    assert np.array_equal(direct.x, bx.minimize(small, x0, y0, **given).x)
    with pytest.raises(ValueError, match="batch_size is given twice"):
        bx.minimize(small, x0, y0, batch_size="all", sampling=bx.Sampling(batch_size=3), **given)


def test_a_run_on_large_data_resumes_with_what_was_chosen(tmp_path):
    large = problem(2000, per_block(2000, 10))
    x0, y0 = jnp.ones(()), jnp.zeros(2000)
    given = {"solver": bx.SOBA(upper_step=0.1), "progress": None}

    def resumed(**others):
        saving = bx.Checkpoint(tmp_path / "run", resume=True)
        return bx.minimize(large, x0, y0, steps=40, checkpoint=saving, **given, **others)

    bx.minimize(large, x0, y0, steps=20, checkpoint=tmp_path / "run", **given)
    with pytest.raises(bx.CheckpointError, match="128 of 2000 blocks"):
        resumed(blocks_per_step="all", batch_size="all")
    found = resumed()
    assert np.array_equal(found.x, bx.minimize(large, x0, y0, steps=40, **given).x)
    chosen = {line.name: (line.value, line.chosen) for line in found.settings.lines}
    assert chosen["blocks_per_step"] == ("128 of 2000", "automatic")
    assert chosen["batch_size"] == ("all", "automatic")


@pytest.mark.parametrize(
    ("width", "rows", "expected"),
    [(64, 3000, bx.BlockNewton), (100, 500, bx.BlockNewton), (400, 2000, bx.MMBO)],
)
def test_newton_steps_are_the_default_where_a_step_can_afford_them(width, rows, expected):
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.mean((batch @ y) ** 2),
        lambda x, y, block, batch: jnp.mean((batch @ (y - x)) ** 2) + y @ y,
        4,
        bx.Shared(np.ones((1, width), np.float32)),
        bx.Shared(np.ones((rows, width), np.float32)),
    )
    sampler = bx.Sampling().sampler(problem, jax.random.key(0))
    assert isinstance(chosen_solver(problem, None, jnp.zeros((4, width)), sampler), expected)
