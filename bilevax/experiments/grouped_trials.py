"""What one process of `bilevax reproduce grouped` measures: some methods on one split of one panel."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor
from bilevax.data import load_interactions
from bilevax.experiments import grouped_panels as panels
from bilevax.experiments.grouped_baselines import (
    CATEGORIES,
    Sums,
    boosting,
    logistic_baselines,
    mixed_model,
    squared_baselines,
)
from bilevax.experiments.grouped_metadata import metadata_baselines
from bilevax.experiments.grouped_panels import Rows, Split
from bilevax.experiments.grouped_quantiles import boosted_quantiles, pinball, quantile_baselines

if TYPE_CHECKING:
    from bilevax.experiments.grouped import GroupedOptions

BASELINES, BOOSTING, OURS = "baselines", "boosting", "ours"
_MIXED = 300  # groups, up to which MixedLM is tried
_KNOWN = (1, 3, 10, 30)  # rows of new users
_QUANTILES = (0.1, 0.5, 0.9)
_OF_QUANTILES = ("quantiles", "skewed", "skewed_known")

Method = Callable[[], Any]  # predictors of the test rows, or None if it cannot


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one process measures.

    Attributes:
      part: the table that it belongs to.
      seed: of the split.
      kind: of the methods: `BASELINES`, `BOOSTING` or `OURS`.
      quantile: which one is predicted; None in tables of other losses.
    """

    part: str
    seed: int
    kind: str
    quantile: float | None = None

    @property
    def name(self) -> str:
        """Under which its results are kept."""
        quantile = "" if self.quantile is None else f", quantile {self.quantile}"
        return f"{self.part}, split {self.seed}{quantile}, {self.kind}"


def pieces(options: GroupedOptions, part: str, seed: int) -> Iterator[Piece]:
    """The pieces of one split of a table, in the order of its lines."""
    boosted = [BOOSTING] if seed - options.seed < options.boosted and part != "new" else []
    for quantile in _QUANTILES if part in _OF_QUANTILES else (None,):
        for kind in (BASELINES, *boosted, OURS):
            yield Piece(part, seed, kind, quantile)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What one method reached on one split: losses by group and by row, coverage by group, and seconds."""

    losses: np.ndarray
    by_row: float
    below: np.ndarray | None
    seconds: float


Measured = dict[tuple[str, str], Scores]  # by what is predicted ("" or "quantile 0.9") and method


def measure(options: GroupedOptions, piece: Piece) -> Measured:
    """The scores of a piece's methods. Empty if the panel is missing."""
    split = _panel(options, piece)
    if split is None:
        return {}
    if piece.part == "new":
        return _new_users(split, piece, options)
    if piece.part == "logistic":
        return _measured(
            _logistic(split, piece, options.priors),
            split.test,
            lambda eta: np.logaddexp(0, eta) - split.test.y * eta,
        )
    quantile = piece.quantile
    if quantile is not None:
        return _measured(
            _quantile(split, piece, quantile),
            split.test,
            lambda eta: pinball(split.test.y - eta, quantile),
            f"quantile {quantile}",
            below=True,
        )
    with_metadata = piece.part in ("metadata", "known")
    methods = _metadata(split, piece) if with_metadata else _squared(split, piece, options.priors)
    return _measured(methods, split.test, lambda eta: (eta - split.test.y) ** 2)


def _panel(options: GroupedOptions, piece: Piece) -> Split | None:
    part, seed = piece.part, piece.seed
    if part == "generated":
        return panels.generated(options.generated, seed)
    if part == "known":
        return panels.known_normal(options.generated, seed)
    if part in ("skewed", "skewed_known"):
        return panels.skewed(options.generated // 2, seed, known=3 * (part == "skewed_known"))
    if part in panels.OF_STATSMODELS:
        return panels.statsmodels_panel(part, seed)
    users = {"logistic": options.logistic_users, "quantiles": options.quantile_users}
    split = _ratings(options.data, users.get(part, options.users), options.factors, seed, part == "logistic")
    if part == "quantiles":
        return dataclasses.replace(split, known=np.zeros((split.train.groups, 0)))
    return split


@functools.lru_cache(maxsize=1)
def _ratings(data: str, users: int | None, factors: int, seed: int, logistic: bool) -> Split:
    """The panel of ratings; the last one is kept, as other pieces need it too."""
    return panels.movielens(load_interactions(data), users, factors, seed, logistic=logistic)


def _measured(
    methods: dict[str, Method], test: Rows, loss: Any, what: str = "", below: bool = False
) -> Measured:
    """Runs methods, and judges what they predict."""
    out: Measured = {}
    for name, method in methods.items():
        began = time.process_time()
        eta = method()
        if eta is None:
            continue
        seconds, losses = time.process_time() - began, loss(eta)
        under = _by_group(test, (test.y <= eta).astype(float)) if below else None
        out[what, name] = Scores(_by_group(test, losses), float(losses.mean()), under, seconds)
    return out


def _by_group(rows: Rows, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, rows.offsets[:-1]) / np.diff(rows.offsets)


def _squared(split: Split, piece: Piece, priors: tuple[str, ...]) -> dict[str, Method]:
    train, test, seed = split.train, split.test, piece.seed
    if piece.kind == BOOSTING:
        return {_boosting_name(train): lambda: boosting(train, test, seed)}
    if piece.kind == OURS:
        return {
            f"GroupedRegressor, {prior}": lambda prior=prior: _regressor(split, seed, prior=prior)
            for prior in priors
        }
    methods: dict[str, Method] = {
        name: lambda fit=fit: _predicted(test, fit()) for name, fit in squared_baselines(train, seed).items()
    }
    if train.groups <= _MIXED:
        methods["MixedLM"] = lambda: _predicted(test, mixed_model(train))
    return methods


def _logistic(split: Split, piece: Piece, priors: tuple[str, ...]) -> dict[str, Method]:
    train, test, seed = split.train, split.test, piece.seed
    if piece.kind == BOOSTING:
        return {_boosting_name(train): lambda: boosting(train, test, seed, logistic=True)}
    if piece.kind == BASELINES:
        return {
            name: lambda fit=fit: _predicted(test, fit())
            for name, fit in logistic_baselines(train, seed).items()
        }

    def ours(prior: str) -> np.ndarray:
        model = GroupedClassifier(prior=prior, random_state=seed)
        model.fit(train.X[:, 1:], train.y, groups=train.group)
        return model.decision_function(test.X[:, 1:], groups=test.group)

    return {f"GroupedClassifier, {prior}": lambda prior=prior: ours(prior) for prior in priors}


def _quantile(split: Split, piece: Piece, quantile: float) -> dict[str, Method]:
    if piece.kind == BASELINES:
        return _rounded(split, quantile_baselines(split, quantile, piece.seed))
    if piece.kind == BOOSTING:
        return _rounded(split, boosted_quantiles(split, quantile, piece.seed))
    given: dict[str, Any] = {"loss": "quantile", "quantile": quantile}
    return _with_and_without(split, piece.seed, **given)


def _rounded(split: Split, methods: dict[str, Callable[[], np.ndarray]]) -> dict[str, Method]:
    """The methods, and where targets are whole numbers, what they predict rounded to those that occur."""
    y, out = split.train.y, dict[str, Method]()
    for name, method in methods.items():
        once = functools.cache(method)
        out[name] = once
        if (y == np.round(y)).all():
            out[f"{name}, rounded"] = lambda once=once: np.clip(np.round(once()), y.min(), y.max())
    return out


def _metadata(split: Split, piece: Piece) -> dict[str, Method]:
    train, test, seed = split.train, split.test, piece.seed
    if piece.kind == BASELINES:
        return dict(metadata_baselines(split, seed))
    if piece.kind == BOOSTING:
        return {"boosting with metadata": lambda: boosting(train, test, seed, known=split.known)}
    return _with_and_without(split, seed)


def _with_and_without(split: Split, seed: int, **given: Any) -> dict[str, Method]:
    """Ours, without what is known of groups and with it, if anything is."""
    if not split.known.shape[1]:
        return {"GroupedRegressor": lambda: _regressor(split, seed, **given)}
    return {
        "GroupedRegressor without metadata": lambda: _regressor(split, seed, **given),
        "GroupedRegressor": lambda: _regressor(split, seed, metadata=True, **given),
    }


def _regressor(split: Split, seed: int, *, metadata: bool = False, **parameters: Any) -> np.ndarray:
    train, test = split.train, split.test
    table = dict(enumerate(split.known)) if metadata else None
    model = GroupedRegressor(random_state=seed, **parameters)
    model.fit(train.X[:, 1:], train.y, groups=train.group, metadata=table)
    return model.predict(test.X[:, 1:], groups=test.group)


def _new_users(split: Split, piece: Piece, options: GroupedOptions) -> Measured:
    """Users that were not in the fit, with a few of their rows known."""
    train, test, seed = split.train, split.test, piece.seed
    random = np.random.default_rng(seed)
    new = np.zeros(train.groups, bool)
    new[random.permutation(train.groups)[: min(options.new_users, train.groups // 2)]] = True
    old = train.chosen(~new[train.group])
    methods_of = _adapting(old, seed) if piece.kind == OURS else _known_ways(old, seed)
    place = np.arange(len(train.y)) - np.repeat(train.offsets[:-1], np.diff(train.offsets))
    seen, out = test.chosen(new[test.group]), Measured()
    for known in _KNOWN:
        few = train.chosen(new[train.group] & (place < known))
        rows_known = f"{known} rows known" if known > 1 else "1 row known"
        out |= _measured(methods_of(few, seen), seen, lambda eta: (eta - seen.y) ** 2, rows_known)
    return out


def _adapting(old: Rows, seed: int) -> Callable[[Rows, Rows], dict[str, Method]]:
    """`adapt`, from a few rows of new users to others of theirs."""
    model = GroupedRegressor(random_state=seed).fit(old.X[:, 1:], old.y, groups=old.group)

    def methods(few: Rows, seen: Rows) -> dict[str, Method]:
        def adapted() -> np.ndarray:
            names = [("new", one) for one in few.group.tolist()]
            wiser = model.adapt(few.X[:, 1:], few.y, groups=names)
            return wiser.predict(seen.X[:, 1:], groups=[("new", one) for one in seen.group.tolist()])

        return {"adapt": adapted}

    return methods


def _known_ways(old: Rows, seed: int) -> Callable[[Rows, Rows], dict[str, Method]]:
    """What one would do without `adapt`; strengths are those that are best in the folds of known users."""
    sums, every = Sums.by_fold(old, seed), np.eye(old.X.shape[1])
    pooled, learnt = sums.pooled(), sums.expectation_maximisation()
    slopes, zero = np.diag(np.arange(sums.size) > 0).astype(float), np.zeros(sums.size)
    around_zero, around_pooled = sums.best_alpha(zero, slopes), sums.best_alpha(pooled, every)

    def methods(few: Rows, seen: Rows) -> dict[str, Method]:
        own = Sums.whole(few)
        return {
            "pooled": lambda: seen.X @ pooled,
            "shared α": lambda: _predicted(seen, own.ridge(around_zero, zero, slopes)),
            "shared α around pooled": lambda: _predicted(seen, own.ridge(around_pooled, pooled, every)),
            "EM": lambda: _predicted(seen, own.posterior(*learnt)),
        }

    return methods


def _boosting_name(rows: Rows) -> str:
    return "boosting, groups as categories" if rows.groups <= CATEGORIES else "boosting, groups encoded"


def _predicted(rows: Rows, beta: np.ndarray | None) -> np.ndarray | None:
    return None if beta is None else (rows.X * beta[rows.group]).sum(1)
