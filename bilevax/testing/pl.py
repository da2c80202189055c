"""A non-convex F that satisfies the Polyak-Łojasiewicz (PL) condition with a known constant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem, checks
from bilevax.testing.block_algebra import largest, longest, scatter, solve, times
from bilevax.testing.draws import Draws
from bilevax.testing.linear import LinearBlocks
from bilevax.testing.quadratic_upper import lower
from bilevax.testing.settings import FamilySettings, check_narrow, takes_fields_of

_MOST_NONCONVEX = 4.5


@dataclass(frozen=True, kw_only=True)
class PLSettings(FamilySettings):
    """Settings of `pl_blocks`, which needs d_x ≤ d_y and a positive coupling.

    Attributes:
      nonconvexity: κ in [0, 4.5]; F is non-convex for κ > 1.
    """

    nonconvexity: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_narrow(self)
        checks.number("nonconvexity", self.nonconvexity, 0)
        if self.nonconvexity > _MOST_NONCONVEX:
            raise ValueError(f"nonconvexity must lie in [0, {_MOST_NONCONVEX}], got {self.nonconvexity}")
        if self.coupling == 0:
            raise ValueError("coupling must be positive in this family, got 0: f depends on x only through y")


@dataclass(frozen=True, eq=False, kw_only=True)
class PLBlocks(LinearBlocks):
    """Linear blocks with F(x) = w̄ Σ_k h(x_k − x*_k), h(t) = t² + κ sin² t. Made by `pl_blocks`.

    Exact: x*, min F = 0, Δ, L_fx = C_fx = 0, L_F = w̄ (2 + 2κ), and μ = w̄ inf h'²/h (computed to a relative
    error of 1e-6, from below). Bounds: L_fy, C_fy.
    """

    settings: PLSettings
    recover: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    tilts: np.ndarray
    optimum: np.ndarray

    @property
    def solution(self) -> np.ndarray:
        return self.optimum

    @property
    def least(self) -> float:
        return 0.0

    def coordinates(self, y: np.ndarray) -> np.ndarray:
        """t_i = M_i y_i − o_i, which is x − x* at y_i(x)."""
        return times(self.recover, y) - self.offsets

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        t = self.coordinates(y)
        waves = np.sum(t**2 + self.settings.nonconvexity * np.sin(t) ** 2, -1)
        return self.weights * waves + np.sum(self.mean_tilts * t, -1)

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = self.coordinates(y)
        steepness = 2 * t + self.settings.nonconvexity * np.sin(2 * t)
        slope = self.weights[:, None] * steepness + self.mean_tilts
        return np.zeros((len(y), len(x))), times(self.recover.transpose(0, 2, 1), slope)

    @cached_property
    def mean_tilts(self) -> np.ndarray:
        """Zero up to rounding."""
        return self.tilts.mean(1)

    @cached_property
    def mean_weight(self) -> float:
        """w̄."""
        return float(self.weights.mean())

    def upper_constants(self) -> dict[str, Any]:
        where, nonconvexity = self.region, self.settings.nonconvexity
        bend = 2 + 2 * nonconvexity
        size, heaviest = largest(self.recover), float(self.weights.max())
        far = size * where.y_radius + longest(self.offsets)
        steepest = 2 * far + nonconvexity * self.settings.d_x**0.5
        return {
            "upper_x_lipschitz": 0.0,
            "upper_y_lipschitz": heaviest * bend * size**2,
            "upper_x_bound": 0.0,
            "upper_y_bound": size * heaviest * steepest,
            "noise": size * scatter(self.tilts),
            "upper_smoothness": self.mean_weight * bend,
            "pl": self.mean_weight * pl_constant(nonconvexity),
            "gap": self.value(self.x0),
        }


def pl_constant(nonconvexity: float) -> float:
    """inf over t of h'(t)²/h(t) for h = t² + κ sin² t, from below; positive for κ < 4.6.

    The ratio tends to 4 (1 + κ) as t → 0, and to 4 for large t, as 4 + 4κ sin(2t)/t. Its minimum lies in the
    first trough, near t = 3π/4.

    Example:
      >>> pl_constant(0.0).__round__(3), 0.06 < pl_constant(3.0) < 1  # 1/16 is the constant usually quoted
      (4.0, True)
    """

    def ratio(t: np.ndarray) -> np.ndarray:
        return (2 * t + nonconvexity * np.sin(2 * t)) ** 2 / (t**2 + nonconvexity * np.sin(t) ** 2)

    grid = np.linspace(1e-3, 4 * nonconvexity + 4, 20_001)
    best = grid[np.argmin(ratio(grid))]
    spacing = grid[1] - grid[0]
    near = np.linspace(max(best - spacing, 1e-4), best + spacing, 20_001)
    return float(min(ratio(near).min(), 4.0) * (1 - 1e-6))


def upper(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """f_i on a batch of tilts."""
    t = block["recover"] @ y - block["offset"]
    waves = jnp.sum(t**2 + block["nonconvexity"] * jnp.sin(t) ** 2)
    return block["weight"] * waves + jnp.mean(batch["tilt"], 0) @ t


@takes_fields_of(PLSettings)
def pl_blocks(settings: PLSettings) -> PLBlocks:
    r"""A non-convex F whose only stationary point is its minimum.

    .. math::
        F(x) = \bar w \sum_k h(x_k - x^*_k), \quad h(t) = t^2 + \kappa \sin^2 t, \quad
        \mu (F - \min F) \le \|\nabla F\|^2

    Block i observes it through y_i(x) = coupling · Q_i x + …, where Q_i has orthonormal columns:

    .. math::
        g_i &= \text{mean of } \tfrac12 h\, y^\top A_i y - e\, y^\top B_i x - b^\top y, \quad
        B_i = \text{coupling} \cdot A_i Q_i \\
        f_i &= \text{mean of } w_i \sum_k h(t_k) + s^\top t, \quad
        t = Q_i^\top y / \text{coupling} - o_i

    over rows (h, e, b) and s; the tilts s have mean zero. `PLBlocks` and `LinearBlocks` say which constants
    are exact.

    Args:
      noise: standard deviation of b and s; h and e lie within 1 ± noise/(1 + noise) and have mean 1.
      conditioning: the eigenvalues of each A_i are evenly spaced on [1, conditioning].
      coupling: of y_i and x, positive.

    The other arguments are those of `PLSettings` and `FamilySettings`.

    Returns:
      The family.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.pl_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> family.least, abs(family.value(family.solution)) < 1e-12
      (0.0, True)
    """
    m, d_x, d_y, coupling = settings.m, settings.d_x, settings.d_y, settings.coupling
    draw, cast = Draws(settings), settings.cast
    A, Q = draw.positive_definite(d_y), draw.orthonormal(d_y, d_x)
    B, recover = coupling * A @ Q, Q.transpose(0, 2, 1) / coupling
    shifts = draw.normal(1, d_y) + draw.deviations(d_y)
    weights, tilts = draw.means.uniform(0.5, 1.5, m), draw.deviations(d_x)
    h, e = draw.factors(), draw.factors()
    optimum = draw.means.normal(size=d_x)
    offsets = times(recover, solve(A, shifts.mean(1))) + optimum
    arrays = {
        "A": A, "B": B, "recover": recover, "offset": offsets, "weight": weights,
        "nonconvexity": np.full(m, settings.nonconvexity),
    }  # fmt: skip
    problem = Problem(
        upper,
        lower,
        {name: cast(array) for name, array in arrays.items()},
        settings.per_block(tilt=tilts),
        settings.per_block(hessian_factor=h, jacobian_factor=e, shift=shifts),
    )
    return PLBlocks(
        settings=settings, problem=problem, x0=cast(optimum + 2), y0=cast(np.zeros((m, d_y))), A=A, B=B,
        hessian_factors=h, jacobian_factors=e, shifts=shifts, recover=recover, offsets=offsets,
        weights=weights, tilts=tilts, optimum=optimum,
    )  # fmt: skip
