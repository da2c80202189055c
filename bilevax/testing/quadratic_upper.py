"""Linear blocks under a quadratic f: F is quadratic, and its minimum a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.testing.family import times
from bilevax.testing.linear import LinearBlocks
from bilevax.testing.settings import largest, longest, scatter


@dataclass(frozen=True, eq=False, kw_only=True)
class QuadraticUpper(LinearBlocks):
    r"""Linear blocks with, over rows c,

    .. math::
        f_i = \text{mean of } \tfrac12 (y-c)^\top W_i (y-c) + \tfrac{\rho}{2} \|x\|^2
            + \kappa \sum_k \sin^2 x_k

    κ is the non-convexity. At κ = 0 the solution, min F, μ and L_F are exact. For κ > 0 the minimum is not
    known (`solution` and `least` are None); Δ, μ and L_F are bounds, and μ is None unless F is still
    strongly convex. L_fx and L_fy are exact; C_fx and C_fy are bounds (exact at κ = 0 and W = I).
    """

    W: np.ndarray
    targets: np.ndarray
    ridge: float
    nonconvexity: float

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        errors = y - self.mean_targets
        fit = 0.5 * np.sum(times(self.W, errors) * errors, -1)
        return self.floors + fit + 0.5 * self.ridge * x @ x + self.nonconvexity * np.sum(np.sin(x) ** 2)

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f_x = self.ridge * x + self.nonconvexity * np.sin(2 * x)
        return np.tile(f_x, (len(y), 1)), times(self.W, y - self.mean_targets)

    @cached_property
    def mean_targets(self) -> np.ndarray:
        """c̄_i, (m, d)."""
        return self.targets.mean(1)

    @cached_property
    def floors(self) -> np.ndarray:
        """What the scatter of the targets adds to f_i, (m,): ½ mean of (c − c̄)ᵀ W (c − c̄)."""
        deviations = self.targets - self.mean_targets[:, None]
        return 0.5 * np.sum((deviations @ self.W) * deviations, -1).mean(1)

    @cached_property
    def curvature(self) -> np.ndarray:
        """∇²F at κ = 0."""
        fit = (self.slopes.transpose(0, 2, 1) @ self.W @ self.slopes).mean(0)
        return fit + self.ridge * np.eye(len(fit))

    @cached_property
    def convex_solution(self) -> np.ndarray:
        """The minimiser at κ = 0, where sin² and its gradient at zero vanish."""
        return np.linalg.solve(self.curvature, -self.gradient(np.zeros(self.settings.d_x)))

    @cached_property
    def solution(self) -> np.ndarray | None:
        return self.convex_solution if self.nonconvexity == 0 else None

    @cached_property
    def least(self) -> float | None:
        return None if self.solution is None else self.value(self.solution)

    def upper_constants(self) -> dict[str, Any]:
        where, metric, bend = self.region, largest(self.W), 2 * self.nonconvexity
        eigenvalues = np.linalg.eigvalsh(self.curvature)
        waves = self.nonconvexity * np.sum(np.sin(self.convex_solution) ** 2)
        convexity = 2 * (float(eigenvalues[0]) - bend)
        return {
            "upper_x_lipschitz": self.ridge + bend,
            "upper_y_lipschitz": metric,
            "upper_x_bound": self.ridge * where.x_radius + self.nonconvexity * self.settings.d_x**0.5,
            "upper_y_bound": metric * (where.y_radius + longest(self.mean_targets)),
            "noise": metric * scatter(self.targets),
            "upper_smoothness": float(eigenvalues[-1]) + bend,
            "pl": convexity if convexity > 0 else None,
            "gap": self.value(self.x0) - (self.value(self.convex_solution) - waves),
        }


def upper(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """f_i of `QuadraticUpper` on a batch."""
    errors = y - batch["target"]
    fit = 0.5 * jnp.mean(jnp.sum((errors @ block["W"]) * errors, -1))
    return fit + 0.5 * block["ridge"] * x @ x + block["nonconvexity"] * jnp.sum(jnp.sin(x) ** 2)


def lower(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i of `LinearBlocks` on a batch."""
    quadratic = 0.5 * jnp.mean(batch["hessian_factor"]) * (y @ block["A"] @ y)
    return quadratic - y @ inner(x, block, batch)


def inner(x: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """c_i on a batch: mean of e B_i x + b."""
    return jnp.mean(batch["jacobian_factor"]) * (block["B"] @ x) + jnp.mean(batch["shift"], 0)
