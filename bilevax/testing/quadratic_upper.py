"""Linear blocks under a quadratic f: F is quadratic, and its minimiser solves a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import checks
from bilevax.testing.block_algebra import largest, longest, scatter, times
from bilevax.testing.linear import LinearBlocks
from bilevax.testing.settings import FamilySettings


@dataclass(frozen=True, kw_only=True)
class QuadraticSettings(FamilySettings):
    """Settings of families whose f is quadratic, up to waves.

    Attributes:
      nonconvexity: κ, the height of the waves. F is non-convex if κ exceeds about a quarter of the μ of
        κ = 0. The minimum is known only for κ = 0.
      ridge: ρ.
    """

    nonconvexity: float = 0.0
    ridge: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("nonconvexity", self.nonconvexity, 0)
        checks.number("ridge", self.ridge, 0)

    def block_constants(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays, ρ and κ as `Problem.blocks`."""
        whole = {name: np.full(self.m, getattr(self, name)) for name in ("ridge", "nonconvexity")}
        return {name: self.cast(array) for name, array in (arrays | whole).items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class QuadraticUpper(LinearBlocks):
    r"""Linear blocks under an upper function that is, over rows c,

    .. math::
        f_i = \text{mean of } \tfrac12 (y-c)^\top W_i (y-c) + \tfrac{\rho}{2} \|x\|^2
            + \kappa \sum_k \sin^2 x_k

    κ is the non-convexity. For κ = 0 the solution, min F, μ and L_F are exact. For κ > 0 the minimum is
    unknown (`solution` and `least` are None); Δ, μ and L_F are bounds, and μ is None unless F is still
    strongly convex. L_fx and L_fy are exact; C_fx and C_fy are bounds (exact for κ = 0 and W = I).
    """

    settings: QuadraticSettings
    W: np.ndarray
    targets: np.ndarray

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        errors = y - self.mean_targets
        fit = 0.5 * np.sum(times(self.W, errors) * errors, -1)
        waves = self.settings.nonconvexity * np.sum(np.sin(x) ** 2)
        return self.floors + fit + 0.5 * self.settings.ridge * x @ x + waves

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f_x = self.settings.ridge * x + self.settings.nonconvexity * np.sin(2 * x)
        return np.tile(f_x, (len(y), 1)), times(self.W, y - self.mean_targets)

    @cached_property
    def mean_targets(self) -> np.ndarray:
        """c̄_i, (m, d)."""
        return self.targets.mean(1)

    @cached_property
    def floors(self) -> np.ndarray:
        """The part of f_i due to the scatter of the targets, (m,): ½ mean of (c − c̄)ᵀ W (c − c̄)."""
        deviations = self.targets - self.mean_targets[:, None]
        return 0.5 * np.sum((deviations @ self.W) * deviations, -1).mean(1)

    @cached_property
    def curvature(self) -> np.ndarray:
        """∇²F for κ = 0."""
        fit = (self.slopes.transpose(0, 2, 1) @ self.W @ self.slopes).mean(0)
        return fit + self.settings.ridge * np.eye(len(fit))

    @cached_property
    def convex_solution(self) -> np.ndarray:
        """The minimiser for κ = 0. ∇F(0) is the same for every κ: the gradient of sin² is zero there."""
        return np.linalg.solve(self.curvature, -self.gradient(np.zeros(self.settings.d_x)))

    @cached_property
    def solution(self) -> np.ndarray | None:
        return self.convex_solution if self.settings.nonconvexity == 0 else None

    @cached_property
    def least(self) -> float | None:
        return None if self.solution is None else self.value(self.solution)

    def upper_constants(self) -> dict[str, Any]:
        ridge, nonconvexity = self.settings.ridge, self.settings.nonconvexity
        where, metric, bend = self.region, largest(self.W), 2 * nonconvexity
        eigenvalues = np.linalg.eigvalsh(self.curvature)
        waves = nonconvexity * np.sum(np.sin(self.convex_solution) ** 2)
        convexity = 2 * (float(eigenvalues[0]) - bend)
        return {
            "upper_x_lipschitz": ridge + bend,
            "upper_y_lipschitz": metric,
            "upper_x_bound": ridge * where.x_radius + nonconvexity * self.settings.d_x**0.5,
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
