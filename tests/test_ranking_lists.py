"""Lists of a user's items: which items are drawn, and that the estimates are unbiased."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.applications.ranking import Lists, Logistic, Ratings, Sigmoid, SmoothedNDCG, SquaredHinge
from bilevax.applications.ranking.lists import List, full_list, sample_distinct
from bilevax.applications.ranking.objective import Rank, Threshold, estimated_ranks, make_queries

ITEMS = 7
OWN = [[1, 4, 6], [0, 2, 3, 5], [3, 2], list(range(ITEMS))]


def small_ratings(own=OWN):
    rng = np.random.default_rng(0)
    items = np.concatenate(own)
    values = rng.integers(1, 6, len(items)).astype(np.float32)
    return Ratings(np.r_[0, np.cumsum([len(one) for one in own])], items, values, ITEMS)


def drawn(ratings, users, size, draws=1, positives=2, seed=0):
    stream = bx.Stream.start(jax.random.key(seed))
    lists = Lists(ratings, positives)
    draw = jax.jit(jax.vmap(lambda n: lists.draw(stream.at(n), jnp.asarray(users), size).rows))
    return draw(jnp.arange(draws))


def test_positives_are_distinct_pairs_of_the_user_and_every_set_is_equally_likely():
    draws = 6000
    places, real = sample_distinct(bx.Stream.start(jax.random.key(1)), jnp.full(draws, 4, jnp.int32), 2)
    assert bool(real.all())
    sets, counts = np.unique(np.sort(np.asarray(places), axis=1), axis=0, return_counts=True)
    assert len(sets) == 6  # all pairs of four places, and none with a place twice
    assert np.max(np.abs(counts - draws / 6)) < 4 * np.sqrt(draws / 6)


def test_distinct_places_are_those_of_floyds_algorithm_turn_by_turn():
    count, lengths, stream = 9, np.tile(np.arange(14), 100), bx.Stream.start(jax.random.key(2))
    words = np.asarray(stream.bits((count, len(lengths)))).astype(np.int64)
    places = np.asarray(sample_distinct(stream, jnp.asarray(lengths, jnp.int32), count)[0])
    for user, length in enumerate(lengths):
        chosen = []
        for last in range(max(length - count, 0), length):
            place = words[len(chosen), user] % (last + 1)
            chosen.append(last if place in chosen else place)
        assert places[user, : len(chosen)].tolist() == chosen


def test_a_user_with_few_pairs_gives_them_all_and_padding():
    batch = drawn(small_ratings(), [2, 1], 3, draws=50, positives=3)
    assert np.all(np.sort(np.asarray(batch.items[:, 0, :2]), axis=1) == [2, 3])
    np.testing.assert_array_equal(batch.real[:, 0], np.tile([True, True, False], (50, 1)))
    assert np.all(batch.slot[:, 0, 2] == small_ratings().pairs)
    assert np.all(batch.real[:, 1])


def test_no_slot_occurs_twice_in_a_step():
    batch = drawn(small_ratings(), [0, 1, 2, 3], 3, draws=200, positives=3)
    slots = np.asarray(batch.slot).reshape(200, -1)
    for row, real in zip(slots, np.asarray(batch.real).reshape(200, -1), strict=True):
        assert len(np.unique(row[real])) == real.sum()
    ratings = small_ratings()
    real = np.asarray(batch.real)
    np.testing.assert_array_equal(
        np.asarray(ratings.items)[np.asarray(batch.slot)[real]], np.asarray(batch.items)[..., :3][real]
    )


def test_negatives_are_uniform_over_the_items_that_a_user_has_not_rated():
    draws = 7000
    batch = drawn(small_ratings(), [0, 1, 2], 1, draws=draws)
    for row, own in enumerate(OWN[:3]):
        free = sorted(set(range(ITEMS)) - set(own))
        counts = np.bincount(np.asarray(batch.items[:, row, 2]), minlength=ITEMS)
        assert np.flatnonzero(counts).tolist() == free
        assert np.max(np.abs(counts[free] - draws / len(free))) < 4 * np.sqrt(draws / len(free))


def test_bisection_finds_every_unrated_item_of_rows_of_any_length():
    rng = np.random.default_rng(3)
    own = [np.sort(rng.choice(40, size=n, replace=False)) for n in (1, 2, 7, 31, 32, 39)]
    ratings = Ratings(np.r_[0, np.cumsum([len(one) for one in own])], np.concatenate(own), np.ones(112), 40)
    batch = drawn(ratings, np.arange(6), 60, draws=30)
    for row, mine in enumerate(own):
        seen = set(np.asarray(batch.items[:, row, 2:]).ravel().tolist())
        assert seen == set(range(40)) - set(mine.tolist())


def hand_made(ratings, user, pairs, negatives):
    start, stop = int(ratings.offsets[user]), int(ratings.offsets[user + 1])
    slot = start + jnp.asarray(pairs)
    zero = jnp.zeros((), jnp.uint32)
    return List(
        user=jnp.asarray(user),
        items=jnp.concatenate([ratings.items[slot], jnp.asarray(negatives, jnp.int32)]),
        rating=ratings.values[slot],
        slot=slot,
        real=jnp.ones(len(pairs), bool),
        owned=jnp.asarray(stop - start),
        noise=bx.Stream(zero, zero),
    )


@pytest.mark.parametrize("surrogate", [SquaredHinge(0.7), Logistic(0.5), Sigmoid(0.3)])
@pytest.mark.usefixtures("x64")
def test_the_mean_over_all_lists_is_the_full_sum(surrogate):
    """Every list of 2 positives and 1 negative of a user, each equally likely."""
    ratings = small_ratings()
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, ITEMS)))
    queries = make_queries(ratings, SmoothedNDCG(3, surrogate, softness=0.4))
    rank, threshold = jax.jit(Rank(ITEMS)), jax.jit(Threshold(ITEMS))
    for user in (0, 1):
        query = jax.tree.map(lambda a, user=user: a[user].astype(float), queries)
        free = sorted(set(range(ITEMS)) - set(OWN[user]))
        count = len(OWN[user])
        sums, times, thresholds = np.zeros(count), np.zeros(count), []
        for pairs in itertools.combinations(range(count), 2):
            for negative in free:
                batch = hand_made(ratings, user, list(pairs), [negative])
                listed = x[user, batch.items]
                sums[list(pairs)] += rank(listed, query, batch)
                times[list(pairs)] += 1
                thresholds.append(threshold(listed, jnp.asarray(0.2), query, batch))
        scores, own = x[user], np.asarray(OWN[user])
        differences = scores[None, :] - scores[own][:, None]
        full = query.surrogate(differences).at[np.arange(count), own].set(query.surrogate.own).sum(1)
        np.testing.assert_allclose(sums / times, full, rtol=1e-12)
        exact = query.cutoff * 0.2 / ITEMS + 0.5 * query.ridge * 0.04
        exact += jnp.mean(0.4 * jax.nn.softplus((scores - 0.2) / 0.4))
        np.testing.assert_allclose(np.mean(thresholds), exact, rtol=1e-6)


def test_the_full_list_gives_the_full_sum_at_once():
    ratings, surrogate = small_ratings(), Sigmoid(0.3)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, ITEMS)), jnp.float32)
    batch = full_list(ratings, 1)
    ranks = estimated_ranks(x[1, batch.items], surrogate, batch, ITEMS)
    differences = x[1][None, :] - x[1, np.asarray(OWN[1])][:, None]
    np.testing.assert_allclose(ranks, surrogate(differences).sum(1) + 0.5, rtol=1e-5)  # own term 1, not ½


def test_a_user_that_has_rated_everything_counts_no_negatives():
    batch = jax.tree.map(lambda a: a[0], drawn(small_ratings(), [3], 5, positives=7))
    one = jax.tree.map(lambda a: a[0], batch)
    scores = jnp.linspace(0, 1, ITEMS)[one.items]
    ranks = estimated_ranks(scores, Sigmoid(1e-4), one, ITEMS)
    np.testing.assert_allclose(ranks, ITEMS - one.items[:7], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 2], [0, 0], [1.0, 1.0], 3), "only once"),
        (([0, 2], [0, 3], [1.0, 1.0], 3), r"lie in 0\.\.2, got 0 to 3"),
        (([0, 2], [0, 1], [1.0, -1.0], 3), r"0\.\.30.*got -1.0"),
        (([0, 2], [0, 1], [1.0, np.nan], 3), r"0\.\.30"),
        (([0, 1], [0, 1], [1.0, 1.0], 3), "number of pairs 2"),
        (([0, 0, 2], [0, 1], [1.0, 1.0], 3), "got none for user 0"),
        (([0, 0], [], [], 3), "vector of integers|at least one pair"),
    ],
)
def test_ratings_that_do_not_fit_are_rejected(arguments, words):
    with pytest.raises(ValueError, match=words):
        Ratings(*arguments)


def test_a_problem_needs_lists_of_its_own_users_and_a_number_of_negatives():
    lists = Lists(small_ratings())
    with pytest.raises(ValueError, match="4 users, expected 3 blocks"):
        lists.check("lower_data", 3)
    with pytest.raises(ValueError, match="number of negatives"):
        lists.draw(bx.Stream.start(jax.random.key(0)), jnp.zeros(1, jnp.int32), None)
    with pytest.raises(ValueError, match="positives must be at least 2, got 1"):
        Lists(small_ratings(), 1)
