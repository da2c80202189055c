"""`bilevax reproduce meta`: what many tasks teach about a new one, beside joint training, MAML and ANIL.

Every method sees the same training tasks. Its step sizes are chosen from a grid of nine, by the loss on
validation tasks, after equally many seconds each; so is the number of steps that it takes on a new task. Then
it is run from several seeds, again for equally many seconds. In every run what was learnt is looked at a few
times, and the look that is best on validation tasks counts: longer runs learn the training tasks by heart.
Seconds are those of the processor, compilation left out: they hardly depend on what else the machine does.
What trials and runs find is written at once, and several may be made at a time.
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
ADAPTED = {"sines": (1, 5, 10, 20, 50, 100, 200, 500), "digits": (1, 5, 10, 20, 50)}  # steps on a new task
LOOKS = 6  # in a run
BLOWN_UP = 10.0  # times the loss after one step
TUNING = 1000  # what is added to the first seed for the tasks of the tuning


@dataclasses.dataclass(frozen=True)
class MetaOptions:
    """The options of `bilevax reproduce meta`.

    Attributes:
      families: kinds of tasks.
      methods: whom to compare.
      tasks: to learn from.
      digit_tasks: the same for digits.
      test_tasks: to be judged by.
      validation_tasks: to choose by.
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
    digit_tasks: int = 5000
    test_tasks: int = 500
    validation_tasks: int = 200
    per_step: int = 25
    seconds: float = 15.0
    tuning_seconds: float = 15.0
    seeds: int = 5
    seed: int = 0
    processes: int = 1

    def quick(self) -> MetaOptions:
        """A short check."""
        few = {"tasks": 50, "digit_tasks": 50, "test_tasks": 20, "validation_tasks": 20, "per_step": 5}
        return dataclasses.replace(self, **few, seconds=0.3, tuning_seconds=0.1, seeds=2)

    def tasks_of(self, family: str) -> int:
        """How many tasks of a family to learn from."""
        return self.digit_tasks if family == "digits" else self.tasks


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What a method has come to at some time of a run.

    Attributes:
      adapters: what may be applied to new tasks.
      steps: taken so far.
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
        _name(family, method, number): functools.partial(trial, options, family, method, number)
        for family, method in pairs
        for number in range(len(METHODS[method].settings(family)))
    }
    found = kept.fill(trials, options.processes, alone=True)
    chosen = {
        (family, method): _best(
            [found[_name(family, method, number)] for number in range(len(METHODS[method].settings(family)))]
        )
        for family, method in pairs
    }
    seeds = range(options.seed, options.seed + options.seeds)
    names = {
        (family, method, seed): f"{_name(family, method, chosen[family, method][0])}, seed {seed}"
        for seed in seeds
        for family, method in pairs
    }
    runs = {
        name: functools.partial(measure, options, family, method, chosen[family, method][0], seed)
        for (family, method, seed), name in names.items()
    }
    found = kept.fill(runs, options.processes, alone=True)
    tables = {}
    for family in options.families:
        tables[family] = [
            _row(
                family,
                method,
                *chosen[family, method],
                [found[names[family, method, seed]] for seed in seeds],
            )
            for method in options.methods
        ]
        report.table(
            f"meta_{family}",
            tables[family],
            f"New tasks after adaptation, {family}",
            "loss: mean over seeds of the mean query loss of test tasks ± its standard error; "
            f"{options.tasks_of(family)} training tasks, {options.seconds:g} processor seconds each.",
        )
    report.finish()
    return tables


def _name(family: str, method: str, number: int) -> str:
    """What the results of a setting are kept under: the setting itself, as grids may change."""
    setting = METHODS[method].settings(family)[number]
    return ", ".join([family, method, *(f"{name} {value:g}" for name, value in setting.items())])


def trial(options: MetaOptions, family: str, method: str, number: int) -> list[list[list[float]]]:
    """The validation loss of a setting: by look, adapter and number of steps in `ADAPTED`."""
    seed = options.seed + TUNING
    known, looks = _looks(options, family, method, number, seed, options.tuning_seconds)
    return _judged_looks(options, known, looks, seed)


def measure(options: MetaOptions, family: str, method: str, number: int, seed: int) -> dict[str, Any]:
    """A run with the chosen setting.

    Returns:
      By look, adapter and number of steps in `ADAPTED`, the loss of validation tasks, and loss and error of
      test tasks; by look, the steps that the run had taken and λ of the adapters; and their rates.
    """
    known, looks = _looks(options, family, method, number, seed, options.seconds)
    tasks = known.draw(options.test_tasks, seed, "test")
    found = [[judged(known, adapter, tasks) for adapter in look.adapters] for look in looks]
    loss, error = ([[one[part].tolist() for one in look] for look in found] for part in (0, 1))
    pulls = [[adapter.strength for adapter in look.adapters] for look in looks]
    rates = [adapter.rate for adapter in looks[0].adapters]
    steps = [look.steps for look in looks]
    validation = _judged_looks(options, known, looks, seed)
    return {
        "validation": validation,
        "loss": loss,
        "error": error,
        "pulls": pulls,
        "rates": rates,
        "steps": steps,
    }


def _looks(
    options: MetaOptions, family: str, method: str, number: int, seed: int, seconds: float
) -> tuple[Family, list[Learnt]]:
    known, kind = _made(FAMILIES[family]), METHODS[method]
    began = time.perf_counter()
    learner = kind(known, known.draw(options.tasks_of(family), seed, "train"), options.per_step)
    looks = learn(learner, kind.settings(family)[number], seed, seconds)
    passed = time.perf_counter() - began
    print(f"{family}, {method}, setting {number}, seed {seed}: {passed:.0f} s", flush=True)
    return known, looks


def _judged_looks(
    options: MetaOptions, family: Family, looks: list[Learnt], seed: int
) -> list[list[list[float]]]:
    tasks = family.draw(options.validation_tasks, seed, "validation")
    return [[judged(family, adapter, tasks)[0].tolist() for adapter in look.adapters] for look in looks]


@functools.cache
def _made(make: Callable[[], Family]) -> Family:
    """One family for all runs of a process, as programs are compiled once per family."""
    return make()


def _best(losses: list[list[list[list[float]]]]) -> tuple[int, int, int]:
    """The numbers of the setting, of the adapter and of the entry of `ADAPTED` with the least loss.

    Where more steps on a new task made some look far worse than one step, single tasks have blown up: on
    other tasks than these they may do so earlier. Such settings do not count, unless all are so.
    """
    values = np.asarray(losses, float)
    values = np.where(np.isfinite(values), values, np.inf)  # by setting, look, adapter and steps
    most, after_one = values.max((1, 3)), values[..., 0].max(1)
    steady = np.isfinite(most) & (most <= BLOWN_UP * after_one)
    if steady.any():
        values = np.where(steady[:, None, :, None], values, np.inf)
    setting, _, adapter, steps = _least(values)
    return setting, adapter, steps


def _least(losses: Any) -> tuple[int, ...]:
    """Where the least of some losses is."""
    values = np.asarray(losses, float)
    place = np.argmin(np.where(np.isfinite(values), values, np.inf))
    return tuple(int(one) for one in np.unravel_index(place, values.shape))


def _row(
    family: str, method: str, number: int, adapter: int, steps: int, found: list[dict[str, Any]]
) -> dict[str, Any]:
    setting = METHODS[method].settings(family)[number]
    looks = [_least([look[adapter][steps] for look in one["validation"]])[0] for one in found]

    def mean(name: str, steps: int) -> str:
        return _mean([one[name][look][adapter][steps] for one, look in zip(found, looks, strict=True)])

    row = {"method": method, "loss": mean("loss", steps)}
    if _made(FAMILIES[family]).error is not None:
        row["error rate"] = mean("error", steps)
    taken = "solved" if METHODS[method].solves else ADAPTED[family][steps]
    row |= {
        "after one step": mean("loss", 0),
        "steps on a new task": taken,
        "of size": "none" if METHODS[method].solves else f"{found[0]['rates'][adapter]:g}",
    }
    row |= {"upper step": setting["upper"], "lower step": setting.get("lower", "none")}
    pulls = [one["pulls"][look][adapter] for one, look in zip(found, looks, strict=True)]
    row |= {"pull": f"{setting['strength']:g}" if "strength" in setting else "none"}
    row |= {"on a new task": f"{np.mean(pulls):.3g}"}
    return row | {"steps": int(np.mean([one["steps"][look] for one, look in zip(found, looks, strict=True)]))}


def learn(method: Method, setting: Setting, seed: int, seconds: float) -> list[Learnt]:
    """What a method has learnt, at `LOOKS` times of so many seconds of the processor.

    Compilation is left out, and so are the looks.
    """
    state = method.begin(setting, seed)
    for chunk in range(2):  # the state after a step may be of other types than the first one
        state = jax.block_until_ready(method.advance(state, setting, chunk))
    state, chunks, passed = method.begin(setting, seed), 0, 0.0
    looks = []
    for look in range(LOOKS):
        began = time.process_time() - passed
        while chunks == 0 or passed < (look + 1) / LOOKS * seconds:
            state = jax.block_until_ready(method.advance(state, setting, chunks))
            chunks, passed = chunks + 1, time.process_time() - began
        adapters = method.adapters(state, setting)
        # Copies: the next steps are taken in the memory of the state.
        copies = [dataclasses.replace(one, params=jax.tree.map(np.array, one.params)) for one in adapters]
        looks.append(Learnt(tuple(copies), chunks * STEPS, passed))
    return looks


def judged(family: Family, adapter: Adapter, tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """The mean query loss of tasks, and their error, after every number of steps in `ADAPTED`.

    Where the last layer of a task is solved for, it is the same for all of them.
    """
    numbers = adapter.strength, adapter.scale if adapter.rate is None else adapter.rate
    program = _adapted(family, adapter.last_only, adapter.rate is None)
    found = program(adapter.params, *map(jnp.asarray, numbers), tasks.support, tasks.query)
    places = np.subtract(ADAPTED[family.name], 1)
    loss, wrong = (np.asarray(part)[:, places if part.shape[1] > 1 else 0 * places].mean(0) for part in found)
    return loss, wrong


@functools.lru_cache
def _adapted(family: Family, last_only: bool, solved: bool) -> Any:
    """A program that fits networks to tasks, and returns the query loss and error after each step."""

    def seen(out: Array, targets: Array) -> tuple[Array, Array]:
        wrong = jnp.zeros(()) if family.error is None else jnp.mean(family.error(out, targets))
        return jnp.mean(family.loss(out, targets)), wrong

    def by_steps(start: Params, strength: Array, rate: Array, support: Any, query: Any) -> Any:
        def loss(params: Params) -> Array:
            return family.mean_loss(params, support) + pull(params, start, strength)

        def step(params: Params, _: Any) -> tuple[Params, tuple[Array, Array]]:
            params = moved(params, jax.grad(loss)(params), rate, last_only)
            return params, seen(predict(params, query[0]), query[1])

        return jax.lax.scan(step, start, length=ADAPTED[family.name][-1])[1]

    def by_solution(start: Params, strength: Array, scale: Array, support: Any, query: Any) -> Any:
        flat, as_layer = ravel_pytree(start[-1])

        def squares(head: Array) -> Array:
            out = predict([*start[:-1], as_layer(head)], support[0])
            return jnp.mean(family.squares(out, support[1])) + 0.5 * strength * jnp.sum((head - flat) ** 2)

        head = flat - jnp.linalg.solve(jax.hessian(squares)(flat), jax.grad(squares)(flat))
        out = scale * predict([*start[:-1], as_layer(head)], query[0])
        return jax.tree.map(lambda one: one[None], seen(out, query[1]))

    return jax.jit(jax.vmap(by_solution if solved else by_steps, (None, None, None, 0, 0)))


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
