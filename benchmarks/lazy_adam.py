"""`bx.lazy_adam` for users' vectors beside Adam: the time of an epoch, and NDCG.

`python -m benchmarks.lazy_adam` times epochs of NeuMF by K-SONG on MovieLens 1M, by Adam and by its lazy
form; `--data like-ml-20m` has the shape of ML-20M, and `--trace` lists the kernels of a step on an
accelerator. Then it trains both with the tuned settings, from the same warm-ups of softmax and with the same
seeds, and compares NDCG on test data; `--epochs 0` leaves this out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from benchmarks import launches
from bilevax.applications.ranking import NeuMF, TrainingSettings, make_method, train_many
from bilevax.applications.ranking.methods import steps_per_epoch
from bilevax.applications.ranking.presets import tuned
from bilevax.experiments.ndcg_parts import Parts, load_parts
from bilevax.experiments.ndcg_results import cutoffs_of
from bilevax.experiments.report import Report, command_line, spread

FORMS = {"Adam": False, "lazy Adam": True}
METHOD, WARM_UP = "k-song", 20


class Epochs:
    """K-SONG on a table, compiled, with its state."""

    def __init__(self, parts: Parts, model: Any, settings: TrainingSettings):
        ratings = parts.train
        settings = settings.replace(users_per_step=min(settings.users_per_step, ratings.users))
        self.steps = steps_per_epoch(ratings.users, settings)
        self.inputs = make_method(METHOD, ratings, model, settings, 100 * self.steps)
        problem, solver = self.inputs
        # The start of the levels does not change the time of a step.
        y0 = {name: jnp.ones(problem.slots_of(name)) for name in problem.levels}
        began = time.perf_counter()
        sampling = settings.sampling(ratings.users)
        x0 = model.start(jax.random.key(0))
        self.state = eqx.filter_jit(solver.init)(problem, x0, y0, key=jax.random.key(1), sampling=sampling)
        self.advance(1)
        self.compile_seconds = time.perf_counter() - began

    def advance(self, steps: int) -> None:
        """Takes steps, and waits for them."""
        self.state = jax.block_until_ready(_advance(self.inputs, self.state, jnp.asarray(steps)))


@eqx.filter_jit(donate="all-except-first")
def _advance(inputs: tuple[bx.Problem, Any], state: bx.State, steps: jax.Array) -> bx.State:
    problem, solver = inputs
    return bx.advance(problem, solver, state, steps)


def time_epochs(
    parts: Parts, model: Any, settings: TrainingSettings, repeats: int, trace: bool
) -> dict[str, Any]:
    """The median, least and most seconds of an epoch, and the kernels of a step."""
    epochs, seconds = Epochs(parts, model, settings), []
    for _ in range(repeats):
        began = time.perf_counter()
        epochs.advance(epochs.steps)
        seconds.append(time.perf_counter() - began)
    if not bool(jnp.all(jnp.isfinite(epochs.state.z["product_item"]))):
        raise FloatingPointError("the run diverged while it was timed: the times are meaningless")
    row: dict[str, Any] = {"steps": epochs.steps, "seconds": float(np.median(seconds))}
    row |= {"least": min(seconds), "most": max(seconds), "compile s": epochs.compile_seconds}
    return row | ({"kernels": launches.kernels(epochs)} if trace else {})


def compare_ndcg(parts: Parts, model: Any, seeds: int, epochs: int, every: int) -> dict[str, Any]:
    """The test metrics of every seed, by Adam and by its lazy form, from the same warm-ups."""
    keys = jax.vmap(jax.random.key)(np.arange(seeds))
    given = {"keys": keys, "dev": parts.held_dev, "cutoffs": cutoffs_of(parts)}
    softmax = TrainingSettings().replace(**tuned("ml-1m", "softmax"))
    softmax = softmax.replace(users_per_step=min(softmax.users_per_step, parts.train.users))
    warm = train_many(parts.train, model, "softmax", softmax, epochs=WARM_UP, every=WARM_UP, **given).x
    found: dict[str, Any] = {}
    for name, lazy in FORMS.items():
        settings = TrainingSettings().replace(**tuned("ml-1m", METHOD), lazy=lazy)
        settings = settings.replace(users_per_step=min(settings.users_per_step, parts.train.users))
        done = train_many(
            parts.train, model, METHOD, settings, epochs=epochs, every=every, x0=warm, test=parts.held_test,
            **given,
        )  # fmt: skip
        found[name] = {metric: done.means(metric).tolist() for metric in done.test if "ndcg" in metric}
        found[name] |= {"best epoch": done.best_epoch.tolist(), "seconds": float(done.seconds[-1])}
        print(name, json.dumps(found[name]), flush=True)
    return found


def ndcg_rows(ndcg: dict[str, Any]) -> list[dict[str, Any]]:
    """The mean and the standard deviation of every metric over the seeds, and of the differences."""
    metrics = [name for name in next(iter(ndcg.values())) if "ndcg" in name]
    rows = [{"upper step": name} | {one: spread(row[one]) for one in metrics} for name, row in ndcg.items()]
    lazy, dense = (ndcg[name] for name in ("lazy Adam", "Adam"))
    apart = {one: spread(np.subtract(lazy[one], dense[one])) for one in metrics}
    return [*rows, {"upper step": "difference, seed by seed"} | apart]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="ml-1m")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=120, help="of a training; 0 leaves NDCG out")
    parser.add_argument("--every", type=int, default=5, help="epochs between two measurements")
    parser.add_argument("--forms", nargs="*", default=["paper", "tuned"], choices=["paper", "tuned"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--users", type=int, help="the first of them only")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--trace", action="store_true", help="list the kernels of a step")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    parts = load_parts(options.data, options.seeds, options.users)
    model = NeuMF(parts.train.users, parts.train.item_count, options.width)
    rows: list[dict[str, Any]] = []
    for form in options.forms:
        for name, lazy in FORMS.items():
            settings = TrainingSettings().replace(
                lazy=lazy, **(tuned("ml-1m", METHOD) if form == "tuned" else {})
            )
            row = time_epochs(parts, model, settings, options.repeats, options.trace)
            kernels = row.pop("kernels", [])
            if kernels:
                report.csv(f"kernels-{form}-{name.replace(' ', '-')}", kernels)
            rows.append({"data": options.data, "upper step": name, "settings": form} | row)
            report.table("epochs", rows, "Seconds of an epoch of K-SONG")
    if options.epochs:
        ndcg = compare_ndcg(parts, model, options.seeds, options.epochs, options.every)
        report.fact("ndcg", ndcg)
        report.table("ndcg", ndcg_rows(ndcg), f"NDCG on test data of {options.data}")
    report.finish()


if __name__ == "__main__":
    main()
