"""Metrics against other implementations; ties, NaN, groups and protocols."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from bilevax.applications.ranking import MF, NeuMF, Ratings, evaluate, evaluate_parts, hold_out, summarize

USERS, ITEMS = 9, 30


class Given:
    """A model whose parameters are the scores themselves."""

    def score(self, x, user, items):
        return x[user, items]


def split(seed=0, held=3, empty=()):
    """Training pairs and held-out pairs with random sizes."""
    rng = np.random.default_rng(seed)
    train, test = [], []
    for user in range(USERS):
        order = rng.permutation(ITEMS)
        seen = rng.integers(2, 12)
        train.append(order[:seen])
        test.append(order[seen : seen + (0 if user in empty else held)])

    def ratings(parts):
        items = np.concatenate(parts)
        offsets = np.r_[0, np.cumsum([len(part) for part in parts])]
        values = rng.integers(1, 6, len(items)).astype(np.float32)
        return Ratings(offsets, items, values, ITEMS, empty_users=True)

    return ratings(train), ratings(test)


def rows(ratings, user):
    one = slice(int(ratings.offsets[user]), int(ratings.offsets[user + 1]))
    return np.asarray(ratings.items[one]), np.asarray(ratings.values[one])


@pytest.fixture(scope="module")
def scores():
    return jnp.asarray(np.random.default_rng(5).normal(size=(USERS, ITEMS)), jnp.float32)


def test_ndcg_is_that_of_scikit_learn(scores):
    train, test = split()
    found = evaluate(Given(), scores, hold_out(test, [train]), (1, 5, 20))
    for user in range(USERS):
        seen, _ = rows(train, user)
        items, values = rows(test, user)
        candidates = np.setdiff1d(np.arange(ITEMS), seen)
        gains = np.zeros(ITEMS)
        gains[items] = 2**values - 1
        for k in (1, 5, 20):
            expected = ndcg_score(gains[candidates][None], np.asarray(scores)[user, candidates][None], k=k)
            assert float(found[f"ndcg@{k}"][user]) == pytest.approx(expected, abs=1e-6)


def test_the_other_metrics_are_those_of_a_plain_sort(scores):
    train, test = split(seed=1)
    found = evaluate(Given(), scores, hold_out(test, [train]), (5, 12))
    for user in range(USERS):
        seen, _ = rows(train, user)
        items, _ = rows(test, user)
        order = [i for i in np.argsort(-np.asarray(scores[user])) if i not in set(seen)]
        for k in (5, 12):
            hits = np.array([i in set(items) for i in order[:k]])
            places = np.flatnonzero(hits) + 1
            precision = [hits[:place].mean() for place in places]
            assert float(found[f"recall@{k}"][user]) == pytest.approx(hits.sum() / len(items))
            assert float(found[f"hit@{k}"][user]) == float(hits.any())
            assert float(found[f"mrr@{k}"][user]) == pytest.approx(1 / places[0] if len(places) else 0)
            assert float(found[f"map@{k}"][user]) == pytest.approx(
                sum(precision) / min(k, len(items)), abs=1e-6
            )


def test_ties_are_ranked_in_the_worst_order():
    train, test = split(seed=2)
    tied = jnp.asarray(np.random.default_rng(0).integers(0, 3, (USERS, ITEMS)), jnp.float32)
    found = evaluate(Given(), tied, hold_out(test, [train]), (4,))["ndcg@4"]
    for user in range(USERS):
        seen, _ = rows(train, user)
        items, values = rows(test, user)
        gains = dict(zip(items.tolist(), (2**values - 1).tolist(), strict=True))
        candidates = [i for i in range(ITEMS) if i not in set(seen.tolist())]
        # Among equal scores the gains ascend: the order of least DCG.
        order = sorted(candidates, key=lambda i: (-float(tied[user, i]), gains.get(i, 0.0)))
        discounts = 1 / np.log2(np.arange(2, 6))
        dcg = sum(gains.get(i, 0.0) * d for i, d in zip(order, discounts, strict=False))
        ideal = sum(g * d for g, d in zip(sorted(gains.values(), reverse=True), discounts, strict=False))
        assert float(found[user]) == pytest.approx(dcg / ideal, abs=1e-6)


def test_the_order_of_least_dcg_is_the_one_with_gains_ascending():
    gains, discounts = [7.0, 0.0, 3.0], 1 / np.log2(np.arange(2, 5))
    worst = min(itertools.permutations(gains), key=lambda order: np.dot(order, discounts))
    assert list(worst) == sorted(gains)


def test_a_diverged_or_constant_model_finds_nothing(scores):
    train, test = split()
    held = hold_out(test, [train])
    for x in (jnp.full_like(scores, jnp.nan), jnp.zeros_like(scores), jnp.full_like(scores, -jnp.inf)):
        assert summarize(evaluate(Given(), x, held, (5,)))["ndcg@5"] == 0


@pytest.mark.parametrize("group", [1, 4, 9])
def test_users_may_be_evaluated_in_groups_of_any_size(scores, group):
    train, test = split(empty=(2, 8))
    whole = evaluate(Given(), scores, hold_out(test, [train]), (5,))
    parts = evaluate(Given(), scores, hold_out(test, [train], group=group), (5,))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])
        assert np.flatnonzero(np.isnan(whole[name])).tolist() == [2, 8]


def test_many_held_out_items_are_counted_one_by_one(scores):
    train, test = split(held=17)
    found = evaluate(Given(), scores, hold_out(test, [train]), (6,))["recall@6"]
    for user in range(USERS):
        seen, items = rows(train, user)[0], rows(test, user)[0]
        order = [i for i in np.argsort(-np.asarray(scores[user])) if i not in set(seen)][:6]
        assert float(found[user]) == pytest.approx(len(set(order) & set(items)) / 17)


def test_the_development_pairs_are_left_out_of_a_test(scores):
    train, test = split()
    dev = Ratings(np.arange(USERS + 1), _unused(train, test), np.ones(USERS), ITEMS)
    without = np.asarray(scores).copy()
    without[np.arange(USERS), np.asarray(dev.items)] = -np.inf
    left_out = evaluate(Given(), scores, hold_out(test, [train, dev]), (5,))
    np.testing.assert_array_equal(
        left_out["ndcg@5"], evaluate(Given(), jnp.asarray(without), hold_out(test, [train]), (5,))["ndcg@5"]
    )


def _unused(train, test):
    return np.array(
        [np.setdiff1d(np.arange(ITEMS), np.r_[rows(train, u)[0], rows(test, u)[0]])[0] for u in range(USERS)]
    )


def test_the_sampled_protocol_is_marked_and_ranks_against_stored_items_only(scores):
    train, test = split()
    held = hold_out(test, [train], sampled=4, seed=1)
    assert held.protocol == "4 sampled negatives"
    assert hold_out(test, [train]).protocol == "full ranking"
    for user, stored in zip(np.asarray(held.users[0]), np.asarray(held.sampled[0]), strict=True):
        rated = np.r_[rows(train, user)[0], rows(test, user)[0]]
        assert len(np.unique(stored)) == 4
        assert not np.isin(stored, rated).any()
    found = evaluate(Given(), scores, held, (2,))["hit@2"]
    for user, stored in zip(np.asarray(held.users[0]), np.asarray(held.sampled[0]), strict=True):
        items = rows(test, user)[0]
        order = sorted([*items, *stored], key=lambda i: -float(scores[user, i]))[:2]
        assert float(found[user]) == float(bool(set(order) & set(items.tolist())))


@pytest.mark.parametrize("width", [1, 4, 16, 20, 64])
def test_all_items_are_scored_as_lists_are(width):
    model = NeuMF(USERS, ITEMS, width, dropout=0.5, spread=1.0)
    x = model.start(jax.random.key(1))
    x = x | {"hidden_bias": jax.random.normal(jax.random.key(2), (width,))}
    users = jnp.array([3, 0, 3])
    one_by_one = [model.score(x, user, jnp.arange(ITEMS)) for user in users]
    np.testing.assert_allclose(model.score_all(x, users), jnp.stack(one_by_one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [MF(USERS, ITEMS, 4), NeuMF(USERS, ITEMS, 4)])
def test_models_score_lists_as_they_score_the_catalogue(model):
    x = model.start(jax.random.key(0))
    catalogue = model.score(x, jnp.asarray(3), jnp.arange(ITEMS))
    chosen = jnp.array([5, 0, 29])
    np.testing.assert_allclose(model.score(x, jnp.asarray(3), chosen), catalogue[chosen], rtol=1e-5)


def test_neumf_is_a_product_part_and_a_perceptron_part():
    model = NeuMF(USERS, ITEMS, 4, spread=1.0)
    x = jax.tree.map(np.asarray, model.start(jax.random.key(0)))
    x["hidden_bias"] = np.ones(4, np.float32)
    joint = np.r_[x["perceptron_user"][2], x["perceptron_item"][7]]
    hidden = np.maximum(joint @ np.r_[x["hidden_user"], x["hidden_item"]] + 1, 0)
    product = x["product_user"][2] * x["product_item"][7]
    expected = product @ x["output_product"] + hidden @ x["output_perceptron"]
    found = model.score(jax.tree.map(jnp.asarray, x), jnp.asarray(2), jnp.array([7]))[0]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_bad_questions_are_rejected(scores):
    train, test = split()
    held = hold_out(test, [train])
    with pytest.raises(ValueError, match=r"every cutoff must be between 1 and 30, got 31"):
        evaluate(Given(), scores, held, (31,))
    with pytest.raises(ValueError, match="must not be among the seen"):
        hold_out(test, [train, test])
    other = Ratings([0, 1], [0], [1.0], ITEMS)
    with pytest.raises(ValueError, match="9 users and 30 items of held, got 1 and 30"):
        hold_out(test, [other])
    with pytest.raises(TypeError, match=r"model must have a method score\(x, user, items\), got object"):
        evaluate(object(), scores, held, (5,))


@pytest.mark.parametrize("sampled", [None, 4])
def test_parts_of_the_same_users_are_scored_once_with_the_same_metrics(scores, sampled):
    train, test = split(held=4)
    dev = Ratings(test.offsets // 2, _halves(test, 0), _halves(test, 0, "values"), ITEMS)
    last = Ratings(test.offsets // 2, _halves(test, 1), _halves(test, 1, "values"), ITEMS)
    parts = [
        hold_out(dev, [train], sampled=sampled, group=4),
        hold_out(last, [train, dev], sampled=sampled, group=4),
    ]
    calls = []

    class Counting(Given):
        def score(self, x, user, items):
            calls.append(items.shape)
            return x[user, items]

    together = evaluate_parts(Counting(), scores, parts, (5, 10))
    assert len(calls) == (1 if sampled is None else 2)
    for part, found in zip(parts, together, strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, evaluate(Given(), scores, part, (5, 10)))


def _halves(ratings, which, name="items"):
    """Of every user's four pairs the first two, or the last two."""
    return np.asarray(getattr(ratings, name)).reshape(USERS, 2, 2)[:, which].reshape(-1)


def test_parts_of_other_users_are_rejected(scores):
    train, test = split()
    _, fewer = split(empty=(2,))
    with pytest.raises(ValueError, match="parts must hold out items of the same users"):
        evaluate_parts(
            Given(), scores, [hold_out(test, [train], group=3), hold_out(fewer, [], group=3)], (5,)
        )
    with pytest.raises(ValueError, match="parts must hold out items of the same users"):
        evaluate_parts(
            Given(), scores, [hold_out(test, [train], group=3), hold_out(test, [train], group=2)], (5,)
        )
