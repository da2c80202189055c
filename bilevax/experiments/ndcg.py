"""Top-K NDCG of every ranking method on the same split, lists and model, and the paper's table.

Every user's last five ratings are for testing; the five before them choose the epoch. Every item that the
user did not rate before is ranked. Seeds run side by side.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

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
from bilevax.experiments.arguments import make_parser, read_options
from bilevax.experiments.report import Report, markdown, spread

CUTOFFS = (10, 20, 50)
QUICK = ("lambdarank", "k-song")  # the methods of a short check: a plain loss and a bilevel one
RIVAL = "lambdarank"  # the other methods are compared with it, user by user
# Hu et al. 2023, test NDCG @10, @20 and @50 on ML-20M, then on Netflix, with one held-out item per user.
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
class NDCGOptions:
    """The options of `bilevax reproduce ndcg`.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: the methods, in this order.
      seeds: trainings per method.
      first_seed: the first seed; tuning uses other seeds.
      epochs: epochs of each training.
      warm_up: epochs of softmax cross-entropy before every bilevel method.
      every: epochs between evaluations on the development data.
      width: length of the model's vectors.
      users: number of users to use, from the first; None uses all.
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

    def quick(self) -> NDCGOptions:
        """A short check: few users, seeds and epochs, a small model, and few methods unless some were named.

        Nearly all of its time is compilation, of one program per method.
        """
        methods = QUICK if self.methods == METHODS else self.methods
        return dataclasses.replace(
            self, methods=methods, users=200, seeds=2, epochs=2, warm_up=1, every=1, width=8
        )


@dataclasses.dataclass(frozen=True)
class Parts:
    """A split on the device, and its held-out parts in the form that `evaluate` takes."""

    train: Ratings
    dev: Ratings
    test: Ratings
    held_dev: Held
    held_test: Held


def load_parts(name: str, models: int = 1, users: int | None = None, *, gap: int = 0) -> Parts:
    """Splits a data set: the last five ratings of every user for testing, the five before for development.

    Args:
      name: a data set of `bilevax.data.load_interactions`.
      models: number of models that are evaluated side by side.
      users: number of users to use, from the first; None uses all.
      gap: number of ratings of every user, just before the development ratings, to leave out of `train`; they
        are not ranked either. With a gap of 5 the development data are as far from the training data as the
        test data are.

    Raises:
      DataError: if no user has 11 ratings and those of the gap.
    """
    table = load_interactions(name)
    if users is not None:
        few = np.flatnonzero(table.user < users)
        columns = {field: getattr(table, field)[few] for field in ("user", "item", "rating", "time")}
        table = dataclasses.replace(table, **columns, user_ids=table.user_ids[:users])
    if gap and table.csr().counts.max() < 11 + gap:
        raise DataError(f"a gap of {gap} needs users with {11 + gap} ratings, got none: try a smaller gap")
    table = table.at_least(11 + gap)
    split = split_last(table, 5, 5)
    seen, dev, test = (Ratings.of(part) for part in (split.train, split.dev, split.test))
    train = Ratings.of(split_last(table, gap, 10).train) if gap else seen
    group = max(1, min(train.users, group_scores() // (train.item_count * models)))
    return Parts(
        train, dev, test, hold_out(dev, [seen], group=group), hold_out(test, [seen, dev], group=group)
    )


def group_scores() -> int:
    """How many scores to compute at once."""
    return 2**20 if jax.default_backend() == "cpu" else 2**23


def run(
    options: NDCGOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    hyperparameters: Mapping[str, Any] | None = None,
) -> dict[str, Trainings]:
    """Trains every method with all seeds; writes tables and curves to a folder.

    Args:
      options: of the experiment.
      folder: where the results go.
      quick: run a short check, `options.quick()`.
      hyperparameters: by method, in place of the tuned ones.

    Returns:
      The trainings by method.
    """
    unknown = sorted(set(options.methods) - set(METHODS))
    if unknown:
        raise ValueError(f"methods must be among {list(METHODS)}, got {unknown}")
    options = options.quick() if quick else options
    chosen = {m: (hyperparameters or {}).get(m, tuned(options.data, m)) for m in options.methods}
    report = Report(folder, {"experiment": options, "hyperparameters": chosen}, quick=quick)
    parts = load_parts(options.data, options.seeds, options.users)
    report.fact("protocol", parts.held_test.protocol)
    model = NeuMF(parts.train.users, parts.train.item_count, options.width)
    keys = jax.vmap(jax.random.key)(options.first_seed + np.arange(options.seeds))
    popular = _popularity(parts)
    warm = None
    found: dict[str, Trainings] = {}
    for method in options.methods:
        began = time.perf_counter()
        bilevel = method in BILEVEL
        if bilevel and options.warm_up and warm is None:
            warm = _train(parts, model, "softmax", tuned(options.data, "softmax"), keys, options, warm=True)
        x0 = warm.x if bilevel and warm is not None else None
        found[method] = _train(parts, model, method, chosen[method], keys, options, x0=x0)
        print(f"{method}: {time.perf_counter() - began:.1f} s", _line(found[method]), flush=True)
        _write(report, options, parts, popular, found, show=method == options.methods[-1])
    report.finish()
    return found


def _train(
    parts: Parts,
    model: Any,
    method: str,
    hyperparameters: Mapping[str, Any],
    keys: Any,
    options: NDCGOptions,
    x0: Any = None,
    warm: bool = False,
) -> Trainings:
    return train_many(
        parts.train,
        model,
        method,
        TrainingSettings().replace(**hyperparameters),
        keys=keys,
        epochs=options.warm_up if warm else options.epochs,
        dev=parts.held_dev,
        test=None if warm else parts.held_test,
        x0=x0,
        every=options.warm_up if warm else options.every,
        cutoffs=_cutoffs(parts),
    )


def paired(one: Trainings, other: Trainings, metric: str) -> tuple[float, float]:
    """The mean over users of the difference of two methods, averaged over seeds; and its standard error."""
    difference = one.test[metric].mean(0) - other.test[metric].mean(0)
    difference = difference[np.isfinite(difference)]
    return float(difference.mean()), float(stats.sem(difference))


def _cutoffs(parts: Parts) -> list[int]:
    return [k for k in CUTOFFS if k <= parts.train.item_count]


def _popularity(parts: Parts) -> dict[str, str]:
    """The first row of the table: items ranked by popularity."""
    popular, cutoffs = Popularity(), _cutoffs(parts)
    plain = jax.jit(lambda x: evaluate(popular, x, parts.held_test, cutoffs))(popular.count(parts.train))
    means = {f"NDCG@{k}": f"{np.nanmean(np.asarray(plain[f'ndcg@{k}'])):.4f}" for k in cutoffs}
    return {"method": "popularity"} | means


def _write(
    report: Report,
    options: NDCGOptions,
    parts: Parts,
    popular: dict[str, str],
    found: Mapping[str, Trainings],
    show: bool,
) -> None:
    """Writes all tables and curves so far, so that an interrupted experiment keeps its results."""
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
        f"{options.data}, test data, {parts.held_test.protocol}; mean ± standard deviation over "
        f"{options.seeds} seeds; differences: paired by user, mean ± standard error; s/epoch: seconds of all "
        "seeds together, without compilation and evaluation."
    )
    if show:
        report.table("ndcg", rows, "Top-K NDCG", note)
    else:
        (report.folder / "ndcg.md").write_text(f"# So far\n\n{markdown(rows)}\n\n{note}\n", encoding="utf-8")
    published = [
        {"method": m}
        | dict(zip(("ML-20M@10", "@20", "@50", "Netflix@10", "@20 ", "@50 "), values, strict=True))
        for m, values in PAPER.items()
    ]
    (report.folder / "paper.md").write_text(
        "# The paper's table\n\nOn other data (ML-20M, Netflix), with one held-out item per user: the values "
        f"are not directly comparable.\n\n{markdown(published)}\n",
        encoding="utf-8",
    )
    curves = [
        {"method": m, "seed": seed, "epoch": int(e), "seconds": float(s), "dev ndcg@10": float(v)}
        for m, one in found.items()
        for seed, line in enumerate(one.dev)
        for e, s, v in zip(one.epochs, one.seconds, line, strict=True)
    ]
    report.csv("curves", curves)
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


def _line(one: Trainings) -> str:
    return "  ".join(f"{name} {spread(one.means(name))}" for name in one.test if name.startswith("ndcg"))


def read_hyperparameters(path: str | Path) -> dict[str, dict[str, Any]]:
    """Hyper-parameters by method from a JSON file, such as the best.json of `bilevax tune`.

    Raises:
      ValueError: if it is not such a file, or names an unknown method.
    """
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"hyperparameters must be a JSON file, got {path}: {error}") from error
    if not (isinstance(found, dict) and all(isinstance(one, dict) for one in found.values())):
        raise ValueError(f"hyperparameters must be a JSON object of objects, one by method, got {path}")
    unknown = sorted(set(found) - set(METHODS))
    if unknown:
        raise ValueError(f"hyperparameters must be of methods among {list(METHODS)}, got {unknown} in {path}")
    return found


def main() -> None:
    """`python -m bilevax.experiments.ndcg`: `bilevax reproduce ndcg` without the extra `cli`."""
    parser = make_parser(NDCGOptions, __doc__, "results/ndcg")
    parser.add_argument("--hyperparameters", help="a JSON file, by method, in place of the tuned ones")
    given = parser.parse_args()
    chosen = given.hyperparameters and read_hyperparameters(given.hyperparameters)
    run(read_options(NDCGOptions, given), given.out, hyperparameters=chosen)


if __name__ == "__main__":
    main()
