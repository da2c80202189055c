"""Top-K NDCG by the paper's own rules, on MovieLens 1M, beside the paper's table.

- The last rating of every user is for testing, the one before for development. Development items are ranked
  among 1,000 random items that the user has not rated, test items among all.
- NeuMF is trained for 100 epochs by softmax cross-entropy (Adam, 1e-3, 256 users a step), for all methods.
- Then its last layer is drawn again, and every method trains it for 120 epochs with Adam: learning rate 4e-4,
  times a quarter after 60 epochs; 1e-7 times the parameters is added to gradients.
- Squared hinge, 1/log₂(1 + rank), K = 10. SONG, K-SONG and BSVRB v1 are those of `bilevax`, as published.
- Every method has the best of nine settings by development NDCG@5: for BSVRB v1 the printed α × γ, for SONG
  and K-SONG nine α, for the other losses nine temperatures.

What the text leaves open is as in `TrainingSettings`: ten positives and 300 negatives a list (NeuralNDCG 100,
whose cost grows with their square), β = 0.9, τ₁ = 0.1, τ₂ = 1e-3, a margin of 1, three stages.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bilevax.applications.ranking import METHODS, NeuMF, TrainingSettings, train_many
from bilevax.applications.ranking.methods import steps_per_epoch
from bilevax.experiments.arguments import check_names, make_parser, read_options
from bilevax.experiments.kept import Kept
from bilevax.experiments.ndcg import identity, line
from bilevax.experiments.ndcg_baselines import BASELINES, some
from bilevax.experiments.ndcg_parts import Parts, load_parts
from bilevax.experiments.ndcg_results import (
    MethodResult,
    cutoffs_of,
    judged,
    keep,
    table_rows,
    write_curves,
)
from bilevax.experiments.report import Report

# Hu et al. 2023, test NDCG @10, @20 and @50 on ML-20M, then on Netflix: mean and standard deviation, 5 runs.
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
COLUMNS = ("ML-20M @10", "ML-20M @20", "ML-20M @50", "Netflix @10", "Netflix @20", "Netflix @50")
WATCH = "ndcg@5"  # on development data: the paper's figure
LAST_LAYER = ("output_product", "output_perceptron")

_ALPHAS, _GAMMAS = (0.7, 0.8, 0.9), (0.001, 0.005, 0.01)  # the paper's grid for its own method
_CORRECTED = tuple(
    {"alpha": a, "threshold_alpha": a, "gamma": c, "threshold_gamma": c}
    for a, c in itertools.product(_ALPHAS, _GAMMAS)
)
_AVERAGED = tuple({"alpha": k / 10, "threshold_alpha": k / 10} for k in range(1, 10))
_TEMPERED = tuple({"temperature": round(10 ** (k / 4), 3)} for k in range(-4, 5))
_SIZES = {"neural ndcg": {"negatives": 100}}


@dataclasses.dataclass(frozen=True)
class PaperNDCGOptions:
    """The options of `bilevax reproduce ndcg --protocol paper`.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: the methods, in this order: those of the paper's table, and BSVRB v1 without restarts.
      baselines: the closed forms of `ndcg_baselines`, in this order.
      choices: how many settings every method and every closed form may try, at even distances in its grid;
        None is all.
      seeds: trainings per method and setting.
      first_seed: the first seed.
      warm_up: epochs of softmax cross-entropy before every method.
      epochs: epochs of every method; the learning rate falls after half of them.
      every: epochs between evaluations on the development data.
      cutoff: K.
      width: length of the model's vectors.
      users: number of users to use, from the first; None uses all.
    """

    data: str = "ml-1m"
    methods: tuple[str, ...] = (*PAPER, "bsvrb v1")
    baselines: tuple[str, ...] = tuple(BASELINES)
    choices: int | None = None
    seeds: int = 5
    first_seed: int = 0
    warm_up: int = 100
    epochs: int = 120
    every: int = 5
    cutoff: int = 10
    width: int = 64
    users: int | None = None

    def __post_init__(self) -> None:
        check_names("methods", self.methods, METHODS)
        check_names("baselines", self.baselines, tuple(BASELINES))

    def quick(self) -> PaperNDCGOptions:
        """A short check: few users and epochs, one setting and seed, a small model, K-SONG unless others."""
        methods = ("k-song",) if self.methods == type(self)().methods else self.methods
        small = {"users": 100, "seeds": 1, "warm_up": 1, "epochs": 2, "every": 1, "width": 8, "choices": 1}
        return dataclasses.replace(self, methods=methods, **small)


def run(
    options: PaperNDCGOptions, folder: str | Path, *, quick: bool = False, resume: bool = False
) -> dict[str, MethodResult]:
    """Trains every method with all settings and seeds; writes a table and curves to a folder.

    The result of every method is kept in `kept.json` as it comes; `resume` runs only what is missing there.

    Returns:
      The results by method, closed forms first, with the settings that development data chose.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    kept = Kept(report.folder / "kept.json", identity(options), resume=resume)
    models = options.seeds * max((len(some(grid(m), options.choices)) for m in options.methods), default=1)
    parts = load_parts(options.data, models, options.users, held=1, sampled=1000)
    report.fact("protocol", {"dev": parts.held_dev.protocol, "test": parts.held_test.protocol})
    found: dict[str, MethodResult] = {}
    for name in options.baselines:
        baseline = BASELINES[name].few(options.choices)
        found[name] = keep(kept, name, functools.partial(judged, name, baseline, parts, WATCH))
        print(f"{name}: {line(found[name])}", flush=True)
    trainer = _Trainer(parts, options)
    for method in options.methods:
        began = time.perf_counter()
        found[method] = keep(kept, method, functools.partial(trainer.best, method))
        print(f"{method}: {time.perf_counter() - began:.1f} s  {line(found[method])}", flush=True)
        _write(report, options, found, parts)
    _write(report, options, found, parts, show=True)
    report.finish()
    return found


def grid(method: str) -> tuple[dict[str, float], ...]:
    """The settings that a method may have."""
    if method in ("bsvrb v1", "re-bsvrb v1"):
        return _CORRECTED
    return _AVERAGED if method in ("song", "k-song") else _TEMPERED


class _Trainer:
    """Trains methods from one warm-up, which is trained when it is first needed."""

    def __init__(self, parts: Parts, options: PaperNDCGOptions):
        self.parts, self.options = parts, options
        self.model = NeuMF(parts.train.users, parts.train.item_count, options.width)
        self.keys = jax.vmap(jax.random.key)(options.first_seed + np.arange(options.seeds))
        self.common = {"l2": 1e-7, "weight_decay": 0.0, "cutoff": options.cutoff, "fresh": False}

    def best(self, method: str) -> MethodResult:
        """The result with the setting of the best mean over seeds, all of which run side by side."""
        options, parts, tried = self.options, self.parts, some(grid(method), self.options.choices)
        settings = TrainingSettings().replace(**self.common, **_SIZES.get(method, {}))
        half = options.epochs // 2 * steps_per_epoch(parts.train.users, settings)
        rate = optax.piecewise_constant_schedule(4e-4, {half: 0.25})
        columns = {name: np.repeat([one[name] for one in tried], options.seeds) for name in tried[0]}
        found = train_many(
            parts.train,
            self.model,
            method,
            settings.replace(learning_rate=rate),
            columns,
            keys=jnp.tile(self.keys, len(tried)),
            x0=jax.tree.map(lambda leaf: jnp.tile(leaf, (len(tried),) + (1,) * (leaf.ndim - 1)), self.warm),
            epochs=options.epochs,
            dev=parts.held_dev,
            test=parts.held_test,
            every=options.every,
            watch=WATCH,
            cutoffs=cutoffs_of(parts),
        )
        scores = found.dev.max(1).reshape(len(tried), options.seeds).mean(1)
        first = int(np.argmax(scores)) * options.seeds
        chosen = tried[int(np.argmax(scores))]
        return MethodResult.of(found, chosen, slice(first, first + options.seeds))

    @functools.cached_property
    def warm(self) -> Any:
        """The parameters after the warm-up, with a new last layer."""
        options, parts = self.options, self.parts
        settings = TrainingSettings().replace(**self.common, learning_rate=1e-3)
        found = train_many(
            parts.train, self.model, "softmax", settings, keys=self.keys, epochs=options.warm_up,
            dev=parts.held_dev, every=options.warm_up, watch=WATCH,
        )  # fmt: skip
        print(f"warm-up: {found.compile_seconds + found.seconds[-1]:.1f} s", flush=True)
        return jax.vmap(functools.partial(with_new_last_layer, self.model))(found.x, self.keys)


def with_new_last_layer(model: NeuMF, x: Any, key: Any) -> Any:
    """The parameters of NeuMF with another random last layer."""
    drawn = model.start(jax.random.fold_in(key, 1))
    return x | {name: drawn[name] for name in LAST_LAYER}


def _write(
    report: Report,
    options: PaperNDCGOptions,
    found: Mapping[str, MethodResult],
    parts: Parts,
    show: bool = False,
) -> None:
    """Writes the table and the curves of what is there; prints the table in the end."""
    rows = table_rows(list(found.values()))
    for row in rows:
        chosen = found[row["method"]].settings
        row["settings"] = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        if row["method"] in PAPER:
            row |= {name: f"{value:.4f}" for name, value in zip(COLUMNS, PAPER[row["method"]], strict=True)}
    note = (
        f"{options.data}, one test item per user, {parts.held_test.protocol}; settings and epoch by "
        f"development {WATCH.upper()} among {parts.held_dev.protocol}; mean ± standard deviation over "
        f"{options.seeds} seeds; differences: paired by user, mean ± standard error; s/epoch: of all "
        "settings and seeds together. ML-20M, Netflix: the paper's figures, on other data."
    )
    if show:
        report.table("ndcg_paper", rows, "Top-K NDCG by the paper's protocol", note)
    else:
        report.csv("ndcg_paper", rows)
    write_curves(report, list(found.values()), WATCH)


def main(words: list[str] | None = None) -> None:
    """`python -m bilevax.experiments.ndcg --protocol paper`."""
    parser = make_parser(PaperNDCGOptions, __doc__, "results/ndcg-paper")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--resume", action="store_true", help="run only what is missing in the folder")
    parser.add_argument("--quick", action="store_true", help="a short check")
    given = parser.parse_args(words)
    run(read_options(PaperNDCGOptions, given), given.out, quick=given.quick, resume=given.resume)


if __name__ == "__main__":
    main()
