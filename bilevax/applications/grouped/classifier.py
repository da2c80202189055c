"""A classifier for every group, with a prior that all groups share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

import bilevax as bx
from bilevax.applications.grouped import saved
from bilevax.applications.grouped.base import GroupedModel
from bilevax.applications.grouped.losses import Loss, classification_loss


class GroupedClassifier(ClassifierMixin, GroupedModel):
    r"""Linear classifiers of many groups that share what they have in common.

    As `GroupedRegressor`, with the logistic loss of two or more classes. A group need not have rows of every
    class: the prior says how likely the others are.

    Args:
      loss: "logistic", or a function of logits (that of the second of two classes, or a vector with one per
        class) and a class's place in `classes_`, in JAX, convex in the logits.
      prior: as in `GroupedRegressor`; classes have means of their own, and the same strengths.
      rank: the number of directions of "low_rank".
      folds: into how many parts a group's rows are divided to be held out, at most.
      judge: whether the prior is judged by the mean loss of "groups", each counting alike, or of "rows".
      newcomers: the share of that judgement that looks at groups as if they were new, with none to 30 of
        their rows known: it makes the prior good for `adapt` and for groups with few rows.
      prior_groups: the prior is learnt from at most so many groups, drawn at random.
      unseen: "prior" predicts groups that were not in the fit by the prior, "error" refuses them.
      max_iter: the most steps of L-BFGS on the prior.
      tol: stop when a step lowers the loss by less than this share.
      progress: "auto", "bar", "lines", or None for silence.
      raise_on_interrupt: as in `GroupedRegressor`.
      random_state: seed or `numpy.random.RandomState` of the folds and of the choice of groups.

    Attributes:
      classes_: the classes.
      groups_: the groups.
      coef_: (groups, features); with more than two classes (groups, classes, features).
      intercept_: (groups,); with more than two classes (groups, classes).
      prior_: a `FittedPrior`: mean, deviation and covariance of the coefficients between groups.
      shrinkage_: (groups,), how much a group is its own, from 0 (it follows the prior) to 1.
      history_: the loss of held-out rows after every step.
      n_iter_: the number of steps.
      outcome_: why learning ended, a `bx.Outcome`.
      n_features_in_, feature_names_in_: as usual.

    Example:
      >>> import numpy as np
      >>> from bilevax.applications.grouped import GroupedClassifier
      >>> random = np.random.default_rng(0)
      >>> groups = np.repeat(np.arange(50), 10)
      >>> X = random.normal(size=(500, 2))
      >>> slopes = np.array([2.0, -2.0]) + 0.5 * random.normal(size=(50, 2))
      >>> y = np.where((X * slopes[groups]).sum(1) + random.logistic(size=500) > 0, "yes", "no")
      >>> model = GroupedClassifier(prior="ridge", random_state=0).fit(X, y, groups=groups)
      >>> model.predict_proba(X[:3], groups=groups[:3]).shape
      (3, 2)
    """

    def __init__(
        self,
        *,
        loss: Any = "logistic",
        prior: Any = "auto",
        rank: int = 3,
        folds: int = 5,
        judge: str = "groups",
        newcomers: float = 0.2,
        prior_groups: int = 20_000,
        unseen: str = "prior",
        max_iter: int = 200,
        tol: float = 3e-4,
        progress: Any = None,
        raise_on_interrupt: bool = True,
        random_state: Any = None,
    ):
        self.loss = loss
        self.prior = prior
        self.rank = rank
        self.folds = folds
        self.judge = judge
        self.newcomers = newcomers
        self.prior_groups = prior_groups
        self.unseen = unseen
        self.max_iter = max_iter
        self.tol = tol
        self.progress = progress
        self.raise_on_interrupt = raise_on_interrupt
        self.random_state = random_state

    @bx.program_cache()
    def fit(
        self, X: Any, y: Any, groups: Any = None, metadata: Any = None, sample_weight: Any = None
    ) -> GroupedClassifier:
        """Learns the prior, and the coefficients of every group.

        Args:
          X: rows (n, features): NumPy, pandas or scipy-sparse.
          y: labels (n,) of at least two classes.
          groups: the group of every row, of any hashable type; left out, all rows are one group.
          metadata: as in `GroupedRegressor.fit`.
          sample_weight: the weight of every row.

        Returns:
          Itself.

        Raises:
          ValueError, TypeError: the input is invalid.
          KeyboardInterrupt: the fit was interrupted.
        """
        self._check_parameters()
        X, y, groups, weight = self._checked_rows(X, y, sample_weight, groups)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs samples of at least 2 classes in the data, but the data "
                f"contains only one class: {self.classes_.tolist()[0]!r}"
            )
        with self._precision():
            self._fit(X, codes.astype(float), groups, metadata, weight)
        return self

    def adapt(
        self, X: Any, y: Any, groups: Any = None, metadata: Any = None, sample_weight: Any = None
    ) -> GroupedClassifier:
        """A model that also knows new groups, from a few rows of each; the prior stays as it is.

        A group that is known already is fitted again, to the rows given here alone.

        Args:
          X: rows of the new groups.
          y: their labels, all of `classes_`.
          groups: the group of every row; left out, they are one new group, which the model that is returned
            takes for rows without a group.
          metadata: as in `fit`, if the model was fitted with it.
          sample_weight: the weight of every row, in the units of `fit`; left out, the mean weight there.

        Returns:
          A copy of the model.
        """
        check_is_fitted(self)
        X, y, groups, weight = self._checked_rows(
            X, y, sample_weight, groups, reset=False, ensure_min_samples=1
        )
        unseen = np.setdiff1d(y, self.classes_)
        if unseen.size:
            raise ValueError(f"y contains previously unseen labels: {unseen.tolist()}")
        codes = np.searchsorted(self.classes_, y).astype(float)
        with self._precision():
            return self._adapted(X, codes, groups, metadata, weight)

    def decision_function(self, X: Any, groups: Any = None, metadata: Any = None) -> np.ndarray:
        """Logits: of the second of two classes, (n,), or of all classes, (n, C)."""
        eta = self._predictors(X, groups, metadata)[1] * self._scaling.target_scale
        return eta[:, 0] if eta.shape[1] == 1 else eta

    def predict_proba(self, X: Any, groups: Any = None, metadata: Any = None) -> np.ndarray:
        """The probability of every class, (n, C).

        Args:
          X: rows (n, features).
          groups: the group of every row; left out, the prior predicts, or the one group of a fit without any.
          metadata: of groups that were not in the fit, as in `fit`; without it they have the prior's mean.
        """
        logits = self.decision_function(X, groups, metadata)
        if logits.ndim == 2:
            return softmax(logits, -1)
        chance = expit(logits)
        return np.stack([1 - chance, chance], 1)

    def predict(self, X: Any, groups: Any = None, metadata: Any = None) -> np.ndarray:
        """The likeliest class of every row; arguments as in `predict_proba`."""
        logits = self.decision_function(X, groups, metadata)
        return self.classes_[np.argmax(logits, 1) if logits.ndim == 2 else (logits > 0).astype(int)]

    def score(
        self, X: Any, y: Any, groups: Any = None, metadata: Any = None, sample_weight: Any = None
    ) -> float:
        """The accuracy of the predictions; arguments as in `predict`."""
        return float(accuracy_score(y, self.predict(X, groups, metadata), sample_weight=sample_weight))

    def save(self, path: str | Path) -> None:
        """Writes the model to one .npz file of plain arrays and JSON, with a checksum.

        Raises:
          TypeError: the loss or the prior is a function, or a group is of a type that JSON does not have.
          OSError: the file cannot be written.
        """
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> GroupedClassifier:
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is of another kind, damaged, or its contents do not fit together.
          OSError: the file cannot be read.
        """
        return saved.load(cls, path)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not callable(self.loss) and self.loss != "logistic":
            raise ValueError(f"loss must be 'logistic' or a function, got {self.loss!r}")

    def _scales_target(self) -> bool:
        return False

    def _predicts_targets(self) -> bool:
        return False

    def _has_intervals(self) -> bool:
        return False

    def _make_loss(self) -> Loss:
        return classification_loss(self.loss, len(self.classes_))
