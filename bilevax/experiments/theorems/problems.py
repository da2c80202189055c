"""The problems of these experiments. Copies of blocks change m but not F."""

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

# Noise in every derivative, and waves that make F non-convex (without them its curvature is 0.3 to 0.6).
QUADRATIC: dict[str, Any] = {"noise": 1.0, "conditioning": 3.0, "coupling": 1.0, "nonconvexity": 0.5}
# ‖∇F(x0)‖ is about the same: 2.0 for quadratic blocks and 1.9 for these.
MEAN: dict[str, Any] = QUADRATIC | {"conditioning": 1.0, "coupling": 0.6}


def make_family(mean: bool, m: int, d: int, rows: int, copies: int = 1, seed: int = 0) -> QuadraticUpper:
    """Quadratic or mean blocks; `copies` of each block multiply m and leave F unchanged."""
    make = bilevax.testing.mean_blocks if mean else bilevax.testing.quadratic_blocks
    family = make(m=m, d_x=d, d_y=d, rows=rows, seed=seed, **(MEAN if mean else QUADRATIC))
    return family if copies == 1 else copied(family, copies)


def copied(family: QuadraticUpper, copies: int) -> QuadraticUpper:
    """The family with every block repeated `copies` times."""

    def tile(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return np.tile(array, (copies,) + (1,) * (array.ndim - 1))

    def repeated(data: Any) -> bx.PerBlock:
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
            repeated(problem.upper_data),
            repeated(problem.lower_data[0]),
        ),
        y0=None if family.y0 is None else tile(family.y0),
        **{name: tile(getattr(family, name)) for name in names},
    )


def make_task(family: QuadraticUpper, sizes: Sizes, initial: int | Literal["all"] | None) -> Task:
    """A run that starts from x0 and y_i(x0) and draws blocks independently, as Theorem 1 assumes."""
    y0 = None if family.y0 is None else family.settings.cast(family.lower_solution(family.x0))
    sampling = bx.Sampling(sizes.blocks_per_step, sizes.batch_size, False, initial)
    return Task(family.problem, family.x0, y0, sampling)


def stationary_point(family: QuadraticUpper, steps: int = 2000) -> np.ndarray:
    """The limit of exact gradient descent from x0, in float64."""
    x = np.asarray(family.x0, float)
    for _ in range(steps):
        x = x - family.gradient(x) / family.constants.upper_smoothness
    return x


def noise_of_terms(family: QuadraticUpper) -> dict[str, float]:
    """The variance of ∇_x f − ∇²_xy g v at a stationary point: between blocks, and between rows."""
    x = stationary_point(family)
    y = family.stacked_solution(x)
    through = np.einsum("mij,mi->mj", family.B, family.inverse_solution(x))
    terms = family.upper_slopes(x, y)[0] + through
    between = np.sum((terms - terms.mean(0)) ** 2, 1).mean()
    rows = (family.jacobian_factors.var(1) * np.sum(through**2, 1)).mean()
    return {"blocks": float(between), "rows": float(rows)}


def initial_rows(epsilon: float) -> int:
    """Rows per block of the initial estimators: O(1/ε)."""
    return math.ceil(4 / epsilon)


def with_common_factor(family: QuadraticUpper) -> QuadraticUpper:
    """Quadratic blocks with e = h: rows scale Hessian and Jacobian alike, so their noise is correlated."""
    problem, (data,) = family.problem, family.problem.lower_data
    assert isinstance(data, bx.PerBlock)
    rows = dict(data.packed.unpacked())
    rows["jacobian_factor"] = rows["hessian_factor"]
    offsets = np.arange(family.settings.m + 1) * family.settings.rows
    (level,) = problem.levels.values()
    problem = bx.Problem(problem.upper, level, problem.blocks, problem.upper_data, bx.PerBlock(rows, offsets))
    return dataclasses.replace(family, problem=problem, jacobian_factors=family.hessian_factors)
