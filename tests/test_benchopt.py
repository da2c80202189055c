"""The solver files for the harness of benchmark_bilevel, against stand-ins for its interface.

The stand-ins have the names and call signatures that its templates document: solvers get f_inner and
f_outer as functions of (inner_var, outer_var, start, batch_size), run while a callback says so, and
return both variables.
"""

import importlib.util
import sys
import types
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "integrations" / "benchopt"
FILES = sorted((FOLDER / "solvers").glob("*.py"))
ROWS, INNER, OUTER = 90, 4, 3


class StandInBaseSolver:
    """Parameters become attributes; `run_once` runs until the callback has been asked so many times."""

    def __init__(self, **given):
        for name, (default,) in self.parameters.items():
            setattr(self, name, given.pop(name, default))
        assert not given

    def run_once(self, stop_val=1):
        answers = iter([True] * stop_val + [False])
        self.run(lambda: next(answers))


class StandInImportContext(AbstractContextManager):
    def __exit__(self, *error):
        return None


class StandInCriterion:
    def __init__(self, patience, strategy):
        assert strategy == "callback"


def module(name, **content):
    made = types.ModuleType(name)
    made.__dict__.update(content)
    return made


def load(monkeypatch, path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def harness(monkeypatch):
    constants = module("benchmark_utils.constants", PATIENCE=100)
    content = {"BaseSolver": StandInBaseSolver, "safe_import_context": StandInImportContext}
    stopping = module("benchopt.stopping_criterion", SufficientProgressCriterion=StandInCriterion)
    for made in (
        module("benchopt", **content),
        stopping,
        module("benchmark_utils", constants=constants),
        constants,
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    load(monkeypatch, FOLDER / "benchmark_utils" / "bilevax_solver.py", "benchmark_utils.bilevax_solver")
    return lambda path: load(monkeypatch, path, path.stem).Solver


def quadratic():
    """What the objective gives to a solver, and ‖∇F‖ at a given outer variable."""
    random = np.random.default_rng(0)
    targets = jnp.asarray(random.normal(size=(ROWS, INNER)), jnp.float32)
    goals = jnp.asarray(random.normal(size=(ROWS, INNER)), jnp.float32)
    A = jnp.asarray(random.normal(size=(INNER, OUTER)), jnp.float32)

    def part(rows, start, batch_size):
        return jax.lax.dynamic_slice(rows, (start, 0), (batch_size, INNER))

    def f_inner(inner_var, outer_var, start=0, batch_size=1):
        left = inner_var - A @ outer_var - part(targets, start, batch_size)
        return 0.5 * jnp.mean(jnp.sum(left**2, axis=1))

    def f_outer(inner_var, outer_var, start=0, batch_size=1):
        left = inner_var - part(goals, start, batch_size)
        return 0.5 * jnp.mean(jnp.sum(left**2, axis=1)) + 0.05 * outer_var @ outer_var

    def size_of_gradient(outer_var):
        inner_var = A @ outer_var + targets.mean(0)
        return float(jnp.linalg.norm(A.T @ (inner_var - goals.mean(0)) + 0.1 * outer_var))

    given = {
        "f_inner": f_inner,
        "f_outer": f_outer,
        "n_inner_samples": ROWS,
        "n_outer_samples": ROWS,
        "inner_var0": np.zeros(INNER),
        "outer_var0": np.ones(OUTER),
        "f_inner_fb": None,
        "f_outer_fb": None,
    }
    return given, size_of_gradient


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_solver_of_the_harness_goes_down_and_starts_anew_with_every_run(path, harness):
    given, size_of_gradient = quadratic()
    solver = harness(path)(batch_size=30, eval_freq=100)
    solver.set_objective(**given)
    solver.run_once(5)
    found = solver.get_result()
    assert found["inner_var"].shape == (INNER,)
    assert size_of_gradient(found["outer_var"]) < 0.2 * size_of_gradient(given["outer_var0"])
    solver.run_once(5)
    assert np.array_equal(solver.get_result()["outer_var"], found["outer_var"])
    assert solver.get_next(7) == 8


def test_a_step_may_see_all_rows_and_steps_may_be_given(harness):
    given, size_of_gradient = quadratic()
    steps = {"upper_step": 0.02, "lower_step": 0.5}
    solver = harness(FOLDER / "solvers" / "bilevax_mmbo.py")(batch_size="full", eval_freq=100, **steps)
    solver.set_objective(**given)
    solver.run_once(5)
    assert size_of_gradient(solver.get_result()["outer_var"]) < 0.1 * size_of_gradient(given["outer_var0"])


def test_names_are_those_of_methods_and_differ(harness):
    names = [harness(path).name for path in FILES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("bilevax-") for name in names)
