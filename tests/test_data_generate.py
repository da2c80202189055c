"""Generated interactions: exact counts, the promised skew, the promised truth."""

import numpy as np
import pytest

from bilevax.data import generate, load_interactions
from bilevax.data.drawing import Draw


@pytest.fixture(scope="module")
def made():
    return generate.interactions(300, 200, 9_000, seed=1)


def test_counts_are_exact_and_no_pair_occurs_twice(made):
    table = made.table
    assert (table.users, table.items, len(table)) == (300, 200, 9_000)
    assert len(np.unique(table.user.astype(int) * 200 + table.item)) == 9_000
    assert np.bincount(table.user, minlength=300).min() >= 1
    assert np.bincount(table.item, minlength=200).min() >= 1
    assert set(np.unique(table.rating)) == {1, 2, 3, 4, 5}


def test_the_seed_decides(made):
    again = generate.interactions(300, 200, 9_000, seed=1)
    other = generate.interactions(300, 200, 9_000, seed=2)
    for name in ("user", "item", "rating", "time"):
        np.testing.assert_array_equal(getattr(made.table, name), getattr(again.table, name))
    assert (made.table.item != other.table.item).any()


@pytest.mark.parametrize(
    ("users", "items", "ratings"), [(1, 1, 1), (3, 4, 12), (5, 1, 5), (1, 5, 5), (50, 40, 1_999), (9, 7, 9)]
)
def test_extreme_shapes_are_exact_too(users, items, ratings):
    table = generate.interactions(users, items, ratings, seed=0).table
    assert (table.users, table.items, len(table)) == (users, items, ratings)
    assert len(np.unique(table.user.astype(int) * items + table.item)) == ratings
    assert len(np.unique(table.user)) == users
    assert len(np.unique(table.item)) == items


def test_shape_of_movielens_1m_by_name():
    table = load_interactions("like-ml-1m")
    assert (table.users, table.items, len(table)) == (6_040, 3_706, 1_000_209)
    counts = np.bincount(table.user)
    assert counts.min() >= 20
    assert counts.max() <= 3_706 // 2


def test_popular_items_are_rated_more_the_larger_the_skew():
    shares = []
    for skew in (0.0, 1.0, 2.0):
        made = generate.interactions(500, 400, 10_000, seed=0, skew=skew)
        counts = np.sort(np.bincount(made.table.item, minlength=400))[::-1]
        shares.append(counts[:40].sum() / 10_000)
    assert shares[0] < 0.2 < shares[1] < shares[2]


def test_items_and_ratings_follow_the_latent_truth(made):
    table = made.table
    liking = np.sum(made.user_factors[table.user] * made.item_factors[table.item], axis=1)
    # Pairs at random have liking 0 on average; what was chosen has clearly more.
    assert liking.mean() > 0.2
    assert np.corrcoef(liking, table.rating)[0, 1] > 0.3


def sampled(share, monkeypatch, trials=3_000):
    """How often each of six items is among the two that one user gets, beside the two it has."""
    monkeypatch.setattr("bilevax.data.drawing._SHARE", share)
    random = np.random.default_rng(0)
    popularity = np.array([0.3, 0.25, 0.2, 0.12, 0.08, 0.05])
    factors = np.linspace(-1, 1, 6, dtype=np.float32)[:, None]
    users = np.ones((trials, 1), np.float32)
    draw = Draw(random, users, factors, popularity)
    pairs = draw.block(0, trials, np.full(trials, 2), np.empty(0, np.int64))
    return np.bincount(pairs % 6, minlength=6) / trials


def test_both_ways_of_drawing_are_the_same_choice_without_replacement(monkeypatch):
    popularity = np.array([0.3, 0.25, 0.2, 0.12, 0.08, 0.05])
    weights = popularity / (1 + np.exp(-2.0 * np.linspace(-1, 1, 6)))
    weights /= weights.sum()
    # The chance to be first, or second after any other.
    second = [sum(weights[i] * weights[j] / (1 - weights[i]) for i in range(6) if i != j) for j in range(6)]
    expected = weights + np.array(second)
    # Three thousand trials: the standard error is below 0.0092, and four of them are allowed.
    np.testing.assert_allclose(sampled(1.0, monkeypatch), expected, atol=0.037)
    np.testing.assert_allclose(sampled(0.0, monkeypatch), expected, atol=0.037)


def test_weights_of_a_user_sum_to_one(made):
    weights = made.weights(3)
    assert weights.shape == (200,)
    assert weights.sum() == pytest.approx(1)


BAD = {
    "an unknown shape": (("like-mars",), {}, "users must be a number or one of like-ml-1m"),
    "a shape and numbers": (("like-ml-1m", 5), {}, "items and ratings must be left out"),
    "no items": ((5,), {}, "items must be a whole number from 1 to 2147483647, got None"),
    "too few ratings": ((5, 9, 8), {}, "ratings must be at least users and items"),
    "too many ratings": ((5, 9, 46), {}, "at most users · items, got 46"),
    "a negative skew": ((5, 5, 10), {"skew": -1}, "skew must be a number from 0 to 10, got -1"),
    "a word as skew": ((5, 5, 10), {"skew": "high"}, "skew must be a number from 0 to 10"),
    "a skew that underflows": ((5, 5, 10), {"skew": 400}, "skew must be a number from 0 to 10, got 400"),
    "users that 32 bits do not hold": ((2**31, 5, 2**31), {}, "users must be a whole number from 1 to"),
    "a number as grades": ((5, 5, 10), {"grades": 5}, "grades must be the lowest"),
    "two grades": ((5, 5, 10), {"grades": (1, 5)}, "grades must be the lowest"),
    "grades of a named shape": (("like-ml-1m",), {"grades": (5, 1, 1)}, "grades must be the lowest"),
    "a step above the range": ((5, 5, 10), {"grades": (1, 2, 3)}, "grades must be the lowest"),
    "a word as seed": ((5, 5, 10), {"seed": "x"}, "seed must be a whole number from 0, got 'x'"),
    "rank 0": ((5, 5, 10), {"rank": 0}, "rank must be a whole number from 1, got 0"),
    "grades": ((5, 5, 10), {"grades": (5, 1, 1)}, "grades must be the lowest"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_arguments_are_refused(case):
    shape, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        generate.interactions(*shape, **({"seed": 0} | options))


def test_grades_are_those_asked_for():
    table = generate.interactions(50, 40, 1_000, seed=0, grades=(0.0, 1.0, 0.25)).table
    assert set(np.unique(table.rating)) <= {0.0, 0.25, 0.5, 0.75, 1.0}
