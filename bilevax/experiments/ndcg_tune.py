"""Settings of the ranking methods: equal numbers of random trials for each, side by side, judged on dev data.

A trial is a draw from the method's ranges. Where a method has a choice of forms (surrogate and discount), its
trials are divided among them: no method gets more trials than another. Seeds differ by as much as good
settings do, so that the best trials are run again with other seeds, and the best in the mean is taken.

Test items come after the development items, which no model is trained on. Trials are trained without the
items just before the development items, and so are judged on what is asked of them: to look as far ahead.
"""

from __future__ import annotations

import argparse
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
from bilevax.experiments.ndcg import Parts, load_parts
from bilevax.experiments.report import Report

Range = tuple[float, float]  # drawn evenly on a logarithmic scale, if it is of positive numbers

# Narrowed down by the searches in docs/ranking.md, but for gamma and softness.
COMMON: dict[str, Range] = {
    "learning_rate": (8e-4, 2e-3),
    "weight_decay": (0.3, 1.0),
    "evenness": (-1.5, 0.5),
}
TEMPERATURE: dict[str, Range] = {"temperature": (0.3, 1.2)}
HOT: dict[str, Range] = {"temperature": (0.5, 4.0)}  # for losses that want larger ones
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
# In a resumed search; trials are compared one by one.
_MAY_DIFFER = ("methods", "trials", "finalists", "forms")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What tuning is run with.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: which methods to tune.
      trials: per method.
      epochs: of each trial.
      warm_up: epochs of softmax cross-entropy that every bilevel method starts from.
      every: epochs between two looks at the development data.
      seed: of the trials; experiments use other seeds.
      finalists: how many of the trials, the best of all, are run again.
      repeats: with how many other seeds; 0 takes the best trial as it is.
      positives: P of every list.
      averaging: epochs over which every model is averaged.
      gap: how many items of every user, those before the development items, are left out of training; users
        with less than 11 ratings beside them are left out altogether.
      forms: the choices of the bilevel methods: a surrogate and a discount, with a plus between them.
      width: of the model's vectors.
      users: use only the first so many users; None takes all.
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


def ranges(method: str, discount: str = "logarithmic") -> dict[str, Range]:
    """What is tuned of a method."""
    if method not in BILEVEL:
        return COMMON | (HOT if method in HOT_LOSSES else TEMPERATURE)
    out = COMMON | RANKS
    if discount == "power":
        out = out | DEPTHS
    if method != "song":
        out = out | THRESHOLDS
    return out | CORRECTED if "bsvrb" in method else out


def draw_trials(method: str, count: int, seed: int, discount: str = "logarithmic") -> dict[str, np.ndarray]:
    """Random settings, as columns; the first trial is the middle of every range.

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
    settings: Settings, folder: str | Path, *, quick: bool = False, resume: bool = False
) -> dict[str, dict[str, Any]]:
    """Tunes every method, and writes all trials and the best of each to a folder.

    Args:
      settings: what to run.
      folder: where the results go.
      quick: marks them as a short check.
      resume: take the trials that are in the folder's `trials.json` already, and run what is missing.

    Returns:
      The best numbers by method, as `ndcg.run` takes them (`best.json`).

    Raises:
      ValueError: if the trials cannot be divided among the forms, a form is not known, or the folder is of
        another search.
    """
    checks.whole_number("finalists", settings.finalists, 1)
    checks.whole_number("repeats", settings.repeats, 0)
    checks.whole_number("gap", settings.gap, 0)
    if settings.trials % len(settings.forms):
        raise ValueError(
            f"trials must be a multiple of the {len(settings.forms)} forms, got {settings.trials}"
        )
    forms = [parse_form(form) for form in settings.forms]
    folder, warm = Path(folder), tuned(settings.data, "softmax")
    common = {"warm up": warm, "ranges": _all_ranges()}
    rows, best = _found(folder, settings, common) if resume else ([], {})
    report = Report(folder, settings, quick=quick)
    for name, fact in common.items():
        report.fact(name, fact)
    _keep(folder, rows, best)  # from here on the folder's trials are of these settings
    runs = max(settings.trials, settings.finalists * settings.repeats)
    parts = load_parts(settings.data, runs, settings.users, gap=settings.gap)
    report.fact("users with enough ratings", parts.train.users)
    search = _Search(settings, parts)
    for method in settings.methods:
        began = time.perf_counter()
        choices: list[dict[str, Any]] = forms if method in BILEVEL else [{}]
        known = [row for row in rows if row["method"] == method]
        others = [row for row in rows if row["method"] != method]
        mine: list[dict[str, Any]] = []
        for form in choices:
            columns = draw_trials(
                method, settings.trials // len(choices), settings.seed, **_only(form, "discount")
            )
            keys = jax.random.split(jax.random.key(settings.seed), len(columns["learning_rate"]))
            again = _same_trials(known, search.fixed(method, form), columns)
            mine += again or search.run(method, form, columns, keys)
            rows = others + mine
            _keep(folder, rows, best)
        mine.sort(key=lambda row: -row[JUDGED])
        search.repeat(method, [row for row in mine[: settings.finalists] if REPEATED not in row])
        top = max(mine[: settings.finalists], key=lambda row: row.get(REPEATED, row[JUDGED]))
        best[method] = {name: value for name, value in top.items() if name not in MEASURED}
        rows = others + mine
        _keep(folder, rows, best)
        repeated = f", {top[REPEATED]:.4f} with other seeds" if REPEATED in top else ""
        seconds = time.perf_counter() - began
        print(
            f"{method}: best dev {mine[0][JUDGED]:.4f} of {len(mine)} trials{repeated}, {seconds:.1f} s",
            flush=True,
        )
    report.finish()
    return best


class _Search:
    """Runs of one data set, side by side."""

    def __init__(self, settings: Settings, parts: Parts):
        self.settings, self.parts = settings, parts
        self.model = NeuMF(parts.train.users, parts.train.item_count, settings.width)
        self.warm: Any = None

    def fixed(self, method: str, form: dict[str, Any]) -> dict[str, Any]:
        """What is not drawn: a form, what all methods have in common, and a size that one has of its own."""
        common = {"positives": self.settings.positives, "averaging": self.settings.averaging}
        return form | common | _only(tuned(self.settings.data, method), "negatives")

    def run(
        self, method: str, form: dict[str, Any], columns: dict[str, np.ndarray], keys: Any
    ) -> list[dict[str, Any]]:
        """Trains once per row of the columns; a row of results for each."""
        settings = self.settings
        count = len(next(iter(columns.values())))
        fixed = self.fixed(method, form)
        found = train_many(
            self.parts.train,
            self.model,
            method,
            TrainingSettings().replace(**fixed),
            columns,
            keys=keys,
            epochs=settings.epochs,
            dev=self.parts.held_dev,
            x0=self._start(method, count),
            every=settings.every,
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
        """Runs finalists with other seeds, the same for all, and notes down the mean of each."""
        repeats = self.settings.repeats
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in finalists if repeats else []:  # those of one form go side by side
            groups.setdefault((row.get("surrogate"), row.get("discount")), []).append(row)
        for rows in groups.values():
            form = _only(rows[0], "surrogate", "discount")
            names = ranges(method, **_only(form, "discount"))
            columns = {name: np.repeat([row[name] for row in rows], repeats) for name in names}
            keys = jax.random.split(jax.random.key(self.settings.seed + 1), repeats)
            again = self.run(method, form, columns, jnp.tile(keys, len(rows)))
            for place, row in enumerate(rows):
                row[REPEATED] = float(
                    np.mean([one[JUDGED] for one in again[place * repeats : (place + 1) * repeats]])
                )

    def _start(self, method: str, count: int) -> Any:
        """For bilevel methods one model, trained by softmax cross-entropy, that all runs start from."""
        if method not in BILEVEL or not self.settings.warm_up:
            return None
        if self.warm is None:
            settings = self.settings
            numbers = TrainingSettings().replace(**tuned(settings.data, "softmax"))
            key = jax.random.split(jax.random.key(settings.seed), 1)
            plan = {"epochs": settings.warm_up, "every": settings.warm_up, "dev": self.parts.held_dev}
            self.warm = train_many(self.parts.train, self.model, "softmax", numbers, keys=key, **plan).x
        return jax.tree.map(lambda a: jnp.broadcast_to(a[0], (count, *a.shape[1:])), self.warm)


def parse_form(form: str) -> dict[str, str]:
    """A form's surrogate and discount.

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
    """What every method's numbers are drawn from, as it is written to a file."""
    parts = (COMMON, TEMPERATURE, HOT, RANKS, DEPTHS, THRESHOLDS, CORRECTED)
    return {f"{place} {name}": list(span) for place, part in enumerate(parts) for name, span in part.items()}


def _found(
    folder: Path, settings: Settings, common: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The trials, and the best of them, of an earlier search with the same settings."""
    if not (folder / "trials.json").exists():
        return [], {}
    facts, rows, best = (
        json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("settings", "trials", "best")
    )
    same = {field.name for field in dataclasses.fields(Settings)} - set(_MAY_DIFFER)
    mine = {name: getattr(settings, name) for name in sorted(same)} | common
    theirs = facts["settings"] | _only(facts, *common)
    for name, value in mine.items():
        if theirs.get(name, "nothing") != value:
            raise ValueError(
                f"{folder} holds a search with {name}={theirs.get(name, 'nothing')!r}, got {name}={value!r}"
            )
    return rows, best


def _same_trials(
    known: list[dict[str, Any]], fixed: dict[str, Any], columns: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Those of a method's known trials that have these numbers, if they are all of them."""
    mine = [row for row in known if fixed.items() <= row.items()]
    drawn = zip(*(map(_rounded, column) for column in columns.values()), strict=True)
    there = (tuple(row.get(name, np.nan) for name in columns) for row in mine)
    return mine if sorted(drawn) == sorted(there) else []


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _keep(folder: Path, rows: list[dict[str, Any]], best: dict[str, dict[str, Any]]) -> None:
    """Writes what there is so far: an interrupted search leaves what it had."""
    (folder / "trials.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "best.json").write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """`python -m bilevax.experiments.ndcg_tune`: for machines without the command-line extras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=Settings.data)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--forms", nargs="+", default=list(Settings.forms))
    for name in ("trials", "epochs", "warm_up", "every", "seed", "finalists", "repeats", "positives", "gap"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name))
    parser.add_argument("--averaging", type=float, default=Settings.averaging)
    parser.add_argument("--users", type=int)
    parser.add_argument("--out", default="results/ndcg-tune")
    parser.add_argument("--resume", action="store_true", help="run what is missing in the folder")
    given: dict[str, Any] = vars(parser.parse_args())
    folder, resume = given.pop("out"), given.pop("resume")
    for name in ("methods", "forms"):
        given[name] = tuple(given[name])
    tune(Settings(**given), folder, resume=resume)


if __name__ == "__main__":
    main()
