r"""The recursions of the paper's main lemmas, checked by simulation: the bound over what is measured.

Errors are means over blocks and runs; a run is observed at pairs of steps. With e = (x, y) or (x, y, v), the
lemma on MSVR (with m in its last term, as its proof has it), applied to s, H and u, bounds

.. math::
    \delta_{t+1} \le (1 - \tfrac{I\alpha}{m}) \delta_t + \tfrac{2 I \alpha^2 \sigma^2}{m B}
        + \tfrac{8 m L^2}{I} \|e_t - e_{t-1}\|^2

where σ² is the variance of the rows where the runs are, and L the Lipschitz constant of the family's rows.
The lemmas on y and v are, for steps τ and τ̄, and λ, L_g, L_y and L_v,

.. math::
    \delta_{y,t+1} &\le (1 - \tfrac{\tau\lambda}{4}) \delta_{y,t} + \tfrac{8\tau}{\lambda} \delta_s
        + \tfrac{8 L_y^2}{\tau\lambda} \|\Delta x\|^2
        - \tfrac{1 + \tau\lambda/4}{6 L_g \tau} \|\Delta y\|^2 \\
    \delta_{v,t+1} &\le (1 - \tfrac{\bar\tau\lambda}{4}) \delta_{v,t} + \tfrac{10\bar\tau}{\lambda} \delta_u
        + \tfrac{5 L_v^2}{\bar\tau\lambda} (\|\Delta x\|^2 + \|\Delta y\|^2)

with the errors of the s and u that y and v have just moved along. (10 λτ̄ is printed; the proof gives 10 τ̄/λ.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.experiments.kept import Task
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.curved_truth import truth_of
from bilevax.experiments.theorems.error_terms import TRACKED, ErrorTerms
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task, step_constants
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS, Sizes
from bilevax.theory import Constants

PLACES = 60  # pairs of steps at which a run is observed


class Moves(eqx.Module):
    """The error terms of a state, how far x, y and v have just moved, and the variances of the rows there.

    Means over blocks. The variances are those of ∇_y g, and of ∇²_yy g or ∇_v φ, at the point before, at
    which the step's samples were taken.
    """

    terms: ErrorTerms
    problem: bx.Problem
    rows: int

    def __call__(self, state: bx.State) -> dict[str, Array]:
        (table,), (clocks,) = state.levels.values(), state.clocks.values()
        memory = table.memory
        y, y_old = memory.y.at(clocks.y.now), memory.y.at(clocks.y.before)
        seen = self.terms(state)
        seen |= {"Δx": jnp.sum((state.x - state.x_before) ** 2), "Δy": _mean_square(y - y_old)}
        v_old = None
        if memory.hessian is None:
            v, v_old = memory.v.at(clocks.v.now), memory.v.at(clocks.v.before)
            seen["Δv"] = _mean_square(v - v_old)
        return seen | self.variances(state.x_before, y_old, v_old)

    def variances(self, x: Array, y: Array, v: Array | None) -> dict[str, Array]:
        """Of one row's derivatives, as means over blocks."""
        (level,), problem = self.problem.levels.values(), self.problem
        lower, upper = (self._by_block(data) for data in (problem.lower_data[0], problem.upper_data))

        def slope(y: Array, block: Any, row: Any) -> Array:
            return jax.grad(level.function, 1)(x, y, block, jax.tree.map(lambda a: a[None], row))

        def one(y: Array, v: Any, block: Any, rows: Any, others: Any) -> dict[str, Array]:
            found = {"σ_s": _variance(jax.vmap(lambda row: slope(y, block, row))(rows))}
            if v is None:
                curve = jax.jacfwd(slope)
                return found | {"σ_H": _variance(jax.vmap(lambda row: curve(y, block, row))(rows))}
            # φ's two batches are independent, so their variances add up.
            turned = jax.vmap(lambda row: jax.jvp(lambda y: slope(y, block, row), (y,), (v,))[1])(rows)
            by_y = jax.grad(problem.upper, 1)
            f_y = jax.vmap(lambda row: by_y(x, y, block, jax.tree.map(lambda a: a[None], row)))(others)
            return found | {"σ_u": _variance(turned) + _variance(f_y)}

        each = jax.vmap(one, (0, None if v is None else 0, 0, 0, 0))(y, v, problem.blocks, lower, upper)
        return jax.tree.map(jnp.mean, each)

    def _by_block(self, data: Any) -> Any:
        def shaped(array: Any) -> Array:
            return jnp.asarray(array).reshape(-1, self.rows, *array.shape[1:])

        return {name: shaped(array) for name, array in data.packed.unpacked().items()}


@dataclasses.dataclass(frozen=True)
class Recursion:
    """A lemma at the observed steps: δ before, δ after, its bound, and the bound's factor of δ before."""

    before: np.ndarray
    after: np.ndarray
    bound: np.ndarray
    kept: float

    @property
    def least(self) -> float:
        """The least bound over measured, of one step."""
        return float((self.bound / self.after).min())

    @property
    def summed(self) -> float:
        """What the recursion bounds the mean of δ by over the second half, over that mean.

        In the mean over many steps δ before and after are equal: δ ≤ (the other terms)/(1 − the factor).
        """
        late = slice(len(self.after) // 2, None)
        others = (self.bound - self.kept * self.before)[late].mean()
        return float(others / (1 - self.kept) / self.after[late].mean())


def tasks(constants: dict[str, float], options: RatesOptions) -> dict[str, Task]:
    """The runs of BSVRB v1 and v2 in which the lemmas are checked, by name."""
    return {
        f"{name}: lemmas": functools.partial(checked, name, constants[name], options)
        for name in TRACKED
        if name in constants
    }


def checked(name: str, c: float, options: RatesOptions) -> list[dict[str, Any]]:
    """The lemmas of one method: the rows of the table."""
    epsilon = options.lemma_epsilon
    family = make_family(options.family, options.blocks, options.dimension, options.rows)
    solver = METHODS[name].make(c, epsilon, options.sizes, step_constants(family))
    task = make_task(family, options.sizes, initial_rows(epsilon))
    first = np.linspace(2, options.lemma_steps, min(PLACES, options.lemma_steps // 3), dtype=int)
    at = sorted({int(step) for one in first for step in (one, one + 1)})
    keys = jax.random.split(jax.random.key(options.seed + 4000), options.lemma_seeds)
    observe = Moves(ErrorTerms(truth_of(family)), family.problem, family.settings.rows)
    seen = lanes.trace(task, [solver], keys, observe, at)
    mean = {term: values[0].mean(0) for term, values in seen.items()}
    pairs = [(at.index(step), at.index(step) + 1) for step in (int(one) for one in first)]
    before, after = (
        {term: values[list(side)] for term, values in mean.items()} for side in zip(*pairs, strict=True)
    )
    found = recursions(before, after, solver, options.sizes, family.constants)
    return [
        {"method": name, "lemma": f"δ_{term}", "δ": float(one.after.mean()), "least": one.least,
         "summed": one.summed, "conditions": _conditions(term, solver, family.constants)}
        for term, one in found.items()
    ]  # fmt: skip


def recursions(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray], solver: Any, sizes: Sizes, known: Constants
) -> dict[str, Recursion]:
    """The lemmas of a method at pairs of steps, from the observed means."""
    ratio, rows, low = sizes.ratio, sizes.batch_size, known.strong_convexity
    moved = before["Δx"] + before["Δy"]

    def msvr(term: str, alpha: float, lipschitz: float, moved: np.ndarray) -> Recursion:
        kept = 1 - ratio * alpha
        noise = 2 * ratio * alpha**2 * after[f"σ_{term}"] / rows
        bound = kept * before[term] + noise + 8 / ratio * lipschitz**2 * moved
        return Recursion(before[term], after[term], bound, kept)

    step, smooth = solver.lower_step, known.lower_smoothness
    kept = 1 - step * low / 4
    # τ = 1/(3 L_g) and τ_t = 3 L_g · step, as in `bilevax.theory`.
    y_bound = (
        kept * before["y"]
        + 8 * step / low * after["s"]
        + 8 * known.solution_lipschitz**2 / (step * low) * after["Δx"]
        - (1 + step * low / 4) / (6 * smooth * step) * after["Δy"]
    )
    found = {"y": Recursion(before["y"], after["y"], y_bound, kept)}
    found["s"] = msvr("s", solver.alpha, known.lower_lipschitz, moved)
    if "H" in before:
        return found | {"H": msvr("H", solver.alpha_bar, known.hessian_lipschitz, moved)}
    found["u"] = msvr("u", solver.alpha_bar, math.sqrt(_phi(known)), moved + before["Δv"])
    step = solver.inverse_step
    kept = 1 - step * low / 4
    slope = (
        known.upper_y_lipschitz * known.mean_hessian_bound + known.upper_y_bound * known.hessian_lipschitz
    ) / low**2
    v_bound = (
        kept * before["v"]
        + 10 * step / low * after["u"]
        + 5 * slope**2 / (step * low) * (after["Δx"] + after["Δy"])
    )
    return found | {"v": Recursion(before["v"], after["v"], v_bound, kept)}


def _phi(known: Constants) -> float:
    """L_φv²."""
    radius = known.upper_y_bound / known.strong_convexity
    return max(
        4 * known.hessian_lipschitz**2 * radius**2 + 2 * known.upper_y_lipschitz**2,
        4 * known.hessian_bound**2,
    )


def _conditions(term: str, solver: Any, known: Constants) -> str:
    """Whether the steps are as small as the lemma asks for."""
    low = known.strong_convexity
    if term == "y":
        holds = solver.lower_step <= 1 / (3 * known.lower_smoothness)
    elif term == "v":
        holds = solver.inverse_step <= min(low / (8 * _phi(known)), low / 2, 1 / low)
    else:
        holds = (solver.alpha if term == "s" else solver.alpha_bar) <= 0.5
    return "hold" if holds else "the step is larger"


def write(
    results: dict[str, Any], constants: dict[str, float], options: RatesOptions, report: Report
) -> list[dict[str, Any]]:
    """Writes `lemmas.csv` and `lemmas.md` from the results of the tasks; returns the rows."""
    found = [row for name in TRACKED if name in constants for row in results[f"{name}: lemmas"]]
    rows = [row | {key: f"{row[key]:.3g}" for key in ("δ", "least", "summed")} for row in found]
    note = (
        f"ε = {options.lemma_epsilon}, {options.lemma_seeds} runs, {PLACES} pairs of steps of "
        f"{options.lemma_steps}. least: the least bound over measured of one step, at least 1 if the lemma "
        "holds. summed: the mean that the recursion allows δ over the second half, over its mean there. σ² "
        "is that of the rows where the runs are, the other constants are those of the family."
    )
    if rows:
        report.table("lemmas", rows, "The recursions of the main lemmas", note)
    return rows


def _mean_square(errors: Array) -> Array:
    return jnp.mean(jnp.sum(errors**2, -1))


def _variance(samples: Array) -> Array:
    """The variance of rows, (rows, …), summed over entries."""
    return jnp.sum(jnp.var(samples.reshape(len(samples), -1), axis=0))
