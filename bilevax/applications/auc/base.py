"""What the classifiers that learn to rank rows have in common."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.special import expit

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("AUC classifiers need scikit-learn: pip install 'bilevax[experiments]'") from error

import bilevax as bx
from bilevax.applications import interrupted
from bilevax.applications.auc import saved
from bilevax.applications.auc.objectives import SURROGATES, Score, linear_score, scores
from bilevax.applications.in_words_of import in_words_of
from bilevax.applications.linear import calibrate
from bilevax.applications.seeds import drawn_from

_DENSE = 2**29  # entries of X, zeros included: more do not fit
_START, _RIDGE = 100, 2e-3  # iterations and ridge of the logistic regression that a linear score starts from


class RankingClassifier(ClassifierMixin, BaseEstimator):
    """The fit of a score by a problem of bilevax, without the problem."""

    surrogate: str
    model: Any
    alpha: float
    max_iter: int
    solver: Any
    progress: Any
    raise_on_interrupt: bool
    random_state: Any

    def fit(self, X: Any, y: Any) -> Any:
        """Fits the score.

        An interrupted fit (SIGINT or SIGTERM) keeps the score it has, sets `outcome_` and raises
        `KeyboardInterrupt`; with `raise_on_interrupt=False` it prints a line and returns.

        Args:
          X: rows (n, features), dense or scipy-sparse.
          y: labels of two classes; the positive class is the second in sorted order.

        Returns:
          Itself.

        Raises:
          ValueError, TypeError: the input is invalid.
          KeyboardInterrupt: the fit was interrupted.
        """
        self._check_parameters()
        random = drawn_from(self.random_state)
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        rows, positive = self._dense(X), self._positive(y)
        self._shift, self._scale = rows.mean(0), _deviations(rows)
        rows = self._standardised(rows)
        x0 = self._start(rows, positive, random)
        problem, y0 = self._problem(x0, rows[positive], rows[~positive])
        seed = int(random.randint(2**31 - 1))
        with in_words_of(steps="max_iter"):
            result = bx.minimize(
                problem,
                x0,
                y0,
                solver=self._default_solver() if self.solver is None else self.solver,
                steps=self.max_iter,
                key=jax.random.key(seed),
                progress=self.progress,
                stop=bx.Stop(verify=False),
            )
        self._x = jax.tree.map(np.asarray, result.x)
        self._calibrate(rows, positive)
        self.history_, self.n_iter_, self.outcome_ = result.history, self.max_iter, result.outcome
        self._publish()
        if result.outcome is bx.Outcome.INTERRUPTED:
            interrupted.end_fit(
                f"{type(self).__name__}.fit was interrupted: the score is the one found so far",
                raises=self.raise_on_interrupt,
            )
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores (n,): the higher, the likelier is the positive class, `classes_[1]`.

        They are logits of its probability on the training rows, as Platt's method finds them.
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        rows = self._standardised(self._dense(X))
        return self._slope * scores(self._score, self._x, rows).astype(float) + self._level

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of both classes, (n, 2)."""
        chance = expit(self.decision_function(X))
        return np.stack([1 - chance, chance], 1)

    def predict(self, X: Any) -> np.ndarray:
        """The likelier class of every row."""
        check_is_fitted(self)
        return self.classes_[(self.decision_function(X) > 0).astype(int)]

    def save(self, path: str | Path) -> None:
        """Writes the model to one .npz file of plain arrays and JSON, with a checksum.

        Raises:
          OSError: the file cannot be written.
        """
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Any:
        """Reads what `save` wrote.

        Args:
          path: the file.
          model: the model that the estimator was made with, if it was not linear: functions are not stored.

        Raises:
          ValueError: the file is of another kind, damaged, or its contents do not fit together.
          OSError: the file cannot be read.
        """
        return saved.load(cls, path, model)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_class = False
        return tags

    def _positive(self, y: Any) -> np.ndarray:
        """Which rows are of the positive class."""
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs samples of 2 classes in the data, but the data contains only "
                f"one class: {self.classes_[0]!r}"
            )
        if len(self.classes_) > 2:
            kind = type_of_target(y)
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}, with "
                f"{len(self.classes_)} classes."
            )
        return y == self.classes_[1]

    def _dense(self, X: Any) -> np.ndarray:
        if not sparse.issparse(X):
            return X
        if X.shape[0] * X.shape[1] > _DENSE:
            raise ValueError(
                f"X must have at most {_DENSE:,} entries, zeros included, as rows are made dense, got "
                f"{X.shape[0]:,} × {X.shape[1]:,}; leave rare features out, or fit a part of the rows"
            )
        return X.toarray(order="C")

    def _standardised(self, rows: np.ndarray) -> np.ndarray:
        return ((rows - self._shift) / self._scale).astype(np.float32)

    def _start(self, rows: np.ndarray, positive: np.ndarray, random: np.random.RandomState) -> Any:
        """Where x starts: that of the model given, or the coefficients of a logistic regression."""
        if self.model is not None:
            return jax.tree.map(jnp.asarray, parameters_of(self.model))
        logistic = LogisticRegression(C=1 / (_RIDGE * len(rows)), max_iter=_START)
        with warnings.catch_warnings():  # a start need not have converged
            warnings.simplefilter("ignore", ConvergenceWarning)
            return jnp.asarray(logistic.fit(rows, positive).coef_[0], jnp.float32)

    def _calibrate(self, rows: np.ndarray, positive: np.ndarray) -> None:
        """Finds the line that makes logits of scores; it rises, so that the ranking stays."""
        values = scores(self._score, self._x, rows).astype(float)
        if not np.isfinite(values).all():
            raise ValueError("model must give finite scores after the fit, got others; try a larger alpha")
        middle, spread = float(values.mean()), float(values.std()) or 1.0
        slope, level = calibrate(((values - middle) / spread)[:, None], positive.astype(int), 2)
        self._slope = float(slope[0]) / spread
        self._level = float(level[0]) - self._slope * middle

    def _publish(self) -> None:
        """Sets `coef_` and `intercept_` of a linear model, in the units of X."""
        if self.model is None:
            coef = self._slope * np.asarray(self._x, float) / self._scale
            self.coef_, self.intercept_ = coef[None], np.array([self._level - coef @ self._shift])

    @property
    def _score(self) -> Score:
        return linear_score if self.model is None else score_of(self.model)

    def _problem(self, x0: Any, positives: np.ndarray, negatives: np.ndarray) -> tuple[bx.Problem, Any]:
        raise NotImplementedError

    def _default_solver(self) -> bx.AbstractSolver:
        raise NotImplementedError

    def _check_parameters(self) -> None:
        if self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate must be one of {list(SURROGATES)}, got {self.surrogate!r}")
        if not isinstance(self.alpha, (int, float, np.number)) or not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha must be a number from 0, got {self.alpha!r}")
        steps = self.max_iter
        if not isinstance(steps, (int, np.integer)) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"max_iter must be a whole number from 0, got {steps!r}")
        if not isinstance(self.raise_on_interrupt, (bool, np.bool_)):
            raise ValueError(f"raise_on_interrupt must be True or False, got {self.raise_on_interrupt!r}")
        if self.model is not None:
            parameters_of(self.model)


def parameters_of(model: Any) -> Any:
    """The arrays of a model that are learnt.

    Raises:
      TypeError: the model is neither an equinox module nor a pair (parameters, function).
    """
    if isinstance(model, eqx.Module):
        return eqx.filter(model, eqx.is_inexact_array)
    if isinstance(model, tuple) and len(model) == 2 and callable(model[1]):
        return model[0]
    raise TypeError(
        "model must be an equinox module that maps a row to its score, or a pair (parameters, function of "
        f"parameters and rows), got {type(model).__name__}"
    )


def score_of(model: Any) -> Score:
    """The scores of rows as a function of a model's parameters."""
    if not isinstance(model, eqx.Module):
        return lambda x, rows: jnp.reshape(model[1](x, rows), (rows.shape[0],))
    rest = eqx.filter(model, eqx.is_inexact_array, inverse=True)
    return lambda x, rows: jax.vmap(lambda row: jnp.reshape(eqx.combine(x, rest)(row), ()))(rows)


def _deviations(rows: np.ndarray) -> np.ndarray:
    """The standard deviation of every feature; 1 for those that are constant."""
    deviations = rows.std(0)
    return np.where(deviations > 1e-10 * (np.abs(rows.mean(0)) + 1e-150), deviations, 1.0)
