"""`bilevax reproduce meta`: what many tasks teach about a new one, beside joint training, MAML and ANIL.

Every method sees the same training tasks. Its step sizes are chosen from a grid of nine, by the loss on
validation tasks, after equally many seconds each; so is the number of steps that it takes on a new task. Then
it is run from several seeds, again for equally many seconds. Seconds are those of the processor, compilation
left out: they do not depend on what else the machine does.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.experiments.meta_methods import METHODS, STEPS, Adapter, Method, Setting, moved, pull
from bilevax.experiments.meta_tasks import Family, Params, Tasks, digits, predict, sines
from bilevax.experiments.report import Report

FAMILIES = {"sines": sines, "digits": digits}
ADAPTED = (1, 5, 10, 20, 50, 100, 200)  # steps on a new task


@dataclasses.dataclass(frozen=True)
class MetaOptions:
    """The options of `bilevax reproduce meta`.

    Attributes:
      families: kinds of tasks.
      methods: whom to compare.
      tasks: to learn from.
      test_tasks: to be judged by; as many are for validation.
      per_step: tasks of a step.
      seconds: of a run.
      tuning_seconds: of each of the nine settings.
      seeds: runs with the chosen setting, each with its own tasks.
      seed: the first of them.
    """

    families: tuple[str, ...] = ("sines", "digits")
    methods: tuple[str, ...] = tuple(METHODS)
    tasks: int = 1000
    test_tasks: int = 500
    per_step: int = 25
    seconds: float = 60.0
    tuning_seconds: float = 20.0
    seeds: int = 5
    seed: int = 0

    def quick(self) -> MetaOptions:
        """A short check."""
        return dataclasses.replace(
            self, tasks=50, test_tasks=20, per_step=5, seconds=0.3, tuning_seconds=0.1, seeds=2
        )


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What a run of a method has come to.

    Attributes:
      adapter: what is applied to new tasks.
      steps: taken.
      seconds: they took.
    """

    adapter: Adapter
    steps: int
    seconds: float


def run(options: MetaOptions, folder: str | Path, *, quick: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Tunes and runs everything; writes a table per family.

    Returns:
      The rows of the tables, by family.
    """
    options = options.quick() if quick else options
    unknown = [name for name in options.families if name not in FAMILIES]
    unknown += [name for name in options.methods if name not in METHODS]
    if unknown:
        raise ValueError(f"families are {list(FAMILIES)}, methods {list(METHODS)}, got {unknown}")
    report = Report(folder, options, quick=quick)
    tables = {}
    for name in options.families:
        tables[name] = _compared(FAMILIES[name](), options)
        report.table(
            f"meta_{name}",
            tables[name],
            f"New tasks after adaptation, {name}",
            "loss: mean over seeds of the mean query loss of test tasks ± its standard error; "
            f"{options.tasks} training tasks, {options.seconds:g} processor seconds each.",
        )
    report.finish()
    return tables


def _compared(family: Family, options: MetaOptions) -> list[dict[str, Any]]:
    rows = []
    for name in options.methods:
        setting, adapted = _chosen(name, family, options)
        losses, errors, steps, start = [], [], [], []
        for seed in range(options.seed, options.seed + options.seeds):
            method = METHODS[name](family, family.draw(options.tasks, seed, "train"), options.per_step)
            learnt = learn(method, setting, seed, options.seconds)
            test = family.draw(options.test_tasks, seed, "test")
            loss, error = judged(family, learnt.adapter, test)
            losses.append(loss[ADAPTED.index(adapted)])
            errors.append(error[ADAPTED.index(adapted)])
            start.append(loss[0])
            steps.append(learnt.steps)
        row = {"method": name, "loss": _mean(losses)}
        row |= {} if family.error is None else {"error rate": _mean(errors)}
        row |= {
            "after one step": _mean(start),
            "steps on a new task": adapted,
            "upper step": setting["upper"],
            "lower step": setting["lower"],
        }
        row |= {"pull": setting["strength"]} if "strength" in setting else {}
        rows.append(row | {"steps": int(np.mean(steps))})
    return rows


def _chosen(name: str, family: Family, options: MetaOptions) -> tuple[Setting, int]:
    """The setting and the number of steps on a new task with the least validation loss."""
    seed = options.seed + options.seeds
    method = METHODS[name](family, family.draw(options.tasks, seed, "train"), options.per_step)
    validation = family.draw(options.test_tasks, seed, "validation")
    found = []
    for setting in METHODS[name].settings(family.name):
        loss, _ = judged(family, learn(method, setting, seed, options.tuning_seconds).adapter, validation)
        best = int(np.argmin(np.where(np.isfinite(loss), loss, np.inf)))
        found.append((loss[best] if np.isfinite(loss[best]) else np.inf, setting, ADAPTED[best]))
    return min(found, key=lambda one: one[0])[1:]


def learn(method: Method, setting: Setting, seed: int, seconds: float) -> Learnt:
    """A method after so many seconds of the processor, compilation left out."""
    state = method.begin(setting, seed)
    jax.block_until_ready(method.advance(state, setting, 0))
    chunks, began = 0, time.process_time()
    while (passed := time.process_time() - began) < seconds:
        state = jax.block_until_ready(method.advance(state, setting, chunks))
        chunks += 1
    return Learnt(method.adapter(state, setting), chunks * STEPS, passed)


def judged(family: Family, adapter: Adapter, tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """The mean query loss of tasks, and their error, after every number of steps in `ADAPTED`."""
    numbers = jnp.asarray(adapter.rate), jnp.asarray(adapter.strength)
    found = _adapted(family, adapter.last_only)(adapter.params, *numbers, tasks.support, tasks.query)
    places = np.asarray(ADAPTED) - 1
    loss, wrong = (np.asarray(part)[:, places].mean(0) for part in found)
    return loss, wrong


@functools.lru_cache
def _adapted(family: Family, last_only: bool) -> Any:
    """A program that takes steps on tasks, and returns the query loss and error after each."""

    def one(start: Params, rate: Array, strength: Array, support: Any, query: Any) -> Any:
        def loss(params: Params) -> Array:
            return family.mean_loss(params, support) + pull(params, start, strength)

        def step(params: Params, _: Any) -> tuple[Params, tuple[Array, Array]]:
            params = moved(params, jax.grad(loss)(params), rate, last_only)
            out = predict(params, query[0])
            wrong = jnp.zeros(()) if family.error is None else jnp.mean(family.error(out, query[1]))
            return params, (jnp.mean(family.loss(out, query[1])), wrong)

        return jax.lax.scan(step, start, length=ADAPTED[-1])[1]

    return jax.jit(jax.vmap(one, (None, None, None, 0, 0)))


def _mean(values: Any) -> str:
    values = np.asarray(values, float)
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{values.mean():.4f} ± {error:.4f}"
