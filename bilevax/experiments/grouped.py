"""`bilevax reproduce grouped`: one prior for thousands of models, beside what is usually done.

ML-1M is a panel: every user is a group, with the ratings as targets (squared loss and quantiles) or whether
they are at least 4 (logistic loss), and as features 10 factors of the items, from a singular value
decomposition of the training ratings. A fifth of every user's ratings are for testing. Other panels are
generated, with known truth, or come with statsmodels. All figures are means over groups of the mean loss of
a group's test rows; differences are paired by group.

Every panel and split is a job of its own; jobs run in several processes.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor
from bilevax.data import load_interactions
from bilevax.experiments import grouped_panels as panels
from bilevax.experiments.grouped_baselines import (
    Sums,
    boosting,
    logistic_baselines,
    mixed_model,
    squared_baselines,
)
from bilevax.experiments.grouped_metadata import metadata_baselines
from bilevax.experiments.grouped_panels import Rows, Split
from bilevax.experiments.grouped_quantiles import pinball, quantile_baselines
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report

_MIXED = 300  # groups, up to which MixedLM is tried
_KNOWN = (1, 3, 10, 30)  # rows of new users
_QUANTILES = (0.1, 0.5, 0.9)
TITLES = {
    "squared": "Squared error, {data}",
    "logistic": "Log-loss of rating ≥ 4, {data}",
    "generated": "Squared error, generated groups",
    "statsmodels": "Squared error, Grunfeld's firms",
    "quantiles": "Pinball loss, {data}",
    "skewed": "Pinball loss, generated groups with skewed noise",
    "metadata": "Squared error, {data} with metadata of users",
    "known": "Squared error, generated groups with metadata",
    "skewed_known": "Pinball loss, generated groups with metadata and skewed noise",
    "new": "Squared error of {new_users} users of {data} that were not in the fit",
}
_NOTE = (
    "loss: mean over groups of a group's mean test loss ± its standard error; difference: from the last "
    "line, paired by group; by row: the mean over test rows; below: the share of targets at or below the "
    "prediction; seconds: of the processor, compilation included."
)


@dataclasses.dataclass(frozen=True)
class GroupedOptions:
    """The options of `bilevax reproduce grouped`.

    Attributes:
      data: the name or path of a table of ratings.
      splits: number of splits, each with its own test rows, folds and generated panel.
      seed: the first seed.
      users: the most users of the squared loss; None takes all.
      logistic_users: the most users of the logistic loss.
      quantile_users: the most users of the quantile loss.
      generated: groups of the generated panels.
      new_users: users that are left out of the fit, and adapted to.
      factors: of the items.
      priors: forms of the prior to learn.
      parts: the tables to make, of `TITLES`.
      boosted: of how many splits boosting takes part; it takes longer than all others together.
      processes: how many jobs run at a time.
    """

    data: str = "ml-1m"
    splits: int = 5
    seed: int = 0
    users: int | None = None
    logistic_users: int = 2_000
    quantile_users: int = 1_000
    generated: int = 2_000
    new_users: int = 500
    factors: int = 10
    priors: tuple[str, ...] = ("ridge", "diagonal", "full")
    parts: tuple[str, ...] = tuple(TITLES)
    boosted: int = 1
    processes: int = 1

    def quick(self) -> GroupedOptions:
        """A short check: one split of few users."""
        few = {"users": 200, "logistic_users": 100, "quantile_users": 100, "generated": 200, "new_users": 50}
        return dataclasses.replace(self, splits=1, factors=4, **few)


def run(
    options: GroupedOptions, folder: str | Path, *, quick: bool = False, resume: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Fits everything; writes a table per panel, and one of new users.

    Args:
      options: what to run.
      folder: where tables go, and `kept.json` with what every job found.
      quick: a short check.
      resume: run only the jobs that the folder does not have; other parts and splits may be asked for.

    Returns:
      The rows of the tables, by name.
    """
    options = options.quick() if quick else options
    unknown = [part for part in options.parts if part not in TITLES]
    if unknown:
        raise ValueError(f"parts must be of {list(TITLES)}, got {unknown[0]!r}")
    report = Report(folder, options, quick=quick)
    same = {n: v for n, v in dataclasses.asdict(options).items() if n not in ("splits", "parts", "processes")}
    kept = Kept(Path(folder) / "kept.json", same, resume=resume)
    seeds = range(options.seed, options.seed + options.splits)
    jobs = {
        f"{part}, split {seed}": functools.partial(job, options, part, seed)
        for seed in seeds  # parts of one split follow each other: several have the same panel
        for part in options.parts
    }
    results = kept.fill(jobs, options.processes, alone=True)
    tables: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        found = [_measured_from(results[f"{part}, split {seed}"]) for seed in seeds]
        title = TITLES[part].format(data=options.data, new_users=options.new_users)
        if not found[0]:
            print(f"{title}: left out, as statsmodels is not installed")
            continue
        tables[part] = _table(found)
        report.table(f"grouped_{part}", tables[part], title, _NOTE)
    report.finish()
    return tables


@dataclasses.dataclass(frozen=True)
class Scores:
    """What one method reached on one split: losses by group and by row, coverage by group, and seconds."""

    losses: np.ndarray
    by_row: float
    below: np.ndarray | None
    seconds: float


Measured = dict[tuple[str, str], Scores]  # by what is predicted ("" or "quantile 0.9") and method
Method = Callable[[], Any]


def _measured_from(kept: list[dict[str, Any]]) -> Measured:
    """What a job returned, after it was written and read."""
    out: Measured = {}
    for one in kept:
        below = None if one["below"] is None else np.asarray(one["below"])
        out[one["what"], one["method"]] = Scores(
            np.asarray(one["losses"]), one["by_row"], below, one["seconds"]
        )
    return out


def job(options: GroupedOptions, part: str, seed: int) -> list[dict[str, Any]]:
    """One split of one panel: everything is fitted and measured. Empty if the panel is missing."""
    began = time.process_time()
    found = measure(options, part, seed)
    print(f"{part}, split {seed}: {time.process_time() - began:.0f} s of the processor", flush=True)
    return [
        {"what": what, "method": name} | dataclasses.asdict(scores) for (what, name), scores in found.items()
    ]


def measure(options: GroupedOptions, part: str, seed: int) -> Measured:
    """The scores of all methods on one split of one panel."""
    boosted = seed - options.seed < options.boosted

    def users(count: int | None, *, logistic: bool = False) -> Split:
        return _ratings(options.data, count, options.factors, seed, logistic)

    if part in ("squared", "generated", "statsmodels"):
        split = (
            users(options.users) if part == "squared"
            else panels.generated(options.generated, seed) if part == "generated"
            else panels.statsmodels_panel(seed)
        )  # fmt: skip
        return {} if split is None else _squared(split, seed, options.priors, boosted)
    if part == "logistic":
        return _logistic(users(options.logistic_users, logistic=True), seed, options.priors, boosted)
    if part in ("quantiles", "skewed", "skewed_known"):
        split = (
            users(options.quantile_users) if part == "quantiles"
            else panels.skewed(options.generated // 2, seed, known=3 * (part == "skewed_known"))
        )  # fmt: skip
        if part == "quantiles":
            split = dataclasses.replace(split, known=np.zeros((split.train.groups, 0)))
        found: Measured = {}
        for quantile in _QUANTILES if part != "skewed_known" else (0.9,):
            found |= _quantile(split, quantile, seed, boosted)
        return found
    if part in ("metadata", "known"):
        split = users(options.users) if part == "metadata" else panels.known_normal(options.generated, seed)
        return _metadata(split, seed, boosted)
    return _new_users(users(options.users), seed, options)


@functools.lru_cache(maxsize=1)
def _ratings(data: str, users: int | None, factors: int, seed: int, logistic: bool) -> Split:
    """The panel of ratings; the last one is kept, as other parts need it too."""
    return panels.movielens(load_interactions(data), users, factors, seed, logistic=logistic)


def _measured(
    methods: dict[str, Method], test: Rows, loss: Any, what: str = "", below: bool = False
) -> Measured:
    """Runs methods that return predictors of the test rows, or None if they cannot."""
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


def _squared(split: Split, seed: int, priors: tuple[str, ...], boosted: bool) -> Measured:
    train, test = split.train, split.test
    methods: dict[str, Method] = {
        name: lambda fit=fit: _predicted(test, fit()) for name, fit in squared_baselines(train, seed).items()
    }
    if train.groups <= _MIXED:
        methods["MixedLM"] = lambda: _predicted(test, mixed_model(train))
    if boosted:
        methods["boosting, groups encoded"] = lambda: boosting(train, test, seed)
    for prior in priors:
        methods[f"GroupedRegressor, {prior}"] = lambda prior=prior: _regressor(split, seed, prior=prior)
    return _measured(methods, test, lambda eta: (eta - test.y) ** 2)


def _logistic(split: Split, seed: int, priors: tuple[str, ...], boosted: bool) -> Measured:
    train, test = split.train, split.test
    methods: dict[str, Method] = {
        name: lambda fit=fit: _predicted(test, fit()) for name, fit in logistic_baselines(train, seed).items()
    }
    if boosted:
        methods["boosting, groups encoded"] = lambda: boosting(train, test, seed, logistic=True)

    def ours(prior: str) -> np.ndarray:
        model = GroupedClassifier(prior=prior, random_state=seed)
        model.fit(train.X[:, 1:], train.y, groups=train.group)
        return model.decision_function(test.X[:, 1:], groups=test.group)

    for prior in priors:
        methods[f"GroupedClassifier, {prior}"] = lambda prior=prior: ours(prior)
    return _measured(methods, test, lambda eta: np.logaddexp(0, eta) - test.y * eta)


def _quantile(split: Split, quantile: float, seed: int, boosted: bool) -> Measured:
    test = split.test
    methods: dict[str, Method] = dict(quantile_baselines(split, quantile, seed, boosted=boosted))
    given: dict[str, Any] = {"loss": "quantile", "quantile": quantile}
    if split.known.shape[1]:
        methods["GroupedRegressor without metadata"] = lambda: _regressor(split, seed, **given)
        methods["GroupedRegressor"] = lambda: _regressor(split, seed, metadata=True, **given)
    else:
        methods["GroupedRegressor"] = lambda: _regressor(split, seed, **given)
    return _measured(
        methods, test, lambda eta: pinball(test.y - eta, quantile), f"quantile {quantile}", below=True
    )


def _metadata(split: Split, seed: int, boosted: bool) -> Measured:
    test = split.test
    methods: dict[str, Method] = dict(metadata_baselines(split, seed, boosted=boosted))
    methods["GroupedRegressor without metadata"] = lambda: _regressor(split, seed)
    methods["GroupedRegressor"] = lambda: _regressor(split, seed, metadata=True)
    return _measured(methods, test, lambda eta: (eta - test.y) ** 2)


def _regressor(split: Split, seed: int, *, metadata: bool = False, **parameters: Any) -> np.ndarray:
    train, test = split.train, split.test
    table = dict(enumerate(split.known)) if metadata else None
    model = GroupedRegressor(random_state=seed, **parameters)
    model.fit(train.X[:, 1:], train.y, groups=train.group, metadata=table)
    return model.predict(test.X[:, 1:], groups=test.group)


def _new_users(split: Split, seed: int, options: GroupedOptions) -> Measured:
    """Users that were not in the fit, with a few of their rows known."""
    train, test = split.train, split.test
    random = np.random.default_rng(seed)
    new = np.zeros(train.groups, bool)
    new[random.permutation(train.groups)[: min(options.new_users, train.groups // 2)]] = True
    old = train.chosen(~new[train.group])
    model = GroupedRegressor(random_state=seed).fit(old.X[:, 1:], old.y, groups=old.group)
    sums = Sums.of(old, np.zeros(len(old.y), int))
    pooled, learnt = sums.pooled(), sums.expectation_maximisation()
    place = np.arange(len(train.y)) - np.repeat(train.offsets[:-1], np.diff(train.offsets))
    seen, out = test.chosen(new[test.group]), Measured()
    for known in _KNOWN:
        few = train.chosen(new[train.group] & (place < known))
        own = Sums.of(few, np.zeros(len(few.y), int))
        penalty = np.diag(np.arange(own.size) > 0)

        def adapted(few: Rows = few) -> np.ndarray:
            names = [("new", one) for one in few.group.tolist()]
            wiser = model.adapt(few.X[:, 1:], few.y, groups=names)
            return wiser.predict(seen.X[:, 1:], groups=[("new", one) for one in seen.group.tolist()])

        methods: dict[str, Method] = {
            "pooled": lambda: seen.X @ pooled,
            "ridge α = 10": lambda own=own, p=penalty: _predicted(
                seen, own.ridge(10.0, np.zeros(own.size), p)
            ),
            "ridge α = 10 around pooled": lambda own=own: _predicted(
                seen, own.ridge(10.0, pooled, np.eye(own.size))
            ),
            "EM": lambda own=own: _predicted(seen, own.posterior(*learnt)),
            "adapt": adapted,
        }
        rows_known = f"{known} rows known" if known > 1 else "1 row known"
        out |= _measured(methods, seen, lambda eta: (eta - seen.y) ** 2, rows_known)
    return out


def _predicted(rows: Rows, beta: np.ndarray | None) -> np.ndarray | None:
    return None if beta is None else (rows.X * beta[rows.group]).sum(1)


def _table(splits: list[Measured]) -> list[dict[str, Any]]:
    """The rows of a table; splits may have other groups, differences are within a split."""
    out = []
    for what, name in splits[0]:
        last = [one for one in splits[0] if one[0] == what][-1]
        having = [split for split in splits if (what, name) in split]  # boosting is slow
        scores = [split[what, name] for split in having]
        off = [split[what, name].losses - split[last].losses for split in having]
        row: dict[str, Any] = {"predicted": what} if what else {}
        row |= {"method": name, "loss": _mean(np.concatenate([one.losses for one in scores]))}
        row["difference"] = "" if (what, name) == last else _mean(np.concatenate(off), signed=True)
        row["by row"] = f"{np.mean([one.by_row for one in scores]):.4f}"
        below = [one.below for one in scores if one.below is not None]
        if below:
            row["below"] = f"{np.mean(np.concatenate(below)):.3f}"
        row["seconds"] = f"{np.mean([one.seconds for one in scores]):.1f}"
        row["splits"] = str(len(having))
        out.append(row)
    return out


def _mean(values: np.ndarray, *, signed: bool = False) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{'+' if signed else ''}.4f} ± {error:.4f}"
