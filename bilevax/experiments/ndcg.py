"""Top-K NDCG of every ranking method on the same split, lists and model, beside closed forms.

Every user's last five ratings are for testing; the five before them choose the epoch. Every item that the
user did not rate before is ranked. Seeds run side by side. With `--protocol paper`, the paper's own rules
(`ndcg_paper`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.applications.ranking import (
    BILEVEL,
    METHODS,
    NeuMF,
    Trainings,
    TrainingSettings,
    train_many,
)
from bilevax.applications.ranking.presets import tuned
from bilevax.experiments.arguments import check_names, make_parser, read_options
from bilevax.experiments.kept import Kept
from bilevax.experiments.ndcg_baselines import BASELINES
from bilevax.experiments.ndcg_parts import Parts, load_parts
from bilevax.experiments.ndcg_results import (
    MethodResult,
    cutoffs_of,
    judged,
    keep,
    table_rows,
    write_curves,
)
from bilevax.experiments.report import Report, markdown, spread

QUICK = ("lambdarank", "k-song")  # the methods of a short check: a plain loss and a bilevel one
WATCH = "ndcg@10"


@dataclasses.dataclass(frozen=True)
class NDCGOptions:
    """The options of `bilevax reproduce ndcg`.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: the methods, in this order.
      baselines: the closed forms of `ndcg_baselines`, in this order.
      choices: how many settings a closed form may try; None is all.
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
    baselines: tuple[str, ...] = tuple(BASELINES)
    choices: int | None = None
    seeds: int = 5
    first_seed: int = 0
    epochs: int = 250
    warm_up: int = 20
    every: int = 10
    width: int = 64
    users: int | None = None

    def __post_init__(self) -> None:
        check_names("methods", self.methods, METHODS)
        check_names("baselines", self.baselines, tuple(BASELINES))

    def quick(self) -> NDCGOptions:
        """A short check: few users, seeds and epochs, a small model, and few methods unless some were named.

        Nearly all of its time is compilation, of one program per method.
        """
        methods = QUICK if self.methods == METHODS else self.methods
        small = {"users": 100, "seeds": 2, "epochs": 2, "warm_up": 0, "every": 1, "width": 8, "choices": 1}
        return dataclasses.replace(self, methods=methods, **small)


def identity(options: Any) -> dict[str, Any]:
    """What the result of a method depends on: all options but the names of the other methods."""
    return {
        name: value
        for name, value in dataclasses.asdict(options).items()
        if name not in ("methods", "baselines")
    }


def run(
    options: NDCGOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    hyperparameters: Mapping[str, Any] | None = None,
) -> dict[str, MethodResult]:
    """Trains every method with all seeds; writes tables and curves to a folder.

    The result of every method is kept in `kept.json` as it comes; `resume` runs only what is missing there.

    Args:
      options: of the experiment.
      folder: where the results go.
      quick: run a short check, `options.quick()`.
      resume: go on where an earlier run with the same options was stopped.
      hyperparameters: by method, in place of the tuned ones.

    Returns:
      The results by method, closed forms first.
    """
    options = options.quick() if quick else options
    chosen = {m: (hyperparameters or {}).get(m, tuned(options.data, m)) for m in options.methods}
    report = Report(folder, {"experiment": options, "hyperparameters": chosen}, quick=quick)
    known = {m: (hyperparameters or {}).get(m, tuned(options.data, m)) for m in METHODS}
    kept = Kept(report.folder / "kept.json", identity(options) | {"hyperparameters": known}, resume=resume)
    parts = load_parts(options.data, options.seeds, options.users)
    report.fact("protocol", parts.held_test.protocol)
    found: dict[str, MethodResult] = {}
    for name in options.baselines:
        baseline = BASELINES[name].few(options.choices)
        found[name] = keep(kept, name, functools.partial(judged, name, baseline, parts, WATCH))
        print(f"{name}: {line(found[name])}", flush=True)
    trainer = _Trainer(parts, options)
    note = (
        f"{options.data}, test data, {parts.held_test.protocol}; mean ± standard deviation over "
        f"{options.seeds} seeds; differences: paired by user, mean ± standard error; s/epoch: seconds of all "
        "seeds together, without compilation and evaluation. (fresh): the `Fresh` form of a bilevel method. "
        "Closed forms: the best settings by development data."
    )
    for method in options.methods:
        began = time.perf_counter()
        found[method] = keep(kept, method, functools.partial(trainer.result, method, chosen[method]))
        print(f"{method}: {time.perf_counter() - began:.1f} s {line(found[method])}", flush=True)
        write_so_far(report, found, note)
    shown = [named_form(one) for one in found.values()]
    report.fact("chosen settings", {one.method: one.settings for one in shown})
    report.table("ndcg", table_rows(shown), "Top-K NDCG", note)
    write_curves(report, shown, WATCH)
    report.finish()
    return found


class _Trainer:
    """Trains methods from one warm-up, which is trained when it is first needed."""

    def __init__(self, parts: Parts, options: NDCGOptions):
        self.parts, self.options = parts, options
        self.model = NeuMF(parts.train.users, parts.train.item_count, options.width)
        self.keys = jax.vmap(jax.random.key)(options.first_seed + np.arange(options.seeds))

    def result(self, method: str, hyperparameters: Mapping[str, Any]) -> MethodResult:
        """The result of a method."""
        x0 = self.warm if method in BILEVEL and self.options.warm_up else None
        return MethodResult.of(self.train(method, hyperparameters, x0), hyperparameters)

    @functools.cached_property
    def warm(self) -> Any:
        """The parameters after the warm-up."""
        return self.train("softmax", tuned(self.options.data, "softmax"), warm=True).x

    def train(
        self, method: str, hyperparameters: Mapping[str, Any], x0: Any = None, warm: bool = False
    ) -> Trainings:
        options, parts = self.options, self.parts
        return train_many(
            parts.train,
            self.model,
            method,
            TrainingSettings().replace(**hyperparameters),
            keys=self.keys,
            epochs=options.warm_up if warm else options.epochs,
            dev=parts.held_dev,
            test=None if warm else parts.held_test,
            x0=x0,
            every=options.warm_up if warm else options.every,
            watch=WATCH,
            cutoffs=cutoffs_of(parts),
        )


def named_form(one: MethodResult) -> MethodResult:
    """A result whose name says which form of a bilevel method ran: "k-song (fresh)" for `FreshKSONG`."""
    fresh = one.method in BILEVEL and one.settings.get("fresh", TrainingSettings().fresh)
    return dataclasses.replace(one, method=f"{one.method} (fresh)") if fresh else one


def write_so_far(report: Report, found: Mapping[str, MethodResult], note: str) -> None:
    """Writes a table of what is there, which a run that is stopped leaves behind."""
    rows = table_rows([named_form(one) for one in found.values()])
    (report.folder / "ndcg.md").write_text(f"# So far\n\n{markdown(rows)}\n\n{note}\n", encoding="utf-8")


def line(one: MethodResult) -> str:
    """A result in one line."""
    return "  ".join(f"{name} {spread(values)}" for name, values in one.means.items() if "ndcg" in name)


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
    check_names(f"the hyperparameters of {path}", tuple(found), METHODS)
    return found


def main(words: list[str] | None = None) -> None:
    """`python -m bilevax.experiments.ndcg`: `bilevax reproduce ndcg` without the extra `cli`."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--protocol", choices=("ours", "paper"), default="ours")
    given, rest = first.parse_known_args(sys.argv[1:] if words is None else words)
    if given.protocol == "paper":
        from bilevax.experiments import ndcg_paper

        ndcg_paper.main(rest)
        return
    parser = make_parser(NDCGOptions, __doc__, "results/ndcg")
    parser.add_argument("--protocol", choices=("ours", "paper"), help="ours, or by the paper's own rules")
    parser.add_argument("--hyperparameters", help="a JSON file, by method, in place of the tuned ones")
    parser.add_argument("--resume", action="store_true", help="run only what is missing in the folder")
    parser.add_argument("--quick", action="store_true", help="a short check")
    given = parser.parse_args(rest)
    chosen = given.hyperparameters and read_hyperparameters(given.hyperparameters)
    options = read_options(NDCGOptions, given)
    run(options, given.out, quick=given.quick, resume=given.resume, hyperparameters=chosen)


if __name__ == "__main__":
    main()
