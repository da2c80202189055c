"""`bilevax reproduce meta`: what many tasks teach about a new one, beside joint training, MAML and ANIL.

Every method sees the same training tasks. Its step sizes are chosen from a grid of nine, by the loss on
validation tasks, after equally many seconds each; so is the number of steps that it takes on a new task. Then
it is run from several seeds, again for equally many seconds. Seconds are those of the processor, compilation
left out: they hardly depend on what else the machine does. What trials and runs find is written at once, and
several may be made at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax.experiments.arguments import check_names, make_parser, read_options
from bilevax.experiments.kept import Kept
from bilevax.experiments.meta_methods import METHODS, STEPS, Adapter, Method, Setting, moved, pull
from bilevax.experiments.meta_tasks import Family, Params, Tasks, digits, predict, sines
from bilevax.experiments.report import Report

FAMILIES: dict[str, Callable[[], Family]] = {"sines": sines, "digits": digits}
ADAPTED = (1, 5, 10, 20, 50, 100, 200)  # steps on a new task
NEWTON = 5  # at most, where they are Newton's
TUNING = 1000  # what is added to the first seed for the tasks of the tuning


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
      processes: trials and runs that are made at a time, a core each.
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
    processes: int = 1

    def quick(self) -> MetaOptions:
        """A short check."""
        return dataclasses.replace(
            self, tasks=50, test_tasks=20, per_step=5, seconds=0.3, tuning_seconds=0.1, seeds=2
        )


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What a run of a method has come to.

    Attributes:
      adapters: what may be applied to new tasks.
      steps: taken.
      seconds: they took.
    """

    adapters: tuple[Adapter, ...]
    steps: int
    seconds: float


def run(
    options: MetaOptions, folder: str | Path, *, quick: bool = False, resume: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Tunes and runs everything; writes a table per family.

    Args:
      options: what to run.
      folder: where tables go, and `kept.json` with what every trial and run found.
      quick: a short check.
      resume: run only what the folder does not have; other families, methods and seeds may be asked for.

    Returns:
      The rows of the tables, by family.
    """
    options = options.quick() if quick else options
    check_names("families", options.families, FAMILIES)
    check_names("methods", options.methods, METHODS)
    report = Report(folder, options, quick=quick)
    free = ("families", "methods", "seeds", "processes")
    same = {name: value for name, value in dataclasses.asdict(options).items() if name not in free}
    kept = Kept(Path(folder) / "kept.json", same, resume=resume)
    pairs = [(family, method) for family in options.families for method in options.methods]
    trials = {
        f"{family}, {method}, setting {number}": functools.partial(trial, options, family, method, number)
        for family, method in pairs
        for number in range(len(METHODS[method].settings(family)))
    }
    found = kept.fill(trials, options.processes, alone=True)
    chosen = {
        (family, method): _best(
            [one for name, one in found.items() if name.startswith(f"{family}, {method},")]
        )
        for family, method in pairs
    }
    seeds = range(options.seed, options.seed + options.seeds)
    runs = {
        f"{family}, {method}, seed {seed}": functools.partial(
            measure, options, family, method, chosen[family, method][0], seed
        )
        for seed in seeds
        for family, method in pairs
    }
    found = kept.fill(runs, options.processes, alone=True)
    tables = {}
    for family in options.families:
        tables[family] = [
            _row(
                family,
                method,
                *chosen[family, method],
                [found[f"{family}, {method}, seed {seed}"] for seed in seeds],
            )
            for method in options.methods
        ]
        report.table(
            f"meta_{family}",
            tables[family],
            f"New tasks after adaptation, {family}",
            "loss: mean over seeds of the mean query loss of test tasks ± its standard error; "
            f"{options.tasks} training tasks, {options.seconds:g} processor seconds each.",
        )
    report.finish()
    return tables


def trial(options: MetaOptions, family: str, method: str, number: int) -> list[list[float]]:
    """The validation loss of a setting, of every adapter after every number of steps in `ADAPTED`."""
    found = _judged_run(
        options, family, method, number, options.seed + TUNING, "validation", options.tuning_seconds
    )
    return found["loss"]


def measure(options: MetaOptions, family: str, method: str, number: int, seed: int) -> dict[str, Any]:
    """The same of a run with the chosen setting on test tasks, with errors and the steps that it took."""
    return _judged_run(options, family, method, number, seed, "test", options.seconds)


def _judged_run(
    options: MetaOptions, family: str, method: str, number: int, seed: int, part: str, seconds: float
) -> dict[str, Any]:
    known, kind = _made(FAMILIES[family]), METHODS[method]
    began = time.perf_counter()
    learner = kind(known, known.draw(options.tasks, seed, "train"), options.per_step)
    learnt = learn(learner, kind.settings(family)[number], seed, seconds)
    tasks = known.draw(options.test_tasks, seed, part)
    losses, errors = zip(*(judged(known, adapter, tasks) for adapter in learnt.adapters), strict=True)
    print(
        f"{family}, {method}, setting {number}, seed {seed}: {time.perf_counter() - began:.0f} s", flush=True
    )
    pulls = [adapter.strength for adapter in learnt.adapters]
    steps = {"steps": learnt.steps, "seconds": learnt.seconds, "pulls": pulls}
    return {"loss": np.array(losses).tolist(), "error": np.array(errors).tolist()} | steps


@functools.cache
def _made(make: Callable[[], Family]) -> Family:
    """One family for all runs of a process, as programs are compiled once per family."""
    return make()


def _best(losses: list[list[list[float]]]) -> tuple[int, int, int]:
    """The numbers of the setting, of the adapter and of the entry of `ADAPTED` with the least loss."""
    values = np.asarray(losses, float)
    place = np.argmin(np.where(np.isfinite(values), values, np.inf))
    setting, adapter, steps = (int(one) for one in np.unravel_index(place, values.shape))
    return setting, adapter, steps


def _row(
    family: str, method: str, number: int, adapter: int, steps: int, found: list[dict[str, Any]]
) -> dict[str, Any]:
    setting = METHODS[method].settings(family)[number]
    row = {"method": method, "loss": _mean([one["loss"][adapter][steps] for one in found])}
    if _made(FAMILIES[family]).error is not None:
        row["error rate"] = _mean([one["error"][adapter][steps] for one in found])
    row |= {
        "after one step": _mean([one["loss"][adapter][0] for one in found]),
        "steps on a new task": ADAPTED[steps],
        "upper step": setting["upper"],
    }
    row |= {"lower step": setting["lower"]} if "lower" in setting else {}
    if "strength" in setting:
        row |= {
            "pull": setting["strength"],
            "on a new task": np.mean([one["pulls"][adapter] for one in found]),
        }
    return row | {"steps": int(np.mean([one["steps"] for one in found]))}


def learn(method: Method, setting: Setting, seed: int, seconds: float) -> Learnt:
    """A method after so many seconds of the processor, compilation left out."""
    state = method.begin(setting, seed)
    jax.block_until_ready(method.advance(state, setting, 0))
    chunks, began = 0, time.process_time()
    while (passed := time.process_time() - began) < seconds:
        state = jax.block_until_ready(method.advance(state, setting, chunks))
        chunks += 1
    return Learnt(method.adapters(state, setting), chunks * STEPS, passed)


def judged(family: Family, adapter: Adapter, tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """The mean query loss of tasks, and their error, after every number of steps in `ADAPTED`.

    Newton's steps are no more than `NEWTON`: what they find does not change after those.
    """
    newton = adapter.rate is None
    numbers = jnp.asarray(0.0 if newton else adapter.rate), jnp.asarray(adapter.strength)
    program = _adapted(family, adapter.last_only, newton)
    found = program(adapter.params, *numbers, tasks.support, tasks.query)
    places = np.minimum(ADAPTED, NEWTON if newton else ADAPTED[-1]) - 1
    loss, wrong = (np.asarray(part)[:, places].mean(0) for part in found)
    return loss, wrong


@functools.lru_cache
def _adapted(family: Family, last_only: bool, newton: bool) -> Any:
    """A program that takes steps on tasks, and returns the query loss and error after each."""

    def one(start: Params, rate: Array, strength: Array, support: Any, query: Any) -> Any:
        def loss(params: Params) -> Array:
            return family.mean_loss(params, support) + pull(params, start, strength)

        def seen(params: Params) -> tuple[Array, Array]:
            out = predict(params, query[0])
            wrong = jnp.zeros(()) if family.error is None else jnp.mean(family.error(out, query[1]))
            return jnp.mean(family.loss(out, query[1])), wrong

        def step(params: Params, _: Any) -> tuple[Params, tuple[Array, Array]]:
            params = moved(params, jax.grad(loss)(params), rate, last_only)
            return params, seen(params)

        flat, as_layer = ravel_pytree(start[-1])

        def of_head(head: Array) -> Params:
            return [*start[:-1], as_layer(head)]

        def newton_step(head: Array, _: Any) -> tuple[Array, tuple[Array, Array]]:
            slope, hessian = (
                derive(lambda one: loss(of_head(one)))(head) for derive in (jax.grad, jax.hessian)
            )
            head = head - jnp.linalg.solve(hessian, slope)
            return head, seen(of_head(head))

        if newton:
            return jax.lax.scan(newton_step, flat, length=NEWTON)[1]
        return jax.lax.scan(step, start, length=ADAPTED[-1])[1]

    return jax.jit(jax.vmap(one, (None, None, None, 0, 0)))


def _mean(values: Any) -> str:
    values = np.asarray(values, float)
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{values.mean():.4f} ± {error:.4f}"


def main(words: list[str] | None = None) -> None:
    """`python -m bilevax.experiments.meta`: `bilevax reproduce meta` without the extra `cli`."""
    parser = make_parser(MetaOptions, __doc__, "results/meta")
    parser.add_argument("--resume", action="store_true", help="run only what is missing in the folder")
    parser.add_argument("--quick", action="store_true", help="a short check")
    given = parser.parse_args(words)
    run(read_options(MetaOptions, given), given.out, quick=given.quick, resume=given.resume)


if __name__ == "__main__":
    main()
