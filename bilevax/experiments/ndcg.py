"""Top-K NDCG: every method on the same split, lists and model, beside the paper's table.

Every user's last five ratings are for test, the five before them choose the epoch. All items that a user did
not rate before compete. Seeds run side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.applications.ranking import (
    BILEVEL,
    METHODS,
    Held,
    NeuMF,
    Popularity,
    Ratings,
    Trainings,
    TrainingSettings,
    evaluate,
    hold_out,
    train_many,
)
from bilevax.applications.ranking.presets import tuned
from bilevax.data import DataError, load_interactions, split_last
from bilevax.experiments.report import Report, markdown, spread

CUTOFFS = (10, 20, 50)
RIVAL = "lambdarank"  # what the paired differences are taken with
# Hu et al. 2023, table of test NDCG: ML-20M and Netflix, each @10, @20, @50. Other data than ML-1M, and only
# the very last item is held out there.
PAPER = {
    "ranknet": (0.0538, 0.0744, 0.1086, 0.0362, 0.0489, 0.0730),
    "listnet": (0.0660, 0.0875, 0.1227, 0.0532, 0.0700, 0.0992),
    "listmle": (0.0588, 0.0799, 0.1137, 0.0376, 0.0508, 0.0753),
    "lambdarank": (0.0697, 0.0913, 0.1259, 0.0531, 0.0693, 0.0976),
    "approx ndcg": (0.0735, 0.0938, 0.1284, 0.0434, 0.0592, 0.0873),
    "neural ndcg": (0.0692, 0.0901, 0.1232, 0.0554, 0.0718, 0.1003),
    "song": (0.0748, 0.0969, 0.1326, 0.0571, 0.0749, 0.1050),
    "k-song": (0.0747, 0.0973, 0.1340, 0.0573, 0.0743, 0.1042),
    "re-bsvrb v1": (0.0749, 0.0963, 0.1314, 0.0585, 0.0760, 0.1061),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the experiment is run with.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: which methods, in this order.
      seeds: how many runs of each.
      first_seed: tuning uses others.
      epochs: of each run.
      warm_up: epochs of softmax cross-entropy that every bilevel method starts from.
      every: epochs between two looks at the development data.
      width: of the model's vectors.
      users: use only the first so many users; None takes all.
    """

    data: str = "ml-1m"
    methods: tuple[str, ...] = METHODS
    seeds: int = 5
    first_seed: int = 0
    epochs: int = 250
    warm_up: int = 20
    every: int = 10
    width: int = 64
    users: int | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
    """A split on the device, and its held-out parts made ready for `runs` runs side by side."""

    train: Ratings
    dev: Ratings
    test: Ratings
    held_dev: Held
    held_test: Held


def load_parts(name: str, runs: int = 1, users: int | None = None, *, gap: int = 0) -> Parts:
    """A data set, split: five last ratings of every user for test, five before them for development.

    Args:
      name: a data set of `bilevax.data.load_interactions`.
      runs: how many models are to be evaluated side by side.
      users: use only the first so many users; None takes all.
      gap: leave so many ratings of every user before those for development out of `train`; they are not
        ranked either. With 5, development data are as far from training data as test data are.

    Raises:
      DataError: if no user has the 11 ratings, and those of the gap, that it takes.
    """
    table = load_interactions(name)
    if users is not None:
        few = np.flatnonzero(table.user < users)
        columns = {field: getattr(table, field)[few] for field in ("user", "item", "rating", "time")}
        table = dataclasses.replace(table, **columns, user_ids=table.user_ids[:users])
    if gap and table.csr().counts.max() < 11 + gap:
        raise DataError(f"a gap of {gap} takes users with {11 + gap} ratings, got none: try a smaller gap")
    table = table.at_least(11 + gap)
    split = split_last(table, 5, 5)
    seen, dev, test = (Ratings.of(part) for part in (split.train, split.dev, split.test))
    train = Ratings.of(split_last(table, gap, 10).train) if gap else seen
    group = max(1, min(train.users, group_scores() // (train.item_count * runs)))
    return Parts(
        train, dev, test, hold_out(dev, [seen], group=group), hold_out(test, [seen, dev], group=group)
    )


def group_scores() -> int:
    """How many scores are made at once."""
    return 2**20 if jax.default_backend() == "cpu" else 2**23


def run(
    settings: Settings, folder: str | Path, *, quick: bool = False, numbers: Mapping[str, Any] | None = None
) -> dict[str, Trainings]:
    """Trains every method with all seeds, and writes the tables and curves to a folder.

    Args:
      settings: what to run.
      folder: where the results go.
      quick: marks the tables as a short check.
      numbers: numbers by method, in place of the tuned ones.

    Returns:
      The trainings by method.
    """
    unknown = sorted(set(settings.methods) - set(METHODS))
    if unknown:
        raise ValueError(f"methods must be among {list(METHODS)}, got {unknown}")
    chosen = {m: (numbers or {}).get(m, tuned(settings.data, m)) for m in settings.methods}
    report = Report(folder, {"experiment": settings, "numbers": chosen}, quick=quick)
    parts = load_parts(settings.data, settings.seeds, settings.users)
    report.fact("protocol", parts.held_test.protocol)
    model = NeuMF(parts.train.users, parts.train.item_count, settings.width)
    keys = jax.vmap(jax.random.key)(settings.first_seed + np.arange(settings.seeds))
    popular = _popularity(parts)
    warm = None
    found: dict[str, Trainings] = {}
    for method in settings.methods:
        began = time.perf_counter()
        bilevel = method in BILEVEL
        if bilevel and settings.warm_up and warm is None:
            warm = _train(parts, model, "softmax", tuned(settings.data, "softmax"), keys, settings, warm=True)
        x0 = warm.x if bilevel and warm is not None else None
        found[method] = _train(parts, model, method, chosen[method], keys, settings, x0=x0)
        print(f"{method}: {time.perf_counter() - began:.1f} s", _line(found[method]), flush=True)
        _write(report, settings, parts, popular, found, show=method == settings.methods[-1])
    report.finish()
    return found


def _train(
    parts: Parts,
    model: Any,
    method: str,
    numbers: Mapping[str, Any],
    keys: Any,
    settings: Settings,
    x0: Any = None,
    warm: bool = False,
) -> Trainings:
    return train_many(
        parts.train,
        model,
        method,
        TrainingSettings().replace(**numbers),
        keys=keys,
        epochs=settings.warm_up if warm else settings.epochs,
        dev=parts.held_dev,
        test=None if warm else parts.held_test,
        x0=x0,
        every=settings.warm_up if warm else settings.every,
        cutoffs=_cutoffs(parts),
    )


def paired(one: Trainings, other: Trainings, metric: str) -> tuple[float, float]:
    """The mean over users of the difference of two methods (each the mean of its seeds), and its error."""
    difference = one.test[metric].mean(0) - other.test[metric].mean(0)
    difference = difference[np.isfinite(difference)]
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


def _cutoffs(parts: Parts) -> list[int]:
    return [k for k in CUTOFFS if k <= parts.train.item_count]


def _popularity(parts: Parts) -> dict[str, str]:
    """The table's first row."""
    popular, cutoffs = Popularity(), _cutoffs(parts)
    plain = jax.jit(lambda x: evaluate(popular, x, parts.held_test, cutoffs))(popular.count(parts.train))
    means = {f"NDCG@{k}": f"{np.nanmean(np.asarray(plain[f'ndcg@{k}'])):.4f}" for k in cutoffs}
    return {"method": "popularity"} | means


def _write(
    report: Report,
    settings: Settings,
    parts: Parts,
    popular: dict[str, str],
    found: Mapping[str, Trainings],
    show: bool,
) -> None:
    """All tables and curves of what there is so far: an interrupted experiment leaves what it had."""
    cutoffs = _cutoffs(parts)
    rows: list[dict[str, Any]] = [dict(popular)]
    for method, one in found.items():
        row: dict[str, Any] = {"method": method}
        row |= {f"NDCG@{k}": spread(one.means(f"ndcg@{k}")) for k in cutoffs}
        row[f"recall@{cutoffs[0]}"] = spread(one.means(f"recall@{cutoffs[0]}"))
        if RIVAL in found and method != RIVAL:
            for k in (cutoffs[0], cutoffs[-1]):
                mean, error = paired(one, found[RIVAL], f"ndcg@{k}")
                row[f"− {RIVAL} @{k}"] = f"{mean:+.4f} ± {error:.4f}"
        row["best epoch"] = spread(one.best_epoch, 0)
        row["s/epoch"] = f"{one.seconds[-1] / one.epochs[-1]:.4f}"
        rows.append(row)
    note = (
        f"{settings.data}, test, {parts.held_test.protocol}; mean ± sd of {settings.seeds} seeds; "
        "differences: paired by user, mean ± standard error; s/epoch: all seeds together, without "
        "compilation and evaluation."
    )
    if show:
        _table(report, "ndcg", rows, "Top-K NDCG", note)
    else:
        (report.folder / "ndcg.md").write_text(f"# So far\n\n{markdown(rows)}\n\n{note}\n", encoding="utf-8")
    published = [
        {"method": m}
        | dict(zip(("ML-20M@10", "@20", "@50", "Netflix@10", "@20 ", "@50 "), values, strict=True))
        for m, values in PAPER.items()
    ]
    (report.folder / "paper.md").write_text(
        "# The paper's table\n\nOther data (ML-20M, Netflix), one held-out item per user: not to be compared "
        f"number by number.\n\n{markdown(published)}\n",
        encoding="utf-8",
    )
    curves = [
        {"method": m, "seed": seed, "epoch": int(e), "seconds": float(s), "dev ndcg@10": float(v)}
        for m, one in found.items()
        for seed, line in enumerate(one.dev)
        for e, s, v in zip(one.epochs, one.seconds, line, strict=True)
    ]
    lines = [",".join(curves[0])] + [",".join(str(value) for value in row.values()) for row in curves]
    (report.folder / "curves.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _plot(report, found)


def _plot(report: Report, found: Mapping[str, Trainings]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the curves are in curves.csv
        return
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, against in zip(figure.subplots(1, 2, sharey=True), ("epochs", "seconds"), strict=True):
        for method, one in found.items():
            axes.plot(getattr(one, against), one.dev.mean(0), label=method)
        axes.set_xlabel(against if against == "epochs" else "seconds, all seeds together")
    figure.axes[0].set_ylabel("development NDCG@10")
    figure.axes[0].legend(fontsize="small", ncols=2)
    report.figure("curves", figure)


def _table(report: Report, name: str, rows: Sequence[Mapping[str, Any]], title: str, note: str) -> None:
    try:
        report.table(name, rows, title, note)
    except ImportError:  # written all the same; rich is only needed to show it
        print(markdown(rows), note, sep="\n\n", flush=True)


def _line(one: Trainings) -> str:
    return "  ".join(f"{name} {spread(one.means(name))}" for name in one.test if name.startswith("ndcg"))


def read_numbers(path: str | Path) -> dict[str, dict[str, Any]]:
    """Numbers by method from a JSON file.

    Raises:
      ValueError: if it is none, or names something that is no method.
    """
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"numbers must be a JSON file, got {path}: {error}") from error
    if not (isinstance(found, dict) and all(isinstance(one, dict) for one in found.values())):
        raise ValueError(f"numbers must hold a table of numbers by method, got another thing in {path}")
    unknown = sorted(set(found) - set(METHODS))
    if unknown:
        raise ValueError(f"numbers must be of methods among {list(METHODS)}, got {unknown} in {path}")
    return found


def main() -> None:
    """`python -m bilevax.experiments.ndcg`: for machines without the command-line extras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=Settings.data)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=Settings.seeds)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--warm-up", type=int, default=Settings.warm_up)
    parser.add_argument("--every", type=int, default=Settings.every)
    parser.add_argument("--users", type=int)
    parser.add_argument("--numbers", help="a JSON file of numbers by method, in place of the tuned ones")
    parser.add_argument("--out", default="results/ndcg")
    given = parser.parse_args()
    fields = {field.name for field in dataclasses.fields(Settings)}
    chosen: dict[str, Any] = {name: value for name, value in vars(given).items() if name in fields}
    numbers = given.numbers and read_numbers(given.numbers)
    chosen["methods"] = tuple(given.methods)
    run(Settings(**chosen), given.out, numbers=numbers)


if __name__ == "__main__":
    main()
