"""The error terms of the analysis over time: the distance of every estimator from its target."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.experiments import figures
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS
from bilevax.experiments.theorems.truth import Truth
from bilevax.solvers.toolkit import flatten_slots, solve, where_slot

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

    truth: Truth

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
            terms["v"] = _mean_square(v - truth.inverse_solution(y))
            terms["u"] = _mean_square(memory.v.slope - truth.inverse_gradient(y_old, v_old))
        else:
            # H_t, which step t used: if the block was visited, H before its refresh.
            used = where_slot(memory.visit == state.step - 1, memory.previous, memory.hessian)
            v_old = solve(used, flatten_slots(truth.upper_slope(y_old))[..., None])[..., 0]
            terms["H"] = _mean_square((memory.hessian - truth.A).reshape(len(truth.A), -1))
        terms["z"] = jnp.sum((state.z - truth.mean_term(x_old, v_old)) ** 2)
        return terms


def measure(
    constants: dict[str, float], options: RatesOptions, report: Report
) -> dict[str, dict[str, np.ndarray]]:
    """Records the error terms of BSVRB v1 and v2 at one ε; writes `errors.csv`, `.md` and `.png`.

    Args:
      constants: the tuned c of each method.
      options: of the experiment.
      report: where the table and the plot go.

    Returns:
      By method: every term, (seeds, steps), and "step", the steps at which they were recorded.
    """
    epsilon = options.error_epsilon
    family = make_family(False, options.blocks, options.dimension, options.rows)
    observe = ErrorTerms(Truth.of(family))
    keys = jax.random.split(jax.random.key(options.seed + 2000), options.seeds)
    at = lanes.log_spaced(2, options.error_steps, 60)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in ("BSVRB v1", "BSVRB v2"):
        if name not in constants:
            continue
        print(f"error terms of {name} at ε = {epsilon}")
        solver = METHODS[name].make(constants[name], epsilon, options.sizes, family.constants)
        task = make_task(family, options.sizes, initial_rows(epsilon))
        seen = lanes.trace(task, [solver], keys, observe, at)
        found[name] = {"step": np.asarray(at)} | {term: values[0] for term, values in seen.items()}
    rows = [_row(name, terms, epsilon) for name, terms in found.items()]
    note = (
        f"At ε = {epsilon}: the mean over blocks, seeds and the second half of {options.error_steps} steps, "
        "in units of ε². The true Hessian of quadratic blocks is constant: δ_H is noise alone."
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
