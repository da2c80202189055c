"""`bilevax reproduce grouped`: one prior for thousands of models, beside what is usually done.

ML-1M is a panel: every user is a group, with the ratings as targets (squared loss) or whether they are at
least 4 (logistic loss), and as features 10 factors of the items, from a singular value decomposition of the
training ratings. A fifth of every user's ratings are for testing. A second panel is generated, with known
truth. All figures are means over users of the mean loss of a user's test rows; differences are paired by
user.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds

from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor
from bilevax.data import Interactions, load_interactions
from bilevax.experiments.grouped_baselines import (
    Rows,
    Sums,
    boosting,
    logistic_baselines,
    mixed_model,
    squared_baselines,
)
from bilevax.experiments.report import Report

OURS = "GroupedRegressor", "GroupedClassifier"
_MIXED = 300  # groups, up to which MixedLM is tried
_FEWEST = 5  # ratings that a user must have


@dataclasses.dataclass(frozen=True)
class GroupedOptions:
    """The options of `bilevax reproduce grouped`.

    Attributes:
      data: the name or path of a table of ratings.
      splits: number of splits, each with its own test rows, folds and generated panel.
      seed: the first seed.
      users: the most users of the squared loss; None takes all.
      logistic_users: the most users of the logistic loss.
      generated: groups of the generated panel.
      new_users: users that are left out of the fit, and adapted to.
      factors: of the items.
      priors: forms of the prior to learn.
    """

    data: str = "ml-1m"
    splits: int = 5
    seed: int = 0
    users: int | None = None
    logistic_users: int = 2_000
    generated: int = 2_000
    new_users: int = 500
    factors: int = 10
    priors: tuple[str, ...] = ("ridge", "diagonal", "full")

    def quick(self) -> GroupedOptions:
        """A short check: one split of few users."""
        return dataclasses.replace(
            self, splits=1, users=200, logistic_users=100, generated=200, new_users=50, factors=4
        )


def run(
    options: GroupedOptions, folder: str | Path, *, quick: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Fits everything; writes a table per panel, and one of new users.

    Returns:
      The rows of the tables, by name.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    table = load_interactions(options.data)
    seeds = range(options.seed, options.seed + options.splits)
    note = (
        "loss: mean over users of a user's mean test loss ± its standard error; difference: from the last "
        "line, paired by user; by row: the mean over test rows; seconds: of a fit, compilation included."
    )
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, title, made, logistic in (
        ("squared", f"Squared error, {options.data}", _movielens(table, options.users, options), False),
        ("logistic", f"Log-loss, {options.data}", _movielens(table, options.logistic_users, options), True),
        ("generated", "Squared error, generated groups", _generated(options.generated), False),
    ):
        tables[name] = [_shown(one) for one in _compared(made, seeds, logistic, options.priors)]
        report.table(f"grouped_{name}", tables[name], title, note)
    tables["new"] = _new_users(_movielens(table, options.users, options), options)
    report.table(
        "grouped_new",
        tables["new"],
        f"Squared error of {options.new_users} users that were not in the fit",
        "by the number of their rows that are known; mean over users ± its standard error.",
    )
    report.finish()
    return tables


Split = tuple[Rows, Rows]
Maker = Callable[[int, bool], Split]


def _movielens(table: Interactions, users: int | None, options: GroupedOptions) -> Maker:
    """Splits of a table of ratings."""

    def make(seed: int, logistic: bool) -> Split:
        random = np.random.default_rng(seed)
        counts = np.bincount(table.user, minlength=table.users)
        chosen = random.permutation(np.flatnonzero(counts >= _FEWEST))[:users]
        code = np.full(table.users, -1)
        code[np.sort(chosen)] = np.arange(len(chosen))
        keep = code[table.user] >= 0
        user, item, rating = code[table.user[keep]], table.item[keep], table.rating[keep].astype(float)
        order = np.lexsort((random.random(len(user)), user))
        user, item, rating = user[order], item[order], rating[order]
        lengths = np.bincount(user)
        place = np.arange(len(user)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        test = place < np.maximum(lengths // 5, 1)[user]
        level = rating[~test].mean()
        shape = (len(lengths), table.items)
        matrix = sparse.csr_matrix((rating[~test] - level, (user[~test], item[~test])), shape)
        found: Any = svds(matrix, options.factors, v0=random.normal(size=min(shape)))
        factors = found[2].T
        features = factors[item]
        features /= features[~test].std(0)
        target = (rating >= 4).astype(float) if logistic else rating
        X = np.concatenate([np.ones((len(user), 1)), features], 1)
        return _rows(X[~test], target[~test], user[~test]), _rows(X[test], target[test], user[test])

    return make


def _generated(groups: int) -> Maker:
    """Groups of 5 to 50 rows whose coefficients are correlated normal variables."""

    def make(seed: int, logistic: bool) -> Split:
        random = np.random.default_rng(seed)
        size = 9
        mean, mix = random.normal(size=size), 0.3 * random.normal(size=(size, size))
        beta = mean + random.normal(size=(groups, size)) @ mix.T

        def part(lengths: np.ndarray) -> Rows:
            group = np.repeat(np.arange(groups), lengths)
            X = np.concatenate([np.ones((len(group), 1)), random.normal(size=(len(group), size - 1))], 1)
            return _rows(X, (X * beta[group]).sum(1) + random.normal(size=len(group)), group)

        return part(random.integers(5, 51, groups)), part(np.full(groups, 20))

    return make


def _rows(X: np.ndarray, y: np.ndarray, group: np.ndarray) -> Rows:
    return Rows(X, y, np.concatenate([[0], np.cumsum(np.bincount(group))]))


def _compared(make: Maker, seeds: range, logistic: bool, priors: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every method's losses by user, averaged over splits, its mean loss by row, and its seconds."""
    users: dict[str, list[np.ndarray]] = {}
    by_row: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for seed in seeds:
        train, test = make(seed, logistic)
        for name, method in _methods(train, test, seed, logistic, priors).items():
            began = time.perf_counter()
            eta = method()
            if eta is None:
                continue
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            loss = np.logaddexp(0, eta) - test.y * eta if logistic else (eta - test.y) ** 2
            means = np.add.reduceat(loss, test.offsets[:-1]) / np.diff(test.offsets)
            users.setdefault(name, []).append(means)
            by_row.setdefault(name, []).append(float(loss.mean()))
    # Splits may have other users; paired differences are within a split.
    last = users[next(reversed(users))]
    return [
        {
            "method": name,
            "users": np.concatenate(parts),
            "difference": np.concatenate([a - b for a, b in zip(parts, last, strict=True)]),
            "splits": len(parts),
            "by row": float(np.mean(by_row[name])),
            "seconds": float(np.mean(seconds[name])),
        }
        for name, parts in users.items()
    ]


def _methods(
    train: Rows, test: Rows, seed: int, logistic: bool, priors: tuple[str, ...]
) -> dict[str, Callable[[], Any]]:
    """Every method, as a function that returns the predictors of the test rows."""

    def by_coefficients(fit: Callable[[], Any]) -> Callable[[], Any]:
        def predict() -> Any:
            beta = fit()
            return None if beta is None else (test.X * beta[test.group]).sum(1)

        return predict

    baselines = (logistic_baselines if logistic else squared_baselines)(train, seed)
    out = {name: by_coefficients(fit) for name, fit in baselines.items()}
    if not logistic and len(train.offsets) - 1 <= _MIXED:
        out["MixedLM"] = by_coefficients(lambda: mixed_model(train))
    out["boosting, groups encoded"] = lambda: boosting(train, test, seed, logistic=logistic)
    for prior in priors:
        out[f"{OURS[logistic]}, {prior}"] = lambda prior=prior: _ours(train, test, prior, seed, logistic)
    return out


def _ours(train: Rows, test: Rows, prior: str, seed: int, logistic: bool) -> np.ndarray:
    if logistic:
        model = GroupedClassifier(prior=prior, random_state=seed)
        model.fit(train.X[:, 1:], train.y, groups=train.group)
        return model.decision_function(test.X[:, 1:], groups=test.group)
    model = GroupedRegressor(prior=prior, random_state=seed)
    return model.fit(train.X[:, 1:], train.y, groups=train.group).predict(test.X[:, 1:], groups=test.group)


def _new_users(make: Maker, options: GroupedOptions) -> list[dict[str, Any]]:
    """Users that were not in the fit, with a few of their rows known."""
    train, test = make(options.seed, False)
    random = np.random.default_rng(options.seed)
    count = len(train.offsets) - 1
    new = np.zeros(count, bool)
    new[random.permutation(count)[: min(options.new_users, count // 2)]] = True
    old = Rows(*_part(train, ~new[train.group]), _offsets(np.diff(train.offsets)[~new]))
    model = GroupedRegressor(prior="full", random_state=options.seed)
    model.fit(old.X[:, 1:], old.y, groups=old.group)
    sums = Sums.of(old, np.zeros(len(old.y), int))
    pooled, learnt = sums.pooled(), sums.expectation_maximisation()
    rows = []
    for known in (1, 3, 10, 30):
        place = np.arange(len(train.y)) - np.repeat(train.offsets[:-1], np.diff(train.offsets))
        few_rows = new[train.group] & (place < known)
        lengths = np.minimum(np.diff(train.offsets)[new], known)
        few = Rows(*_part(train, few_rows), _offsets(lengths))
        seen = Rows(*_part(test, new[test.group]), _offsets(np.diff(test.offsets)[new]))
        sums = Sums.of(few, np.zeros(len(few.y), int))
        adapted = model.adapt(few.X[:, 1:], few.y, groups=[("new", one) for one in few.group.tolist()])
        names = [("new", one) for one in seen.group.tolist()]
        found = {
            "pooled": (seen.X * pooled).sum(1),
            "ridge α = 10": _predicted(
                seen, sums.ridge(10.0, np.zeros(sums.size), np.diag(np.arange(sums.size) > 0))
            ),
            "ridge α = 10 around pooled": _predicted(seen, sums.ridge(10.0, pooled, np.eye(sums.size))),
            "EM": _predicted(seen, sums.posterior(*learnt)),
            "adapt": adapted.predict(seen.X[:, 1:], groups=names),
        }
        row: dict[str, Any] = {"rows known": known}
        for name, eta in found.items():
            means = np.add.reduceat((eta - seen.y) ** 2, seen.offsets[:-1]) / np.diff(seen.offsets)
            row[name] = _mean(means)
        rows.append(row)
    return rows


def _predicted(rows: Rows, beta: np.ndarray) -> np.ndarray:
    return (rows.X * beta[rows.group]).sum(1)


def _part(rows: Rows, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows.X[chosen], rows.y[chosen]


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _shown(one: dict[str, Any]) -> dict[str, Any]:
    same = not np.any(one["difference"])
    return {
        "method": one["method"],
        "loss": _mean(one["users"]),
        "difference": "" if same else _mean(one["difference"], signed=True),
        "by row": f"{one['by row']:.4f}",
        "seconds": f"{one['seconds']:.1f}",
    }


def _mean(values: np.ndarray, *, signed: bool = False) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{'+' if signed else ''}.4f} ± {error:.4f}"
