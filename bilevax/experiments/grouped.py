"""`bilevax reproduce grouped`: one prior for thousands of models, beside what is usually done.

ML-1M is a panel: every user is a group, with the ratings as targets (squared loss and quantiles) or whether
they are at least 4 (logistic loss), and as features 10 factors of the items, from a singular value
decomposition of the training ratings. A fifth of every user's ratings are for testing. Other panels are
generated, with known truth, or come with statsmodels. All figures are means over groups of the mean loss of
a group's test rows; differences are paired by group.

A panel, a split and a kind of method are a job (`grouped_trials`); jobs run in several processes.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import numpy as np

from bilevax.experiments.grouped_trials import OURS, Measured, Piece, Scores, measure, pieces
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report

TITLES = {
    "squared": "Squared error, {data}",
    "logistic": "Log-loss of rating ≥ 4, {data}",
    "generated": "Squared error, generated groups",
    "grunfeld": "Squared error of the logarithm of investments, Grunfeld's firms",
    "fertility": "Squared error of the fertility of women, countries",
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
    # Parts of one split follow each other: several have the same panel.
    wanted = [piece for seed in seeds for part in options.parts for piece in pieces(options, part, seed)]
    if options.processes > 1:
        wanted.sort(key=lambda piece: piece.kind != OURS)  # they take longest
    jobs = {piece.name: functools.partial(job, options, piece) for piece in wanted}
    results = kept.fill(jobs, options.processes, alone=True)
    tables: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        found = [_measured_from(options, results, part, seed) for seed in seeds]
        title = TITLES[part].format(data=options.data, new_users=options.new_users)
        if not found[0]:
            print(f"{title}: left out, as statsmodels is not installed")
            continue
        tables[part] = _table(found)
        report.table(f"grouped_{part}", tables[part], title, _NOTE)
    report.finish()
    return tables


def _measured_from(options: GroupedOptions, results: dict[str, Any], part: str, seed: int) -> Measured:
    """What the jobs of one split of a table returned, after it was written and read."""
    out: Measured = {}
    for one in (one for piece in pieces(options, part, seed) for one in results[piece.name]):
        below = None if one["below"] is None else np.asarray(one["below"])
        losses = np.asarray(one["losses"])
        out[one["what"], one["method"]] = Scores(losses, one["by_row"], below, one["seconds"])
    return out


def job(options: GroupedOptions, piece: Piece) -> list[dict[str, Any]]:
    """Fits and measures the methods of a piece."""
    began = time.process_time()
    found = measure(options, piece)
    print(f"{piece.name}: {time.process_time() - began:.0f} s of the processor", flush=True)
    return [
        {"what": what, "method": name} | dataclasses.asdict(scores) for (what, name), scores in found.items()
    ]


def _table(splits: list[Measured]) -> list[dict[str, Any]]:
    """The rows of a table; splits may have other groups, differences are within a split."""
    out, predicted = [], list(dict.fromkeys(what for what, _ in splits[0]))
    for what, name in sorted(splits[0], key=lambda one: predicted.index(one[0])):
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
