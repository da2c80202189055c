"""`TopKRecommender` with its defaults, beside popularity, EASE and ALS, on tables of several shapes.

    python -m benchmarks.recommenders dense medium sparse implicit --seeds 3 --processes 4
    python -m benchmarks.recommenders ml-1m --resume

The last five items of every user are for testing; everything else is the table that a user would have.
`TopKRecommender` is fitted to it with its defaults and holds out development items by itself. The others
choose their settings on the five items before the test items, and are then fitted to the whole table. All
items that the table does not have for a user are ranked; NDCG@10 has the gains 2^r − 1.

- ml-1m: MovieLens 1M (BILEVAX_DATA), the last items by time;
- dense, medium, sparse: 2,000 users, 1,000 items and 120,000, 60,000 and 30,000 generated ratings
  (`bilevax.data.generate`);
- implicit: 2,000 users, 1,000 items and 80,000 pairs without ratings, drawn with softmax probabilities of
  random vectors of length 16: a strong taste.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from bilevax.applications.ranking import Held, Ratings, TopKRecommender, hold_out
from bilevax.data import Interactions, generate, load_interactions, make_interactions, split_last
from bilevax.experiments.kept import Kept, Task
from bilevax.experiments.ndcg_baselines import (
    BASELINES,
    Baseline,
    Scores,
    als,
    ease,
    gain_ease,
    score_metrics,
)
from bilevax.experiments.report import Report

SIZES = {"dense": 120_000, "medium": 60_000, "sparse": 30_000}
TEST = 5
RIDGES = tuple({"ridge": ridge} for ridge in (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0))
CLOSED_FORMS = {
    "popularity": BASELINES["popularity"],
    "EASE": Baseline(ease, RIDGES),
    "EASE, gains": Baseline(gain_ease, RIDGES),
    "ALS": Baseline(
        als,
        tuple(
            {"rank": rank, "alpha": alpha, "ridge": ridge}
            for rank in (16, 64)
            for alpha in (3.0, 10.0)
            for ridge in (3.0, 30.0)
        ),
    ),
}


class Score(NamedTuple):
    """The test NDCG@10 of a method, the seconds of its fit, and a note on its settings."""

    ndcg: float
    seconds: float
    note: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A table to fit, the same without its development items, and what to find in the end."""

    table: Interactions
    shorter: Ratings
    seen: Ratings
    dev: Ratings
    test: Ratings


def load_table(name: str, seed: int) -> Interactions:
    """A table by its name; MovieLens does not depend on the seed."""
    if name in SIZES:
        return generate.interactions(2000, 1000, SIZES[name], seed=seed).table
    if name == "implicit":
        return tastes(2000, 1000, 40, seed)
    return load_interactions(name)


def tastes(users: int, items: int, each: int, seed: int, rank: int = 16) -> Interactions:
    """Pairs without ratings: `each` items per user, without replacement, by softmax of ⟨a_u, b_j⟩ + c_j."""
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(users, rank)), random.normal(size=(items, rank))
    logits = 1.5 * a @ b.T / rank**0.5 + random.normal(size=items)
    keys = logits + random.gumbel(size=logits.shape)
    chosen = np.argsort(-keys, axis=1)[:, :each]
    chosen = random.permuted(chosen, axis=1)  # the order of times says nothing about the taste
    return make_interactions(
        np.repeat(np.arange(users), each), chosen.ravel(), time=np.tile(np.arange(each), users)
    )


def make_case(table: Interactions) -> Case:
    """Splits a table."""
    table = table.at_least(11)
    split = split_last(table, TEST, TEST)
    train, dev, test = (Ratings.of(part) for part in (split.train, split.dev, split.test))
    whole = split_last(table, 0, TEST)
    fitted = _rows(table, whole.train)
    return Case(fitted, train, Ratings.of(whole.train), dev, test)


def _rows(table: Interactions, kept: Any) -> Interactions:
    """The rows of a table that a part of its split holds."""
    width = table.items
    pairs = kept.user.astype(np.int64) * width + kept.item
    inside = np.isin(table.user.astype(np.int64) * width + table.item, pairs)
    columns = {name: getattr(table, name)[inside] for name in ("user", "item", "rating", "time")}
    return dataclasses.replace(table, **columns)


def ndcg(scores: Scores, held: Held) -> float:
    """The mean NDCG@10."""
    found = score_metrics(np.asarray(scores, np.float32), held, (10,))
    return float(np.nanmean(np.asarray(found["ndcg@10"])))


def chosen(closed: Baseline, case: Case) -> tuple[Scores, str]:
    """The scores of the best setting by development items, fitted to the whole table."""
    held = hold_out(case.dev, [case.shorter])
    best = max(closed.choices, key=lambda one: ndcg(closed.fit(case.shorter, **one), held))
    return closed.fit(case.seen, **best), " ".join(f"{value:g}" for value in best.values())


def recommender(case: Case, **arguments: Any) -> tuple[Scores, str]:
    """The scores of `TopKRecommender`, with its defaults unless arguments say otherwise."""
    made = TopKRecommender(**arguments).fit(case.table, progress=None)
    fitted: Any = made._fitted  # pyright: ignore[reportPrivateUsage]
    scores = np.stack([fitted.catalogue_scores(user) for user in range(len(fitted.user_ids))])
    return scores, f"epoch {made.best_epoch_:.0f}"


def score(table: str, seed: int, method: str, arguments: dict[str, Any] | None) -> Score:
    """The result of a method on a table: of a closed form, or of the recommender with these arguments."""
    case = case_of(table, seed)
    began = time.perf_counter()
    if arguments is None:
        scores, note = chosen(CLOSED_FORMS[method], case)
    else:
        scores, note = recommender(case, seed=seed, **arguments)
    found = Score(ndcg(scores, hold_out(case.test, [case.seen])), time.perf_counter() - began, note)
    print(f"{table} {seed} {method}: {found.ndcg:.4f}  {found.seconds:.1f} s  {note}", flush=True)
    return found


@functools.cache
def case_of(table: str, seed: int) -> Case:
    """A table that is split."""
    return make_case(load_table(table, seed))


def main() -> None:
    """Prints a line for every fit, and writes a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.recommenders", description=__doc__)
    parser.add_argument("tables", nargs="*", default=["dense", "medium", "sparse", "implicit"])
    parser.add_argument("--seeds", type=int, default=3, help="of generated tables; MovieLens has one split")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--closed", nargs="*", choices=CLOSED_FORMS, default=list(CLOSED_FORMS))
    parser.add_argument(
        "--variants", default='{"TopKRecommender": {}}', help="arguments of the recommender, as JSON by name"
    )
    parser.add_argument("--processes", type=int, default=1, help="fits at a time, each on its own core")
    parser.add_argument("--resume", action="store_true", help="fit only what is missing in the folder")
    parser.add_argument("--out", type=Path, default=Path("results/recommenders"))
    options = parser.parse_args()
    variants = json.loads(options.variants)
    apart = ("out", "resume", "processes")
    report = Report(options.out, {name: one for name, one in vars(options).items() if name not in apart})
    kept = Kept(options.out / "kept.json", {"variants": variants}, resume=options.resume)
    every = range(options.first_seed, options.first_seed + options.seeds)
    seeds = {name: every if name in (*SIZES, "implicit") else every[:1] for name in options.tables}
    tasks: dict[str, Task] = {
        _name(name, seed, method): functools.partial(score, name, seed, method, arguments)
        for name, chosen in seeds.items()
        for seed in chosen
        for method, arguments in (variants | dict.fromkeys(options.closed)).items()  # the longest first
    }
    found = kept.fill(tasks, options.processes, alone=True)

    def scores(name: str, method: str) -> list[Score]:
        return [Score(*found[_name(name, seed, method)]) for seed in seeds[name]]

    rows = [_row(name, {one: scores(name, one) for one in (*options.closed, *variants)}) for name in seeds]
    note = "Test NDCG@10, mean ± standard error over seeds, and seconds of a fit with its search."
    report.table("recommenders", rows, "Recommenders", note)
    report.finish()


def _name(table: str, seed: int, method: str) -> str:
    return f"{table} {seed} {method}"


def _row(name: str, methods: dict[str, list[Score]]) -> dict[str, Any]:
    """A row of the table: the methods on one kind of table."""
    row: dict[str, Any] = {"table": name, "seeds": len(next(iter(methods.values())))}
    row |= {method: _mean([one.ndcg for one in runs]) for method, runs in methods.items()}
    seconds = {method: np.mean([one.seconds for one in runs]) for method, runs in methods.items()}
    return row | {f"{method}: seconds": f"{value:.0f}" for method, value in seconds.items()}


def _mean(values: list[float]) -> str:
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {stats.sem(values):.4f}"


if __name__ == "__main__":
    main()
