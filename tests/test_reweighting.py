"""The reweighting problem: what it computes, for two classes and more, dense and sparse; and its parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import approx_fprime
from sklearn.linear_model import LogisticRegression

import bilevax as bx
from bilevax.applications import linear, noise_model
from bilevax.applications.cross_validated import cross_validated_loss, make_problem
from bilevax.applications.fold_rows import bucket
from bilevax.applications.noisy_task import NoisyTask
from bilevax.applications.reweighting import as_rows, products, reweighting


def labelled(classes: int = 2, n: int = 80, clean: int = 30, width: int = 4, seed: int = 0):
    random = np.random.default_rng(seed)
    X = random.normal(size=(n + clean, width)) * (random.random((n + clean, width)) < 0.6)
    y = np.argmax(X @ random.normal(size=(width, classes)) + random.normal(size=(n + clean, classes)), 1)
    return X[:n], y[:n], X[n:], y[n:]


@pytest.mark.parametrize("classes", [2, 3])
def test_the_objective_is_that_of_the_formula(classes):
    X, y, X_clean, y_clean = labelled(classes)
    task = reweighting(X, y, X_clean, y_clean, temperatures=[1.0, 2.0], ridge=0.1)
    x = jnp.linspace(-2, 2, len(y))
    got = float(bx.objective(task.problem, x, y0=task.y0))
    weight = 1 / (1 + np.exp(-np.asarray(x)))
    rows, clean_rows = (np.c_[one, np.ones(len(one))] for one in (X, X_clean))
    total = 0.0
    for heat in (1.0, 2.0):
        # With coefficients b = y/T the ridge is n · λT².
        strength = 1 / (len(y) * 0.1 * heat**2)
        model = LogisticRegression(C=strength, fit_intercept=False, tol=1e-9, max_iter=5000)
        total += linear.losses(clean_rows @ model.fit(rows, y, weight).coef_.T, y_clean).mean()
    assert got == pytest.approx(total / 2, rel=1e-3)


def test_sparse_rows_are_the_same_problem_dense_or_padded(monkeypatch):
    X, y, X_clean, y_clean = labelled(3)
    X, X_clean = sparse.csr_matrix(X), sparse.csr_matrix(X_clean)
    dense = reweighting(X, y, X_clean, y_clean, temperatures=2)
    monkeypatch.setattr("bilevax.applications.reweighting._DENSE", 1)
    padded = reweighting(X, y, X_clean, y_clean, temperatures=2)
    assert "column" in padded.problem.upper_data.rows["row"]
    y0 = jax.random.normal(jax.random.key(0), dense.y0.shape)
    np.testing.assert_allclose(padded.logits(X, y0), dense.logits(X, y0), atol=1e-5)
    x = jnp.linspace(-1, 1, len(y))
    assert float(bx.objective(padded.problem, x, y0=padded.y0)) == pytest.approx(
        float(bx.objective(dense.problem, x, y0=dense.y0)), rel=1e-4
    )


def test_wide_sparse_rows_are_never_made_dense():
    columns = np.random.default_rng(0).integers(0, 10**7, (50, 10))
    wide = sparse.csr_matrix((np.ones(500), (np.repeat(np.arange(50), 10), columns.ravel())), (50, 10**7))
    rows = as_rows(wide, intercept=False)
    assert rows["value"].size < 50 * 100
    y = jnp.ones(10**7)
    np.testing.assert_allclose(products(rows, y), np.asarray(wide.sum(1)).ravel(), rtol=1e-5)


def test_rows_that_cannot_be_stored_are_rejected(monkeypatch):
    monkeypatch.setattr("bilevax.applications.reweighting._DENSE", 1)
    monkeypatch.setattr("bilevax.applications.reweighting._PADDED", 10)
    with pytest.raises(ValueError, match="too many to store"):
        as_rows(sparse.csr_matrix(np.ones((5, 5))), intercept=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.zeros(80)}, "at least two classes"),
        ({"X_clean": np.zeros((30, 3))}, "must have the 4 features of X, got 3"),
        ({"y_clean": np.full(30, 9)}, "classes that y does not have: \\[9\\]"),
        ({"y_clean": np.zeros(0)}, "at least one label"),
        ({"y": np.r_[np.zeros(5), np.ones(5)]}, "one label per row, got 10 for 80 rows"),
        ({"X": np.full((80, 4), np.nan)}, "finite"),
        ({"temperatures": [0.0]}, "temperatures"),
        ({"ridge": 0.0}, "ridge"),
        ({"X": np.zeros(80)}, "matrix"),
        ({"X_clean": 1e5 + labelled()[2]}, "on the scale of X"),
    ],
)
def test_bad_input_is_rejected(changes, message):
    given = dict(zip(("X", "y", "X_clean", "y_clean"), labelled(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        reweighting(**given)


def test_weights_learnt_by_a_run_prefer_right_labels():
    X, y, X_clean, y_clean = labelled(n=300, clean=100, seed=1)
    wrong = np.random.default_rng(0).random(300) < 0.3
    task = reweighting(X, np.where(wrong, 1 - y, y), X_clean, y_clean, temperatures=3, ridge=1e-2)
    result = bx.minimize(
        task.problem,
        task.x0,
        task.y0,
        solver=bx.BSVRBv2(upper_step=30.0),
        steps=1000,
        batch_size=32,
        key=jax.random.key(0),
        progress=None,
    )
    weights = task.weights(result.x)
    assert weights[~wrong].mean() > weights[wrong].mean() + 0.05


@pytest.mark.parametrize("classes", [2, 3])
def test_linear_fits_are_those_of_scikit_learn(classes):
    X, y, *_ = labelled(classes, n=200)
    weight = np.linspace(0.1, 1, 200)
    model = linear.fit(X, y, weight, 2.0, classes=classes)
    other = LogisticRegression(C=0.5, tol=1e-8, max_iter=5000).fit(X, y, weight)
    got = linear.losses(model.logits(X), y)
    want = -np.log(other.predict_proba(X)[np.arange(200), y])
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_a_shift_of_noisy_rows_takes_up_their_class_frequencies():
    random = np.random.default_rng(0)
    X = random.normal(size=(4000, 2))
    noisy = np.arange(4000) < 2000
    chance = 1 / (1 + np.exp(-(2 * X[:, 0] + np.where(noisy, -1.5, 0.0))))
    y = (random.random(4000) < chance).astype(int)
    model = linear.fit(X, y, np.ones(4000), 1e-3, classes=2, noisy=noisy, shift_deviation=10.0)
    assert model.shift[0] == pytest.approx(-1.5, abs=0.3)
    assert model.intercept[0] == pytest.approx(0.0, abs=0.2)


def test_noise_rates_and_frequencies_are_recovered():
    random = np.random.default_rng(1)
    logits = np.c_[np.zeros(30_000), 3 * random.normal(size=30_000)]
    shifted = 1 / (1 + np.exp(-(logits[:, 1] - 1.0)))
    true = (random.random(30_000) < shifted).astype(int)
    flip = np.array([[0.7, 0.3], [0.2, 0.8]])
    labels = (random.random(30_000) < flip[true, 1]).astype(int)
    found = noise_model.estimate(logits, labels)
    np.testing.assert_allclose(found.flip, flip, atol=0.04)
    assert found.shift[1] - found.shift[0] == pytest.approx(-1.0, abs=0.25)


def test_weighted_rows_have_the_gradient_of_the_labels_likelihood():
    flip = np.array([[0.7, 0.3], [0.2, 0.8]])
    model = noise_model.NoiseModel(flip, np.zeros(2))
    for code in (0, 1):
        for logit in (-2.0, 0.3, 1.5):

            def likelihood(t, code=code):
                chance = 1 / (1 + np.exp(-t[0]))
                return np.log((1 - chance) * flip[0, code] + chance * flip[1, code])

            weight = model.weight(np.array([[0.0, logit]]), np.array([code]))[0]
            slope = weight * (code - 1 / (1 + np.exp(-logit)))
            assert slope == pytest.approx(approx_fprime([logit], likelihood)[0], abs=1e-4)


def test_blocks_draw_their_folds_and_only_them():
    X, y, X_clean, y_clean = labelled()
    fold = np.arange(30) % 3
    X_clean = np.c_[fold, X_clean[:, 1:]]  # the first feature tells the fold
    task = NoisyTask(X, y, X_clean, y_clean, fold, 2)
    problem = make_problem(task, np.full((4, 80), 0.5), [(k, 1.0) for k in range(3)], 0.5)
    stream, blocks = bx.Stream.start(jax.random.key(0)), jnp.arange(3)
    judged = problem.upper_data.draw(stream, blocks, 200).rows["row"]["dense"][..., 0]
    learnt = problem.lower_data[0].draw(stream, blocks, 200).rows
    for k in range(3):
        assert set(np.asarray(judged[k])) == {float(k)}
        assert set(np.asarray(learnt["clean"]["row"]["dense"][k, :, 0])) == {0.0, 1.0, 2.0} - {float(k)}
    assert set(np.asarray(learnt["noisy"]["index"]).ravel()) <= set(range(80))


def test_the_cross_validated_loss_leaves_padding_out():
    X, y, X_clean, y_clean = labelled()
    fold = np.arange(30) % 3
    task = NoisyTask(X, y, X_clean, y_clean, fold, 2)
    problem = make_problem(task, np.full((4, 80), 0.5), [(k, 1.0) for k in range(3)], 0.5)
    coef = np.zeros((3, 16, 1), np.float32)
    coef[:, :4, 0] = [1.0, -1.0, 0.5, 2.0]
    models = {"coef": jnp.asarray(coef), "intercept": jnp.zeros((3, 1)), "shift": jnp.zeros((3, 1))}
    losses = linear.losses(X_clean @ coef[0, :4], y_clean)
    want = np.mean([losses[fold == k].mean() for k in range(3)])
    assert float(cross_validated_loss(problem, models)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("size", [1, 64, 65, 1000, 4097, 15_000, 10**6])
def test_buckets_hold_what_they_must_and_little_more(size):
    got = bucket(size, 64)
    assert got >= size
    assert got <= max(64, 2 * size)
