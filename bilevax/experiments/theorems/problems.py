"""The problems that the theorems are measured on, and copies of their blocks: m changes, F does not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

import bilevax as bx
import bilevax.testing
from bilevax.experiments.theorems.lanes import Task
from bilevax.experiments.theorems.scalings import Sizes
from bilevax.testing.quadratic_upper import QuadraticUpper

# Noise in every derivative, and waves that make F non-convex (its curvature without them is 0.3 to 0.6).
QUADRATIC: dict[str, Any] = {"noise": 1.0, "conditioning": 3.0, "coupling": 1.0, "nonconvexity": 0.5}
# Of the same size: |∇F(x0)| is 2.0 and 1.9.
MEAN: dict[str, Any] = QUADRATIC | {"conditioning": 1.0, "coupling": 0.6}


def make_family(mean: bool, m: int, d: int, rows: int, copies: int = 1, seed: int = 0) -> QuadraticUpper:
    """Quadratic or mean blocks; `copies` of each block make m larger and leave F as it is."""
    make = bilevax.testing.mean_blocks if mean else bilevax.testing.quadratic_blocks
    family = make(m=m, d_x=d, d_y=d, rows=rows, seed=seed, **(MEAN if mean else QUADRATIC))
    return family if copies == 1 else copied(family, copies)


def copied(family: QuadraticUpper, copies: int) -> QuadraticUpper:
    """The family with every block so many times, in F and in the data."""

    def tile(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return np.tile(array, (copies,) + (1,) * (array.ndim - 1))

    def again(data: Any) -> bx.PerBlock:
        rows = {name: tile(array) for name, array in data.packed.unpacked().items()}
        return bx.PerBlock(rows, np.arange(copies * family.settings.m + 1) * family.settings.rows)

    problem = family.problem
    (level,) = problem.levels.values()
    names = ("A", "B", "W", "hessian_factors", "jacobian_factors", "shifts", "targets")
    return dataclasses.replace(
        family,
        settings=dataclasses.replace(family.settings, m=copies * family.settings.m),
        problem=bx.Problem(
            problem.upper,
            level,
            {name: tile(array) for name, array in problem.blocks.items()},
            again(problem.upper_data),
            again(problem.lower_data[0]),
        ),
        y0=None if family.y0 is None else tile(family.y0),
        **{name: tile(getattr(family, name)) for name in names},
    )


def make_task(family: QuadraticUpper, sampling: Sizes, initial: int | Literal["all"] | None) -> Task:
    """Independent draws of blocks; x0 and y_i(x0) to start from, as Theorem 1 asks."""
    y0 = None if family.y0 is None else family.settings.cast(family.lower_solution(family.x0))
    drawn = bx.Sampling(sampling.blocks_per_step, sampling.batch_size, False, initial)
    return Task(family.problem, family.x0, y0, drawn)


def stationary_point(family: QuadraticUpper, steps: int = 2000) -> np.ndarray:
    """Where exact gradient descent from x0 ends, in float64."""
    x = np.asarray(family.x0, float)
    for _ in range(steps):
        x = x - family.gradient(x) / family.constants.upper_smoothness
    return x


def noise_of_terms(family: QuadraticUpper) -> dict[str, float]:
    """The variance of a block's ∇_x f − ∇²_xy g v at a stationary point: between blocks, between rows."""
    x = stationary_point(family)
    y = family.stacked_solution(x)
    through = np.einsum("mij,mi->mj", family.B, family.inverse_solution(x))
    terms = family.upper_slopes(x, y)[0] + through
    between = np.sum((terms - terms.mean(0)) ** 2, 1).mean()
    rows = (family.jacobian_factors.var(1) * np.sum(through**2, 1)).mean()
    return {"blocks": float(between), "rows": float(rows)}


def initial_rows(epsilon: float) -> int:
    """The large batch of the first estimators: O(1/ε)."""
    return math.ceil(4 / epsilon)


def with_common_factor(family: QuadraticUpper) -> QuadraticUpper:
    """Quadratic blocks whose rows scale Hessian and Jacobian alike, e = h: their noise is correlated."""
    problem, (data,) = family.problem, family.problem.lower_data
    assert isinstance(data, bx.PerBlock)
    rows = dict(data.packed.unpacked())
    rows["jacobian_factor"] = rows["hessian_factor"]
    offsets = np.arange(family.settings.m + 1) * family.settings.rows
    (level,) = problem.levels.values()
    problem = bx.Problem(problem.upper, level, problem.blocks, problem.upper_data, bx.PerBlock(rows, offsets))
    return dataclasses.replace(family, problem=problem, jacobian_factors=family.hessian_factors)
