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
from bilevax.experiments import ndcg, ndcg_speed, ndcg_tune

FORMS = ("squared hinge + logarithmic", "logistic + power")


@pytest.fixture
def small(monkeypatch):
    table = generate.interactions(30, 80, 900, seed=0).table
    monkeypatch.setattr(ndcg, "load_interactions", lambda name: table)
    return table


def test_the_table_has_every_method_and_the_papers_is_written_too(small, tmp_path):
    methods = ("softmax", "lambdarank")
    options = ndcg.NDCGOptions(data="small", methods=methods, seeds=2, epochs=4, every=2, width=4)
    chosen = {key: {"users_per_step": 10, "negatives": 10, "positives": 4} for key in methods}
    found = ndcg.run(options, tmp_path, hyperparameters=chosen)
    assert found["softmax"].dev.shape == (2, 2)
    assert found["softmax"].epochs.tolist() == [2, 4]
    table = (tmp_path / "ndcg.md").read_text()
    assert "| popularity |" in table
    assert "| softmax |" in table
    assert "full ranking" in table
    rows = list(csv.DictReader((tmp_path / "ndcg.csv").open()))
    for k in (10, 50):
        mean, error = ndcg.paired(found["softmax"], found["lambdarank"], f"ndcg@{k}")
        assert rows[1][f"− lambdarank @{k}"] == f"{mean:+.4f} ± {error:.4f}"
        assert rows[2][f"− lambdarank @{k}"] == ""
    assert "RE-" not in (tmp_path / "paper.md").read_text()
    assert "0.0749" in (tmp_path / "paper.md").read_text()
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0] == "method,seed,epoch,seconds,dev ndcg@10"
    assert len(lines) == 1 + 2 * 2 * 2
    with pytest.raises(ValueError, match=r"methods must be among .* got \['magic'\]"):
        ndcg.run(ndcg.NDCGOptions(methods=("magic",)), tmp_path)


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
    parts, near = ndcg.load_parts("small", gap=3), ndcg.load_parts("small")
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
    assert searched.pairs == ndcg.load_parts("small", gap=gap).train.pairs
    assert (searched.pairs == ndcg.load_parts("small").train.pairs) == (gap == 0)


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
    assert json.loads((tmp_path / "speed.json").read_text()) == rows


def test_paired_differences_are_over_users_of_means_over_seeds():
    rng = np.random.default_rng(0)

    def made(values):
        nothing = np.zeros(0)
        return Trainings("m", {}, nothing, nothing, nothing, nothing, None, {"ndcg@10": values}, 0.0)

    one, other = rng.random((3, 50)), rng.random((3, 50))
    one[:, 7] = np.nan  # a user without held-out items
    difference = np.delete(one.mean(0) - other.mean(0), 7)
    mean, error = ndcg.paired(made(one), made(other), "ndcg@10")
    assert mean == pytest.approx(difference.mean())
    assert error == pytest.approx(difference.std(ddof=1) / np.sqrt(49))
    assert jax.tree.leaves(made(one).means("ndcg@10"))[0].shape == (3,)


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
    monkeypatch.setattr(ndcg, "load_interactions", lambda name: table)
    options = ndcg_tune.NDCGTuneOptions(
        data="few", methods=("softmax",), gap=1, trials=2, epochs=1, every=1, finalists=1, repeats=0, width=2,
        positives=3,
    )  # fmt: skip
    best = ndcg_tune.tune(options, tmp_path)
    assert best["softmax"]["positives"] == 3


def test_a_gap_larger_than_every_users_ratings_is_rejected(small):
    with pytest.raises(DataError, match="a gap of 500 needs users with 511 ratings, got none"):
        ndcg.load_parts("small", gap=500)


@pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA names no folder with ml-1m.zip")
def test_popularity_on_movielens():
    """The split and the protocol agree with the results of an independent program."""
    parts = ndcg.load_parts("ml-1m")
    assert (parts.train.users, parts.train.item_count, parts.train.pairs) == (6040, 3706, 939_809)
    model = Popularity()
    counts = model.count(parts.train)
    found = summarize(jax.jit(lambda x: evaluate(model, x, parts.held_test, (10, 50)))(counts))
    assert found["ndcg@10"] == pytest.approx(0.0337, abs=5e-5)
    assert found["ndcg@50"] == pytest.approx(0.0692, abs=5e-5)


def test_a_quick_check_has_few_methods_unless_some_were_named():
    assert set(ndcg.NDCGOptions().quick().methods) == set(ndcg.QUICK)
    assert ndcg.NDCGOptions(methods=("song", "bpr")).quick().methods == ("song", "bpr")
