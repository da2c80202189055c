"""Top-K NDCG as a bilevel problem: its value, its exact gradient, and the methods on it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import grouped

import bilevax as bx
from bilevax.applications.ranking import (
    FreshBSVRBv1,
    FreshKSONG,
    FreshSONG,
    Lists,
    Logarithmic,
    Power,
    Ratings,
    Sigmoid,
    SmoothedNDCG,
    SquaredHinge,
    TrainingSettings,
    make_method,
    make_problem,
    start_levels,
)
from bilevax.applications.ranking.lists import full_list
from bilevax.applications.ranking.objective import estimated_ranks, focused
from bilevax.applications.ranking.ratings import gain

USERS, ITEMS, OWNED = 5, 9, 4


@dataclasses.dataclass(frozen=True)
class Bilinear:
    """Scores that are a smooth function of few parameters."""

    def score(self, x, user, items):
        return jnp.tanh(x["item"][items] @ x["user"][user])


class FullLists(bx.Rows):
    """Every item of every user in every list: nothing is left to chance."""

    lists: object

    def draw(self, random, blocks, size):
        return bx.Batch(jax.tree.map(lambda a: a[blocks], self.lists))


def ratings():
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.choice(ITEMS, OWNED, replace=False) for _ in range(USERS)])
    values = rng.integers(1, 6, USERS * OWNED).astype(np.float32)
    return Ratings(np.arange(USERS + 1) * OWNED, items, values, ITEMS)


def parameters(dtype=jnp.float64):
    rng = np.random.default_rng(1)
    return {
        "item": jnp.asarray(rng.normal(size=(ITEMS, 3)), dtype),
        "user": jnp.asarray(rng.normal(size=(USERS, 3)), dtype),
    }


def exact_objective(x, known, surrogate, cutoff, softness, ridge, gate, evenness, rivals, worth):
    """F(x) with every sum in full and every threshold solved for, in plain terms."""
    total = 0.0
    ideal, all_items, all_values = known
    for user in range(USERS):
        scores = Bilinear().score(x, user, jnp.arange(ITEMS))
        own = all_items[user * OWNED : (user + 1) * OWNED]
        values = all_values[user * OWNED : (user + 1) * OWNED]
        above = surrogate(scores[None, :] - scores[own][:, None])
        weight = jnp.ones(ITEMS).at[own].set(rivals)
        ranks = (weight * above).at[np.arange(OWNED), own].set(surrogate.own).sum(1)
        terms = gain(values) * worth(ranks)
        if cutoff is not None:

            def slope(level, scores):
                share = jnp.mean(jax.nn.sigmoid((scores - level) / softness))
                return (cutoff + 0.5) / ITEMS - share + ridge * level

            def improved(_, found):
                level, scores = found
                return level - 0.5 * slope(level, scores) / jax.grad(slope)(level, scores), scores

            # Newton's method, differentiated by one more step at the solution
            fixed, _ = jax.lax.fori_loop(0, 60, improved, (jnp.zeros(()), jax.lax.stop_gradient(scores)))
            level = fixed - slope(fixed, scores) / jax.lax.stop_gradient(jax.grad(slope)(fixed, scores))
            terms = terms * jax.nn.sigmoid((scores[own] - level) / gate)
        norm = ideal[user] ** (1 + evenness)
        if evenness > 0:
            norm = ideal[user] ** (1 - evenness) * gain(values).sum() ** evenness
        total = total - jnp.sum(terms) / norm
    return total / USERS


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("method", "cutoff", "deep"),
    [(bx.SONG, None, False), (FreshSONG, None, True), (FreshKSONG, 3, False), (FreshBSVRBv1, 3, False)],
)
def test_with_full_lists_the_tracked_gradient_becomes_the_exact_one(method, cutoff, deep):
    data, x, surrogate = ratings(), parameters(), Sigmoid(jnp.asarray(0.5))
    evenness = {bx.SONG: 0.6, FreshSONG: -1.7}.get(method, 0.0)
    numbers = {"softness": 0.3, "ridge": 1e-2, "gate": 0.7, "evenness": evenness}
    numbers["rivals"] = 0.3 if deep else 1.0
    discount = Power(0.4, 8.0) if deep else Logarithmic()

    def worth(ranks):
        return 1 - (ranks**0.4 - 1) / (8.0**0.4 - 1) if deep else 1 / jnp.log2(1 + ranks)

    known = data.ideal(cutoff), np.asarray(data.items), np.asarray(data.values)
    exact, gradient = jax.jit(
        jax.value_and_grad(lambda x: exact_objective(x, known, surrogate, cutoff, **numbers, worth=worth))
    )(x)
    lists = jax.tree.map(lambda *a: jnp.stack(a), *[full_list(data, user) for user in range(USERS)])
    objective = SmoothedNDCG(cutoff, surrogate, discount=discount, **numbers)
    drawing = make_problem(data, Bilinear(), objective)
    problem = eqx.tree_at(lambda p: p.lower_data, drawing, (FullLists(lists),))
    problem = eqx.tree_at(
        lambda p: p.blocks, problem, jax.tree.map(lambda a: a.astype(float), problem.blocks)
    )
    options = {} if cutoff is None else {"lower_step": 0.5, "floor": 1e-2}
    if method is FreshBSVRBv1:
        options["gamma"] = 0.1
    solver = method(upper_step=0.0, alpha=0.9, beta=0.5, **options)
    y0 = {"rank": jnp.full(data.pairs + 1, 3.0)}
    if cutoff is not None:
        y0["threshold"] = jnp.zeros(USERS)
    result = bx.minimize(problem, x, y0, solver=solver, steps=600, key=jax.random.key(0), progress=None)
    assert result.history["objective"][-1] == pytest.approx(float(exact), rel=1e-5)
    for name in x:
        np.testing.assert_allclose(result.state.z[name], gradient[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("cutoff", "focus"), [(None, None), (3, None), (None, 0.6)])
def test_first_levels_are_near_what_they_estimate(cutoff, focus):
    data, x = ratings(), parameters(jnp.float32)
    objective = SmoothedNDCG(cutoff, Sigmoid(0.5), focus=focus)
    problem = make_problem(data, Bilinear(), objective, positives=OWNED)
    levels = jax.jit(lambda key: start_levels(problem, Bilinear(), x, key, 400))(jax.random.key(0))
    assert set(levels) == set(problem.levels)
    assert levels["rank"].shape == (data.pairs + 1,)
    scores = jax.vmap(lambda user: Bilinear().score(x, user, jnp.arange(ITEMS)))(jnp.arange(USERS))
    for pair, user in enumerate(data.owners()):
        item = int(data.items[pair])
        weight = np.ones(ITEMS)
        if focus is not None:  # in a list of many negatives a place is that of its share of the items
            own = data.items[data.offsets[user] : data.offsets[user + 1]]
            free = np.setdiff1d(np.arange(ITEMS), own)
            better = [np.sum(scores[user, free] > scores[user, one]) for one in free]
            shares = np.asarray(better, float) / len(free)
            weight[free] = [(share * 400 + 0.5) ** -focus for share in shares]
            weight[free] /= weight[free].mean()
        exact = (weight * Sigmoid(0.5)(scores[user] - scores[user, item])).sum() + 0.5
        assert float(levels["rank"][pair]) == pytest.approx(float(exact), abs=0.25 if focus is None else 0.5)
    if cutoff is not None:
        largest = -np.sort(-np.asarray(scores), axis=1)
        assert np.all(levels["threshold"] <= largest[:, 2])
        assert np.all(levels["threshold"] >= largest[:, 4])


def naive_focused_rank(scores, place, real, owned, rivals, focus):
    """The rank of a list's positive, its negatives weighted by their places: in loops."""
    positives, own = len(real), 1.0
    others = [
        1 / (1 + np.exp(-(scores[j] - scores[place]) / 0.5))
        for j in range(positives)
        if j != place and real[j]
    ]
    negative = scores[positives:]
    weight = [(sum(other > one for other in negative) + 0.5) ** -focus for one in negative]
    terms = [
        w / np.mean(weight) / (1 + np.exp(-(one - scores[place]) / 0.5))
        for w, one in zip(weight, negative, strict=True)
    ]
    among = rivals * (owned - 1) / max(sum(real) - 1, 1) * sum(others)
    return own + among + (ITEMS - owned) / len(negative) * sum(terms)


def drawn_list(data, negatives=4):
    batch = Lists(data, 3).draw(bx.Stream.start(jax.random.key(3)), jnp.array([1]), negatives).rows
    return jax.tree.map(lambda a: a[0], batch)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("focus", [0.0, 0.4, 1.5])
def test_rivals_are_weighted_by_their_place(focus):
    data, x = ratings(), parameters()
    batch = drawn_list(data, 6)
    scores = Bilinear().score(x, batch.user, batch.items)
    ranks = estimated_ranks(scores, Sigmoid(0.5), batch, ITEMS, 0.3, jnp.asarray(focus))
    real = np.asarray(batch.real)
    for place in np.flatnonzero(real):
        expected = naive_focused_rank(np.asarray(scores), place, real, OWNED, 0.3, focus)
        assert float(ranks[place]) == pytest.approx(expected, rel=1e-6)
    if focus == 0:
        np.testing.assert_allclose(ranks, estimated_ranks(scores, Sigmoid(0.5), batch, ITEMS, 0.3))


@pytest.mark.usefixtures("x64")
def test_places_count_from_the_top_and_ties_share_the_best():
    found = focused(jnp.array([0.3, 2.0, 0.3, -1.0]), jnp.asarray(1.0))
    expected = np.array([1 / 1.5, 1 / 0.5, 1 / 1.5, 1 / 3.5])
    np.testing.assert_allclose(found, expected / expected.mean(), rtol=1e-12)


@pytest.mark.parametrize("method", ["song", "k-song", "bsvrb v1"])
def test_a_method_runs_with_a_focus_and_differs_by_it(method):
    data, x = ratings(), parameters(jnp.float32)
    y0 = {"rank": jnp.full(data.pairs + 1, 3.0)}
    if method != "song":
        y0["threshold"] = jnp.zeros(USERS)

    def trained(focus):
        settings = TrainingSettings(surrogate="sigmoid", cutoff=3, focus=focus, learning_rate=0.1)
        problem, solver = make_method(method, data, Bilinear(), settings, 5)
        plan = {"key": jax.random.key(1), "blocks_per_step": 3, "batch_size": 6, "initial_batch_size": 0}
        return bx.minimize(problem, x, y0, solver=solver, steps=5, progress=None, **grouped(**plan)).x["user"]

    plain, zero, strong = trained(None), trained(0.0), trained(2.0)
    np.testing.assert_allclose(plain, zero, rtol=1e-4, atol=1e-5)
    assert float(jnp.max(jnp.abs(strong - plain))) > 1e-4


def test_memory_is_a_few_floats_per_pair():
    data, x = ratings(), parameters(jnp.float32)
    problem = make_problem(data, Bilinear(), SmoothedNDCG(cutoff=3))
    y0 = {"rank": jnp.ones(data.pairs + 1), "threshold": jnp.zeros(USERS)}
    for solver, most in ((FreshKSONG(0.1), 1), (FreshBSVRBv1(0.1), 3)):
        plan = {"key": jax.random.key(0), "blocks_per_step": 2, "batch_size": 3}
        state = eqx.filter_eval_shape(solver.init, problem, x, y0, **plan)
        stored = sum(leaf.size for leaf in jax.tree.leaves(state.levels["rank"]))
        assert stored == most * (data.pairs + 1)
        assert all(leaf.ndim <= 3 for leaf in jax.tree.leaves(state.levels["threshold"]))
        assert sum(leaf.size for leaf in jax.tree.leaves(state.levels["threshold"])) <= 7 * USERS


def test_fresh_means_differ_between_the_two_points_only_by_the_last_step():
    """With the stored estimate far off, STORM's difference is blind to it."""
    data, x = ratings(), parameters(jnp.float32)
    problem = make_problem(data, Bilinear(), SmoothedNDCG(None, SquaredHinge()), positives=OWNED)
    solver = FreshBSVRBv1(1e-4, alpha=0.5, gamma=0.0, beta=0.1)
    y0 = {"rank": jnp.full(data.pairs + 1, 500.0)}

    @jax.jit
    def second_look(key):
        plan = {"blocks_per_step": 3, "batch_size": 4, "initial_batch_size": 0}
        state = solver.init(problem, x, y0, key=key, **grouped(**plan))
        state, _ = solver.step(problem, state)
        sample = state.sampler.draw(problem, state.step)
        look = solver.look(problem, state, sample, solver.visits(problem, state, sample, 0))
        return [point.y["rank"] for point in look.points], state.levels["rank"].y[sample.slots["rank"]]

    (now, before), stored = second_look(jax.random.key(0))
    assert float(jnp.max(jnp.abs(now - before))) < 0.1
    assert float(jnp.min(jnp.abs(now - stored))) > 1


def test_bad_problems_are_rejected():
    data = ratings()
    with pytest.raises(ValueError, match="cutoff must be less than the number of items 9, got 9"):
        make_problem(data, Bilinear(), SmoothedNDCG(ITEMS))
    with pytest.raises(TypeError, match="model must have a method score"):
        make_problem(data, object())
    with pytest.raises(ValueError, match="softness"):
        SmoothedNDCG(cutoff=2, softness=0.0)
    with pytest.raises(ValueError, match="rivals must lie in"):
        SmoothedNDCG(cutoff=3, rivals=1.5)
    with pytest.raises(ValueError, match="evenness must lie in"):
        SmoothedNDCG(cutoff=3, evenness=-3.5)
    with pytest.raises(ValueError, match="focus must"):
        SmoothedNDCG(cutoff=3, focus=-0.1)
    with pytest.raises(ValueError, match="focus must"):
        make_method("song", ratings(), Bilinear(), TrainingSettings(focus=-0.1), 1)
    with pytest.raises(ValueError, match="depth must lie in"):
        Power(depth=0.0, last=9.0)
    with pytest.raises(ValueError, match="last must lie in"):
        Power(depth=0.5, last=1.0)
    with pytest.raises(ValueError, match="discount must be one of"):
        make_method("song", ratings(), Bilinear(), TrainingSettings(discount="linear"), 1)
    with pytest.raises(ValueError, match="margin"):
        SquaredHinge(-1.0)
    with pytest.raises(TypeError, match="ratings must be Ratings"):
        Lists([1, 2])
    with pytest.raises(ValueError, match="upper_data must be rows or the name of a lower level"):
        bx.Problem(lambda *a: 0.0, {"rank": bx.mean(lambda *a: 0.0)}, 3, upper_data="ranks")


def test_what_goes_through_scores_is_what_goes_through_x():
    """The same problem written with `through` and without: the same steps."""

    def scores(x, block, batch):
        return jnp.tanh(x) * (1 + block)

    def upper(s, y, block, batch):
        return jnp.sum((y["mean"] - 1) ** 2) + y["least"] * s[0]

    levels = {
        "mean": (bx.mean, lambda s, block, batch: s**2),
        "least": (bx.argmin, lambda s, y, block, batch: (y - jnp.sum(s)) ** 2),
    }
    rows = bx.Shared(jnp.ones(4))

    def plainly(function):
        return lambda x, *rest: function(jnp.tanh(x) * (1 + rest[-2]), *rest)

    problems = [
        bx.Problem(upper, {n: kind(c) for n, (kind, c) in levels.items()}, 3, "mean", rows, scores),
        bx.Problem(plainly(upper), {n: kind(plainly(c)) for n, (kind, c) in levels.items()}, 3, "mean", rows),
    ]
    solver = bx.BSVRBv1(0.01, lower_step=0.1, floor=1.0)
    y0 = {"mean": jnp.zeros((3, 2)), "least": jnp.zeros(3)}

    def steps(problem):
        state = solver.init(problem, jnp.array([0.3, -0.2]), y0, key=jax.random.key(0), batch_size=2)
        return bx.advance(problem, solver, state, 5).x

    through, plain = (jax.jit(steps)(problem) for problem in problems)
    np.testing.assert_allclose(through, plain, rtol=1e-6)
    with pytest.raises(ValueError, match="through needs one batch for all"):
        bx.Problem(upper, {n: kind(c) for n, (kind, c) in levels.items()}, 3, None, rows, scores)
    with pytest.raises(TypeError, match="through must be a function"):
        bx.Problem(upper, {n: kind(c) for n, (kind, c) in levels.items()}, 3, "mean", rows, 3)
