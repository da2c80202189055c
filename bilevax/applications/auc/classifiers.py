"""Classifiers for rare classes, which learn to rank rows: by partial AUC, and by average precision."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.utils.validation import check_is_fitted

import bilevax as bx
from bilevax.applications.auc.base import RankingClassifier
from bilevax.applications.auc.objectives import average_precision, partial_auc, thresholds

_SPEED = 0.2  # of thresholds, in units of the loss and of the false positive rate
_SHARPER = 3.0  # times the regression's scores: a sigmoid compares scores only if they are far apart


class PartialAUCClassifier(RankingClassifier):
    """A score that ranks positive rows above negative ones where few false positives are allowed.

    It maximises the area under the ROC curve up to a false positive rate, by a surrogate loss of pairs (see
    `partial_auc`): every positive row is a block, with a threshold of its own. The score is linear, or a
    model of yours. A linear score starts from a logistic regression.

    Features are standardised. Steps need no tuning; `alpha` may be chosen by cross-validation.

    Args:
      max_fpr: the false positive rate up to which the area counts; 1 is the whole AUC.
      surrogate: "logistic", "squared_hinge" or "sigmoid", the loss of a pair.
      model: None for a linear score; an equinox module that maps a row to its score; or a pair (parameters,
        function of parameters and rows (n, features)), which returns n scores.
      alpha: the ridge, for standardised features.
      max_iter: the number of steps.
      solver: a method of bilevax with its hyper-parameters; left out, one that needs no tuning.
      progress: "auto", "bar", "lines", or None for silence.
      raise_on_interrupt: whether `fit` raises `KeyboardInterrupt` after SIGINT or SIGTERM; the score found so
        far is in place in either case.
      random_state: seed or `numpy.random.RandomState` of the samples.

    Attributes:
      classes_: the negative class and the positive one, in sorted order.
      coef_, intercept_: of a linear score, in the units of X.
      history_: what was measured during the run, by name; not saved.
      n_iter_: the number of steps.
      outcome_: how the run ended, a `bx.Outcome`.
      n_features_in_, feature_names_in_: as usual.

    Example:
      >>> import numpy as np
      >>> from bilevax.applications.auc import PartialAUCClassifier
      >>> random = np.random.default_rng(0)
      >>> y = random.random(1000) < 0.1
      >>> X = random.normal(size=(1000, 4)) + y[:, None] * [1.5, 0.0, 0.0, 1.0]
      >>> model = PartialAUCClassifier(max_fpr=0.1, max_iter=200, random_state=0).fit(X, y)
      >>> bool(model.score(X, y) > 0.7)
      True
    """

    def __init__(
        self,
        max_fpr: float = 0.1,
        *,
        surrogate: str = "logistic",
        model: Any = None,
        alpha: float = 1e-3,
        max_iter: int = 2000,
        solver: Any = None,
        progress: Any = None,
        raise_on_interrupt: bool = True,
        random_state: Any = None,
    ):
        self.max_fpr = max_fpr
        self.surrogate = surrogate
        self.model = model
        self.alpha = alpha
        self.max_iter = max_iter
        self.solver = solver
        self.progress = progress
        self.raise_on_interrupt = raise_on_interrupt
        self.random_state = random_state

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The partial AUC, standardised as by `sklearn.metrics.roc_auc_score(…, max_fpr=…)`.

        An arbitrary ranking has 0.5, and a perfect one 1, whatever `max_fpr`.
        """
        whole = None if self.max_fpr == 1 else self.max_fpr
        check_is_fitted(self)
        positive = np.asarray(y) == self.classes_[1]
        return float(
            roc_auc_score(positive, self.decision_function(X), max_fpr=whole, sample_weight=sample_weight)
        )

    def _problem(self, x0: Any, positives: np.ndarray, negatives: np.ndarray) -> tuple[bx.Problem, Any]:
        form = {"max_fpr": self.max_fpr, "surrogate": self.surrogate, "score": self._score}
        problem = partial_auc(positives, negatives, ridge=self.alpha, **form)
        return problem, thresholds(x0, positives, negatives, **form)

    def _default_solver(self) -> bx.AbstractSolver:
        # A margin of one is the unit of scores, so that losses have a unit of their own. The slope of f in a
        # threshold reaches 1/ρ.
        return bx.MMBO(lower_step=_SPEED * self.max_fpr)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not isinstance(self.max_fpr, (int, float, np.number)) or not 0 < self.max_fpr <= 1:
            raise ValueError(f"max_fpr must be a number above 0 and at most 1, got {self.max_fpr!r}")


class AveragePrecisionClassifier(RankingClassifier):
    """A score that ranks positive rows first, by the area under the precision-recall curve.

    It maximises the average precision by a surrogate loss of pairs, as SOAP does (see `average_precision`):
    every positive row is a block, with two means of its own. Otherwise as `PartialAUCClassifier`.

    Args:
      surrogate: "sigmoid", "logistic" or "squared_hinge", the loss of a pair.
      model: as in `PartialAUCClassifier`.
      alpha: the ridge, for standardised features.
      max_iter: the number of steps.
      solver: a method of bilevax with its hyper-parameters; left out, one that needs no tuning.
      progress: "auto", "bar", "lines", or None for silence.
      raise_on_interrupt: as in `PartialAUCClassifier`.
      random_state: seed or `numpy.random.RandomState` of the samples.

    Attributes:
      classes_: the negative class and the positive one, in sorted order.
      coef_, intercept_: of a linear score, in the units of X.
      history_: what was measured during the run, by name; not saved.
      n_iter_: the number of steps.
      outcome_: how the run ended, a `bx.Outcome`.
      n_features_in_, feature_names_in_: as usual.

    Example:
      >>> import numpy as np
      >>> from bilevax.applications.auc import AveragePrecisionClassifier
      >>> random = np.random.default_rng(0)
      >>> y = random.random(1000) < 0.1
      >>> X = random.normal(size=(1000, 4)) + y[:, None] * [1.5, 0.0, 0.0, 1.0]
      >>> model = AveragePrecisionClassifier(max_iter=200, random_state=0).fit(X, y)
      >>> bool(model.score(X, y) > 0.5)
      True
    """

    def __init__(
        self,
        *,
        surrogate: str = "sigmoid",
        model: Any = None,
        alpha: float = 1e-5,
        max_iter: int = 2000,
        solver: Any = None,
        progress: Any = None,
        raise_on_interrupt: bool = True,
        random_state: Any = None,
    ):
        self.surrogate = surrogate
        self.model = model
        self.alpha = alpha
        self.max_iter = max_iter
        self.solver = solver
        self.progress = progress
        self.raise_on_interrupt = raise_on_interrupt
        self.random_state = random_state

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The average precision, as `sklearn.metrics.average_precision_score` has it."""
        check_is_fitted(self)
        positive = np.asarray(y) == self.classes_[1]
        return float(
            average_precision_score(positive, self.decision_function(X), sample_weight=sample_weight)
        )

    def _problem(self, x0: Any, positives: np.ndarray, negatives: np.ndarray) -> tuple[bx.Problem, Any]:
        form = {"surrogate": self.surrogate, "score": self._score}
        return average_precision(positives, negatives, ridge=self.alpha, **form), None

    def _start(self, rows: np.ndarray, positive: np.ndarray, random: np.random.RandomState) -> Any:
        x0 = super()._start(rows, positive, random)
        return _SHARPER * x0 if self.model is None else x0

    def _default_solver(self) -> bx.AbstractSolver:
        return bx.BlockNewton()
