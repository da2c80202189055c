"""Blocks and rows are drawn uniformly and independently, at a cost that does not grow with m.

The statistical tests have fixed keys: they do not flicker. A fair sampler passes each with probability
1 − 1e-4 when it is written anew.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import bilevax as bx
from bilevax._problem.sampling import SECOND_BLOCKS, Sampler
from bilevax._problem.stream import Stream, _known_words, permuted

LEAST = 1e-4  # the p-value below which a draw is called unfair


def stream(seed=0):
    return Stream.start(jax.random.key(seed))


def streams(count, seed=0):
    """As many streams, half of them of different keys, half split off from one, as those of steps are."""
    of_keys = jax.vmap(Stream.start)(jax.random.split(jax.random.key(seed), count // 2))
    of_steps = jax.vmap(stream(seed).at)(jnp.arange(count - count // 2))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), of_keys, of_steps)


def fair(cells, count):
    """Whether outcomes 0..count−1 are equally frequent, by a chi-square test."""
    frequencies = np.bincount(np.ravel(cells), minlength=count)
    assert frequencies.size == count
    return stats.chisquare(frequencies).pvalue > LEAST


def independent(first, second, count):
    """Whether two outcomes 0..count−1 are uniform together."""
    return fair(np.asarray(first) * count + np.asarray(second), count * count)


def sampler(blocks, per_step, shuffle=True, seed=0):
    return Sampler(stream(seed), blocks, per_step, None, shuffle)


@functools.partial(jax.jit, static_argnums=(1, 2))
def chosen(sampler, steps, which=0):
    """The blocks of steps 0..steps−1."""
    return jax.vmap(lambda step: sampler.blocks_at(step, which))(jnp.arange(steps))


# --- the stream -----------------------------------------------------------------------


@functools.cache
def words():
    """1000 streams of 1000 words each: rows split off from one stream by 0, 1, 2, …"""
    return np.asarray(jax.jit(jax.vmap(lambda number: stream(5).at(number).bits((1000,))))(jnp.arange(1000)))


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5])
def test_the_words_of_a_key_are_the_same_on_the_host(seed):
    key = jax.random.fold_in(jax.random.key(seed), 3)
    known = _known_words(key)
    assert known is not None
    np.testing.assert_array_equal(known, jax.random.bits(key, (2,), jnp.uint32))
    assert _known_words(jax.random.key(seed, impl="rbg")) is None
    assert _known_words(jax.random.PRNGKey(seed)) is None


def test_every_bit_of_a_word_is_fair():
    ones = [(words() >> bit & 1).sum() for bit in range(32)]
    assert all(stats.binomtest(int(count), words().size).pvalue > LEAST for count in ones)


@pytest.mark.parametrize("shift", [0, 12, 24], ids=["lowest", "middle", "highest"])
def test_eight_bits_of_neighbouring_words_are_independent(shift):
    part = (words() >> shift & 255).astype(int)
    assert independent(part[:, :-1:2], part[:, 1::2], 256)  # of one stream
    assert independent(part[:-1:2], part[1::2], 256)  # of one stream and the next
    assert independent(part[:-1, 1:], part[1:, :-1], 256)  # the next word of one, this word of the next


def test_streams_split_twice_do_not_meet():
    def word(a, b):
        return stream(6).at(a).at(b).bits((1,))[0]

    grid = np.asarray(
        jax.jit(jax.vmap(jax.vmap(word, (None, 0)), (0, None)))(jnp.arange(50), jnp.arange(2000))
    )
    expected = grid.size**2 / 2 / 2**32  # the pairs of equal words that chance makes
    assert grid.size - np.unique(grid).size < expected + 6 * np.sqrt(expected) + 1
    low = (grid & 15).astype(int)
    assert independent(low[:-1], low[1:], 16)
    assert independent(low[:, :-1], low[:, 1:], 16)


# --- the keyed permutation --------------------------------------------------------


def awkward_sizes():
    """Small numbers of blocks, and those just around the full grids of the permutation."""
    full = [side * (side + more) for side in (8, 9, 17) for more in (0, 1)]
    return sorted({1, 2, 3, 4, 5, 31, 63, 64, 65, 300} | {size + off for size in full for off in (-1, 0, 1)})


def test_every_block_has_one_place():
    with jax.disable_jit():  # op by op: compiling a program per size would take longer
        for size in awkward_sizes():
            places = jnp.minimum(jnp.arange(310), size - 1)
            np.testing.assert_array_equal(np.sort(permuted(stream(1), places, size)[:size]), np.arange(size))


@pytest.mark.parametrize("size", [10_007, 1_000_003, 99_999_989, 2**31 - 1])
def test_many_blocks_have_distinct_values_within_bounds(size):
    scattered = np.unique(np.random.default_rng(size).integers(0, size, 2000))
    places = np.union1d(scattered, [*range(500), *range(size - 500, size)]).astype(np.int32)
    values = np.asarray(jax.jit(permuted, static_argnums=2)(stream(3), places, size))
    assert values.min() >= 0
    assert values.max() < size
    assert np.unique(values).size == places.size
    assert stats.kstest(values / size, "uniform").pvalue > LEAST


@functools.cache
def permutations(size):
    draw = jax.jit(jax.vmap(lambda random: permuted(random, jnp.arange(size), size)))
    return np.asarray(draw(streams(100_000, seed=size)))


SIZES = [2, 3, 5, 7, 10, 65, 100]


@pytest.mark.parametrize("size", SIZES)
def test_every_place_is_equally_likely_to_hold_every_value(size):
    drawn = permutations(size)
    assert all(fair(drawn[:, place], size) for place in range(size))


@pytest.mark.parametrize("size", [size for size in SIZES if size > 2])
def test_every_two_places_are_equally_likely_to_hold_every_two_values(size):
    drawn = permutations(size)
    side = int(np.ceil(np.sqrt(size)))
    for a, b in {
        (0, 1),
        (0, size - 1),
        (1, 2),
        (0, side - 1),
        (0, min(side, size - 1)),
        (size - 2, size - 1),
    }:
        other = drawn[:, b] - (drawn[:, b] > drawn[:, a])  # b's rank among the values that a leaves
        assert fair(drawn[:, a] * (size - 1) + other, size * (size - 1))


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_permutation_is_equally_likely(size):
    drawn = permutations(size)
    number = {order: place for place, order in enumerate(itertools.permutations(range(size)))}
    codes, frequencies = np.unique(drawn @ size ** np.arange(size), return_counts=True)
    assert codes.size == len(number)
    assert stats.chisquare(frequencies).pvalue > LEAST


# --- the blocks of a step ------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "per_step"), [(12, 3), (7, 1), (100, 10), (9, 9)])
def test_a_shuffled_epoch_visits_every_block_exactly_once(blocks, per_step):
    epochs = np.asarray(chosen(sampler(blocks, per_step), 5 * blocks // per_step)).reshape(5, blocks)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(blocks))
    if per_step < blocks:
        assert len({tuple(epoch) for epoch in epochs}) == 5


def test_an_epoch_that_does_not_come_out_even_visits_no_block_twice():
    epochs = np.asarray(chosen(sampler(10, 3), 30_000)).reshape(-1, 9)
    assert all(np.unique(epoch).size == 9 for epoch in epochs[:1000])
    left_out = 45 - epochs.sum(1)
    assert fair(left_out, 10)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("blocks", "per_step"), [(5, 4), (10, 3), (1000, 37)])
def test_the_blocks_of_a_step_are_distinct(blocks, per_step, shuffle):
    for step in np.asarray(chosen(sampler(blocks, per_step, shuffle), 300)):
        assert np.unique(step).size == per_step
        assert 0 <= step.min() <= step.max() < blocks


def test_independent_draws_are_uniform_and_forget_the_step_before():
    drawn = np.asarray(chosen(sampler(6, 2, shuffle=False), 60_000))
    low, high = np.sort(drawn, 1).T
    pairs = {pair: place for place, pair in enumerate(itertools.combinations(range(6), 2))}
    assert fair([pairs[pair] for pair in zip(low.tolist(), high.tolist(), strict=True)], len(pairs))
    assert independent(drawn[:-1:2, 0], drawn[1::2, 0], 6)
    assert independent(drawn[:-1:2, 1], drawn[1::2, 0], 6)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_second_stream_knows_nothing_of_the_first(shuffle):
    plan = sampler(6, 2, shuffle)
    first, second = (np.asarray(chosen(plan, 60_000, which)) for which in (0, SECOND_BLOCKS))
    for a, b in itertools.product(range(2), repeat=2):
        # Within a shuffled epoch the steps depend on each other: one step of each.
        assert independent(first[::3, a], second[::3, b], 6)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_step_is_uniform_over_the_keys(shuffle):
    draw = jax.jit(jax.vmap(lambda random: Sampler(random, 7, 2, None, shuffle).blocks_at(jnp.asarray(4))))
    drawn = np.asarray(draw(streams(60_000, seed=1)))
    assert fair(drawn[:, 0], 7)
    assert fair(drawn[:, 1], 7)


def test_all_blocks_come_in_order():
    np.testing.assert_array_equal(chosen(sampler(5, 5), 3), np.tile(np.arange(5), (3, 1)))


def sizes(jaxpr):
    """The sizes of all arrays of a program, and of the programs within it."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in [*equation.invars, *equation.outvars])
        for inside in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inside = getattr(inside, "jaxpr", inside)
            if hasattr(inside, "eqns"):
                yield from sizes(inside)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_choice_among_many_blocks_makes_no_large_array(shuffle):
    plan = sampler(10**8, 10, shuffle)
    found = list(sizes(jax.make_jaxpr(plan.blocks_at)(jnp.asarray(123_456)).jaxpr))
    assert len(found) > 50
    assert max(found) <= 100
    assert np.unique(plan.blocks_at(jnp.asarray(123_456))).size == 10


# --- rows ---------------------------------------------------------------------------

OFFSETS = np.array([0, 1, 3, 6, 13])
ROWS = jnp.arange(13)


@functools.partial(jax.jit, static_argnums=2)
def rows_drawn(source, streams, size):
    return jax.vmap(lambda random: source.draw(random, jnp.arange(4), size).rows)(streams)


def test_shared_rows_are_drawn_uniformly_and_independently():
    drawn = np.asarray(rows_drawn(bx.Shared(ROWS), streams(40_000), 3))
    assert all(fair(drawn[:, block, place], 13) for block in range(4) for place in range(3))
    assert independent(drawn[:, 0, 0], drawn[:, 0, 1], 13)
    assert independent(drawn[:, 0, 0], drawn[:, 1, 0], 13)


def test_a_block_draws_its_own_rows_uniformly_and_independently():
    drawn = np.asarray(rows_drawn(bx.PerBlock(ROWS, OFFSETS), streams(40_000), 3))
    for block, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        own = drawn[:, block] - start
        assert own.min() == 0
        assert own.max() == end - start - 1
        if end - start > 1:
            assert all(fair(own[:, place], end - start) for place in range(3))
            assert independent(own[:, 0], own[:, 2], end - start)


def test_all_rows_of_ragged_blocks_are_weighted_to_their_mean():
    values = np.random.default_rng(0).normal(size=13).astype(np.float32)
    batch = bx.PerBlock(jnp.asarray(values), OFFSETS).draw(stream(0), jnp.asarray([3, 0, 2]), None)
    expected = [values[OFFSETS[block] : OFFSETS[block + 1]].mean() for block in (3, 0, 2)]
    np.testing.assert_allclose(np.sum(batch.weight * batch.rows, 1), expected, rtol=1e-6)
    np.testing.assert_allclose(np.sum(batch.weight, 1), 1, rtol=1e-6)


def test_all_rows_of_equal_blocks_need_no_weights():
    batch = bx.PerBlock(jnp.arange(6), [0, 2, 4, 6]).draw(stream(0), jnp.asarray([2, 0]), None)
    assert batch.weight is None
    np.testing.assert_array_equal(batch.rows, [[4, 5], [0, 1]])


def drawing_problem(shared_source):
    """A problem of two levels whose rows are their own places."""
    data = bx.Shared(jnp.arange(5.0))
    return bx.Problem(
        lambda x, y, block, batch: jnp.sum(batch),
        {"a": lambda x, y, block, batch: jnp.sum(batch), "b": bx.mean(lambda x, block, batch: batch)},
        3,
        bx.Shared(jnp.arange(5.0)),
        data if shared_source else {"a": data, "b": bx.Shared(jnp.arange(5.0))},
    )


@pytest.mark.parametrize("shared_source", [True, False])
def test_the_two_batches_of_a_step_are_independent_and_levels_share_theirs_if_they_share_data(shared_source):
    problem = drawing_problem(shared_source)
    plan = Sampler(stream(0), 3, 3, 2, True)
    samples = jax.jit(jax.vmap(lambda step: plan.draw(problem, step)))(jnp.arange(30_000))
    upper, a, b = (
        np.asarray(rows, int) for rows in (samples.upper.rows, *(s.rows for s in samples.lower.values()))
    )
    assert independent(upper[:, 0, 0], a[:, 0, 0], 5)
    assert independent(a[:-1:2, 0, 0], a[1::2, 0, 0], 5)  # of one step and the next
    if shared_source:
        np.testing.assert_array_equal(a, b)
    else:
        assert independent(a[:, 0, 0], b[:, 0, 0], 5)


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_do_not_depend_on_the_precision(shuffle):
    def draw():
        plan = sampler(1000, 7, shuffle)
        ragged = bx.PerBlock(jnp.arange(13.0), OFFSETS).draw(stream(1), jnp.asarray([3, 1]), 5)
        shared = bx.Shared(jnp.arange(13.0)).draw(stream(1), jnp.asarray([3, 1]), 5)
        blocks = jax.jit(lambda step: (plan.blocks_at(step), plan.blocks_at(step, SECOND_BLOCKS)))(
            jnp.asarray(150)
        )
        return [np.asarray(drawn) for drawn in (*blocks, ragged.rows, shared.rows)]

    with jax.enable_x64(False):
        single = draw()
    with jax.enable_x64(True):
        double = draw()
    for a, b in zip(single, double, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [67, 101, 4097])
def test_an_accelerator_walks_a_fixed_number_of_times_to_the_same_permutation(size, monkeypatch):
    random, places = Stream.start(jax.random.key(3)), jnp.arange(size)
    looped = permuted(random, places, size)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    unrolled = jax.jit(lambda random: permuted(random, places, size))(random)
    np.testing.assert_array_equal(looped, unrolled)
    assert sorted(unrolled.tolist()) == list(range(size))


def test_what_is_hashed_on_the_host_is_what_a_program_hashes():
    random = Stream.start(jax.random.key(3))
    for number in (0, 4, 2**31 - 1):
        known, traced = random.at(number), jax.jit(lambda random, number: random.at(number))(random, number)
        assert (int(known.first), int(known.second)) == (int(traced.first), int(traced.second))
    words = np.uint32(0xF29A4FA7), np.uint32(0xFA843692)
    on_host, placed = Stream(*words), Stream(*map(jnp.asarray, words))
    for size in (64, 67, 4097):
        np.testing.assert_array_equal(
            permuted(on_host, np.arange(9), size), permuted(placed, jnp.arange(9), size)
        )
    # The same numbers as ever: figures that were kept can be had again.
    assert permuted(placed, jnp.arange(5), 4097).tolist() == [1848, 3994, 3070, 3561, 3563]
