"""A classifier for noisy labels in scikit-learn's form."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from scipy import sparse
from scipy.special import softmax

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
    from threadpoolctl import threadpool_limits  # comes with scikit-learn
except ImportError as error:
    raise ImportError(
        "ReweightedClassifier needs scikit-learn: pip install 'bilevax[experiments]'"
    ) from error

import bilevax as bx
from bilevax.applications import interrupted, noise_model
from bilevax.applications.clean_scale import check_scales
from bilevax.applications.cross_validated import BilevelSettings
from bilevax.applications.linear import all_logits
from bilevax.applications.noisy_task import NoisyTask
from bilevax.applications.refit import SIZE, learn
from bilevax.applications.seeds import drawn_from

_DENSE = 2**24  # sparse features with at most this many entries, zeros included, are made dense


class ReweightedClassifier(ClassifierMixin, BaseEstimator):
    r"""A linear classifier that learns which labels to trust, with the help of a few clean rows.

    1. A first guess: logistic regression on the noisy rows, calibrated on the clean rows, estimates how
       likely every label is to be right (`noise_model`).
    2. Multi-block bilevel optimization learns the weights of the noisy rows: F is the cross-validated loss,
       over the clean rows, of models that are fitted to weighted noisy rows and clean rows together
       (`cross_validated`). Learning stops when F no longer improves.
    3. The final model is refitted to weighted noisy rows and clean rows together. It is the mean of a few
       candidates (several ridges, the guessed weights, the clean rows alone, the noisy labels as they are),
       each with a prior share and one that falls with its cross-validated loss,
       :math:`\propto \exp(-\text{loss summed over clean rows})`, averaged over a bootstrap of the clean
       rows.

    Features should have similar scales, as for any regularised linear model: put a `StandardScaler` first.
    In a `Pipeline`, the clean rows must pass through the scaler too: docs/noisy_labels.md shows how.

    Args:
      folds: the number of parts that the clean rows are divided into, to evaluate weights and candidates.
      rounds: how many times the weights are learnt; every round starts from a guess around the last model.
      max_iter: the most bilevel steps in a round.
      patience: stop when the cross-validated loss has not improved for this many measurements, one in 100
        steps.
      learning_rate: for the part of the weights that rows share.
      row_deviation: how far a row's own part may move the logit of its weight; 0 leaves the shared part only.
      batch_size: noisy rows, and clean rows, per block and step.
      validation_fraction: without clean rows, `fit(X, y)` holds out this fraction of the rows and trusts
        their labels.
      progress: "auto", "bar", "lines", or None for silence.
      raise_on_interrupt: whether `fit` raises `KeyboardInterrupt` after SIGINT or SIGTERM, so that a script
        or a grid search ends and saves no unfinished model. The model with the weights found so far is in
        place in either case.
      random_state: seed or `numpy.random.RandomState` of the folds and of the bilevel run.

    Attributes:
      classes_: the classes.
      coef_, intercept_: the final model; one row if there are two classes, else one per class.
      sample_weight_: the weight of every row of X in the refit; 1 for rows that were held out as clean.
      label_quality_: how likely the label of every row of X is to be right, in view of the final model.
      flip_: (C, C), entry [k, c] estimates the chance that a row of class k has the label c.
      held_out_: the rows of X that were used as clean rows; empty if clean rows were given.
      candidates_: the candidates of the refit, each with its cross-validated loss and its share.
      history_: the measurements of the bilevel runs, by name.
      n_iter_: the number of bilevel steps taken.
      outcome_: why the bilevel runs ended, a `bx.Outcome`: `bx.Outcome.INTERRUPTED` after a signal, and
        `bx.Outcome.DIVERGED` if one of them diverged (its best iterate is used).
      n_features_in_, feature_names_in_: as usual.

    Example:
      >>> import numpy as np
      >>> from bilevax.applications import ReweightedClassifier
      >>> random = np.random.default_rng(0)
      >>> X = random.normal(size=(600, 5)); truth = np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")
      >>> wrong = random.random(500) < 0.3
      >>> noisy = np.where(wrong, np.where(truth[:500] == "yes", "no", "yes"), truth[:500])
      >>> model = ReweightedClassifier(random_state=0).fit(X[:500], noisy, X[500:540], truth[500:540])
      >>> bool(model.score(X[540:], truth[540:]) > 0.9)
      True
      >>> quality = model.label_quality_
      >>> bool(quality[wrong].mean() < 0.5 < quality[~wrong].mean())
      True
    """

    def __init__(
        self,
        *,
        folds: int = 5,
        rounds: int = 2,
        max_iter: int = 3000,
        patience: int = 8,
        learning_rate: float = 0.005,
        row_deviation: float = 0.5,
        batch_size: int = 64,
        validation_fraction: float = 0.2,
        progress: Any = None,
        raise_on_interrupt: bool = True,
        random_state: Any = None,
    ):
        self.folds = folds
        self.rounds = rounds
        self.max_iter = max_iter
        self.patience = patience
        self.learning_rate = learning_rate
        self.row_deviation = row_deviation
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.progress = progress
        self.raise_on_interrupt = raise_on_interrupt
        self.random_state = random_state

    @bx.program_cache()
    def fit(self, X: Any, y: Any, X_clean: Any = None, y_clean: Any = None) -> ReweightedClassifier:
        """Fits the classifier.

        An interrupted fit (SIGINT or SIGTERM) refits with the weights it has, sets `outcome_` and raises
        `KeyboardInterrupt`; with `raise_on_interrupt=False` it prints a line and returns.

        Args:
          X: rows (n, d), dense or scipy-sparse.
          y: their labels, some of which are wrong.
          X_clean: rows (k, d) whose labels are right, on the scale of X. By default a part of X is held out
            and its labels are trusted, although some may be wrong.
          y_clean: their labels.

        Returns:
          Itself.

        Raises:
          ValueError: the input is invalid, or X and X_clean are on different scales.
          KeyboardInterrupt: the fit was interrupted.
        """
        self._check_parameters()
        random = drawn_from(self.random_state)
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, accept_large_sparse=False)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs samples of at least 2 classes in the data, but the data "
                f"contains only one class: {self.classes_[0]!r}"
            )
        if (X_clean is None) != (y_clean is None):
            raise ValueError("X_clean and y_clean go together: give both or neither")
        rows, self._centre, self._scale = _scaled(X)
        if X_clean is None:
            self.held_out_ = _hold_out(codes, self.validation_fraction, random)
            clean = rows[self.held_out_], codes[self.held_out_]
        else:
            self.held_out_ = np.empty(0, int)
            clean = self._clean(X_clean, y_clean, X)
        kept = np.setdiff1d(np.arange(len(codes)), self.held_out_)
        fold = _folds(clean[1], self.folds, random)
        task = NoisyTask(rows[kept], codes[kept], *clean, fold, len(self.classes_))
        # Hundreds of small products: threads that wait for each other would take most of the time.
        with threadpool_limits(1, "blas"):
            found = learn(task, self.rounds, self._bilevel_settings(random))
        final = found.model
        self.candidates_ = found.candidates

        self.sample_weight_ = np.ones(len(codes))
        self.sample_weight_[kept] = found.weights
        logits = all_logits(final.logits(rows))
        noise = noise_model.estimate(logits[kept], codes[kept])
        self.flip_ = noise.flip
        self.label_quality_ = softmax(logits, -1)[np.arange(len(codes)), codes]
        self.label_quality_[kept] = noise.quality(logits[kept], codes[kept])
        self.coef_ = final.coef.T / self._scale
        self.intercept_ = final.intercept - self.coef_ @ self._centre
        self.history_, self.n_iter_, self.outcome_ = found.history, found.steps, found.outcome
        if found.outcome is bx.Outcome.INTERRUPTED:
            interrupted.end_fit(
                "ReweightedClassifier.fit was interrupted: the model has the weights found in "
                f"{found.steps} bilevel steps",
                raises=self.raise_on_interrupt,
            )
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits: of the second of two classes, (n,), or of all classes, (n, C)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        logits = np.asarray(X @ self.coef_.T) + self.intercept_
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, (n, C)."""
        logits = self.decision_function(X)
        return softmax(all_logits(logits[:, None] if logits.ndim == 1 else logits), -1)

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of every row."""
        likeliest = np.argmax(self.predict_proba(X), -1)
        return self.classes_[likeliest]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _clean(self, X_clean: Any, y_clean: Any, X: Any) -> tuple[Any, np.ndarray]:
        if np.shape(X_clean)[:1] == (0,):
            raise ValueError("X_clean must have at least one row, got none")
        checked: Any = validate_data(
            self, X_clean, y_clean, accept_sparse="csr", dtype=np.float64, reset=False
        )
        rows, labels = checked
        unseen = np.setdiff1d(labels, self.classes_)
        if unseen.size:
            raise ValueError(f"y_clean contains previously unseen labels: {unseen.tolist()}")
        seen = np.unique(labels)
        if len(seen) == 1:
            warnings.warn(
                f"y_clean has only the class {seen[0]}: such rows cannot say how often the others are wrong, "
                "and pull the model towards this class. Give clean rows of at least two classes",
                UserWarning,
                stacklevel=4,
            )
        check_scales(X, rows)
        if sparse.issparse(X) and X.shape[0] * X.shape[1] > _DENSE:
            rows = sparse.csr_matrix(rows)
        elif sparse.issparse(rows):
            rows = rows.toarray(order="C")
        if not sparse.issparse(rows):
            rows = rows - self._centre
        return (rows / self._scale).astype(np.float32), np.asarray(np.searchsorted(self.classes_, labels))

    def _bilevel_settings(self, random: np.random.RandomState) -> BilevelSettings:
        return BilevelSettings(
            steps=self.max_iter,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            row_deviation=self.row_deviation,
            patience=self.patience,
            progress=self.progress,
            seed=int(random.randint(2**31 - 1)),
        )

    def _check_parameters(self) -> None:
        for name, least in (("folds", 2), ("rounds", 1), ("max_iter", 0), ("patience", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number from {least}, got {value!r}")
        if not isinstance(self.raise_on_interrupt, (bool, np.bool_)):
            raise ValueError(f"raise_on_interrupt must be True or False, got {self.raise_on_interrupt!r}")
        for name, low, high in (
            ("learning_rate", 0.0, np.inf),
            ("row_deviation", -1e-300, np.inf),
            ("validation_fraction", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not low < value < high:
                raise ValueError(f"{name} must be a number between {max(low, 0.0)} and {high}, got {value!r}")


def _scaled(X: Any) -> tuple[Any, np.ndarray, float]:
    """Rows of a common size, in single precision; centred too, unless they stay sparse."""
    count, features = X.shape
    if sparse.issparse(X) and count * features <= _DENSE:
        X = X.toarray(order="C")
    if sparse.issparse(X):
        X = sparse.csr_matrix(X)
        mean = np.asarray(X.mean(0)).ravel()
        squared = float(X.multiply(X).sum()) / count - mean @ mean
        scale = max(squared / SIZE, 1e-30) ** 0.5
        return (X / scale).astype(np.float32), np.zeros(features), scale
    centre = X.mean(0)
    rows = X - centre
    scale = max(float((rows**2).sum()) / count / SIZE, 1e-30) ** 0.5
    return (rows / scale).astype(np.float32), centre, scale


def _hold_out(codes: np.ndarray, fraction: float, random: np.random.RandomState) -> np.ndarray:
    """A part of the rows with about the same class frequencies; every class keeps at least one row."""
    chosen = []
    for code in np.unique(codes):
        members = random.permutation(np.flatnonzero(codes == code))
        chosen.append(members[: min(max(1, round(fraction * len(members))), len(members) - 1)])
    return np.sort(np.concatenate(chosen))


def _folds(codes: np.ndarray, folds: int, random: np.random.RandomState) -> np.ndarray:
    """The fold of every clean row; every class is spread evenly over the folds."""
    order = random.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    out = np.empty(len(codes), int)
    out[order] = np.arange(len(codes)) % min(folds, len(codes))
    return out
