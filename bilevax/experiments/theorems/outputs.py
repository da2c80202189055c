"""Which iterate to return: a random one, the last one, or an average."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.experiments.report import Report, spread
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.answers import ChoicesOptions
from bilevax.experiments.theorems.curved_truth import CurvedTruth, truth_of
from bilevax.experiments.theorems.problems import initial_rows, make_task, step_constants
from bilevax.experiments.theorems.scalings import variance_reduced
from bilevax.experiments.theorems.truth import Truth


def measure(options: ChoicesOptions, report: Report) -> dict[str, np.ndarray]:
    """‖∇F‖²/ε² of the iterates that BSVRB v2 could return after T(ε) steps; writes `outputs.csv` and `.md`.

    Args:
      options: of the experiment.
      report: where the table goes.

    Returns:
      By kind of output, one value per seed.
    """
    epsilon, copies = options.epsilon, options.copies[0]
    family, sizes = options.blocks_with(copies), options.sizes_with(copies)
    truth, task = truth_of(family), make_task(family, sizes, initial_rows(epsilon))
    keys, known = jax.random.split(jax.random.key(options.seed), options.seeds), step_constants(family)
    rows, last = [], {}
    for c in options.grids["output"].constants:
        print(f"output: c = {c}")
        solver = bx.BSVRBv2(**variance_reduced(c, epsilon, sizes, known))
        reached = lanes.steps_until(
            task, [solver], keys, truth.squared_gradient, epsilon**2, options.max_steps
        )
        if not np.isfinite(reached.steps).all():
            continue
        steps = int(reached.steps.max())
        stacked, started = lanes.start(task, [solver], keys)
        seen = _follow(stacked, task.problem, truth, started.state, jnp.asarray(steps))
        last = {name: np.asarray(value)[0] / epsilon**2 for name, value in seen.items()}
        rows.append({"c": c, "T": steps} | {name: spread(value, 2) for name, value in last.items()})
    note = (
        f"‖∇F‖²/ε² at ε = {epsilon}, mean ± standard deviation over seeds, after the T steps that the "
        "slowest seed needs for a running mean of at most ε². random: the mean over t, which is the "
        "expectation for a random iterate."
    )
    report.table("outputs", rows, "Which iterate to return", note)
    return last


class _Sums(eqx.Module):
    squares: Array
    x: Array
    late_x: Array
    late: Array


@eqx.filter_jit
def _follow(
    solvers: Any, problem: bx.Problem, truth: Truth | CurvedTruth, states: bx.State, steps: Array
) -> dict[str, Array]:
    def one(solver: bx.AbstractSolver, state: bx.State) -> dict[str, Array]:
        def body(t: Array, carry: tuple[bx.State, _Sums]) -> tuple[bx.State, _Sums]:
            state, sums = carry
            late = (2 * t >= steps).astype(state.x.dtype)
            sums = _Sums(
                sums.squares + truth.squared_gradient(state.x),
                sums.x + state.x,
                sums.late_x + late * state.x,
                sums.late + late,
            )
            return solver.step(problem, state)[0], sums

        nothing = jnp.zeros_like(state.x)
        zero = jnp.zeros((), state.x.dtype)
        state, sums = jax.lax.fori_loop(0, steps, body, (state, _Sums(zero, nothing, nothing, zero)))
        return {
            "random": sums.squares / steps,
            "last": truth.squared_gradient(state.x),
            "average": truth.squared_gradient(sums.x / steps),
            "average of the second half": truth.squared_gradient(sums.late_x / sums.late),
        }

    return lanes.over_lanes(one, ())(solvers, states)
