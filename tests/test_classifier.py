"""The estimator for noisy labels: scikit-learn's contract, bad input, and that it learns."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import bilevax as bx
from bilevax.applications import ReweightedClassifier
from bilevax.applications.noisy_task import NoisyTask
from bilevax.applications.refit import PLAIN, RIDGES, Bench, Candidate, overall_outcome


@parametrize_with_checks([ReweightedClassifier(max_iter=60, rounds=1)])
def test_scikit_learn_accepts_the_estimator(estimator, check):
    check(estimator)


def noisy_task(classes: int = 2, clean: int = 60, noise: float = 0.35, seed: int = 0):
    """Rows, noisy labels, which are wrong, clean rows and labels, test rows and labels."""
    X, y = make_classification(
        1500, 10, n_informative=6, n_redundant=0, n_classes=classes, class_sep=1.5, random_state=seed
    )
    random = np.random.default_rng(seed)
    wrong = random.random(900) < noise
    labels = np.where(wrong, (y[:900] + random.integers(1, classes, 900)) % classes, y[:900])
    return X[:900], labels, wrong, X[900 : 900 + clean], y[900 : 900 + clean], X[1000:], y[1000:]


@pytest.fixture(scope="module")
def fitted():
    X, y, wrong, X_clean, y_clean, X_test, y_test = noisy_task()
    model = ReweightedClassifier(random_state=0, max_iter=500).fit(X, y, X_clean, y_clean)
    return model, (X, y, wrong, X_clean, y_clean, X_test, y_test)


def test_two_classes_are_learnt_better_than_from_either_part_alone(fitted):
    model, (X, y, _, X_clean, y_clean, X_test, y_test) = fitted
    both = np.r_[X, X_clean], np.r_[y, y_clean]
    alone = LogisticRegression().fit(X_clean, y_clean).score(X_test, y_test)
    assert model.score(X_test, y_test) >= max(alone, LogisticRegression().fit(*both).score(X_test, y_test))


def test_flipped_labels_are_found(fitted):
    model, (_, _, wrong, *_) = fitted
    assert roc_auc_score(~wrong, model.label_quality_) > 0.85
    assert roc_auc_score(~wrong, model.sample_weight_) > 0.85
    assert model.sample_weight_.shape == wrong.shape
    assert ((model.sample_weight_ > 0) & (model.sample_weight_ < 1)).all()
    assert np.abs(np.diag(model.flip_) - 0.65).max() < 0.12


def test_what_was_learnt_can_be_looked_at(fitted):
    model, (X, *_) = fitted
    assert model.coef_.shape == (1, 10)
    assert model.intercept_.shape == (1,)
    assert 0 < model.n_iter_ <= 1000
    assert set(model.history_) >= {"round", "step", "objective", "cross-validated loss"}
    assert sum(one["share"] for one in model.candidates_) == pytest.approx(1)
    logits = X @ model.coef_[0] + model.intercept_[0]
    np.testing.assert_allclose(model.decision_function(X), logits)
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], 1 / (1 + np.exp(-logits)))


def test_the_bilevel_run_moves_the_weights_and_lowers_the_cross_validated_loss():
    X, y, _, X_clean, y_clean, *_ = noisy_task(clean=100, seed=3)
    learnt = ReweightedClassifier(random_state=0, rounds=1, max_iter=1500).fit(X, y, X_clean, y_clean)
    guessed = ReweightedClassifier(random_state=0, rounds=1, max_iter=0).fit(X, y, X_clean, y_clean)
    assert np.abs(learnt.sample_weight_ - guessed.sample_weight_).max() > 0.01
    loss = {
        name: min(c["loss"] for c in learnt.candidates_ if c["weights"] == name)
        for name in ("guess 1", "learnt 1")
    }
    assert loss["learnt 1"] < loss["guess 1"]


def test_several_classes_with_names_are_learnt():
    X, y, wrong, X_clean, y_clean, X_test, y_test = noisy_task(classes=3, noise=0.3)
    names = np.array(["ash", "birch", "cedar"])
    model = ReweightedClassifier(random_state=0, max_iter=300).fit(X, names[y], X_clean, names[y_clean])
    assert set(model.predict(X_test)) <= set(names)
    alone = LogisticRegression().fit(X_clean, y_clean).score(X_test, y_test)
    assert model.score(X_test, names[y_test]) >= alone - 0.01
    assert roc_auc_score(~wrong, model.label_quality_) > 0.8
    assert model.coef_.shape == (3, 10)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil"])
def test_sparse_rows_give_what_dense_rows_give(form):
    X, y, _, X_clean, y_clean, X_test, _ = noisy_task()
    X, X_clean, X_test = (np.where(np.abs(one) > 1, one, 0) for one in (X, X_clean, X_test))
    dense = ReweightedClassifier(random_state=0, max_iter=50, rounds=1).fit(X, y, X_clean, y_clean)
    matrix = sparse.coo_matrix(X).asformat(form)
    other = ReweightedClassifier(random_state=0, max_iter=50, rounds=1)
    other.fit(matrix, y, sparse.coo_matrix(X_clean).asformat(form), y_clean)
    np.testing.assert_allclose(
        other.predict_proba(sparse.coo_matrix(X_test).asformat(form)), dense.predict_proba(X_test), atol=1e-6
    )


def test_rows_too_wide_to_be_dense_stay_sparse(monkeypatch):
    X, y, _, X_clean, y_clean, X_test, y_test = noisy_task()
    X, X_clean, X_test = (
        sparse.csr_matrix(np.where(np.abs(one) > 0.5, one, 0)) for one in (X, X_clean, X_test)
    )
    dense = ReweightedClassifier(random_state=0, max_iter=100, rounds=1).fit(X, y, X_clean, y_clean)
    monkeypatch.setattr("bilevax.applications.classifier._DENSE", 1)
    monkeypatch.setattr("bilevax.applications.reweighting._DENSE", 1)
    wide = ReweightedClassifier(random_state=0, max_iter=100, rounds=1).fit(X, y, X_clean, y_clean)
    assert abs(wide.score(X_test, y_test) - dense.score(X_test, y_test)) < 0.03


def test_without_clean_rows_a_part_is_held_out():
    X, y, *_ = noisy_task(noise=0.1)
    model = ReweightedClassifier(random_state=0, max_iter=50, validation_fraction=0.25).fit(X, y)
    assert abs(len(model.held_out_) - 225) <= 1
    assert (model.sample_weight_[model.held_out_] == 1).all()
    assert len(model.label_quality_) == len(y)


def test_the_same_seed_gives_the_same_model():
    X, y, _, X_clean, y_clean, *_ = noisy_task()
    one, two = (
        ReweightedClassifier(random_state=3, max_iter=60).fit(X, y, X_clean, y_clean) for _ in range(2)
    )
    assert (one.coef_ == two.coef_).all()
    assert (one.sample_weight_ == two.sample_weight_).all()


def test_units_of_the_features_do_not_matter():
    X, y, _, X_clean, y_clean, X_test, _ = noisy_task()
    one = ReweightedClassifier(random_state=0, max_iter=60).fit(X, y, X_clean, y_clean)
    two = ReweightedClassifier(random_state=0, max_iter=60).fit(
        1000 * X + 5000, y, 1000 * X_clean + 5000, y_clean
    )
    assert np.mean(one.predict(X_test) == two.predict(1000 * X_test + 5000)) > 0.99


def test_pipelines_and_grid_search_pass_clean_rows_on():
    X, y, _, X_clean, y_clean, X_test, y_test = noisy_task()
    model = make_pipeline(StandardScaler(), ReweightedClassifier(random_state=0, max_iter=60, rounds=1))
    model.fit(X, y, reweightedclassifier__X_clean=X_clean, reweightedclassifier__y_clean=y_clean)
    assert model.score(X_test, y_test) > 0.7
    search = GridSearchCV(ReweightedClassifier(random_state=0, max_iter=60), {"rounds": [1, 2]}, cv=2)
    search.fit(X, y, X_clean=X_clean, y_clean=y_clean)
    assert search.score(X_test, y_test) > 0.7


def test_clean_rows_that_skip_the_scaler_are_rejected():
    X, y, _, X_clean, y_clean, *_ = noisy_task()
    X, X_clean = (1e4 * (5 + one) for one in (X, X_clean))
    model = make_pipeline(StandardScaler(), ReweightedClassifier(random_state=0, max_iter=60, rounds=1))
    with pytest.raises(ValueError, match=r"X_clean must be on the scale of X.*transform_input=\['X_clean'\]"):
        model.fit(X, y, reweightedclassifier__X_clean=X_clean, reweightedclassifier__y_clean=y_clean)


def rare_task(seed: int):
    """Noisy, clean and test rows; 4% are positive, and a quarter of the noisy labels is wrong."""
    random = np.random.default_rng(seed)
    X = (random.random((5000, 60)) < 0.12).astype(float)
    logits = 1.6 * X @ np.random.default_rng(0).normal(size=60)
    logits = 3 * (logits - np.quantile(logits, 0.96))
    y = (random.random(5000) < 1 / (1 + np.exp(-logits))).astype(int)
    noisy = np.where(random.random(2000) < 0.25, 1 - y[:2000], y[:2000])
    return X[:2000], noisy, X[2000:2060], y[2000:2060], X[2060:], y[2060:]


@pytest.mark.parametrize("seed", [1, 3])
def test_rare_classes_are_ranked_no_worse_than_by_the_noisy_rows(seed):
    X, y, X_clean, y_clean, X_test, y_test = rare_task(seed)
    assert y_clean.sum() < 5
    plain = LogisticRegression(max_iter=1000).fit(X, y).decision_function(X_test)
    model = ReweightedClassifier(random_state=0, rounds=1, max_iter=100).fit(X, y, X_clean, y_clean)
    found = average_precision_score(y_test, model.decision_function(X_test))
    assert found >= average_precision_score(y_test, plain)


def test_clean_rows_of_one_class_are_noticed():
    X, y, _, X_clean, y_clean, *_ = noisy_task(clean=40)
    one = y_clean == y_clean[0]
    with pytest.warns(UserWarning, match="y_clean has only the class"):
        ReweightedClassifier(random_state=0, rounds=1, max_iter=0).fit(X, y, X_clean[one], y_clean[one])


@pytest.fixture(scope="module")
def bench():
    X, y, _, X_clean, y_clean, *_ = noisy_task(clean=40)
    return Bench(NoisyTask(X, y, X_clean, y_clean, np.arange(40) % 5, 2))


def test_labels_as_they_are_have_half_of_the_prior(bench):
    def group(name, loss, noisy=0.0):
        return [Candidate(name, None, ridge, None, {}, np.full(40, loss), noisy) for ridge in RIDGES]

    few = group("guess 1", 0.5) + group("learnt 1", 0.5) + group("clean rows alone", 0.5, None)
    shares = bench.shares(few + group(PLAIN, 0.5))
    assert shares.sum() == pytest.approx(1)
    assert shares[-len(RIDGES) :].sum() == pytest.approx(0.5)
    # Clean rows decide where they say more: 40 rows, a loss less by 0.5 on each.
    odds = bench.shares(group("guess 1", 0.0) + group(PLAIN, 0.5)).reshape(2, -1).sum(1)
    assert odds[0] / odds[1] == pytest.approx(np.exp(20.0))
    # Noisy rows say at most a factor of e for or against weights.
    for noisy, factor in ((-0.5, np.exp(0.5)), (-50.0, np.exp(1.0))):
        odds = bench.shares(group("guess 1", 0.5) + group(PLAIN, 0.5, noisy)).reshape(2, -1).sum(1)
        assert odds[0] / odds[1] == pytest.approx(factor)


def test_noisy_rows_choose_the_ridge_unless_clean_rows_overrule_them(bench):
    def shares(losses):
        parts = zip(RIDGES, losses, (-30.0, -3.0, 0.0, -3.0), strict=True)
        return bench.shares(
            [Candidate("guess 1", None, r, None, {}, np.full(40, loss), noisy) for r, loss, noisy in parts]
        )

    assert shares([0.5] * 4)[2] > 0.9
    assert shares([0.5, 0.5, 0.6, 0.5])[2] < 0.7
    assert shares([0.0, 2.0, 2.0, 2.0])[0] > 0.9


def test_a_candidate_that_won_by_a_few_lucky_rows_does_not_take_all(bench):
    def shares(losses):
        return bench.shares([Candidate(name, None, 1.0, None, {}, one, None) for name, one in losses.items()])

    same = np.full(40, 0.5)
    steady, lucky = same - 0.1, same.copy()
    lucky[:2] -= 2.0  # as much in all, on two rows
    sure = shares({"a": steady, "b": same})
    unsure = shares({"a": lucky, "b": same})
    assert sure[0] == pytest.approx(1 / (1 + np.exp(-4.0)))
    assert 0.5 < unsure[0] < sure[0] - 0.05


def test_plain_candidates_are_calibrated_on_the_clean_rows(bench):
    found = bench.plain_candidates()
    assert [one.ridge for one in found] == list(RIDGES)
    assert all(np.isfinite(one.noisy) for one in found)
    assert all(one.loss < np.log(2) for one in found)
    task = bench.task
    for one in found:
        # 35% of the labels are wrong: a model of the noisy labels is far less sure than the calibrated one.
        noisy = LogisticRegression(C=1 / one.ridge).fit(task.rows, task.codes)
        ours, theirs = one.model.logits(task.rows)[:, 0], noisy.decision_function(task.rows)
        assert np.corrcoef(ours, theirs)[0, 1] > 0.999
        assert ours.std() > 1.5 * theirs.std()


class Impatient:
    """Interrupts the first run at its first report of progress."""

    def __init__(self):
        self.left = 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, step, speed, metrics):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("raises", [True, False])
def test_an_interrupted_fit_says_so_and_has_a_model(raises, capsys):
    X, y, _, X_clean, y_clean, X_test, y_test = noisy_task()
    model = ReweightedClassifier(
        random_state=0, rounds=3, progress=Impatient(), **({} if raises else {"raise_on_interrupt": False})
    )
    if raises:
        with pytest.raises(KeyboardInterrupt, match=r"fit was interrupted.*raise_on_interrupt=False"):
            model.fit(X, y, X_clean, y_clean)
    else:
        model.fit(X, y, X_clean, y_clean)
    assert model.outcome_ is bx.Outcome.INTERRUPTED
    assert model.n_iter_ < 3000
    assert set(model.history_["round"]) <= {1}
    lines = [line for line in capsys.readouterr().err.splitlines() if "was interrupted" in line]
    assert len(lines) == (not raises)
    assert raises or lines[0].startswith("ReweightedClassifier.fit was interrupted")
    assert model.score(X_test, y_test) > 0.7


def test_the_outcome_is_that_of_the_last_run_unless_one_went_wrong(fitted):
    assert fitted[0].outcome_ in (bx.Outcome.FINISHED, bx.Outcome.PATIENCE)
    X, y, _, X_clean, y_clean, *_ = noisy_task()
    guessed = ReweightedClassifier(random_state=0, max_iter=0).fit(X, y, X_clean, y_clean)
    assert guessed.outcome_ is bx.Outcome.FINISHED
    good, bad, cut = bx.Outcome.PATIENCE, bx.Outcome.DIVERGED, bx.Outcome.INTERRUPTED
    assert overall_outcome([good, bad, good]) is bad
    assert overall_outcome([good, bad, cut]) is cut
    assert overall_outcome([bx.Outcome.FINISHED, good]) is good


def bad(**changes):
    X, y, _, X_clean, y_clean, *_ = noisy_task()
    given = {"X": X, "y": y, "X_clean": X_clean, "y_clean": y_clean} | changes
    return given


NOT_FINITE = np.full((60, 10), np.nan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.zeros(900)}, "only one class"),
        ({"X": np.full((900, 10), np.inf)}, "infinity"),
        ({"X_clean": NOT_FINITE}, "NaN"),
        ({"X_clean": np.zeros((60, 9))}, "9 features"),
        ({"y_clean": np.full(60, 7)}, "previously unseen labels: \\[7\\]"),
        ({"X_clean": np.zeros((0, 10)), "y_clean": np.zeros(0)}, "at least one row"),
        ({"X_clean": sparse.csr_matrix((0, 10)), "y_clean": np.zeros(0)}, "at least one row"),
        ({"y_clean": np.zeros(59)}, "inconsistent numbers of samples"),
        ({"y_clean": None}, "go together"),
        ({"y": np.linspace(0, 1, 900)}, "Unknown label type"),
    ],
)
def test_bad_data_are_rejected(changes, message):
    given = bad(**changes)
    with pytest.raises(ValueError, match=message):
        ReweightedClassifier().fit(**given)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("folds", 1),
        ("rounds", 0),
        ("max_iter", -1),
        ("patience", 0),
        ("batch_size", 1.5),
        ("learning_rate", 0.0),
        ("row_deviation", -1.0),
        ("validation_fraction", 1.0),
    ],
)
def test_bad_settings_are_rejected(setting, value):
    with pytest.raises(ValueError, match=setting):
        ReweightedClassifier(**{setting: value}).fit(**bad())


def test_one_clean_row_is_enough_to_run():
    X, y, _, X_clean, y_clean, *_ = noisy_task()
    model = ReweightedClassifier(random_state=0).fit(X, y, X_clean[:1], y_clean[:1])
    assert model.n_iter_ == 0
    assert np.isfinite(model.coef_).all()
