"""The error terms of the analysis over time: the distance of every estimator from its target."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.experiments import figures
from bilevax.experiments.kept import Task
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.curved_truth import CurvedTruth, truth_of
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task, step_constants
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS
from bilevax.experiments.theorems.truth import Truth
from bilevax.solvers.toolkit import flatten_slots, solve, where_slot

TRACKED = ("BSVRB v1", "BSVRB v2")
SYMBOLS = {
    "z": "‖z − Δ‖²",
    "y": "‖y_i − y_i(x)‖²",
    "s": "‖s_i − ∇_y g_i‖²",
    "H": "‖H_i − ∇²_yy g_i‖²",
    "u": "‖u_i − ∇_v φ_i‖²",
    "v": "‖v_i − v_i(x, y_i)‖²",
    "F": "‖∇F(x)‖²",
}


class ErrorTerms(eqx.Module):
    """δ_z, δ_y, δ_s, and δ_H or δ_u and δ_v, of a state of BSVRB v1 or v2, as means over blocks.

    A state after step t holds x_{t+1} and z_{t+1}. z, s, H and u are compared with what they estimate, the
    derivatives at time t: δ_z = ‖z_{t+1} − Δ_t‖².
    """

    truth: Truth | CurvedTruth

    def __call__(self, state: bx.State) -> dict[str, Array]:
        (table,), (clocks,) = state.levels.values(), state.clocks.values()
        memory = table.memory
        truth, x, x_old = self.truth, state.x, state.x_before
        y, y_old = memory.y.at(clocks.y.now), memory.y.at(clocks.y.before)
        terms = {
            "F": truth.squared_gradient(x),
            "y": _mean_square(y - truth.lower_solution(x)),
            "s": _mean_square(memory.y.slope - truth.lower_gradient(x_old, y_old)),
        }
        if memory.hessian is None:
            v, v_old = memory.v.at(clocks.v.now), memory.v.at(clocks.v.before)
            terms["v"] = _mean_square(v - truth.inverse_solution(x, y))
            terms["u"] = _mean_square(memory.v.slope - truth.inverse_gradient(x_old, y_old, v_old))
        else:
            # H_t, which step t used: if the block was visited, H before its refresh.
            used = where_slot(memory.visit == state.step - 1, memory.previous, memory.hessian)
            v_old = solve(used, flatten_slots(truth.upper_slope(y_old))[..., None])[..., 0]
            missing = memory.hessian - truth.hessian(x_old, y_old)
            terms["H"] = _mean_square(missing.reshape(len(missing), -1))
        terms["z"] = jnp.sum((state.z - truth.mean_term(x_old, y_old, v_old)) ** 2)
        return terms


def tasks(constants: dict[str, float], options: RatesOptions) -> dict[str, Task]:
    """The runs of BSVRB v1 and v2 whose error terms are recorded at one ε, by name."""
    return {
        f"{name}: errors": functools.partial(recorded, name, constants[name], options)
        for name in TRACKED
        if name in constants
    }


def recorded(name: str, c: float, options: RatesOptions) -> dict[str, Any]:
    """Every error term of a method, (seeds, steps), and "step", the steps at which they were recorded."""
    epsilon = options.error_epsilon
    family = make_family(options.family, options.blocks, options.dimension, options.rows)
    keys = jax.random.split(jax.random.key(options.seed + 2000), options.seeds)
    at = lanes.log_spaced(2, options.error_steps, 60)
    solver = METHODS[name].make(c, epsilon, options.sizes, step_constants(family))
    task = make_task(family, options.sizes, initial_rows(epsilon))
    seen = lanes.trace(task, [solver], keys, ErrorTerms(truth_of(family)), at)
    return {"step": np.asarray(at)} | {term: values[0] for term, values in seen.items()}


def write(
    results: dict[str, Any], constants: dict[str, float], options: RatesOptions, report: Report
) -> dict[str, dict[str, np.ndarray]]:
    """Writes `errors.csv`, `.md` and `.png` from the results of the tasks; returns the terms by method."""
    epsilon = options.error_epsilon
    found = {
        name: {term: np.asarray(values) for term, values in results[f"{name}: errors"].items()}
        for name in TRACKED
        if name in constants
    }
    rows = [_row(name, terms, epsilon) for name, terms in found.items()]
    still = (
        ""
        if options.family == "curved"
        else (" The true Hessian of quadratic blocks is constant: δ_H is noise alone.")
    )
    note = (
        f"At ε = {epsilon}: the mean over blocks, seeds and the second half of {options.error_steps} steps, "
        f"in units of ε².{still}"
    )
    report.table("errors", rows, "Error terms of the analysis", note)
    caption = f"Error terms over steps at ε = {epsilon}, means over blocks."
    report.figure("errors", _plot(found, epsilon), figures.spread_caption(caption, options.seeds))
    return found


def _row(name: str, terms: dict[str, np.ndarray], epsilon: float) -> dict[str, Any]:
    late = terms["step"] >= terms["step"][-1] / 2
    row: dict[str, Any] = {"method": name}
    for term in SYMBOLS:
        if term in terms:
            label = "‖∇F‖²/ε²" if term == "F" else f"δ_{term}/ε²"
            row[label] = float(terms[term][:, late].mean() / epsilon**2)
    return row


@figures.styled
def _plot(found: dict[str, dict[str, np.ndarray]], epsilon: float) -> Any:
    figure, axes = figures.panels(1, max(1, len(found)), height=3.0)
    styles = dict(zip(SYMBOLS, figures.shades(len(SYMBOLS)), strict=True))
    for axis, (name, terms) in zip(axes[0], found.items(), strict=True):
        axis.set(title=f"{name}, ε = {epsilon}", xlabel="step", xscale="log", yscale="log")
        for term, label in SYMBOLS.items():
            if term in terms:
                figures.curve(axis, terms["step"], terms[term], styles[term], label)
        axis.axhline(epsilon**2, color="black", linewidth=0.8, linestyle=":", label="ε²")
    figures.legend_of_all(figure)
    return figure


def _mean_square(errors: Array) -> Array:
    return jnp.mean(jnp.sum(errors**2, -1))
