"""Losses over lists: compared with rax; padding, order and evenness."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.applications.ranking import LOSSES, Ratings, TrainingSettings, make_list_problem, make_method
from bilevax.applications.ranking.lists import List
from bilevax.applications.ranking.losses import Listing, score_list
from bilevax.applications.ranking.neural_sort import relaxed_sort

P, B = 5, 12


class Same:
    """Scores all items alike."""

    def score(self, x, user, items):
        return jnp.zeros(items.shape) + x


def scored_list(seed=0, padded=0, scores=None):
    """A list with so many padded places at the end of its positives."""
    rng = np.random.default_rng(seed)
    zero = jnp.zeros((), jnp.uint32)
    rating = rng.integers(1, 6, P).astype(np.float32)
    values = rng.normal(size=P + B).astype(np.float32) if scores is None else scores
    pad = lambda a, fill: np.r_[a[:P], np.full(padded, fill, a.dtype), a[P:]]  # noqa: E731
    batch = List(
        user=jnp.asarray(0),
        items=jnp.arange(P + padded + B),
        rating=jnp.asarray(pad(rating, 3.0)),
        slot=jnp.arange(P + padded),
        real=jnp.arange(P + padded) < P,
        owned=jnp.asarray(P),
        noise=bx.Stream(zero, zero),
    )
    return jnp.asarray(pad(values, 9.0)), batch


CONSTANTS = Listing(jnp.asarray(1.0), jnp.asarray(10.0), jnp.asarray(100.0), jnp.asarray(1.0))


def value(name, scores, batch, listing=CONSTANTS):
    return LOSSES[name](score_list(scores, batch), listing)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_nothing(name):
    scores, batch = scored_list()
    padded_scores, padded = scored_list(padded=3)
    plain, slope = jax.jit(jax.value_and_grad(lambda s: value(name, s, batch)))(scores)
    same, padded_slope = jax.jit(jax.value_and_grad(lambda s: value(name, s, padded)))(padded_scores)
    tolerance = 2e-2 if name == "neural ndcg" else 1e-5  # the relaxed sort has three more places to fill
    assert float(same) == pytest.approx(float(plain), rel=tolerance)
    assert np.all(np.isfinite(padded_slope))
    if name != "neural ndcg":
        np.testing.assert_allclose(np.r_[padded_slope[:P], padded_slope[P + 3 :]], slope, atol=1e-6)
        np.testing.assert_allclose(padded_slope[P : P + 3], 0, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_along_the_slope_ranks_the_positives_higher(name):
    scores, batch = scored_list(seed=3)
    slope = jax.jit(jax.grad(lambda s: value(name, s, batch)))(scores)
    assert np.all(np.isfinite(slope))
    assert float(jnp.mean(slope[:P])) < float(jnp.mean(slope[P:]))


@pytest.mark.parametrize("seed", [0, 1])
def test_losses_are_those_of_rax(seed):
    rax = pytest.importorskip("rax", reason="rax is not installed")
    scores, batch = scored_list(seed)
    labels = jnp.r_[batch.rating, jnp.zeros(B)]
    relevant = (labels > 0).astype(jnp.float32)
    gains = 2.0**labels - 1
    expected = {
        "softmax": rax.softmax_loss(scores, relevant / P),
        "gain softmax": rax.softmax_loss(scores, gains / gains.sum()),
        "listnet": rax.softmax_loss(scores, jax.nn.softmax(labels)),
        "ranknet": rax.pairwise_logistic_loss(scores, labels),
        "bpr": rax.pairwise_logistic_loss(scores, relevant),
        "approx ndcg": -rax.ndcg_metric(
            scores, labels, rank_fn=rax.utils.approx_ranks, cutoff_fn=rax.utils.approx_cutoff
        ),
    }
    for name, number in expected.items():
        assert float(value(name, scores, batch)) == pytest.approx(float(number), rel=1e-4), name
    weighted = rax.pairwise_logistic_loss(
        scores, labels, lambdaweight_fn=rax.dcg_lambdaweight, reduce_fn=jnp.sum
    )
    ideal = jnp.sum(-jnp.sort(-gains) / jnp.log2(jnp.arange(P + B) + 2.0))
    total = weighted / (P + B) / ideal  # rax scales its weights up by the length of the list
    assert float(value("lambdarank", scores, batch)) == pytest.approx(float(total), rel=1e-4)


def test_listmle_is_the_likelihood_of_the_order_by_rating():
    scores, batch = scored_list(seed=2)
    order = np.argsort(-np.asarray(batch.rating), kind="stable")
    sequence = np.r_[np.asarray(scores)[:P][order], np.asarray(scores)[P:]]
    logs = [sequence[i] - np.log(np.exp(sequence[i:]).sum()) for i in range(P)]
    assert float(value("listmle", scores, batch)) == pytest.approx(-np.mean(logs), rel=1e-5)


def test_smooth_ndcgs_become_ndcg_as_the_temperature_falls():
    scores, batch = scored_list(seed=4)
    cold = dataclasses.replace(CONSTANTS, temperature=jnp.asarray(1e-3))
    gains = np.r_[2.0 ** np.asarray(batch.rating) - 1, np.zeros(B)]
    ranks = np.argsort(np.argsort(-np.asarray(scores))) + 1
    discounts = np.log2(1 + np.arange(1, P + B + 1))
    ndcg = np.sum(gains / np.log2(1 + ranks)) / np.sum(-np.sort(-gains) / discounts)
    for name in ("approx ndcg", "neural ndcg"):
        assert float(value(name, scores, batch, cold)) == pytest.approx(-ndcg, rel=1e-3), name


def test_the_relaxed_sort_is_doubly_stochastic_and_sorts():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=20), jnp.float32)
    matrix = relaxed_sort(scores, 1.0, passes=200)
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-2)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(relaxed_sort(scores, 1e-4) @ scores, -jnp.sort(-scores), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.02, 0.5, 5.0])
@pytest.mark.usefixtures("x64")
def test_scaling_by_vectors_is_that_of_the_matrix_and_so_is_its_gradient(temperature):
    rng = np.random.default_rng(0)
    scores, weights = jnp.asarray(rng.normal(size=12)), jnp.asarray(rng.normal(size=(12, 12)))

    def whole(scores):
        matrix = relaxed_sort(scores, temperature, passes=0)
        for _ in range(7):
            matrix = matrix / jnp.maximum(matrix.sum(0), 1e-10)
            matrix = matrix / jnp.maximum(matrix.sum(1, keepdims=True), 1e-10)
        return jnp.sum(weights * matrix)

    def ours(scores):
        return jnp.sum(weights * relaxed_sort(scores, temperature, passes=7))

    found, expected = (jax.value_and_grad(one)(scores) for one in (ours, whole))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-8, atol=1e-10)


def test_scores_so_far_apart_that_columns_vanish_have_a_finite_gradient():
    scores = jnp.asarray([0.0, 1e3, 2e3, 2e3], jnp.float32)
    slope = jax.grad(lambda scores: jnp.sum(relaxed_sort(scores, 0.01)[0] * scores))(scores)
    assert np.all(np.isfinite(slope))


def test_sl_at_k_weights_positives_by_the_threshold():
    # 5 positives stand for themselves, 12 negatives for 95/12 = 7.9 items each: the items above the third
    # negative are 2 + 2 · 7.9, so that the 12th highest of all 100 is the second negative.
    scores = np.r_[5.0, 4.0, -3.0, -4.0, -5.0, np.linspace(2, 0, B)].astype(np.float32)
    scores, batch = scored_list(scores=scores)
    listing = dataclasses.replace(CONSTANTS, cutoff=jnp.asarray(12.0))
    own = np.asarray(scores)[:P]
    weights = 1 / (1 + np.exp(-(own - float(scores[P + 1]))))
    rest = np.log(np.exp(np.asarray(scores)).sum()) - own
    assert float(value("sl@k", scores, batch, listing)) == pytest.approx(np.mean(weights * rest), rel=1e-5)


@pytest.mark.parametrize(("evenness", "factor"), [(1.0, 1.0), (0.0, 2.0), (-1.0, 4.0), (-2.0, 8.0)])
def test_users_weigh_by_their_evenness(evenness, factor):
    """A user with four times the pairs weighs the same, or up to eight times as much."""
    ratings = Ratings([0, 8, 10], [*range(8), 0, 1], np.full(10, 3.0), item_count=12)
    problem = make_list_problem(ratings, Same(), "softmax", positives=2, evenness=evenness)

    def of_user(user):
        batch = problem.upper_data.draw(bx.Stream.start(jax.random.key(0)), jnp.array([user]), 3).rows
        listing, one = jax.tree.map(lambda a: a[user], problem.blocks), jax.tree.map(lambda a: a[0], batch)
        return float(problem.upper(jnp.zeros(()), None, listing, one))

    assert of_user(0) == pytest.approx(factor * of_user(1), rel=1e-5)


def test_bad_list_problems_are_rejected():
    ratings = Ratings([0, 2], [0, 1], [3.0, 4.0], item_count=5)
    with pytest.raises(ValueError, match=r"evenness must lie in \[-3.0, 1.0\], got 1.5"):
        make_list_problem(ratings, Same(), "softmax", evenness=1.5)
    with pytest.raises(ValueError, match="evenness must lie in"):
        make_method("softmax", ratings, Same(), TrainingSettings(evenness=-3.5), 1)
