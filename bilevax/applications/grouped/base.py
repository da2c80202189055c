"""What the estimators of grouped data have in common."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
from scipy import sparse

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils.validation import (
        _check_sample_weight,  # pyright: ignore[reportPrivateUsage]
        check_is_fitted,
        validate_data,
    )
except ImportError as error:
    raise ImportError("grouped estimators need scikit-learn: pip install 'bilevax[experiments]'") from error

import bilevax as bx
from bilevax.applications import interrupted
from bilevax.applications.grouped import plots
from bilevax.applications.grouped.closed_form import SquaredCrossValidation
from bilevax.applications.grouped.group_index import GroupIndex, NewGroup, checked
from bilevax.applications.grouped.learning import (
    Fits,
    Judging,
    Learnt,
    fit_groups,
    held_out_errors,
    learn,
    noise_of,
    prior_errors,
)
from bilevax.applications.grouped.loss_units import units_of
from bilevax.applications.grouped.losses import Loss, check_loss
from bilevax.applications.grouped.metadata import Encoder
from bilevax.applications.grouped.panel import Panel, Scaling
from bilevax.applications.grouped.priors import FORMS, Prior
from bilevax.applications.grouped.row_space import fewer_rows
from bilevax.applications.seeds import drawn_from

_FULL_SIZE, _FULL_GROUPS = 32, 10  # "auto" is "full" for so many features, and so many groups per feature
_STORED = 2**26  # the most entries of the variances of all groups
_JUDGED, _JUDGED_ROWS = (300, 5_000), 20_000  # groups and rows whose held-out errors make the intervals
_QUANTILES = 2_001
_UNSOLVED = 0.01  # share of groups that are not fitted well, beyond which one is warned
_ENTRIES = 2**26  # of the sums of products of all folds that a prior is learnt from, at most
_PREDICTED = 2**16  # rows that are predicted together
_FLOATS = (np.float64, np.float32)  # of X: single precision is not copied


@dataclasses.dataclass(frozen=True)
class FittedPrior:
    """The prior that was learnt, in the units of X and y; with several classes, a first axis counts them.

    Attributes:
      form: "ridge", "diagonal", "low_rank" or "full".
      coef: the mean of the groups' coefficients.
      intercept: the mean of their intercepts.
      deviation: by how much a coefficient differs between groups, a standard deviation per feature.
      covariance: (1 + features, 1 + features), of the intercept and the coefficients between groups.
    """

    form: str
    coef: np.ndarray
    intercept: Any
    deviation: np.ndarray
    covariance: np.ndarray


class GroupedModel(BaseEstimator):
    """The fit of a prior and of all groups, without the loss and the kind of prediction."""

    # The parameters of the estimators that are defined by their subclasses.
    loss: Any
    prior: Any
    rank: int
    folds: int
    judge: str
    newcomers: float
    prior_groups: int
    unseen: str
    max_iter: int
    tol: float
    progress: Any
    raise_on_interrupt: bool
    random_state: Any

    def _fit(
        self, X: np.ndarray, target: np.ndarray, groups: Any, metadata: Any, weight: np.ndarray
    ) -> GroupedModel:
        """Fits everything; `target` is a vector of numbers, and rows without weight are gone."""
        random = drawn_from(self.random_state)
        seed = int(random.randint(2**31 - 1))
        if groups is None:
            warnings.warn(
                "groups were not given, so that all rows are one group; scikit-learn's searches pass groups "
                "on with metadata routing only: set_fit_request(groups=True)",
                UserWarning,
                stacklevel=4,
            )
        names = np.zeros(len(X), int) if groups is None else groups
        index = GroupIndex.of(names, len(X))
        codes = index.codes(names, len(X))
        self._index, self._default = index, 0 if groups is None else -1
        self._encoder = None if metadata is None else Encoder.of(metadata, list(index.place))
        if callable(self.prior) and metadata is None:
            raise ValueError("prior is a function of metadata, so metadata must be given, got None")
        known = self._known(metadata, list(index.place))
        self._scaling = Scaling.of(X, target, weight, targets=self._scales_target())
        self._level = self._level_of(target, weight)
        self._units = None
        if callable(self.loss):
            check_loss(self._loss)
            units = units_of(self._loss, target, weight, seed, constant=self._predicts_targets())
            self._scaling = dataclasses.replace(
                self._scaling, target_shift=units.shift, target_scale=units.scale
            )
            self._units = units
        panel = Panel.by_group(X, self._in_units(target), weight, codes, known, self._scaling)
        panel = self._look_at(panel)
        self._prior = self._form(panel)
        most = int(self.prior_groups)
        _check_size(panel.size)
        if self._loss.quadratic and not fewer_rows(panel, self._loss):
            most = min(most, _most_groups(panel.size, int(self.folds)))
        part = panel.some(most, seed)
        if (np.diff(panel.offsets) < 2).all():
            warnings.warn(
                "no group has two rows, so that nothing tells how much groups differ: all follow the prior",
                UserWarning,
                stacklevel=3,
            )
        learnt = learn(
            part,
            self._prior,
            self._loss,
            self._judging(),
            max_iter=self.max_iter,
            tol=self.tol,
            seed=seed,
            progress=self.progress,
        )
        self._x = learnt.x
        stored = self._has_intervals() and panel.groups * self._prior.size**2 <= _STORED
        judge, sums = learnt.judge, learnt.sums if part is panel else None
        fits = fit_groups(panel, self._prior, self._loss, self._x, variance=stored, sums=sums)
        self._beta, self.shrinkage_, self._variance = fits.coef, fits.share, fits.variance
        self._warn_of_unsolved(fits)
        # A Poisson loss that is divided by its level has so much less noise.
        self._errors, self._prior_errors, self._noise = np.zeros(0), np.zeros(0), self._level**-0.5
        self._judged = 0  # rows
        if callable(self.loss) and not isinstance(judge, SquaredCrossValidation):
            self._noise = noise_of(judge, self._x, judged_groups(part), seed)
        if self._has_intervals():
            few = judged_groups(part)
            errors, weights = held_out_errors(judge, self._x, few, seed)
            self._judged = len(errors)
            self._noise = float(np.sqrt(np.average(errors**2, weights=weights)))
            shares = np.linspace(0, 1, _QUANTILES)
            self._errors = _weighted_quantiles(errors, weights, shares)
            some = part.some(few, seed)
            own = prior_errors(some, self._prior, self._x)
            self._prior_errors = _weighted_quantiles(own, some.weight, shares)
        self._find_steps(part, learnt, seed)
        self.history_, self.n_iter_ = np.asarray(learnt.history), max(learnt.steps, 1)
        if self._units is not None:
            self.history_ = self._units.level + self._units.size * (self.history_ - 0.5)
        self.outcome_ = learnt.outcome
        self._publish()
        if learnt.outcome is bx.Outcome.INTERRUPTED:
            interrupted.end_fit(
                f"{type(self).__name__}.fit was interrupted: the prior is that of {learnt.steps} steps",
                raises=self.raise_on_interrupt,
            )
        return self

    def _adapted(
        self, X: np.ndarray, target: np.ndarray, groups: Any, metadata: Any, weight: np.ndarray
    ) -> Any:
        """A copy that knows more groups."""
        out = copy.copy(self)
        names = [NewGroup()] * len(X) if groups is None else groups
        new = GroupIndex.of(names, len(X))
        ids = list(new.place)
        codes, known = new.codes(names, len(X)), self._known(metadata, ids)
        panel = Panel.by_group(X, self._in_units(target), weight, codes, known, self._scaling)
        fits = fit_groups(panel, self._prior, self._loss, self._x, variance=self._variance is not None)
        self._warn_of_unsolved(fits)
        old = [place for one, place in self._index.place.items() if one not in new.place]
        kept = [one for one in self._index.place if one not in new.place]
        out._index = GroupIndex(kept + ids)
        out._beta = np.concatenate([self._beta[old], fits.coef])
        out.shrinkage_ = np.concatenate([self.shrinkage_[old], fits.share])
        if self._variance is not None and fits.variance is not None:
            out._variance = np.concatenate([self._variance[old], fits.variance])
        out._default = len(out._index.ids) - 1 if groups is None else -1
        out._publish()
        return out

    def _checked_groups(self, X: Any, groups: Any) -> tuple[np.ndarray, np.ndarray]:
        """X as an array, and the codes of its rows' groups, −1 where they are not known."""
        check_is_fitted(self)
        X = _dense(validate_data(self, X, accept_sparse="csr", dtype=_FLOATS, reset=False))
        count = len(X)
        codes = np.full(count, self._default) if groups is None else self._index.codes(groups, count)
        unseen = codes < 0
        if unseen.any() and self.unseen == "error":
            if groups is None:
                raise ValueError('groups must be given as unseen="error", got None')
            row = int(np.argmax(unseen))
            raise ValueError(
                f'groups must be known from the fit as unseen="error", got {list(groups)[row]!r} in row '
                f"{row}; "
                'adapt(X, y, groups=…) adds groups, and unseen="prior" predicts them by the prior'
            )
        if groups is not None and unseen.all():
            self._warn_of_other_types(checked(groups, count))
        return X, codes

    def _warn_of_other_types(self, groups: Any) -> None:
        """Groups that were numbers in the fit, and are text now, are all unknown, and no error tells."""
        known, given = (
            {"number" if isinstance(one, (int, float, np.number)) else type(one).__name__ for one in some}
            for some in (self._index.place, groups.tolist() if isinstance(groups, np.ndarray) else groups)
        )
        if known and given and not known & given:
            warnings.warn(
                f"groups were of type {', '.join(sorted(known))} in the fit, got {', '.join(sorted(given))}: "
                "none is known, and all rows are predicted by the prior",
                UserWarning,
                stacklevel=4,
            )

    def _warn_of_unsolved(self, fits: Fits) -> None:
        if fits.unsolved > _UNSOLVED * len(fits.coef):
            warnings.warn(
                f"{fits.unsolved} of {len(fits.coef)} groups could not be fitted well: the loss must be "
                "smooth and convex",
                UserWarning,
                stacklevel=4,
            )

    def _predictors(self, X: Any, groups: Any, metadata: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """X, linear predictors (n, columns) in the model's units, and the codes of the rows' groups."""
        X, codes = self._checked_groups(X, groups)
        eta, unseen = np.empty((len(X), self._prior.columns)), np.flatnonzero(codes < 0)
        for first in range(0, len(X), _PREDICTED):  # a row's coefficients take as much memory as the row
            part = slice(first, first + _PREDICTED)
            beta = self._beta[np.maximum(codes[part], 0)]
            eta[part] = np.einsum("nd,ndc->nc", self._scaling.rows(X[part]), beta)
        if len(unseen):
            beta = np.broadcast_to(self._x["mean"], (len(unseen), *self._x["mean"].shape))
            if metadata is not None and groups is not None:
                names = list(groups)
                known = self._known(metadata, [names[row] for row in unseen])
                beta = beta + np.tensordot(known, self._x["known"], 1)
            eta[unseen] = np.einsum("nd,ndc->nc", self._scaling.rows(X[unseen]), beta)
        return X, eta, codes

    def _known(self, metadata: Any, groups: list[Any]) -> np.ndarray:
        """The metadata of groups as numbers."""
        encoder: Encoder | None = self._encoder
        if encoder is None:
            if metadata is not None:
                raise ValueError("metadata must be left out, as the model was fitted without it, got a table")
            return np.zeros((len(groups), 0))
        known = encoder.encode({} if metadata is None else metadata, groups)
        if callable(self.prior):
            known = np.asarray([np.atleast_1d(np.asarray(self.prior(one), float)) for one in known])
            if known.ndim != 2 or not np.isfinite(known).all():
                raise ValueError("prior must return a vector of finite numbers for a group's metadata")
        return known

    def _form(self, panel: Panel) -> Prior:
        size, known = panel.size, panel.known.shape[1]
        form = self.prior if isinstance(self.prior, str) else "diagonal"
        if form == "auto":
            small = size - 1 <= _FULL_SIZE and panel.groups >= _FULL_GROUPS * size
            form = "full" if small else "diagonal"
        rank = min(self.rank, size) if form == "low_rank" else 0
        return Prior(form, size, self._loss.columns, rank, known)

    def _publish(self) -> None:
        """Sets the attributes in the units of X and y."""
        self.groups_ = self._index.ids
        coef, intercept = self._scaling.coefficients(self._beta)
        mean, level = self._scaling.coefficients(np.asarray(self._x["mean"]))
        intercept, level = intercept + np.log(self._level), level + np.log(self._level)
        spread = self._prior.matrix(self._x)
        turn = self._scaling.linear_map() @ spread * self._noise
        covariance = turn @ turn.T
        deviation = np.sqrt(np.diag(covariance)[1:])
        if self._prior.columns == 1:
            self.coef_, self.intercept_ = coef[..., 0], intercept[..., 0]
            mean, level = mean[..., 0], float(level[0])
        else:
            self.coef_, self.intercept_ = np.moveaxis(coef, -1, 1), intercept
            mean = mean.T
        self.prior_ = FittedPrior(self._prior.form, mean, level, deviation, covariance)

    def plot_prior(self, ax: Any = None) -> Any:
        """Plots the prior's means and deviations, feature by feature; returns the matplotlib axes."""
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        return plots.plot_prior(self.prior_, names, ax)

    def plot_shrinkage(self, ax: Any = None) -> Any:
        """Plots how many groups are how much their own; returns the matplotlib axes."""
        check_is_fitted(self)
        return plots.plot_shrinkage(self.shrinkage_, ax)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _checked_rows(self, X: Any, y: Any, sample_weight: Any, groups: Any, **options: Any) -> Any:
        """X, y, groups and weights as arrays, without the rows of no weight.

        Weights are in units of the mean weight of the rows that were fitted.
        """
        fitting = options.get("reset", True)
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=_FLOATS, **options)
        X = _dense(X)
        if sample_weight is None:
            self._unit = 1.0 if fitting else self._unit
            return X, y, groups, np.ones(len(X))
        weight = np.asarray(_check_sample_weight(sample_weight, X, ensure_non_negative=True), float)
        keep = weight > 0
        if groups is not None:
            named = checked(groups, len(X))  # before rows are left out: an error names the right row
            if isinstance(named, np.ndarray):
                groups = named[keep]
            else:
                groups = [group for group, one in zip(named, keep, strict=True) if one]
        if fitting:
            self._unit = float(weight.sum() / keep.sum())
        return X[keep], y[keep], groups, weight[keep] / self._unit

    def _check_parameters(self) -> None:
        for name, least in (("folds", 2), ("max_iter", 0), ("prior_groups", 1), ("rank", 1)):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number from {least}, got {value!r}")
        if not isinstance(self.tol, (int, float, np.number)) or not 0 <= self.tol < 1:
            raise ValueError(f"tol must be a number from 0 to 1, got {self.tol!r}")
        if not callable(self.prior) and self.prior not in ("auto", *FORMS):
            raise ValueError(
                f"prior must be 'auto', one of {list(FORMS)} or a function of metadata, got {self.prior!r}"
            )
        if self.judge not in ("groups", "rows"):
            raise ValueError(f"judge must be 'groups' or 'rows', got {self.judge!r}")
        if not isinstance(self.newcomers, (int, float, np.number)) or not 0 <= self.newcomers < 1:
            raise ValueError(f"newcomers must be a number from 0 to 1, got {self.newcomers!r}")
        if self.unseen not in ("prior", "error"):
            raise ValueError(f"unseen must be 'prior' or 'error', got {self.unseen!r}")
        if not isinstance(self.raise_on_interrupt, (bool, np.bool_)):
            raise ValueError(f"raise_on_interrupt must be True or False, got {self.raise_on_interrupt!r}")

    def _judging(self) -> Judging:
        return Judging(int(self.folds), self.judge, float(self.newcomers))

    def _precision(self) -> Any:
        """A loss that a user gave sees targets as they are: where these are far from zero beside their
        spread, single precision has too few digits."""
        return jax.enable_x64(True) if callable(self.loss) else contextlib.nullcontext()

    def _in_units(self, target: np.ndarray) -> np.ndarray:
        """Targets as the model sees them."""
        if callable(self.loss):
            return target
        return (target / self._level - self._scaling.target_shift) / self._scaling.target_scale

    def _scales_target(self) -> bool:
        raise NotImplementedError

    def _predicts_targets(self) -> bool:
        """Whether predictions are of the kind of targets, and not logits."""
        raise NotImplementedError

    def _has_intervals(self) -> bool:
        raise NotImplementedError

    def _level_of(self, target: np.ndarray, weight: np.ndarray) -> float:
        """What targets are divided by before all else, for losses with a logarithm as link."""
        return 1.0

    def _look_at(self, panel: Panel) -> Panel:
        """Notes what the loss depends on besides the parameters; the panel, with its targets in other units
        if need be."""
        return panel

    def _find_steps(self, panel: Panel, learnt: Learnt, seed: int) -> None:
        """Finds by which steps targets of few values are predicted, if any."""

    def _make_loss(self) -> Loss:
        raise NotImplementedError

    @property
    def _loss(self) -> Loss:
        # Not stored: functions cannot be pickled.
        return dataclasses.replace(self._make_loss(), units=getattr(self, "_units", None))


def judged_groups(panel: Panel) -> int:
    """How many groups have enough rows to tell how far predictions of held-out rows are off."""
    return int(np.clip(_JUDGED_ROWS * panel.groups / len(panel.target), *_JUDGED))


def _check_size(size: int) -> None:
    """The prior has a covariance of all coefficients."""
    largest = int(_ENTRIES**0.5)
    if size > largest:
        raise ValueError(f"X must have at most {largest - 1:,} features, got {size - 1:,}")


def _most_groups(size: int, folds: int) -> int:
    """From how many groups a prior may be learnt, as every fold has sums of the products of all features."""
    most = _ENTRIES // ((folds + 1) * (size + 1) ** 2)
    if most < 2:
        largest = int((_ENTRIES / (2 * (folds + 1))) ** 0.5) - 2
        raise ValueError(f"X must have at most {largest:,} features with folds={folds}, got {size - 1:,}")
    return most


def _dense(X: Any) -> np.ndarray:
    return X.toarray(order="C") if sparse.issparse(X) else X


def _weighted_quantiles(values: np.ndarray, weights: np.ndarray, shares: np.ndarray) -> np.ndarray:
    order = np.argsort(values)
    reached = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    return np.interp(shares, reached, values[order])
