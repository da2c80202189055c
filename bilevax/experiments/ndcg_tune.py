"""Tunes the ranking methods: the same number of random trials for each, judged on development data.

A trial is a random draw from the method's ranges; trials run side by side. If a method has several forms
(surrogate and discount), its trials are divided among them, so that no method gets more than another. Seeds
change the result about as much as good hyper-parameters do. So the best trials, the finalists, are repeated
with other seeds, and the one with the best mean wins.

Test items come after the development items, on which no model is trained. Trials are therefore trained
without the items just before the development items: they have to predict equally far ahead.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax import checks
from bilevax.applications.ranking import BILEVEL, METHODS, NeuMF, TrainingSettings, train_many
from bilevax.applications.ranking.methods import DISCOUNTS, SURROGATES
from bilevax.applications.ranking.presets import tuned
from bilevax.experiments.arguments import check_names, make_parser, read_options
from bilevax.experiments.ndcg_parts import Parts, load_parts
from bilevax.experiments.report import Report

Range = tuple[float, float]  # a positive range is sampled uniformly on a logarithmic scale

# All but those of gamma and softness were narrowed by the searches in docs/ranking.md.
COMMON: dict[str, Range] = {
    "learning_rate": (8e-4, 2e-3),
    "weight_decay": (0.3, 1.0),
    "evenness": (-1.5, 0.5),
}
TEMPERATURE: dict[str, Range] = {"temperature": (0.3, 1.2)}
HOT: dict[str, Range] = {"temperature": (0.5, 4.0)}  # for losses that need higher ones
HOT_LOSSES = ("softmax", "gain softmax", "listmle", "neural ndcg", "sl@k")
RANKS: dict[str, Range] = {
    "temperature": (0.4, 1.2),
    "alpha": (0.8, 1.0),
    "beta": (0.5, 1.0),
    "evenness": (-2.6, -1.0),
    "rivals": (0.05, 0.5),
    "focus": (0.2, 0.8),
}
DEPTHS: dict[str, Range] = {"depth": (0.35, 0.8)}
THRESHOLDS: dict[str, Range] = {"gate": (3.0, 20.0), "softness": (0.05, 0.5)}
CORRECTED: dict[str, Range] = {"gamma": (0.01, 1.0)}


JUDGED, REPEATED = "dev ndcg@10", "dev ndcg@10, other seeds"
MEASURED = ("method", JUDGED, REPEATED, "epoch")
# Options that a resumed search may change: its trials are compared one by one.
_MAY_DIFFER = ("methods", "trials", "finalists", "forms")


@dataclasses.dataclass(frozen=True)
class NDCGTuneOptions:
    """The options of `bilevax tune` for ranking data.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: the methods to tune.
      trials: trials per method.
      epochs: epochs of each trial.
      warm_up: epochs of softmax cross-entropy before every bilevel method.
      every: epochs between evaluations on the development data.
      seed: seed of the trials; experiments use other seeds.
      finalists: number of best trials that are repeated.
      repeats: number of other seeds for each finalist; with 0 the best trial wins.
      positives: P, positives per list.
      averaging: epochs over which every model is averaged.
      gap: number of items of every user, just before the development items, that are left out of training.
        Users with fewer than 11 other ratings are left out.
      forms: forms of the bilevel methods, such as "logistic + power": a surrogate, a plus and a discount.
      width: length of the model's vectors.
      users: number of users to use, from the first; None uses all.
    """

    data: str = "ml-1m"
    methods: tuple[str, ...] = METHODS
    trials: int = 24
    epochs: int = 200
    warm_up: int = 20
    every: int = 20
    seed: int = 1000
    finalists: int = 4
    repeats: int = 3
    positives: int = 20
    averaging: float = 10.0
    gap: int = 5
    forms: tuple[str, ...] = ("logistic + power",)
    width: int = 64
    users: int | None = None

    def __post_init__(self) -> None:
        check_names("methods", self.methods, METHODS)

    def quick(self) -> NDCGTuneOptions:
        """A short check: few users, trials and epochs, a small model, and no repeats."""
        return dataclasses.replace(
            self, users=200, trials=2, epochs=2, warm_up=1, every=1, width=8, repeats=0
        )


def ranges(method: str, discount: str = "logarithmic") -> dict[str, Range]:
    """The hyper-parameters of a method that are tuned, with their ranges."""
    if method not in BILEVEL:
        return COMMON | (HOT if method in HOT_LOSSES else TEMPERATURE)
    out = COMMON | RANKS
    if discount == "power":
        out = out | DEPTHS
    if method != "song":
        out = out | THRESHOLDS
    return out | CORRECTED if "bsvrb" in method else out


def draw_trials(method: str, count: int, seed: int, discount: str = "logarithmic") -> dict[str, np.ndarray]:
    """Random hyper-parameters, as columns; the first trial is the middle of every range.

    Example:
      >>> columns = draw_trials("softmax", 4, seed=0)
      >>> sorted(columns), len(columns["temperature"])
      (['evenness', 'learning_rate', 'temperature', 'weight_decay'], 4)
    """
    random = np.random.default_rng(seed)
    out = {}
    for name, (low, high) in ranges(method, discount).items():
        place = np.r_[0.5, random.random(count - 1)]
        out[name] = low * (high / low) ** place if low > 0 else low + (high - low) * place
    return out


def tune(
    options: NDCGTuneOptions, folder: str | Path, *, quick: bool = False, resume: bool = False
) -> dict[str, dict[str, Any]]:
    """Tunes every method; writes all trials and the best of each method to a folder.

    Args:
      options: of the search.
      folder: where the results go.
      quick: run a short check, `options.quick()`.
      resume: reuse the trials in the folder's `trials.json`, and run only the missing ones.

    Returns:
      The best hyper-parameters by method, as `ndcg.run` takes them; they are also in `best.json`.

    Raises:
      ValueError: if the trials cannot be divided among the forms, a form is unknown, or the folder holds a
        different search.
    """
    options = options.quick() if quick else options
    checks.whole_number("finalists", options.finalists, 1)
    checks.whole_number("repeats", options.repeats, 0)
    checks.whole_number("gap", options.gap, 0)
    if options.trials % len(options.forms):
        raise ValueError(f"trials must be a multiple of the {len(options.forms)} forms, got {options.trials}")
    forms = [parse_form(form) for form in options.forms]
    folder, warm = Path(folder), tuned(options.data, "softmax")
    common = {"warm up": warm, "ranges": _all_ranges()}
    rows, best = _found(folder, options, common) if resume else ([], {})
    report = Report(folder, options, quick=quick)
    for name, fact in common.items():
        report.fact(name, fact)
    _save(folder, rows, best)  # replaces the trials of another search, whose options are overwritten
    models = max(options.trials, options.finalists * options.repeats)
    parts = load_parts(options.data, models, options.users, gap=options.gap)
    report.fact("users with enough ratings", parts.train.users)
    search = _Search(options, parts)
    for method in options.methods:
        began = time.perf_counter()
        choices: list[dict[str, Any]] = forms if method in BILEVEL else [{}]
        known = [row for row in rows if row["method"] == method]
        others = [row for row in rows if row["method"] != method]
        mine: list[dict[str, Any]] = []
        for form in choices:
            columns = draw_trials(
                method, options.trials // len(choices), options.seed, **_only(form, "discount")
            )
            keys = jax.random.split(jax.random.key(options.seed), len(columns["learning_rate"]))
            done = _same_trials(known, search.fixed(method, form), columns)
            mine += done or search.train(method, form, columns, keys)
            rows = others + mine
            _save(folder, rows, best)
        mine.sort(key=lambda row: -row[JUDGED])
        search.repeat(method, [row for row in mine[: options.finalists] if REPEATED not in row])
        top = max(mine[: options.finalists], key=lambda row: row.get(REPEATED, row[JUDGED]))
        best[method] = {name: value for name, value in top.items() if name not in MEASURED}
        rows = others + mine
        _save(folder, rows, best)
        repeated = f", {top[REPEATED]:.4f} with other seeds" if REPEATED in top else ""
        seconds = time.perf_counter() - began
        print(
            f"{method}: best dev {mine[0][JUDGED]:.4f} of {len(mine)} trials{repeated}, {seconds:.1f} s",
            flush=True,
        )
    report.finish()
    return best


class _Search:
    """Trains on one data set, with many trials side by side."""

    def __init__(self, options: NDCGTuneOptions, parts: Parts):
        self.options, self.parts = options, parts
        self.model = NeuMF(parts.train.users, parts.train.item_count, options.width)
        self.warm: Any = None

    def fixed(self, method: str, form: dict[str, Any]) -> dict[str, Any]:
        """The hyper-parameters that are not drawn: the form, the common ones, and a method's own size."""
        common = {"positives": self.options.positives, "averaging": self.options.averaging}
        return form | common | _only(tuned(self.options.data, method), "negatives")

    def train(
        self, method: str, form: dict[str, Any], columns: dict[str, np.ndarray], keys: Any
    ) -> list[dict[str, Any]]:
        """Trains once per entry of the columns; returns one row of results for each."""
        options = self.options
        count = len(next(iter(columns.values())))
        fixed = self.fixed(method, form)
        found = train_many(
            self.parts.train,
            self.model,
            method,
            TrainingSettings().replace(**fixed),
            columns,
            keys=keys,
            epochs=options.epochs,
            dev=self.parts.held_dev,
            x0=self._start(method, count),
            every=options.every,
            cutoffs=(),
        )
        reached = np.where(np.isfinite(found.dev), found.dev, 0).max(1)
        return [
            {"method": method, JUDGED: float(value), "epoch": int(found.best_epoch[place])}
            | fixed
            | {name: _rounded(column[place]) for name, column in columns.items()}
            for place, value in enumerate(reached)
        ]

    def repeat(self, method: str, finalists: list[dict[str, Any]]) -> None:
        """Repeats finalists with other seeds, the same for all, and adds the mean to each row."""
        repeats = self.options.repeats
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in finalists if repeats else []:  # finalists of the same form run side by side
            groups.setdefault((row.get("surrogate"), row.get("discount")), []).append(row)
        for rows in groups.values():
            form = _only(rows[0], "surrogate", "discount")
            names = ranges(method, **_only(form, "discount"))
            columns = {name: np.repeat([row[name] for row in rows], repeats) for name in names}
            keys = jax.random.split(jax.random.key(self.options.seed + 1), repeats)
            again = self.train(method, form, columns, jnp.tile(keys, len(rows)))
            for place, row in enumerate(rows):
                row[REPEATED] = float(
                    np.mean([one[JUDGED] for one in again[place * repeats : (place + 1) * repeats]])
                )

    def _start(self, method: str, count: int) -> Any:
        """A model trained by softmax cross-entropy, from which all trials of bilevel methods start."""
        if method not in BILEVEL or not self.options.warm_up:
            return None
        if self.warm is None:
            options = self.options
            self.warm = train_many(
                self.parts.train,
                self.model,
                "softmax",
                TrainingSettings().replace(**tuned(options.data, "softmax")),
                keys=jax.random.split(jax.random.key(options.seed), 1),
                epochs=options.warm_up,
                dev=self.parts.held_dev,
                every=options.warm_up,
            ).x
        return jax.tree.map(lambda a: jnp.broadcast_to(a[0], (count, *a.shape[1:])), self.warm)


def parse_form(form: str) -> dict[str, str]:
    """The surrogate and the discount of a form.

    Example:
      >>> parse_form("logistic + power")
      {'surrogate': 'logistic', 'discount': 'power'}
    """
    surrogate, _, discount = (part.strip() for part in form.partition("+"))
    if surrogate not in SURROGATES or discount not in DISCOUNTS:
        raise ValueError(
            f"a form must be one of {list(SURROGATES)}, a plus, and one of {list(DISCOUNTS)}, got {form!r}"
        )
    return {"surrogate": surrogate, "discount": discount}


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _all_ranges() -> dict[str, Any]:
    """All ranges, in a form that JSON can hold."""
    parts = (COMMON, TEMPERATURE, HOT, RANKS, DEPTHS, THRESHOLDS, CORRECTED)
    return {f"{place} {name}": list(span) for place, part in enumerate(parts) for name, span in part.items()}


def _found(
    folder: Path, options: NDCGTuneOptions, common: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The trials and the best hyper-parameters of an earlier search with the same options."""
    if not (folder / "trials.json").exists():
        return [], {}
    facts, rows, best = (
        json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("settings", "trials", "best")
    )
    same = {field.name for field in dataclasses.fields(NDCGTuneOptions)} - set(_MAY_DIFFER)
    mine = {name: getattr(options, name) for name in sorted(same)} | common
    theirs = facts["options"] | _only(facts, *common)
    for name, value in mine.items():
        if theirs.get(name, "nothing") != value:
            raise ValueError(
                f"{folder} holds a search with {name}={theirs.get(name, 'nothing')!r}, got {name}={value!r}"
            )
    return rows, best


def _same_trials(
    known: list[dict[str, Any]], fixed: dict[str, Any], columns: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """The known trials of a method with these hyper-parameters; none if one is missing."""
    mine = [row for row in known if fixed.items() <= row.items()]
    drawn = zip(*(map(_rounded, column) for column in columns.values()), strict=True)
    there = (tuple(row.get(name, np.nan) for name in columns) for row in mine)
    return mine if sorted(drawn) == sorted(there) else []


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _save(folder: Path, rows: list[dict[str, Any]], best: dict[str, dict[str, Any]]) -> None:
    """Writes the results so far, so that an interrupted search can be resumed."""
    (folder / "trials.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "best.json").write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """`python -m bilevax.experiments.ndcg_tune`: `bilevax tune` without the extra `cli`."""
    parser = make_parser(NDCGTuneOptions, __doc__, "results/ndcg-tune")
    parser.add_argument("--resume", action="store_true", help="run only what is missing in the folder")
    given = parser.parse_args()
    tune(read_options(NDCGTuneOptions, given), given.out, resume=given.resume)


if __name__ == "__main__":
    main()
