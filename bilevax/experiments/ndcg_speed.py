"""Time and memory of an epoch and of an evaluation: medians, without compilation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.applications.ranking import Held, NeuMF, TrainingSettings, make_method
from bilevax.applications.ranking.evaluation import mean_metrics
from bilevax.applications.ranking.methods import steps_per_epoch
from bilevax.applications.ranking.presets import tuned
from bilevax.experiments.arguments import make_parser, read_options
from bilevax.experiments.ndcg_parts import Parts, load_parts
from bilevax.experiments.ndcg_results import CUTOFFS
from bilevax.experiments.report import Report

FORMS = ("paper", "tuned", "paper, lazy", "tuned, lazy")


@dataclasses.dataclass(frozen=True)
class NDCGSpeedOptions:
    """The options of `python -m bilevax.experiments.ndcg_speed`.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: the methods whose epochs are timed.
      forms: hyper-parameters: "tuned", as in the experiment, or "paper": squared hinge, NDCG's discount, ten
        positives per list, no focus and no averaging. "…, lazy" is the same with `bx.lazy_adam` for users.
      users_per_step: I.
      epochs: epochs in one compiled call, as between two evaluations; their time is divided by their number.
      repeats: number of calls, of which the median is reported.
      width: length of the model's vectors.
      users: number of users to use, from the first; None uses all.
    """

    data: str = "ml-1m"
    methods: tuple[str, ...] = ("song", "k-song", "bsvrb v1", "lambdarank")
    forms: tuple[str, ...] = ("paper", "tuned")
    users_per_step: int = 256
    epochs: int = 5
    repeats: int = 5
    width: int = 64
    users: int | None = None


def measure(options: NDCGSpeedOptions, folder: str | Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """Times epochs of every method, and evaluations on test data and on both held-out parts.

    Writes the table `speed`.

    Returns:
      The rows of the table.
    """
    unknown = sorted(set(options.forms) - set(FORMS))
    if unknown:
        raise ValueError(f"forms must be among {list(FORMS)}, got {unknown}")
    report = Report(folder, options, quick=quick)
    parts = load_parts(options.data, 1, options.users)
    model = NeuMF(parts.train.users, parts.train.item_count, options.width)
    shape = {
        "users": parts.train.users,
        "items": parts.train.item_count,
        "training ratings": parts.train.pairs,
    }
    report.fact("shape", shape)
    both = (parts.held_dev, parts.held_test)
    rows = [_time_evaluation(held, parts, model, options) for held in ((parts.held_test,), both)]
    for row in rows:
        print(json.dumps(row), flush=True)
    for form, method in itertools.product(options.forms, options.methods):
        found = tuned(options.data, method)
        sizes = {name: found[name] for name in ("negatives",) if name in found}  # only some methods have it
        training = TrainingSettings().replace(**(found if form.startswith("tuned") else sizes))
        training = training.replace(lazy=form.endswith("lazy"))
        rows.append(_time_epochs(method, form, training, parts, model, options))
        print(json.dumps(rows[-1]), flush=True)
    report.table("speed", rows, f"Time and memory on {options.data}", f"{shape}.")
    report.finish()
    return rows


def _time_epochs(
    method: str, form: str, training: TrainingSettings, parts: Parts, model: Any, options: NDCGSpeedOptions
) -> dict[str, Any]:
    training = training.replace(users_per_step=min(options.users_per_step, parts.train.users))
    per_epoch = steps_per_epoch(parts.train.users, training)
    problem, solver = make_method(method, parts.train, model, training, per_epoch * 100)
    # The start of the levels does not change the time of a step.
    y0 = {name: None if name == "nothing" else jnp.ones(problem.slots_of(name)) for name in problem.levels}
    sampling = bx.Sampling(training.users_per_step, training.negatives, initial_batch_size=0)
    x0 = model.start(jax.random.key(0))
    began = time.perf_counter()
    state = eqx.filter_jit(solver.init)(problem, x0, y0, key=jax.random.key(1), sampling=sampling)
    inputs, steps = (problem, solver), options.epochs * per_epoch
    state = jax.block_until_ready(_advance(inputs, state, steps))
    compiled = time.perf_counter() - began
    del x0, y0

    def epochs() -> None:
        nonlocal state
        state = jax.block_until_ready(_advance(inputs, state, steps))

    seconds = [taken / options.epochs for taken in _repeat(epochs, options.repeats)]
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.z)):
        raise FloatingPointError(f"{method} diverged while it was timed: the times are meaningless")
    return {
        "what": f"epoch of {method}, {form}",
        "steps": per_epoch,
        "seconds": float(np.median(seconds)),
        "least": min(seconds),
        "most": max(seconds),
        "ms per step": 1000 * float(np.median(seconds)) / per_epoch,
        "compile s": compiled,
        "peak GiB": _peak(),
    }


def _time_evaluation(
    held: tuple[Held, ...], parts: Parts, model: Any, options: NDCGSpeedOptions
) -> dict[str, Any]:
    x = model.start(jax.random.key(0))
    cutoffs = tuple(k for k in CUTOFFS if k <= parts.train.item_count)

    def evaluate() -> None:
        jax.block_until_ready(mean_metrics(model, x, held, cutoffs))

    began = time.perf_counter()
    evaluate()
    compiled = time.perf_counter() - began
    seconds = _repeat(evaluate, options.repeats)
    return {
        "what": "evaluation of test" if len(held) == 1 else "evaluation of dev and test",
        "steps": held[0].users.shape[0],
        "seconds": float(np.median(seconds)),
        "least": min(seconds),
        "most": max(seconds),
        "ms per step": 1000 * float(np.median(seconds)) / held[0].users.shape[0],
        "compile s": compiled,
        "peak GiB": _peak(),
    }


@eqx.filter_jit(donate="all-except-first")
def _advance(inputs: tuple[bx.Problem, bx.AbstractSolver], state: bx.State, steps: int) -> bx.State:
    """Takes steps in one compiled call, which reuses the buffers of the state."""
    return bx.advance(*inputs, state, steps)


def _repeat(work: Callable[[], None], times: int) -> list[float]:
    out = []
    for _ in range(times):
        tick = time.perf_counter()
        work()
        out.append(time.perf_counter() - tick)
    return out


def _peak() -> float | None:
    """The peak memory of the device so far, in GiB; None if the device does not report it."""
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30


def main() -> None:
    """`python -m bilevax.experiments.ndcg_speed`."""
    given = make_parser(NDCGSpeedOptions, __doc__, "results/ndcg-speed").parse_args()
    measure(read_options(NDCGSpeedOptions, given), given.out)


if __name__ == "__main__":
    main()
