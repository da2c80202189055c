"""How long an epoch and an evaluation take, and how much memory they need: compilation apart, medians."""

from __future__ import annotations

import argparse
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
from bilevax.experiments.ndcg import CUTOFFS, Parts, load_parts
from bilevax.experiments.report import Report, markdown

FORMS = ("paper", "tuned")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed.

    Attributes:
      data: a data set of `bilevax.data.load_interactions`.
      methods: whose epochs.
      forms: with which settings: "tuned", those of the experiment, or "paper": the squared hinge, NDCG's
        discount, ten positives a list, no focus and no averaging.
      users_per_step: I.
      epochs: how many are taken at once, as between two looks of a training; the time is that of one.
      repeats: how many such runs, of which the median is taken.
      width: of the model's vectors.
      users: use only the first so many users; None takes all.
    """

    data: str = "ml-1m"
    methods: tuple[str, ...] = ("song", "k-song", "bsvrb v1", "lambdarank")
    forms: tuple[str, ...] = FORMS
    users_per_step: int = 256
    epochs: int = 5
    repeats: int = 5
    width: int = 64
    users: int | None = None


def measure(settings: Settings, folder: str | Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """Times every method's epochs, and the evaluation of test data and of both parts; writes `speed.md`.

    Returns:
      The rows of the table.
    """
    unknown = sorted(set(settings.forms) - set(FORMS))
    if unknown:
        raise ValueError(f"forms must be among {list(FORMS)}, got {unknown}")
    report = Report(folder, settings, quick=quick)
    parts = load_parts(settings.data, 1, settings.users)
    model = NeuMF(parts.train.users, parts.train.item_count, settings.width)
    shape = {
        "users": parts.train.users,
        "items": parts.train.item_count,
        "training ratings": parts.train.pairs,
    }
    report.fact("shape", shape)
    both = (parts.held_dev, parts.held_test)
    rows = [_time_evaluation(held, parts, model, settings) for held in ((parts.held_test,), both)]
    for row in rows:
        print(json.dumps(row), flush=True)
    for form, method in itertools.product(settings.forms, settings.methods):
        found = tuned(settings.data, method)
        sizes = {name: found[name] for name in ("negatives",) if name in found}  # one method's own
        numbers = TrainingSettings().replace(**(found if form == "tuned" else sizes))
        rows.append(_time_epochs(method, form, numbers, parts, model, settings))
        print(json.dumps(rows[-1]), flush=True)
    text = f"# {settings.data}: {shape}\n\n{markdown(rows)}\n"
    (report.folder / "speed.md").write_text(text, encoding="utf-8")
    (report.folder / "speed.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(text)
    report.finish()
    return rows


def _time_epochs(
    method: str, form: str, numbers: TrainingSettings, parts: Parts, model: Any, settings: Settings
) -> dict[str, Any]:
    numbers = numbers.replace(users_per_step=min(settings.users_per_step, parts.train.users))
    per_epoch = steps_per_epoch(parts.train.users, numbers)
    problem, solver = make_method(method, parts.train, model, numbers, per_epoch * 100)
    # Where the levels start is of no matter for the time a step takes.
    y0 = {name: None if name == "nothing" else jnp.ones(problem.slots_of(name)) for name in problem.levels}
    sampling = bx.Sampling(numbers.users_per_step, numbers.negatives, initial_batch_size=0)
    x0 = model.start(jax.random.key(0))
    began = time.perf_counter()
    state = eqx.filter_jit(solver.init)(problem, x0, y0, key=jax.random.key(1), sampling=sampling)
    inputs, steps = (problem, solver), settings.epochs * per_epoch
    state = jax.block_until_ready(_advance(inputs, state, steps))
    compiled = time.perf_counter() - began
    del x0, y0

    def epochs() -> None:
        nonlocal state
        state = jax.block_until_ready(_advance(inputs, state, steps))

    seconds = [taken / settings.epochs for taken in _repeat(epochs, settings.repeats)]
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.z)):
        raise FloatingPointError(f"{method} diverged while it was timed: the times mean nothing")
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


def _time_evaluation(held: tuple[Held, ...], parts: Parts, model: Any, settings: Settings) -> dict[str, Any]:
    x = model.start(jax.random.key(0))
    cutoffs = tuple(k for k in CUTOFFS if k <= parts.train.item_count)

    def look() -> None:
        jax.block_until_ready(mean_metrics(model, x, held, cutoffs))

    began = time.perf_counter()
    look()
    compiled = time.perf_counter() - began
    seconds = _repeat(look, settings.repeats)
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
    """Steps as one program that takes over the state."""
    return bx.advance(*inputs, state, steps)


def _repeat(work: Callable[[], None], times: int) -> list[float]:
    out = []
    for _ in range(times):
        tick = time.perf_counter()
        work()
        out.append(time.perf_counter() - tick)
    return out


def _peak() -> float | None:
    """The most memory that the device had in use so far; None where it does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30


def main() -> None:
    """`python -m bilevax.experiments.ndcg_speed`: for machines without the command-line extras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=Settings.data)
    parser.add_argument("--methods", nargs="+", default=list(Settings.methods))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--users-per-step", type=int, default=Settings.users_per_step)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--repeats", type=int, default=Settings.repeats)
    parser.add_argument("--users", type=int)
    parser.add_argument("--out", default="results/ndcg-speed")
    given: dict[str, Any] = vars(parser.parse_args())
    folder = given.pop("out")
    given["methods"], given["forms"] = tuple(given["methods"]), tuple(given["forms"])
    measure(Settings(**given), folder)


if __name__ == "__main__":
    main()
