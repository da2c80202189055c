"""The ranking experiment and its search on a small table: results, resumption and errors."""

import csv
import dataclasses
import json
import os
import types
from typing import ClassVar

import jax
import numpy as np
import pytest

from bilevax.applications.ranking import (
    METHODS,
    NeuMF,
    Popularity,
    Ratings,
    Trainings,
    TrainingSettings,
    evaluate,
    make_method,
    summarize,
)
from bilevax.applications.ranking.presets import tuned
from bilevax.data import DataError, generate
from bilevax.experiments import (
    ndcg,
    ndcg_baselines,
    ndcg_paper,
    ndcg_parts,
    ndcg_results,
    ndcg_speed,
    ndcg_tune,
)

FORMS = ("squared hinge + logarithmic", "logistic + power")


@pytest.fixture
def small(monkeypatch):
    table = generate.interactions(30, 80, 900, seed=0).table
    monkeypatch.setattr(ndcg_parts, "load_interactions", lambda name: table)
    return table


def test_the_table_has_every_method_and_the_closed_forms(small, tmp_path):
    methods = ("softmax", "lambdarank")
    options = ndcg.NDCGOptions(data="small", methods=methods, seeds=2, epochs=4, every=2, width=4, choices=2)
    chosen = {key: {"users_per_step": 10, "negatives": 10, "positives": 4} for key in methods}
    found = ndcg.run(options, tmp_path, hyperparameters=chosen)
    assert found["softmax"].dev.shape == (2, 2)
    assert found["softmax"].epochs.tolist() == [2, 4]
    assert "full ranking" in (tmp_path / "ndcg.md").read_text()
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "ndcg.csv").open())}
    assert list(rows) == [*ndcg_baselines.BASELINES, *methods]
    for k in (10, 50):
        for name in ("EASE", "softmax"):
            mean, error = ndcg_results.paired(found[name], found["lambdarank"], f"ndcg@{k}")
            assert rows[name][f"− lambdarank @{k}"] == f"{mean:+.4f} ± {error:.4f}"
        assert rows["lambdarank"][f"− lambdarank @{k}"] == ""
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0] == "method,seed,epoch,seconds,dev ndcg@10"
    assert len(lines) == 1 + 2 * 2 * 2
    with pytest.raises(ValueError, match=r"methods must be among .* got \['magic'\]"):
        ndcg.NDCGOptions(methods=("magic",))


def test_tuning_writes_every_trial_and_the_best(small, tmp_path):
    options = ndcg_tune.NDCGTuneOptions(
        data="small", methods=("softmax",), trials=4, epochs=2, every=1, width=4, warm_up=0, finalists=2
    )
    best = ndcg_tune.tune(options, tmp_path)
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert len(trials) == 4
    again = "dev ndcg@10, other seeds"
    finalists = sorted(trials, key=lambda row: -row["dev ndcg@10"])[:2]
    assert [again in row for row in trials] == [row in finalists for row in trials]
    top = max(finalists, key=lambda row: row[again])
    names = [*ndcg_tune.ranges("softmax"), "positives", "averaging"]
    assert best["softmax"] == {name: top[name] for name in names}
    assert json.loads((tmp_path / "best.json").read_text()) == best


@pytest.mark.parametrize("method", METHODS)
def test_tuned_and_stored_hyperparameters_are_training_settings(method):
    columns = ndcg_tune.draw_trials(method, 5, seed=1)
    TrainingSettings().replace(**columns)
    stored = tuned("ml-1m", method)
    assert set(stored) >= {"positives", "averaging", *ndcg_tune.ranges(method)}
    assert tuned("unheard of", method) == stored
    ratings = Ratings([0, 2], [0, 1], [3.0, 4.0], item_count=400)
    make_method(method, ratings, NeuMF(1, 400, 2), TrainingSettings().replace(**stored), 10)
    for name, (low, high) in ndcg_tune.ranges(method).items():
        assert len(columns[name]) == 5
        assert np.all((columns[name] >= low) & (columns[name] <= high))


def test_every_method_gets_the_same_number_of_trials(tmp_path):
    with pytest.raises(ValueError, match="trials must be a multiple of the 2 forms, got 5"):
        ndcg_tune.tune(ndcg_tune.NDCGTuneOptions(trials=5, forms=FORMS), tmp_path)
    with pytest.raises(ValueError, match=r"a form must be one of .* got 'logistic'"):
        ndcg_tune.tune(ndcg_tune.NDCGTuneOptions(forms=("logistic",)), tmp_path)


def test_a_bilevel_method_is_tuned_in_all_its_forms(small, tmp_path, monkeypatch):
    """Every form gets its trials, and the finalist with the best mean over other seeds wins."""
    trainings = []

    def train(ratings, model, method, settings, columns, *, keys, **others):
        trainings.append((settings.surrogate, settings.discount, len(keys)))
        score = {"logarithmic": 0.2, "power": 0.1 if len(trainings) == 2 else 0.3}[settings.discount]
        dev = np.full((len(keys), 1), score)
        return types.SimpleNamespace(dev=dev, best_epoch=np.ones(len(keys)))

    monkeypatch.setattr(ndcg_tune, "train_many", train)
    options = ndcg_tune.NDCGTuneOptions(
        data="small", methods=("song",), forms=FORMS, trials=4, warm_up=0, finalists=4, repeats=2
    )
    best = ndcg_tune.tune(options, tmp_path)
    forms = [("squared hinge", "logarithmic"), ("logistic", "power")]
    assert [one[:2] for one in trainings] == forms + forms
    assert [one[2] for one in trainings] == [2, 2, 4, 4]
    assert best["song"]["discount"] == "power"  # 0.1 in its trial, but 0.3 with other seeds
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert len(trials) == 4


class StoppedError(Exception):
    """An interrupted search."""


def test_a_gap_is_left_out_of_training_and_is_not_ranked(small):
    parts, near = ndcg_parts.load_parts("small", gap=3), ndcg_parts.load_parts("small")
    rows = small.at_least(14).csr()

    def pairs(ratings):
        users = np.repeat(np.arange(ratings.users), np.diff(ratings.offsets))
        return set(zip(users.tolist(), np.asarray(ratings.items).tolist(), strict=True))

    ends = np.cumsum(rows.counts)
    earlier = {
        (user, item)
        for user, (end, count) in enumerate(zip(ends, rows.counts, strict=True))
        for item in rows.item[end - count : end - 13].tolist()
    }
    assert pairs(parts.train) == earlier
    assert parts.train.pairs == len(rows.item) - 13 * len(rows.counts)
    assert (rows.counts >= 14).all()

    def left_out(held):
        return held.excluded_rows[held.excluded_rows < held.users.shape[1]].size

    assert left_out(parts.held_dev) == len(rows.item) - 10 * len(rows.counts)  # the gap too
    assert near.train.users >= parts.train.users


@pytest.fixture
def searched(small, tmp_path, monkeypatch):
    """A search that records its trainings, and that can be interrupted at one of them."""

    class Search:
        trainings: ClassVar[list] = []
        stop_at: int | None = None
        pairs: int = 0
        options = ndcg_tune.NDCGTuneOptions(
            data="small", methods=("softmax",), trials=4, finalists=2, repeats=2, warm_up=0
        )

        def __call__(self, resume=True, **changes):
            self.trainings.clear()
            return ndcg_tune.tune(dataclasses.replace(self.options, **changes), tmp_path, resume=resume)

        def trials(self):
            rows = json.loads((tmp_path / "trials.json").read_text())
            return {name: sum(row["method"] == name for row in rows) for name in METHODS}, rows

    search = Search()

    def train(ratings, model, method, settings, columns, *, keys, epochs, **others):
        search.pairs = ratings.pairs
        if search.stop_at == len(search.trainings):
            raise StoppedError
        search.trainings.append((method, len(keys)))
        dev = 0.1 + 0.1 * np.asarray(columns["weight_decay"])[:, None] * epochs / 200
        return types.SimpleNamespace(dev=dev, best_epoch=np.ones(len(keys)))

    monkeypatch.setattr(ndcg_tune, "train_many", train)
    return search


def test_a_resumed_search_runs_only_what_is_missing(searched):
    whole = searched(resume=False, methods=("softmax", "bpr"))
    assert searched.trainings == [("softmax", 4), ("softmax", 4), ("bpr", 4), ("bpr", 4)]
    _, rows = searched.trials()
    # Nothing is missing: nothing is trained, and the trials of other methods are kept.
    assert searched() == whole
    assert searched.trainings == []
    assert searched.trials()[1] == [row for row in rows if row["method"] == "bpr"] + rows[:4]
    # Another method.
    best = searched(methods=("listnet",))
    assert searched.trainings == [("listnet", 4), ("listnet", 4)]
    assert best.items() >= whole.items()
    # Other trials of one method: those of the others are kept.
    searched(trials=2)
    assert searched.trainings == [("softmax", 2), ("softmax", 4)]
    assert searched.trials()[0]["bpr"] == 4
    # One more finalist: only that one is repeated.
    searched(methods=("bpr",), finalists=3)
    assert searched.trainings == [("bpr", 2)]


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3, 4, 5])
def test_an_interrupted_search_ends_like_an_uninterrupted_one(searched, stop_at):
    """Two methods, one of them in two forms: interrupted at any training, then resumed."""
    changes = {"methods": ("softmax", "song"), "forms": FORMS}
    whole = searched(resume=False, **changes)
    (_, rows), count = searched.trials(), len(searched.trainings)
    searched.stop_at = stop_at
    with pytest.raises(StoppedError):
        searched(resume=False, **changes)
    searched.stop_at = None
    done = list(searched.trainings)
    assert searched(**changes) == whole
    assert searched.trials()[1] == rows
    # The repeats of one form may be trained twice.
    assert count <= len(done) + len(searched.trainings) <= count + 1


@pytest.mark.parametrize("gap", [0, 3])
def test_trials_are_trained_without_the_gap(searched, gap):
    searched(resume=False, gap=gap)
    assert searched.pairs == ndcg_parts.load_parts("small", gap=gap).train.pairs
    assert (searched.pairs == ndcg_parts.load_parts("small").train.pairs) == (gap == 0)


def test_trials_of_a_different_search_are_rejected(searched, tmp_path, monkeypatch):
    searched(resume=False)
    with pytest.raises(ValueError, match="holds a search with epochs=200, got epochs=7"):
        searched(epochs=7)
    with pytest.raises(ValueError, match="holds a search with positives=20, got positives=10"):
        searched(positives=10)
    with pytest.raises(ValueError, match="holds a search with gap=5, got gap=0"):
        searched(gap=0)
    # A new search that is interrupted at once has written its options: the old trials must be gone.
    searched.stop_at = 0
    with pytest.raises(StoppedError):
        searched(resume=False, epochs=7)
    searched.stop_at = None
    searched(epochs=7)
    assert searched.trainings == [("softmax", 4), ("softmax", 4)]
    # Another start of the bilevel methods.
    monkeypatch.setattr(ndcg_tune, "tuned", lambda data, method: {"temperature": 3.0})
    with pytest.raises(ValueError, match="holds a search with warm up="):
        searched(epochs=7)
    monkeypatch.undo()
    monkeypatch.setitem(ndcg_tune.COMMON, "learning_rate", (1e-4, 1e-3))
    with pytest.raises(ValueError, match="holds a search with"):
        searched(epochs=7)


def test_times_are_of_whole_epochs(small, tmp_path, monkeypatch):
    monkeypatch.setattr(ndcg_speed, "_repeat", lambda work, times: [work() or 1.0 for _ in range(times)])
    options = ndcg_speed.NDCGSpeedOptions(
        data="small", methods=("softmax",), users_per_step=10, repeats=2, width=4
    )
    rows = ndcg_speed.measure(options, tmp_path)
    evaluations = ["evaluation of test", "evaluation of dev and test"]
    assert [row["what"] for row in rows] == [
        *evaluations,
        "epoch of softmax, paper",
        "epoch of softmax, tuned",
    ]
    users = sum(np.bincount(small.user) >= 11)
    assert rows[2]["steps"] == users // 10
    assert rows[2]["seconds"] == pytest.approx(0.2)  # five epochs take one second
    assert all(row["least"] <= row["seconds"] <= row["most"] for row in rows)
    written = csv.DictReader((tmp_path / "speed.csv").open(encoding="utf-8"))
    assert [float(row["seconds"]) for row in written] == [row["seconds"] for row in rows]


def test_paired_differences_are_over_users_of_means_over_seeds():
    rng = np.random.default_rng(0)

    def made(values):
        nothing = np.zeros((3, 0))
        trainings = Trainings("m", {}, nothing, nothing, nothing, nothing, None, {"ndcg@10": values}, 0.0)
        return ndcg_results.MethodResult.of(trainings, {})

    one, other = rng.random((3, 50)), rng.random((3, 50))
    one[:, 7] = np.nan  # a user without held-out items
    difference = np.delete(one.mean(0) - other.mean(0), 7)
    mean, error = ndcg_results.paired(made(one), made(other), "ndcg@10")
    assert mean == pytest.approx(difference.mean(), abs=1e-6)
    assert error == pytest.approx(difference.std(ddof=1) / np.sqrt(49), abs=1e-6)
    assert made(one).means["ndcg@10"] == pytest.approx(np.nanmean(one, axis=1))


def test_a_search_and_the_table_by_commands(small, tmp_path):
    """The table can use the hyper-parameters that a search found."""
    pytest.importorskip("typer", reason="the command line needs typer")
    from typer.testing import CliRunner

    from bilevax.cli import app

    def invoke(*words):
        return CliRunner().invoke(app, [*words, "--method", "softmax", "--quick", "--out", str(tmp_path)])

    assert invoke("tune", "small").exit_code == 0
    best = tmp_path / "tune-small" / "best.json"
    result = invoke("reproduce", "ndcg", "--data", "small", "--hyperparameters", str(best))
    assert result.exit_code == 0, result.output
    used = json.loads((tmp_path / "ndcg" / "settings.json").read_text())["options"]["hyperparameters"]
    assert used == json.loads(best.read_text())
    for text, words in (
        ("{", "must be a JSON file"),
        ("[]", "by method"),
        ('{"magic": {}}', "got ['magic']"),
    ):
        best.write_text(text)
        result = invoke("reproduce", "ndcg", "--data", "small", "--hyperparameters", str(best))
        assert result.exit_code == 1
        assert words in " ".join(result.output.split())


def test_a_search_works_with_fewer_items_than_the_cutoffs(tmp_path, monkeypatch):
    table = generate.interactions(20, 40, 480, seed=0).table
    monkeypatch.setattr(ndcg_parts, "load_interactions", lambda name: table)
    options = ndcg_tune.NDCGTuneOptions(
        data="few", methods=("softmax",), gap=1, trials=2, epochs=1, every=1, finalists=1, repeats=0, width=2,
        positives=3,
    )  # fmt: skip
    best = ndcg_tune.tune(options, tmp_path)
    assert best["softmax"]["positives"] == 3


def test_a_gap_larger_than_every_users_ratings_is_rejected(small):
    with pytest.raises(DataError, match="a gap of 500 needs users with 511 ratings, got none"):
        ndcg_parts.load_parts("small", gap=500)


@pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA names no folder with ml-1m.zip")
def test_popularity_on_movielens():
    """The split and the protocol agree with the results of an independent program."""
    parts = ndcg_parts.load_parts("ml-1m")
    assert (parts.train.users, parts.train.item_count, parts.train.pairs) == (6040, 3706, 939_809)
    model = Popularity()
    counts = model.count(parts.train)
    found = summarize(jax.jit(lambda x: evaluate(model, x, parts.held_test, (10, 50)))(counts))
    assert found["ndcg@10"] == pytest.approx(0.0337, abs=5e-5)
    assert found["ndcg@50"] == pytest.approx(0.0692, abs=5e-5)


def test_a_quick_check_has_few_methods_unless_some_were_named():
    assert set(ndcg.NDCGOptions().quick().methods) == set(ndcg.QUICK)
    assert ndcg.NDCGOptions(methods=("song", "bpr")).quick().methods == ("song", "bpr")


def test_a_resumed_table_trains_only_what_is_missing(small, tmp_path, monkeypatch):
    trained = []

    def train(ratings, model, method, settings, *, keys, **others):
        trained.append(method)
        users = np.random.default_rng(len(method)).random((len(keys), ratings.users))
        test = {f"{metric}@{k}": users for metric in ("ndcg", "recall") for k in (10, 20, 50)}
        epochs, dev = np.array([2]), np.ones((len(keys), 1))
        return Trainings(method, {}, epochs, np.ones(1), dev, np.full(len(keys), 2), None, test, 0.0)

    monkeypatch.setattr(ndcg, "train_many", train)

    def table(*methods, **changes):
        trained.clear()
        options = ndcg.NDCGOptions(data="small", methods=methods, baselines=("popularity",), **changes)
        ndcg.run(options, tmp_path, resume=True)
        return (tmp_path / "ndcg.csv").read_text()

    table("softmax")
    both = table("softmax", "k-song")
    assert trained == ["softmax", "k-song"]  # a warm-up, and the method
    assert table("softmax", "k-song") == both
    assert trained == []
    assert "k-song (fresh)" in both
    with pytest.raises(ValueError, match=r"resume needs the options .*'seeds': 5.* got .*'seeds': 4"):
        table("softmax", seeds=4)


def test_the_papers_protocol_holds_out_one_item_and_samples_negatives(small):
    parts = ndcg_parts.load_parts("small", held=1, sampled=20)
    rows = small.csr()
    assert parts.train.pairs == len(rows.item) - 2 * len(rows.counts)
    assert parts.held_dev.protocol == "20 sampled negatives"
    assert parts.held_test.protocol == "full ranking"
    for user, drawn in enumerate(np.asarray(parts.held_dev.sampled).reshape(-1, 20)[: parts.train.users]):
        assert not np.isin(drawn, rows.item[rows.user == user]).any()  # not the test item either


def test_the_papers_protocol_chooses_a_setting_over_all_seeds(small, tmp_path):
    """Every method goes through the common warm-up; the chosen setting has the best mean over seeds."""
    options = ndcg_paper.PaperNDCGOptions(
        data="small", methods=("k-song",), choices=2, seeds=2, warm_up=1, epochs=2, every=1, width=4
    )
    found = ndcg_paper.run(options, tmp_path)
    assert found["k-song"].dev.shape == (2, 2)
    first, *_, last = ndcg_paper.grid("k-song")
    assert found["k-song"].settings in (first, last)
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "ndcg_paper.csv").open())}
    assert rows["k-song"]["ML-20M @10"] == "0.0747"
    assert rows["EASE"]["settings"].startswith("ridge")
    assert (tmp_path / "curves.csv").read_text().startswith("method,seed,epoch,seconds,dev ndcg@5")
    again = ndcg_paper.run(options, tmp_path, resume=True)
    assert again["k-song"].means["ndcg@10"].tolist() == found["k-song"].means["ndcg@10"].tolist()


def test_every_method_of_the_paper_tries_nine_settings():
    assert set(ndcg_paper.PAPER) < set(METHODS)
    for method in ndcg_paper.PaperNDCGOptions().methods:
        tried = ndcg_paper.grid(method)
        assert len(tried) == 9
        for one in tried:
            TrainingSettings().replace(**one)


def test_a_new_last_layer_leaves_the_rest_of_the_model():
    model = NeuMF(3, 5, 4)
    x = model.start(jax.random.key(0))
    new = ndcg_paper.with_new_last_layer(model, x, jax.random.key(0))
    changed = {name for name in x if not np.array_equal(x[name], new[name])}
    assert changed == {"output_product", "output_perceptron"}


@pytest.mark.parametrize(("fresh", "kind"), [(True, "FreshKSONG"), (False, "KSONG")])
def test_the_published_recipes_can_be_asked_for(fresh, kind):
    ratings = Ratings([0, 2], [0, 1], [3.0, 4.0], item_count=400)
    settings = TrainingSettings(fresh=fresh)
    _, solver = make_method("k-song", ratings, NeuMF(1, 400, 2), settings, 10)
    assert type(solver).__name__ == kind
    _, restarted = make_method("re-bsvrb v1", ratings, NeuMF(1, 400, 2), settings, 10)
    assert type(restarted.solver).__name__ == ("FreshBSVRBv1" if fresh else "BSVRBv1")


def test_l2_is_added_to_the_gradient_before_adam():
    """With a gradient of zero, Adam's first step is its learning rate towards zero, whatever l2 is."""
    ratings = Ratings([0, 2], [0, 1], [3.0, 4.0], item_count=400)
    settings = TrainingSettings(learning_rate=0.1, weight_decay=0.0, l2=1e-3)
    _, solver = make_method("softmax", ratings, NeuMF(1, 400, 2), settings, 10)
    x = np.array([2.0, -3.0])
    step, _ = solver.upper_step.update(np.zeros(2), solver.upper_step.init(x), x)
    assert np.asarray(step) == pytest.approx([-0.1, 0.1], rel=1e-5)


def test_ease_solves_its_constrained_least_squares_problem():
    """Against the normal equations of every column without its own item, in float64."""
    ratings = Ratings.of(generate.interactions(30, 12, 150, seed=0).table.csr())
    gains = 2.0 ** np.asarray(ratings.values, float) - 1
    for fit, entries in (
        (ndcg_baselines.ease, np.ones(ratings.pairs)),
        (ndcg_baselines.gain_ease, gains / np.sqrt(np.mean(gains**2))),
    ):
        dense = np.zeros((ratings.users, ratings.item_count))
        dense[ratings.owners(), np.asarray(ratings.items)] = entries
        expected = np.zeros_like(dense)
        for item in range(ratings.item_count):
            others = np.arange(ratings.item_count) != item
            features = dense[:, others]
            normal = features.T @ features + 3.0 * np.eye(len(features.T))
            expected[:, item] = features @ np.linalg.solve(normal, features.T @ dense[:, item])
        assert fit(ratings, ridge=3.0) == pytest.approx(expected, abs=2e-4)


def test_als_reaches_a_stationary_point_of_its_weighted_loss():
    """After many sweeps the loss, written out in float64, cannot be lowered by moving the users' factors."""
    ratings = Ratings.of(generate.interactions(20, 12, 120, seed=0).table.csr())
    dense = ndcg_baselines.pair_matrix(ratings).toarray().astype(float)
    rank, alpha, ridge = 2, 3.0, 0.5
    scores = ndcg_baselines.als(ratings, rank, alpha, ridge, sweeps=300).astype(float)
    left, values, right = np.linalg.svd(scores)
    # The least ridge among all factorisations is the nuclear norm, which the balanced one attains.
    user, item = left[:, :rank] * np.sqrt(values[:rank]), right[:rank].T * np.sqrt(values[:rank])
    weights = 1 + alpha * dense

    def loss(user, item):
        return np.sum(weights * (dense - user @ item.T) ** 2) + ridge * (np.sum(user**2) + np.sum(item**2))

    slope = -2 * (weights * (dense - user @ item.T)) @ item + 2 * ridge * user
    assert np.abs(slope).max() < 1e-2
    assert loss(user, item) < loss(1.01 * user, item)
    assert loss(user, item) < loss(user, 0.99 * item)


def test_the_best_setting_of_a_closed_form_is_chosen_on_development_data(small):
    parts = ndcg_parts.load_parts("small")
    items = parts.train.item_count
    truth = np.zeros((parts.train.users, items), np.float32)
    truth[parts.dev.owners(), np.asarray(parts.dev.items)] = parts.dev.values
    baseline = ndcg_baselines.Baseline(lambda train, sign: sign * truth, ({"sign": -1.0}, {"sign": 1.0}))
    found = ndcg_baselines.judge(baseline, parts.train, parts.held_dev, parts.held_test, "ndcg@10", (10,))
    assert found.settings == {"sign": 1.0}
    assert found.dev == pytest.approx(1.0, abs=1e-6)
    assert found.test["ndcg@10"].shape == (parts.train.users,)
