"""A regression for every group, with a prior that all groups share."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted

import bilevax as bx
from bilevax.applications.grouped import saved
from bilevax.applications.grouped.base import GroupedModel, judged_groups
from bilevax.applications.grouped.closed_form import SquaredCrossValidation
from bilevax.applications.grouped.learning import Judging, Learnt, held_out_predictions, prior_predictions
from bilevax.applications.grouped.losses import REGRESSION, Loss, pinball, regression_loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.steps import Steps, few_values, find_steps

_SPREAD_GROUPS = 2_000  # that the spread within groups is measured on, at most
_FEW_ROWS = 50  # whose errors do not tell the ends of intervals
_PER_COEFFICIENT = 10  # rows, with fewer of which the prior's mean is fitted to the held-out rows themselves
_LARGEST = 700.0  # logarithm of a prediction
_ENTRIES = 2**22  # of the variances that are looked at together
_ROUNDS = 10  # of least squares with weights, to the least absolute errors
_ROUNDED = 0.1  # of the spread within groups: where the corner of the quantile loss is rounded off


class GroupedRegressor(RegressorMixin, GroupedModel):
    r"""Linear models of many groups that share what they have in common.

    Every group has coefficients of its own, drawn towards a mean that all groups share, feature by feature as
    much as helps. That mean and these strengths, the prior, are learnt: they minimise the loss of rows that
    their group was not fitted to. A group with few rows follows the prior; one with many is its own.

    Features are standardised inside, and the intercept has a strength of its own, so nothing needs tuning.

    Args:
      loss: "squared", "poisson" (for counts: predictions are exp of a linear function), "quantile", "huber",
        or a function of a prediction and a target, in JAX, convex in the prediction.
      prior: what is shared. "ridge": a mean, and one strength for all features. "diagonal": a strength per
        feature. "low_rank": also some directions in which coefficients vary together. "full": all such
        directions. "auto": "full" for at most 32 features and at least ten groups per feature, else
        "diagonal". Or a function from a group's metadata to a vector, of which the mean is a linear function.
      quantile: which quantile the quantile loss predicts.
      epsilon: Huber's loss is linear beyond this many (robust) standard deviations.
      rank: the number of directions of "low_rank".
      folds: into how many parts a group's rows are divided to be held out, at most.
      judge: whether the prior is judged by the mean loss of "groups", each counting alike, or of "rows".
      newcomers: the share of that judgement that looks at groups as if they were new, with none to 30 of
        their rows known: it makes the prior good for `adapt` and for groups with few rows.
      evidence: with the squared loss, the share of that judgement that is the likelihood of the
        random-effects model, which EM maximises: it tells more of the prior where groups have few rows and
        are as that model has them, and less where they are not.
      prior_groups: the prior is learnt from at most so many groups, drawn at random.
      unseen: "prior" predicts groups that were not in the fit by the prior, "error" refuses them.
      max_iter: the most steps of L-BFGS on the prior.
      tol: stop when a step lowers the loss by less than this share.
      progress: "auto", "bar", "lines", or None for silence.
      raise_on_interrupt: whether `fit` raises `KeyboardInterrupt` after Ctrl-C; the model with the prior
        found so far is in place in either case.
      random_state: seed or `numpy.random.RandomState` of the folds and of the choice of groups.

    Attributes:
      groups_: the groups.
      coef_: (groups, features), the coefficients of every group.
      intercept_: (groups,).
      prior_: a `FittedPrior`: mean, deviation and covariance of the coefficients between groups.
      shrinkage_: (groups,), how much a group is its own: the share of the prior variance that its rows
        account for, the mean over its coefficients, from 0 (it follows the prior) to 1.
      history_: the loss of held-out rows after every step.
      n_iter_: the number of steps.
      outcome_: why learning ended, a `bx.Outcome`.
      n_features_in_, feature_names_in_: as usual.

    Example:
      >>> import numpy as np
      >>> from bilevax.applications.grouped import GroupedRegressor
      >>> random = np.random.default_rng(0)
      >>> groups = np.repeat(np.arange(60), 8)
      >>> X = random.normal(size=(480, 2))
      >>> slopes = np.array([1.0, -2.0]) + 0.3 * random.normal(size=(60, 2))
      >>> y = (X * slopes[groups]).sum(1) + 0.5 * random.normal(size=480)
      >>> model = GroupedRegressor(prior="diagonal", random_state=0).fit(X, y, groups=groups)
      >>> [round(float(one)) for one in model.prior_.coef]
      [1, -2]
      >>> model.predict(X[:2], groups=[0, "a new one"]).shape
      (2,)
    """

    def __init__(
        self,
        *,
        loss: Any = "squared",
        prior: Any = "auto",
        quantile: float = 0.5,
        epsilon: float = 1.35,
        rank: int = 3,
        folds: int = 5,
        judge: str = "groups",
        newcomers: float = 0.2,
        evidence: float = 0.75,
        prior_groups: int = 20_000,
        unseen: str = "prior",
        max_iter: int = 200,
        tol: float = 1e-5,
        progress: Any = None,
        raise_on_interrupt: bool = True,
        random_state: Any = None,
    ):
        self.loss = loss
        self.prior = prior
        self.quantile = quantile
        self.epsilon = epsilon
        self.rank = rank
        self.folds = folds
        self.judge = judge
        self.newcomers = newcomers
        self.evidence = evidence
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
    ) -> GroupedRegressor:
        """Learns the prior, and the coefficients of every group.

        Args:
          X: rows (n, features): NumPy, pandas or scipy-sparse.
          y: targets (n,).
          groups: the group of every row, of any hashable type; left out, all rows are one group.
          metadata: what is known of every group: a pandas frame indexed by group (numbers or categories),
            or a dict from groups to vectors. The prior's mean is then a linear function of it.
          sample_weight: the weight of every row.

        Returns:
          Itself.

        Raises:
          ValueError, TypeError: the input is invalid.
          KeyboardInterrupt: the fit was interrupted.
        """
        self._check_parameters()
        X, y, groups, weight = self._checked_rows(X, y, sample_weight, groups, y_numeric=True)
        self._check_target(y)
        self._values = few_values(np.asarray(y, float)) if self.loss == "quantile" else None
        with self._precision():
            self._fit(X, np.asarray(y, float), groups, metadata, weight)
        return self

    def adapt(
        self, X: Any, y: Any, groups: Any = None, metadata: Any = None, sample_weight: Any = None
    ) -> GroupedRegressor:
        """A model that also knows new groups, from a few rows of each; the prior stays as it is.

        A group that is known already is fitted again, to the rows given here alone.

        Args:
          X: rows of the new groups.
          y: their targets.
          groups: the group of every row; left out, they are one new group, which the model that is returned
            takes for rows without a group.
          metadata: as in `fit`, if the model was fitted with it.
          sample_weight: the weight of every row, in the units of `fit`; left out, the mean weight there.

        Returns:
          A copy of the model.
        """
        check_is_fitted(self)
        X, y, groups, weight = self._checked_rows(
            X, y, sample_weight, groups, y_numeric=True, reset=False, ensure_min_samples=1
        )
        self._check_target(y)
        with self._precision():
            return self._adapted(X, np.asarray(y, float), groups, metadata, weight)

    def predict(self, X: Any, groups: Any = None, metadata: Any = None) -> np.ndarray:
        """Predictions of rows; quantiles of a target with few values, such as ratings, are such values.

        Args:
          X: rows (n, features).
          groups: the group of every row; left out, the prior predicts, or the one group of a fit without any.
          metadata: of groups that were not in the fit, as in `fit`; without it they have the prior's mean.
        """
        _, eta, codes = self._predictors(X, groups, metadata)
        found = self._response(eta[:, 0])
        for steps, rows in ((self._steps, codes >= 0), (self._prior_steps, codes < 0)):
            if steps is not None:
                found[rows] = steps(found[rows])
        return found

    def predict_interval(
        self, X: Any, groups: Any = None, metadata: Any = None, coverage: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """Intervals that hold a row's target with the given chance, for the squared and Huber's loss.

        They come from the errors of rows that were held out in the fit, each in units of how uncertain its
        group's coefficients were: groups with few rows, and new ones, have wider intervals.

        Args:
          X: rows (n, features).
          groups: as in `predict`.
          metadata: as in `predict`.
          coverage: the chance.

        Returns:
          The lower and the upper ends.
        """
        check_is_fitted(self)
        if not self._has_intervals():
            raise ValueError(
                f"predict_interval needs the squared or Huber's loss, got loss={self.loss!r}; two models "
                'with loss="quantile" have quantiles as ends'
            )
        if not isinstance(coverage, (int, float, np.number)) or not 0 < coverage < 1:
            raise ValueError(f"coverage must be a number between 0 and 1, got {coverage!r}")
        if self._variance is None:
            raise ValueError("predict_interval needs a variance per group, too many to be stored here")
        if self._judged < max(_FEW_ROWS, _PER_COEFFICIENT * self._prior.size):
            warnings.warn(
                f"intervals come from the errors of held-out rows, and there are {self._judged} only: they "
                "may be far too narrow",
                UserWarning,
                stacklevel=2,
            )
        X, eta, codes = self._predictors(X, groups, metadata)
        spread, size = self._prior.matrix(self._x), np.empty(len(X))
        step = max(_ENTRIES // self._prior.size**2, 1)
        for first in range(0, len(X), step):  # every row has a matrix of its own
            part = slice(first, first + step)
            rows, code = self._scaling.rows(X[part]), codes[part]
            own = np.einsum("nd,nde,ne->n", rows, self._variance[np.maximum(code, 0)], rows)
            size[part] = np.sqrt(1 + np.where(code < 0, ((rows @ spread) ** 2).sum(1), own))
        places = np.linspace(0, 1, len(self._errors))
        lower, upper = (
            self._response(
                eta[:, 0]
                + size
                * np.where(
                    codes < 0,
                    np.interp(share, places, self._prior_errors),
                    np.interp(share, places, self._errors),
                )
            )
            for share in ((1 - coverage) / 2, (1 + coverage) / 2)
        )
        return lower, upper

    def score(
        self, X: Any, y: Any, groups: Any = None, metadata: Any = None, sample_weight: Any = None
    ) -> float:
        """R² of the predictions; arguments as in `predict`."""
        return float(r2_score(y, self.predict(X, groups, metadata), sample_weight=sample_weight))

    def save(self, path: str | Path) -> None:
        """Writes the model to one .npz file of plain arrays and JSON, with a checksum.

        Raises:
          TypeError: the loss or the prior is a function, or a group is of a type that JSON does not have.
          OSError: the file cannot be written.
        """
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> GroupedRegressor:
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is of another kind, damaged, or its contents do not fit together.
          OSError: the file cannot be read.
        """
        return saved.load(cls, path)

    def _response(self, eta: np.ndarray) -> np.ndarray:
        if isinstance(self.loss, str) and self.loss == "poisson":
            return self._level * np.exp(np.minimum(eta, _LARGEST - np.log(self._level)))
        return self._scaling.target_scale * eta + self._scaling.target_shift

    def _check_target(self, y: np.ndarray) -> None:
        if isinstance(self.loss, str) and self.loss == "poisson" and (np.asarray(y) < 0).any():
            raise ValueError(f'y must not be negative for loss="poisson", got {np.min(y)}')

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not callable(self.loss) and self.loss not in REGRESSION:
            raise ValueError(f"loss must be one of {list(REGRESSION)} or a function, got {self.loss!r}")
        if not isinstance(self.evidence, (int, float, np.number)) or not 0 <= self.evidence < 1:
            raise ValueError(f"evidence must be a number from 0 to 1, got {self.evidence!r}")
        for name, high in (("quantile", 1.0), ("epsilon", np.inf)):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not 0 < value < high:
                raise ValueError(f"{name} must be a number between 0 and {high}, got {value!r}")

    def _judging(self) -> Judging:
        return dataclasses.replace(super()._judging(), evidence=float(self.evidence))

    def _scales_target(self) -> bool:
        return self.loss == "squared"

    def _predicts_targets(self) -> bool:
        return True

    def _has_intervals(self) -> bool:
        return not callable(self.loss) and self.loss in ("squared", "huber")

    def _level_of(self, target: np.ndarray, weight: np.ndarray) -> float:
        level = float(np.average(target, weights=weight)) if self.loss == "poisson" else 0.0
        return level if level > 0 else 1.0

    def _look_at(self, panel: Panel) -> Panel:
        """Targets of robust losses are in units of their spread within groups, which outliers do not move, so
        that the loss is the same function for all data, and compiled once."""
        self._size = 1.0
        if callable(self.loss) or self.loss not in ("quantile", "huber"):
            return panel
        self._size = _ROUNDED if self.loss == "quantile" else float(self.epsilon)
        middle, spread = float(np.median(panel.target)), within_groups(panel)
        self._scaling = dataclasses.replace(self._scaling, target_shift=middle, target_scale=spread)
        return dataclasses.replace(panel, target=(panel.target - middle) / spread, scaling=self._scaling)

    def _find_steps(self, panel: Panel, learnt: Learnt, seed: int) -> None:
        self._steps = self._prior_steps = None
        values, judge = self._values, learnt.judge
        if values is None or isinstance(judge, SquaredCrossValidation):
            return
        few, quantile = judged_groups(panel), float(self.quantile)

        def loss(eta: np.ndarray, target: np.ndarray) -> np.ndarray:
            return pinball(target - eta, quantile)

        def found(eta: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Steps | None:
            return find_steps(values, self._response(eta), self._response(target), weight, loss, seed)

        eta, target, weight = held_out_predictions(judge, learnt.x, few, seed)
        self._steps = found(eta[:, 0], target, weight)
        some = panel.some(few, seed)
        self._prior_steps = found(prior_predictions(some, self._prior, learnt.x), some.target, some.weight)

    def _make_loss(self) -> Loss:
        if callable(self.loss):
            return regression_loss(self.loss, 0.5, 1.0)
        used = {"quantile": float(self.quantile)}.get(self.loss, 0.5)
        size = self._size if self.loss in ("quantile", "huber") else 1.0
        return regression_loss(self.loss, used, size)


def within_groups(panel: Panel) -> float:
    """A robust standard deviation of the target within groups, around one linear model.

    From differences of neighbours in a group, which no group's level is in, around the slopes with the least
    absolute errors: a few wrong targets, however wrong, do not change it.
    """
    panel = panel.some(_SPREAD_GROUPS, 0)
    both = np.concatenate([panel.all()[:, 1:], panel.target[:, None]], 1)
    inside = np.ones(len(both), bool)
    inside[panel.offsets[:-1]] = False
    pairs = inside.any()
    both = (both[1:] - both[:-1])[inside[1:]] if pairs else both - np.median(both, 0)
    left, size = both[:, -1], float(np.median(np.abs(both[:, -1]))) or float(np.abs(both[:, -1]).mean())
    if size <= 0:
        return 1.0
    for _ in range(_ROUNDS):
        pull = 1 / np.sqrt(np.maximum(np.abs(left), 1e-3 * size))[:, None]
        slopes = np.linalg.lstsq(pull * both[:, :-1], pull[:, 0] * both[:, -1], rcond=None)[0]
        left = both[:, -1] - both[:, :-1] @ slopes
    spread = 1.4826 * float(np.median(np.abs(left))) / (2**0.5 if pairs else 1.0)
    return spread if spread > 1e-6 * size else size
