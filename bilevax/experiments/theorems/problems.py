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
from bilevax.testing.block_algebra import times
from bilevax.testing.curved import CurvedBlocks
from bilevax.testing.quadratic_upper import QuadraticUpper
from bilevax.theory import Constants

TheoremFamily = QuadraticUpper | CurvedBlocks
FAMILIES = ("quadratic", "curved")  # of argmin levels

# Noise in every derivative, and waves that make F non-convex (without them its curvature is 0.3 to 0.6).
QUADRATIC: dict[str, Any] = {"noise": 1.0, "conditioning": 3.0, "coupling": 1.0, "nonconvexity": 0.5}
# ‖∇F(x0)‖ is about the same: 2.0 for quadratic blocks and 1.9 for these.
MEAN: dict[str, Any] = QUADRATIC | {"conditioning": 1.0, "coupling": 0.6}


# ‖∇F(x0)‖ is 2.4. Hessians and Jacobians change by more than a quarter of their size between x0 and the end.
CURVED: dict[str, Any] = QUADRATIC | {"bend": 4.0, "coupling": 2.5}


def make_family(kind: str, m: int, d: int, rows: int, copies: int = 1, seed: int = 0) -> TheoremFamily:
    """Quadratic, curved or mean blocks; `copies` of each block multiply m and leave F unchanged."""
    makers: dict[str, Any] = {
        "quadratic": (bilevax.testing.quadratic_blocks, QUADRATIC),
        "curved": (bilevax.testing.curved_blocks, CURVED),
        "mean": (bilevax.testing.mean_blocks, MEAN),
    }
    make, settings = makers[kind]
    family = make(m=m, d_x=d, d_y=d, rows=rows, seed=seed, **settings)
    return family if copies == 1 else copied(family, copies)


def copied(family: TheoremFamily, copies: int) -> TheoremFamily:
    """The family with every block repeated `copies` times."""

    def tile(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return np.tile(array, (copies,) + (1,) * (array.ndim - 1))

    def repeated(data: Any) -> bx.PerBlock:
        rows = {name: tile(array) for name, array in data.packed.unpacked().items()}
        return bx.PerBlock(rows, np.arange(copies * family.settings.m + 1) * family.settings.rows)

    problem = family.problem
    (level,) = problem.levels.values()
    fields = {one.name: getattr(family, one.name) for one in dataclasses.fields(family) if one.name != "x0"}
    return dataclasses.replace(
        family,
        **{name: tile(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
        | {
            "settings": dataclasses.replace(family.settings, m=copies * family.settings.m),
            "problem": bx.Problem(
                problem.upper,
                level,
                {name: tile(array) for name, array in problem.blocks.items()},
                repeated(problem.upper_data),
                repeated(problem.lower_data[0]),
            ),
        },
    )


def step_constants(family: TheoremFamily) -> Constants:
    """The family's constants, as units of the steps: L_F is that on the way from x0, where it is a bound.

    On the way of exact gradient descent; a bound over a whole region is several times larger.
    """
    if not isinstance(family, CurvedBlocks):
        return family.constants
    x, most = np.asarray(family.x0, float), 0.0
    for _ in range(60):
        most = max(most, float(np.linalg.norm(_second_derivative(family, x), 2)))
        x = x - 0.5 * family.gradient(x) / most
    return dataclasses.replace(family.constants, upper_smoothness=most)


def _second_derivative(family: TheoremFamily, x: np.ndarray, h: float = 1e-4) -> np.ndarray:
    steps = h * np.eye(len(x))
    return np.stack([(family.gradient(x + e) - family.gradient(x - e)) / (2 * h) for e in steps])


def make_task(family: TheoremFamily, sizes: Sizes, initial: int | Literal["all"] | None) -> Task:
    """A run that starts from x0 and y_i(x0) and draws blocks independently, as Theorem 1 assumes."""
    y0 = None if family.y0 is None else family.settings.cast(family.lower_solution(family.x0))
    sampling = bx.Sampling(sizes.blocks_per_step, sizes.batch_size, False, initial)
    return Task(family.problem, family.x0, y0, sampling)


def stationary_point(family: TheoremFamily, steps: int = 2000) -> np.ndarray:
    """The limit of exact gradient descent from x0, in float64."""
    x, smoothness = np.asarray(family.x0, float), step_constants(family).upper_smoothness
    for _ in range(steps):
        x = x - family.gradient(x) / smoothness
    return x


def noise_of_terms(family: TheoremFamily) -> dict[str, float]:
    """The variance of ∇_x f − ∇²_xy g v at a stationary point: between blocks, and between rows."""
    x = stationary_point(family)
    y, v = family.stacked_solution(x), family.inverse_solution(x)
    jacobian = family.lower_curvature(x, y)[1]
    # Rows scale the linear part of the Jacobian by e, and the rest, which curved blocks have, by h.
    linear, curved = (times(part.transpose(0, 2, 1), v) for part in (family.B, jacobian - family.B))
    terms = family.upper_slopes(x, y)[0] + linear + curved
    between = np.sum((terms - terms.mean(0)) ** 2, 1).mean()
    factors = family.jacobian_factors[..., None], family.hessian_factors[..., None]
    sampled = factors[0] * linear[:, None] + factors[1] * curved[:, None]
    return {"blocks": float(between), "rows": float(sampled.var(1).sum(1).mean())}


def initial_rows(epsilon: float) -> int:
    """Rows per block of the initial estimators: O(1/ε)."""
    return math.ceil(4 / epsilon)


def with_common_factor(family: TheoremFamily) -> TheoremFamily:
    """The blocks with e = h: rows scale Hessian and Jacobian alike, so their noise is correlated."""
    problem, (data,) = family.problem, family.problem.lower_data
    assert isinstance(data, bx.PerBlock)
    rows = dict(data.packed.unpacked())
    rows["jacobian_factor"] = rows["hessian_factor"]
    offsets = np.arange(family.settings.m + 1) * family.settings.rows
    (level,) = problem.levels.values()
    problem = bx.Problem(problem.upper, level, problem.blocks, problem.upper_data, bx.PerBlock(rows, offsets))
    return dataclasses.replace(family, problem=problem, jacobian_factors=family.hessian_factors)
