"""Lower levels that are quadratic or means of linear maps: y_i(x) is affine in x."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bilevax.testing.block_algebra import largest, longest, scatter, solve
from bilevax.testing.family import Family, Region
from bilevax.theory import Constants


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearBlocks(Family):
    r"""Blocks with :math:`y_i(x) = A_i^{-1} (B_i x + \bar b_i)`, from rows (h, e, b).

    .. math:: g_i = \text{mean of } \tfrac12 h\, y^\top A_i y - e\, y^\top B_i x - b^\top y

    h and e have mean one. A mean level is the case A = I, h = 1.

    Exact constants: λ, L_g, L_gxy = L_gyy = 0, C_gxy, C_gyy, L_y, and C̃_gyy if there is only an argmin
    level. Bounds: L_gy and σ.
    """

    A: np.ndarray
    B: np.ndarray
    hessian_factors: np.ndarray
    jacobian_factors: np.ndarray
    shifts: np.ndarray

    @cached_property
    def slopes(self) -> np.ndarray:
        """y_i'(x), the same for all x: (m, d, d_x)."""
        return np.linalg.solve(self.A, self.B)

    @cached_property
    def bases(self) -> np.ndarray:
        """y_i(0), (m, d)."""
        return solve(self.A, self.shifts.mean(1))

    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        return self.slopes @ x + self.bases

    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.A, self.B

    @cached_property
    def region(self) -> Region:
        known = 0.0 if self.solution is None else longest(self.solution)
        radius = 1 + 2 * max(longest(self.x0), known)
        return Region(radius, 1 + largest(self.slopes) * radius + longest(self.bases))

    @cached_property
    def constants(self) -> Constants:
        eigenvalues, coupling = np.linalg.eigvalsh(self.A), largest(self.B)
        low, high = float(eigenvalues.min()), float(eigenvalues.max())
        row_high = high * float(self.hessian_factors.max())
        of_h, of_e = scatter(self.hessian_factors), scatter(self.jacobian_factors)
        where, upper = self.region, self.upper_constants()
        noise = max(
            upper.pop("noise"),
            of_h * high * where.y_radius + of_e * coupling * where.x_radius + scatter(self.shifts),
            of_h * longest(self.A.reshape(len(self.A), -1)),
            of_e * longest(self.B.reshape(len(self.B), -1)),
        )
        return Constants(
            strong_convexity=low,
            lower_smoothness=high,
            lower_lipschitz=math.hypot(row_high, coupling * float(self.jacobian_factors.max())),
            jacobian_lipschitz=0.0,
            hessian_lipschitz=0.0,
            jacobian_bound=coupling,
            mean_hessian_bound=high,
            hessian_bound=row_high,
            solution_lipschitz=largest(self.slopes),
            noise=noise,
            **upper,
        )

    @abc.abstractmethod
    def upper_constants(self) -> dict[str, Any]:
        """L_fx, L_fy, C_fx, C_fy, f's part of σ, L_F, μ and Δ, by the field names of `Constants`."""
