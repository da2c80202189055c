"""What makes a run another run: any other data, function, schedule or constant is noticed on resume."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import grouped

import bilevax as bx
from bilevax._run.identity import differences, identity

BLOCKS, ROWS = 4, 6
RNG = np.random.default_rng(0)
CONSTANTS = {name: RNG.normal(size=(BLOCKS, 2)).astype(np.float32) for name in ("first", "second")}
TRAINING, VALIDATION = RNG.normal(size=(2, ROWS, 2)).astype(np.float32)


# Given, so that nothing is estimated from the first rows, which would take most of the time.
STEPS = {"lower_step": 0.1, "inverse_step": 0.1}


def upper(x, y, block, batch):
    return jnp.mean(jnp.sum((y - batch - block["first"]) ** 2, -1)) + 0.1 * x @ x


def lower(x, y, block, batch):
    return jnp.mean(jnp.sum((y - x - batch - block["second"]) ** 2, -1))


def problem(upper=upper, lower=lower, blocks=CONSTANTS, upper_data=VALIDATION, lower_data=TRAINING):
    return bx.Problem(upper, lower, blocks, bx.Shared(upper_data), bx.Shared(lower_data))


def of(solver=0.1, problem=problem, **sampling):
    """The identity of a run; a solver may be just its upper step."""
    if not isinstance(solver, bx.AbstractSolver):
        solver = bx.BSVRBv2(solver, **STEPS)
    built = problem()
    given = {"blocks_per_step": 2, "batch_size": 2, "initial_batch_size": 0} | sampling
    key = given.pop("key", jax.random.key(0))
    start = built, jnp.ones(2), jnp.zeros((BLOCKS, 2))
    return identity(built, solver, solver.init(*start, key=key, sampling=bx.Sampling(**given)))


def scaled(factor):
    return lambda x, y, block, batch: factor * upper(x, y, block, batch)


def with_default(factor):
    def function(x, y, block, batch, *, factor=factor):
        return factor * upper(x, y, block, batch)

    return function


class Weighted:
    """A function with a state of its own."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x, y, block, batch):
        return self.factor * upper(x, y, block, batch)


def weighted(factor, x, y, block, batch):
    return factor * upper(x, y, block, batch)


def schedule(last):
    return optax.piecewise_constant_schedule(0.1, {10: 0.5, 20: last})


def by_label(rate):
    transforms = {"a": optax.sgd(0.1), "b": optax.adam(rate)}
    return optax.multi_transform(transforms, lambda x: jax.tree.map(lambda _: "b", x))


def with_lambda(number):
    return (lambda step: 0.1 / (1 + step)) if number == 1 else (lambda step: 0.1 / (2 + step))


PAIRS = {
    "the later value of a piecewise schedule": (schedule(0.5), schedule(0.25)),
    "a schedule within sgd": (optax.sgd(schedule(0.5)), optax.sgd(schedule(0.25))),
    "a rate within multi_transform": (by_label(0.1), by_label(0.2)),
    "a rate of inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(0.1), optax.inject_hyperparams(optax.adam)(0.2)
    ),
    "a default of inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(0.1), optax.inject_hyperparams(optax.adam)(0.1, b2=0.9)
    ),
    "the steps of MultiSteps": (
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation(),
    ),
    "a rate within MultiSteps": (
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        optax.MultiSteps(optax.sgd(0.2), 2).gradient_transformation(),
    ),
    "a constant of a lambda": (with_lambda(1), with_lambda(2)),
    "the order of a chain": (
        optax.chain(optax.clip(0.1), optax.sgd(0.1)), optax.chain(optax.sgd(0.1), optax.clip(0.1))
    ),
    "a clip of a chain": (
        optax.chain(optax.clip(0.1), optax.sgd(0.1)), optax.chain(optax.clip(0.2), optax.sgd(0.1))
    ),
    "a mask": (
        optax.masked(optax.sgd(0.1), True), optax.masked(optax.sgd(0.1), False)
    ),
    "a warm-up": (
        optax.linear_schedule(0.0, 0.1, 10), optax.linear_schedule(0.0, 0.1, 20)
    ),
    "a schedule of another hyper-parameter": (
        bx.BSVRBv2(0.1, **STEPS | {"lower_step": schedule(0.5)}),
        bx.BSVRBv2(0.1, **STEPS | {"lower_step": schedule(0.25)}),
    ),
    "a projection": (bx.BSVRBv2(0.1, **STEPS, radius=1.0), bx.BSVRBv2(0.1, **STEPS, radius=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_another_hyper_parameter_inside_a_solver_is_another_run(case):
    one, other = map(of, PAIRS[case])
    assert differences(one, other) != []


ARRAY = jnp.arange(2.0)
FUNCTIONS = {
    "another function": (upper, lambda x, y, block, batch: jnp.sum(y**2)),
    "a constant of a lambda": (scaled(1.0), scaled(2.0)),
    "a keyword default": (with_default(1.0), with_default(2.0)),
    "an attribute": (Weighted(1.0), Weighted(2.0)),
    "an argument of a partial": (functools.partial(weighted, 1.0), functools.partial(weighted, 2.0)),
    "a closed-over array": (scaled(jnp.float32(1.0)), scaled(jnp.float32(2.0))),
    "a closed-over vector": (
        lambda x, y, block, batch: upper(x, y, block, batch) + ARRAY @ x,
        lambda x, y, block, batch: upper(x, y, block, batch) + ARRAY[::-1] @ x,
    ),
    "a closed-over array of NumPy": (scaled(np.float32(1.0)), scaled(np.float32(1.5))),
    "a branch that is taken later": (
        lambda x, y, block, batch: jax.lax.cond(x[0] > 9, lambda: 1.0, lambda: 2.0) * jnp.sum(y**2),
        lambda x, y, block, batch: jax.lax.cond(x[0] > 9, lambda: 3.0, lambda: 2.0) * jnp.sum(y**2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_another_function_or_constant_inside_it_is_another_run(case, level):
    one, other = [of(problem=lambda f=f: problem(**{level: f})) for f in FUNCTIONS[case]]
    assert differences(one, other) == [
        "the step computes something else: f, g, a schedule or a constant inside them has changed"
    ]


def swapped_rows(rows):
    rows = rows.copy()
    rows[[0, 1]] = rows[[1, 0]]
    return rows


DATA = {
    "training rows for validation rows": {"upper_data": TRAINING, "lower_data": VALIDATION},
    "two block constants": {"blocks": {"first": CONSTANTS["second"], "second": CONSTANTS["first"]}},
    "two rows": {"lower_data": swapped_rows(TRAINING)},
    "two blocks": {"blocks": jax.tree.map(swapped_rows, CONSTANTS)},
    "the signs of a row": {"lower_data": np.concatenate([-TRAINING[:1], TRAINING[1:]])},
}


@pytest.mark.parametrize("case", DATA)
def test_swapped_data_of_equal_shape_are_other_data(case):
    found = differences(of(), of(problem=lambda: problem(**DATA[case])))
    assert found
    assert all(line.startswith("data.") for line in found)


@pytest.mark.parametrize(
    "change", [{"initial_batch_size": "all"}, {"shuffle": False}, {"key": jax.random.key(1)}]
)
def test_another_sampling_is_another_run(change):
    assert differences(of(), of(**change)) != []


def test_the_same_run_is_the_same():
    assert differences(of(by_label(0.1)), of(by_label(0.1))) == []


def run(folder, solver=0.1, make=problem, **arguments):
    given = {"steps": 20, "every": 10, "key": jax.random.key(0), "progress": None, "checkpoint": folder}
    given |= {"blocks_per_step": 2, "batch_size": 2} | arguments
    x0, y0 = jnp.ones(2), jnp.zeros((BLOCKS, 2))
    return bx.minimize(make(), x0, y0, solver=bx.BSVRBv2(solver), **grouped(**given))


def test_a_run_does_not_resume_with_other_hyper_parameters_functions_or_data(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    run(tmp_path, schedule(0.5))
    before = sorted(tmp_path.rglob("*"))
    for change in (
        {"solver": schedule(0.25)},
        {"solver": schedule(0.5), "make": lambda: problem(upper=scaled(2.0))},
        {"solver": schedule(0.5), "make": lambda: problem(upper_data=TRAINING, lower_data=VALIDATION)},
    ):
        with pytest.raises(bx.CheckpointError, match="belongs to another run"):
            run(tmp_path, steps=30, resume=True, **change)
    assert sorted(tmp_path.rglob("*")) == before
    assert run(tmp_path, schedule(0.5), steps=30, resume=True).state.step == 30


def test_a_best_iterate_by_one_metric_is_not_continued_by_another(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    run(tmp_path, patience=10, watch="objective")
    with pytest.raises(bx.CheckpointError, match=r"watched 'objective', this one watches 'gradient_norm'"):
        run(tmp_path, patience=10, watch="gradient_norm", steps=30, resume=True)
    run(tmp_path, patience=10, watch="objective", steps=30, resume=True)


PROGRAM = """
import json, optax, test_resume_identity as t
print(json.dumps(t.of(t.by_label(0.1)), sort_keys=True))
"""


def test_the_identity_of_a_run_is_the_same_in_processes_that_hash_differently():
    """Sets and dicts of strings are ordered by a seed that Python draws for every process."""
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(__file__).parent,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
