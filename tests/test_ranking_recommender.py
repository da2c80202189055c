"""The recommender, from a table to recommendations; and the training loop below it."""

import ast
import json
import re
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import grouped

import bilevax as bx
from bilevax.applications.ranking import (
    METHODS,
    MF,
    Ratings,
    TopKRecommender,
    TrainingSettings,
    evaluate,
    hold_out,
    make_method,
    summarize,
    train,
    train_many,
)
from bilevax.applications.ranking.defaults import method_settings, table_settings
from bilevax.applications.ranking.presets import tuned
from bilevax.applications.ranking.recommender import as_interactions
from bilevax.data import DataError, generate, make_interactions, split_last

SMALL = {
    "users_per_step": 20,
    "positives": 4,
    "negatives": 12,
    "cutoff": 15,
    "learning_rate": 0.02,
    "weight_decay": 0.01,
}


@pytest.fixture(scope="module")
def table():
    return generate.interactions(40, 150, 1200, seed=0).table


@pytest.fixture(scope="module")
def parts(table):
    split = split_last(table, 2, 2)
    train_part, dev, test = (
        Ratings.of(part, empty_users=True) for part in (split.train, split.dev, split.test)
    )
    return train_part, dev, test


@pytest.fixture(scope="module")
def fitted(table):
    recommender = TopKRecommender("song", width=4, epochs=4, warm_up=0, every=2, held_out=2, settings=SMALL)
    return recommender.fit(table, progress=None)


@pytest.mark.parametrize("method", ["k-song", "lambdarank"])
def test_training_beats_what_it_starts_from(parts, method):
    ratings, dev, _ = parts
    model, held = MF(40, 150, 8), hold_out(dev, [ratings])
    key = jax.random.key(0)
    x0 = model.start(key)
    before = summarize(evaluate(model, x0, held, (10,)))["ndcg@10"]
    found = train(
        ratings,
        model,
        method,
        TrainingSettings(**SMALL),
        key=key,
        epochs=30,
        x0=x0,
        dev=held,
        every=10,
        progress=None,
    )
    after = summarize(evaluate(model, found.x, held, (10,)))["ndcg@10"]
    assert after > before + 0.03
    assert 1 - float(np.min(found.history["missed ndcg@10"])) == pytest.approx(after, abs=1e-6)
    assert found.outcome is bx.Outcome.FINISHED


def test_runs_side_by_side_are_the_runs_one_by_one(parts):
    ratings, dev, test = parts
    model, settings = MF(40, 150, 4), TrainingSettings(**SMALL)
    arguments = {"epochs": 4, "every": 2, "dev": hold_out(dev, [ratings]), "cutoffs": (10,)}
    keys = jax.random.split(jax.random.key(1), 2)
    both = train_many(
        ratings, model, "ranknet", settings, {"learning_rate": [0.02, 0.005]}, keys=keys,
        test=hold_out(test, [ratings, dev]), **arguments,
    )  # fmt: skip
    alone = train_many(
        ratings, model, "ranknet", settings, {"learning_rate": [0.005]}, keys=keys[1:], **arguments
    )
    np.testing.assert_allclose(both.dev[1], alone.dev[0], rtol=1e-4)
    assert both.test["ndcg@10"].shape == (2, 40)
    assert both.means("ndcg@10").shape == (2,)
    assert not np.array_equal(both.dev[0], both.dev[1])


@pytest.mark.parametrize("method", ["song", "softmax"])
def test_what_is_measured_and_kept_is_an_average(parts, method):
    """The loops return an average, not the last iterate, and measure what they return."""
    ratings, dev, _ = parts
    held, model = hold_out(dev, [ratings]), MF(40, 150, 4)

    def one(averaging):
        settings = TrainingSettings(**SMALL, averaging=averaging)
        plan = {"epochs": 4, "every": 2, "dev": held, "progress": None}
        return train(ratings, model, method, settings, key=jax.random.key(2), **plan)

    def many(averaging):
        settings, keys = (
            TrainingSettings(**SMALL, averaging=averaging),
            jax.random.split(jax.random.key(2), 2),
        )
        return train_many(ratings, model, method, settings, keys=keys, epochs=4, every=2, dev=held)

    found, plain = one(5.0), one(None)
    assert not np.allclose(found.x["user"], plain.x["user"], rtol=1e-3)
    value = summarize(evaluate(model, found.x, held, (10,)))["ndcg@10"]
    assert 1 - float(np.min(found.history["missed ndcg@10"])) == pytest.approx(value, abs=1e-6)
    np.testing.assert_allclose(one(0.0).history["objective"], plain.history["objective"], rtol=1e-6)

    found, plain = many(5.0), many(None)
    assert not np.allclose(found.x["user"], plain.x["user"], rtol=1e-3)
    for run in range(2):
        x = jax.tree.map(lambda a, run=run: a[run], found.x)
        value = summarize(evaluate(model, x, held, (10,)))["ndcg@10"]
        assert found.dev[run].max() == pytest.approx(value, abs=1e-6)
    with pytest.raises(ValueError, match="averaging must lie in"):
        one(-1.0)
    with pytest.raises(TypeError, match="averaging must be a number"):
        one([1.0, 2.0])


def test_users_vectors_that_move_lazily_go_about_where_adam_moves_them(parts):
    """4 of 40 users in a step: a vector rests for 10 steps, and goes on all the same."""
    ratings, dev, _ = parts
    held, model, ends = hold_out(dev, [ratings]), MF(40, 150, 4), []
    x0 = model.start(jax.random.key(3))
    for lazy in (True, False):
        settings = TrainingSettings(**SMALL | {"users_per_step": 4}, averaging=2.0, lazy=lazy)
        plan = {"epochs": 4, "every": 2, "x0": x0, "dev": held, "progress": None}
        ends.append(train(ratings, model, "song", settings, key=jax.random.key(2), **plan).x)
    for name in x0:
        lazy, dense = (np.asarray(end[name] - x0[name]) for end in ends)
        assert np.linalg.norm(lazy - dense) < 0.1 * np.linalg.norm(dense), name
    settings = TrainingSettings(**SMALL, averaging=2.0, lazy=True)
    keys = jax.random.split(jax.random.key(2), 2)
    found = train_many(ratings, model, "softmax", settings, keys=keys, epochs=2, every=1, dev=held)
    value = summarize(evaluate(model, jax.tree.map(lambda a: a[1], found.x), held, (10,)))["ndcg@10"]
    assert found.dev[1].max() == pytest.approx(value, abs=1e-6)


def test_lazy_users_need_a_model_that_names_their_tables(parts):
    class Nameless:
        def score(self, x, user, items):
            return x[items]

    with pytest.raises(ValueError, match="lazy=True needs a model with user_tables, got Nameless"):
        make_method("song", parts[0], Nameless(), TrainingSettings(lazy=True), 1)


def test_default_settings_are_those_of_the_search():
    assert method_settings("k-song", {"alpha": 0.5}) == tuned("ml-1m", "k-song") | {"alpha": 0.5}
    # The settings belong to a surrogate and a discount: with others they mean something else.
    assert method_settings("k-song", {"surrogate": "sigmoid"}) == {"surrogate": "sigmoid"}


def shaped(users, items, each):
    """A table in which every user has the same number of items."""
    item = (np.arange(users)[:, None] + np.arange(each)) % items
    return Ratings.of(make_interactions(np.repeat(np.arange(users), each), item.ravel()).csr())


def test_defaults_fit_the_size_of_a_table():
    searched = tuned("ml-1m", "k-song")["weight_decay"]
    large = table_settings("k-song", {}, shaped(7000, 400, 160))
    assert (large.users_per_step, large.cutoff) == (256, 200)
    assert large.weight_decay == searched
    small = table_settings("k-song", {}, shaped(1200, 400, 20))
    assert small.users_per_step == 50
    assert small.weight_decay == pytest.approx(searched * (155.6 / 20) ** 0.8)
    tiny = table_settings("k-song", {}, shaped(20, 10, 2))
    assert (tiny.users_per_step, tiny.cutoff, tiny.weight_decay) == (20, 5, 8.0)
    # The weight decay of a plain loss, and what is given, stay as they are.
    assert table_settings("softmax", {}, shaped(1200, 400, 20)).weight_decay == 0.7974
    given = {"users_per_step": 7, "weight_decay": 0.1, "cutoff": 3}
    chosen = table_settings("k-song", given, shaped(1200, 400, 20))
    assert {name: getattr(chosen, name) for name in given} == given


def test_a_refit_learns_from_the_held_out_items_for_the_best_number_of_epochs(table, monkeypatch):
    runs = []

    def watched(ratings, *arguments, **options):
        runs.append((ratings.pairs, options["epochs"], options["warm_up"], options["dev"] is None))
        return train(ratings, *arguments, **options)

    monkeypatch.setattr("bilevax.applications.ranking.recommender.train", watched)
    plan = {"width": 2, "epochs": 6, "warm_up": 1, "every": 2, "held_out": 2, "settings": SMALL}
    fitted = TopKRecommender("song", **plan).fit(table, progress=None)
    pairs = len(table)
    held = 2 * table.users
    assert runs == [(pairs - held, 6, 1, False), (pairs, fitted.best_epoch_, 1, True)]
    assert fitted.outcome_ is bx.Outcome.FINISHED
    assert fitted.settings_.alpha == SMALL.get("alpha", tuned("ml-1m", "song")["alpha"])
    runs.clear()
    TopKRecommender("song", refit=False, **plan).fit(table, progress=None)
    assert len(runs) == 1


def test_a_refit_that_is_interrupted_leaves_the_selected_model(table):
    plan = {"width": 2, "epochs": 3, "warm_up": 0, "every": 1, "held_out": 2, "settings": SMALL}
    selected = TopKRecommender("song", refit=False, **plan).fit(table, progress=None)
    cut = TopKRecommender("song", **plan)
    cut.fit(table, progress=Impatient(4), raise_on_interrupt=False)
    assert cut.outcome_ is bx.Outcome.INTERRUPTED
    jax.tree.map(np.testing.assert_array_equal, cut._require().x, selected._require().x)


def test_bilevel_methods_are_warmed_up_by_default_and_others_are_not(table, monkeypatch):
    seen = []

    def watched(*arguments, **options):
        seen.append(options["warm_up"])
        return train(*arguments, **options | {"warm_up": 0})

    monkeypatch.setattr("bilevax.applications.ranking.recommender.train", watched)
    for method in ("song", "softmax"):
        TopKRecommender(method, width=2, epochs=1, held_out=0, settings=SMALL).fit(table, progress=None)
    assert seen == [20, 0]


class Seen(list):
    """A display that remembers what it was given."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, step, speed, metrics):
        self.append((step, dict(metrics)))


def test_progress_shows_epochs_the_metric_its_best_value_and_the_objective(table):
    shown = Seen()
    plan = {"width": 2, "epochs": 4, "warm_up": 0, "every": 2, "held_out": 2, "refit": False}
    fitted = TopKRecommender("song", settings=SMALL, **plan).fit(table, progress=shown)
    history = fitted.history_
    found = [1 - value for value in history["missed ndcg@10"]]
    assert [set(metrics) for _, metrics in shown] == 2 * [{"epoch", "ndcg@10", "best", "objective"}]
    assert [metrics["epoch"] for _, metrics in shown] == [2, 4]
    assert [metrics["ndcg@10"] for _, metrics in shown] == pytest.approx(found)
    assert [metrics["best"] for _, metrics in shown] == pytest.approx([found[0], max(found)])
    assert [metrics["objective"] for _, metrics in shown] == pytest.approx(list(history["objective"]))


@pytest.mark.parametrize(("rivals", "is_ndcg"), [(1.0, True), (0.2, False)])
def test_the_objective_that_is_shown_is_minus_the_mean_smoothed_ndcg_of_the_docs(parts, rivals, is_ndcg):
    ratings, model, shown = parts[0], MF(40, 150, 4), Seen()
    x = jax.tree.map(lambda leaf: 3 * leaf, model.start(jax.random.key(0)))
    settings = TrainingSettings(
        learning_rate=1e-9, weight_decay=0.0, users_per_step=20, positives=60, negatives=1000, alpha=0.2,
        surrogate="sigmoid", rivals=rivals,
    )  # fmt: skip
    train(ratings, model, "song", settings, key=jax.random.key(1), epochs=20, x0=x, every=5, progress=shown)
    total, ideal = 0.0, np.asarray(ratings.ideal(None))
    for user in range(40):
        scores = np.asarray(model.score(x, user, jnp.arange(150)), float)
        own = slice(ratings.offsets[user], ratings.offsets[user + 1])
        mine, values = np.asarray(ratings.items)[own], np.asarray(ratings.values, float)[own]
        rank = (1 / (1 + np.exp(scores[mine][:, None] - scores[None]))).sum(1)
        total += np.sum((2**values - 1) / np.log2(1 + rank)) / ideal[user]
    close = bool(shown[-1][1]["objective"] == pytest.approx(-total / 40, rel=0.005))
    assert close == is_ndcg


class Impatient:
    """Interrupts a run at its n-th report of progress."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, step, speed, metrics):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def test_interrupted_training_resumes_with_the_same_bits(parts, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    ratings, dev, _ = parts

    def run(**options):
        return train(
            ratings, MF(40, 150, 4), "k-song", TrainingSettings(**SMALL), key=jax.random.key(3), epochs=6,
            warm_up=1, dev=hold_out(dev, [ratings]), every=1, **options,
        )  # fmt: skip

    whole = run(progress=None)
    for at in (1, 4):  # in the warm-up, and in the method
        cut = run(checkpoint=tmp_path / str(at), progress=Impatient(at))
        assert cut.outcome is bx.Outcome.INTERRUPTED
        assert (cut.epoch == 0) == (at == 1)
        assert len(cut.history["step"]) < len(whole.history["step"])
        resumed = run(checkpoint=tmp_path / str(at), resume=True, progress=None)
        assert resumed.outcome is bx.Outcome.FINISHED
        assert resumed.epoch == whole.epoch
        for name in ("step", "missed ndcg@10", "objective"):
            assert resumed.history[name].tolist() == whole.history[name].tolist()
        jax.tree.map(np.testing.assert_array_equal, resumed.x, whole.x)


def test_an_interrupted_fit_says_so_and_stays_marked_when_saved(table, tmp_path, capsys):
    recommender = TopKRecommender("song", width=2, epochs=50, warm_up=0, every=1, settings=SMALL)
    recommender.fit(table, progress=Impatient(2), raise_on_interrupt=False)
    assert recommender.outcome_ is bx.Outcome.INTERRUPTED
    lines = [line for line in capsys.readouterr().err.splitlines() if "was interrupted" in line]
    assert len(lines) == 1
    assert re.search(r"fit was interrupted: the model is that of epoch \d+\.\d of 50$", lines[0])
    recommender.save(tmp_path / "half.npz")
    assert TopKRecommender.load(tmp_path / "half.npz").outcome_ is bx.Outcome.INTERRUPTED


def test_an_interrupted_fit_needs_no_screen(table, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    recommender = TopKRecommender("song", width=2, epochs=50, warm_up=0, every=1, settings=SMALL)
    recommender.fit(table, progress=Impatient(1), raise_on_interrupt=False)
    assert recommender.outcome_ is bx.Outcome.INTERRUPTED


@pytest.mark.parametrize("warm_up", [0, 50])
def test_an_interrupted_fit_raises_and_keeps_its_model(table, warm_up):
    recommender = TopKRecommender(
        "song", model="mf", width=2, epochs=50, warm_up=warm_up, every=1, settings=SMALL
    )
    with pytest.raises(KeyboardInterrupt, match=r"fit was interrupted.*raise_on_interrupt=False"):
        recommender.fit(table, progress=Impatient(2))
    assert recommender.outcome_ is bx.Outcome.INTERRUPTED
    assert len(recommender.recommend(recommender._require().user_ids[0].item(), k=3)) == 3


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_problem_and_a_solver_that_take_a_step(parts, method):
    ratings, model = parts[0], MF(40, 150, 2)
    problem, solver = make_method(method, ratings, model, TrainingSettings(**SMALL), steps=70)
    levels = {
        name: None if name == "nothing" else jnp.ones(problem.slots_of(name)) for name in problem.levels
    }
    x = model.start(jax.random.key(0))

    def two_steps(key):
        plan = {"blocks_per_step": 20, "batch_size": 12, "initial_batch_size": 0}
        return bx.advance(problem, solver, solver.init(problem, x, levels, key=key, **grouped(**plan)), 2)

    shapes = jax.eval_shape(two_steps, jax.random.key(0))
    assert jax.tree.map(lambda a: a.shape, shapes.x) == jax.tree.map(lambda a: a.shape, x)
    if method == "re-bsvrb v1":
        assert solver.steps == 70


def test_recommendations_are_unseen_items_the_best_first(table, fitted):
    for user in (0, 17):
        found = fitted.recommend(user, k=5)
        seen = set(table.item_ids[table.item[table.user == user]].tolist())
        items, scores = zip(*found, strict=True)
        assert len(set(items)) == 5
        assert not seen & set(items)
        assert list(scores) == sorted(scores, reverse=True)
        np.testing.assert_allclose(fitted.score(user, items), scores, rtol=1e-6)
        rest = [item for item in table.item_ids.tolist() if item not in seen and item not in items]
        assert np.max(fitted.score(user, rest)) <= scores[-1]
    assert len(fitted.recommend(0, k=150)) == 150 - int((table.user == 0).sum())
    assert len(fitted.recommend(0, k=150, seen=True)) == 150


def test_what_is_saved_is_what_is_loaded(fitted, tmp_path):
    fitted.save(tmp_path / "recommender.npz")
    again = TopKRecommender.load(tmp_path / "recommender.npz")
    assert again.recommend(3, k=7) == fitted.recommend(3, k=7)
    assert again.settings == fitted.settings
    assert again.best_epoch_ == fitted.best_epoch_
    assert again.outcome_ is fitted.outcome_ is bx.Outcome.FINISHED
    assert dict(again.history_).keys() == dict(fitted.history_).keys()
    np.testing.assert_array_equal(again.history_["missed ndcg@10"], fitted.history_["missed ndcg@10"])
    (tmp_path / "other.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"must be a file that save\(\) wrote"):
        TopKRecommender.load(tmp_path / "other.npz")
    np.savez(tmp_path / "plain.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match=r"must be a file that save\(\) wrote"):
        TopKRecommender.load(tmp_path / "plain.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a file that save\(\) wrote"):
        TopKRecommender.load(tmp_path / "empty.npz")


def test_settings_may_be_numpy_numbers(table, tmp_path):
    numbers = SMALL | {"negatives": np.int64(12), "learning_rate": np.float32(0.02)}
    recommender = TopKRecommender("softmax", model="mf", width=2, epochs=1, held_out=0, settings=numbers)
    recommender.fit(table, progress=None).save(tmp_path / "a.npz")
    assert TopKRecommender.load(tmp_path / "a.npz").settings["negatives"] == 12


def test_a_warm_up_has_its_own_settings_and_counts_as_time(parts):
    ratings, model, plan = parts[0], MF(40, 150, 4), {"key": jax.random.key(1), "progress": None}
    settings = TrainingSettings(**SMALL)
    still = settings.replace(learning_rate=1e-9)
    x0 = model.start(jax.random.key(5))
    one = train(ratings, model, "song", still, x0=x0, epochs=1, warm_up=3, **plan)
    other = train(ratings, model, "song", still, x0=x0, epochs=1, warm_up=3, warm_settings=settings, **plan)
    moved = [float(jnp.abs(run.x["item"] - x0["item"]).max()) for run in (one, other)]
    assert moved[0] < 1e-6
    assert moved[1] > 1e-2
    cut = train(ratings, model, "song", settings, epochs=1, warm_up=10**6, seconds=0.01, **plan)
    assert cut.outcome is bx.Outcome.TIME
    assert cut.epoch == 0


def test_the_warm_up_of_a_recommender_has_the_tuned_settings_of_softmax(table, monkeypatch):
    seen = {}

    def watched(*arguments, **options):
        seen.update(options)
        return train(*arguments, **options)

    monkeypatch.setattr("bilevax.applications.ranking.recommender.train", watched)
    settings = {"users_per_step": 20, "positives": 4, "negatives": 12}
    plan = {"model": "mf", "width": 2, "epochs": 1, "warm_up": 1, "held_out": 0, "settings": settings}
    TopKRecommender("song", **plan).fit(table, progress=None)
    numbers = tuned("ml-1m", "softmax") | settings
    assert {name: getattr(seen["warm_settings"], name) for name in numbers} == numbers


def test_the_example_of_the_docs_runs(capsys):
    text = Path(__file__).parents[1].joinpath("docs", "ranking.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/ranking.md", "exec"), {})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 3


def test_strings_as_ids_and_tables_without_ratings():
    rng = np.random.default_rng(0)
    users = np.repeat([f"user {n}" for n in range(12)], 8)
    items = np.concatenate([rng.choice([f"i{n}" for n in range(20)], 8, replace=False) for _ in range(12)])
    recommender = TopKRecommender(
        "softmax", model="mf", width=2, epochs=1, held_out=0, settings={"negatives": 5}
    )
    recommender.fit({"user": users, "item": items}, progress=None)
    found = recommender.recommend("user 3", k=4)
    assert all(isinstance(item, str) for item, _ in found)
    assert not {item for item, _ in found} & set(items[users == "user 3"])


def test_columns_of_frames_may_have_their_usual_names():
    pandas = pytest.importorskip("pandas")
    days = pandas.to_datetime(["2020-01-03", "2020-01-01", "2020-01-02"])
    frame = pandas.DataFrame({"user_id": [5, 5, 7], "MovieID": [1, 2, 2], "ratings": [4, 2, 3], "date": days})
    table = as_interactions(frame)
    assert table.user_ids.tolist() == [5, 7]
    assert table.item_ids.tolist() == [1, 2]
    assert sorted(table.rating.tolist()) == [2, 3, 4]
    of_day = dict(zip(table.rating.tolist(), table.time.tolist(), strict=True))
    assert of_day[4] - of_day[2] == 2 * 86400


def test_a_configuration_may_be_a_file(tmp_path):
    (tmp_path / "a.toml").write_text('method = "song"\nepochs = 3\n[settings]\nalpha = 0.2\n')
    one = TopKRecommender.from_file(tmp_path / "a.toml")
    assert (one.method, one.epochs) == ("song", 3)
    assert one.settings == {"alpha": 0.2}
    (tmp_path / "b.json").write_text(json.dumps({"method": "softmax", "depth": 3}))
    with pytest.raises(ValueError, match=r"arguments must be among .*got \['depth'\]"):
        TopKRecommender.from_file(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"method": "magic"}, ValueError, "method must be one of"),
        ({"model": "tree"}, ValueError, "model must be one of"),
        ({"watch": "f1@3"}, ValueError, "watch must be one of"),
        ({"watch": "ndcg"}, ValueError, "watch must be one of"),
        ({"model": "mf", "dropout": "a"}, TypeError, "dropout must be a number"),
        (
            {"settings": {"learning_rate": -1.0}},
            ValueError,
            r"learning_rate must lie in \(0.0, ∞\), got",
        ),
        (
            {"settings": {"learning_rate": "a"}},
            TypeError,
            "learning_rate must be a number .*, got str",
        ),
        (
            {"settings": {"averaging": lambda step: 1.0}},
            TypeError,
            "averaging must be a number, got",
        ),
        ({"settings": {"gate": lambda step: 1.0}}, TypeError, "gate must be a number, got function"),
        ({"settings": {"weight_decay": -1.0}}, ValueError, "weight_decay must lie in"),
        ({"settings": {"lazy": 1}}, TypeError, "lazy must be True or False"),
        ({"settings": {"lazy": True, "l2": 0.1}}, ValueError, "lazy=True does not go with l2"),
        ({"method": "lambdarank", "settings": {"temperature": -1.0}}, ValueError, "temperature must lie in"),
        ({"method": "softmax", "settings": {"cutoff": -3}}, ValueError, "cutoff must be at least 1, got -3"),
        ({"settings": {"users_per_step": 0}}, ValueError, "users_per_step must be at least 1, got 0"),
        ({"settings": {"negatives": 10.0}}, TypeError, "negatives must be an integer at least 1, got 10.0"),
        ({"settings": {"alpha": 1.5}}, ValueError, "alpha must lie in"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"settings": {"lr": 1.0}}, TypeError, r"settings must be among .* got \['lr'\]"),
    ],
)
def test_bad_arguments_are_rejected_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        TopKRecommender(**arguments)


def test_bad_questions_are_rejected(fitted):
    with pytest.raises(KeyError, match=r"user must be an id of the table.*got 4000, which the table"):
        fitted.recommend(4000)
    with pytest.raises(KeyError, match=r"user must be an id of the table.*got 'al'"):
        fitted.recommend("al")
    for wrong in (None, True, [0, 1]):
        with pytest.raises(KeyError, match="user must be an id of the table"):
            fitted.recommend(wrong)
    with pytest.raises(KeyError, match="item must be an id of the table"):
        fitted.score(0, [10**6])
    with pytest.raises(TypeError, match="items must be a list of ids, got 1"):
        fitted.score(0, 1)
    with pytest.raises(ValueError, match="k must be between 1 and 150, got 151"):
        fitted.recommend(0, k=151)
    with pytest.raises(RuntimeError, match="must be fitted first"):
        TopKRecommender().recommend(0)


def test_bad_tables_are_rejected():
    recommender = TopKRecommender("softmax", model="mf", epochs=1, held_out=2)
    with pytest.raises(DataError, match="repeat a pair"):
        recommender.fit({"user": [0, 0], "item": [1, 1]}, progress=None)
    with pytest.raises(DataError, match="no column that may be the item; call it 'item'"):
        recommender.fit({"user": [0, 0]}, progress=None)
    with pytest.raises(DataError, match="several columns that may be the user; call it 'user'"):
        recommender.fit({"user": [0, 0], "uid": [0, 1], "item": [1, 2]}, progress=None)
    with pytest.raises(TypeError, match="table must be Interactions"):
        recommender.fit(3, progress=None)
    many = make_interactions(np.repeat(np.arange(3), 20), np.tile(np.arange(20), 3), rating=np.full(60, 90.0))
    with pytest.raises(ValueError, match=r"values must lie in 0\.\.30"):
        recommender.fit(many, progress=None)
    few = make_interactions([0, 0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="cutoff of at most the 3 items, got 'ndcg@10'"):
        recommender.fit(few, progress=None)
    with pytest.raises(DataError, match="users have fewer than"):
        TopKRecommender("softmax", model="mf", epochs=1, held_out=5, watch="ndcg@2").fit(few, progress=None)


def test_training_that_cannot_be_watched_is_rejected(parts):
    ratings, model = parts[0], MF(40, 150, 2)
    with pytest.raises(ValueError, match="patience needs dev"):
        train(ratings, model, key=jax.random.key(0), patience=3)
    with pytest.raises(TypeError, match=r"x0 must be given for a model without start\(key\)"):
        train(ratings, type("Silent", (), {"score": None})(), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"columns\['beta'\] must have one entry per key, 1"):
        train_many(
            ratings, model, "song", None, {"beta": [1.0, 0.5]}, keys=jax.random.split(jax.random.key(0), 1),
            epochs=1, dev=hold_out(parts[1], [ratings]),
        )  # fmt: skip
