"""Curved blocks: an argmin level whose Hessian and Jacobian move with x and y, solved entry by entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem, checks
from bilevax.testing.block_algebra import largest, longest, scatter, times
from bilevax.testing.draws import Draws
from bilevax.testing.family import Family, Region
from bilevax.testing.quadratic_upper import QuadraticSettings, inner, upper
from bilevax.testing.settings import takes_fields_of
from bilevax.theory import Constants

STEEPEST = 4 / (3 * math.sqrt(3))  #: the largest slope of 1/cosh²
SWING = 0.5  #: how much of the bend moves with x


@dataclass(frozen=True, kw_only=True)
class CurvedSettings(QuadraticSettings):
    """Settings of `curved_blocks`.

    Attributes:
      bend: κ_g, the part of the lower curvature that moves; 0 leaves quadratic blocks.
    """

    bend: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("bend", self.bend, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class CurvedBlocks(Family):
    """Blocks with ∇_y g_i = Q_i (D w + κ_g s_i(x) tanh w) − B_i x − b̄, w = Q_iᵀ y. Made by `curved_blocks`.

    y_i(x) is that of one equation in one unknown per entry of w, by Newton's method. The minimum is unknown.
    Exact: L_fx, L_fy. All other constants are bounds on the region; those on changes of Hessians and
    Jacobians hold in the Frobenius norm too. Δ is bounded by f_i ≥ the scatter of its targets.
    """

    settings: CurvedSettings
    Q: np.ndarray
    D: np.ndarray
    B: np.ndarray
    P: np.ndarray
    hessian_factors: np.ndarray
    jacobian_factors: np.ndarray
    shifts: np.ndarray
    targets: np.ndarray

    @property
    def solution(self) -> None:
        return None

    @property
    def least(self) -> None:
        return None

    def weights(self, x: np.ndarray) -> np.ndarray:
        """s_i(x) = 1 + ½ sin(P_i x), (m, d_y)."""
        return 1 + SWING * np.sin(self.P @ x)

    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        right = times(self.Q.transpose(0, 2, 1), self.B @ x + self.shifts.mean(1))
        bend = self.settings.bend * self.weights(x)
        w = right / (self.D + bend)
        # The left-hand side is concave for w > 0 and convex for w < 0: from here Newton's steps do not
        # overshoot.
        for _ in range(100):
            missing = right - self.D * w - bend * np.tanh(w)
            if np.all(np.abs(missing) <= 1e-13 * (1 + np.abs(right))):
                return times(self.Q, w)
            w = w + missing / (self.D + bend / np.cosh(w) ** 2)
        raise RuntimeError(f"Newton's method did not solve every block in 100 steps at x = {x}")

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        fit = 0.5 * np.sum((y - self.targets.mean(1)) ** 2, -1)
        waves = self.settings.nonconvexity * np.sum(np.sin(x) ** 2)
        return self.floors + fit + 0.5 * self.settings.ridge * x @ x + waves

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f_x = self.settings.ridge * x + self.settings.nonconvexity * np.sin(2 * x)
        return np.tile(f_x, (len(y), 1)), y - self.targets.mean(1)

    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w, bend = times(self.Q.transpose(0, 2, 1), y), self.settings.bend
        diagonal = self.D + bend * self.weights(x) / np.cosh(w) ** 2
        moved = bend * SWING * np.cos(self.P @ x) * np.tanh(w)
        hessian = (self.Q * diagonal[:, None]) @ self.Q.transpose(0, 2, 1)
        return hessian, self.B - self.Q @ (moved[..., None] * self.P)

    @cached_property
    def floors(self) -> np.ndarray:
        """The part of f_i due to the scatter of the targets, (m,)."""
        deviations = self.targets - self.targets.mean(1, keepdims=True)
        return 0.5 * np.sum(deviations**2, -1).mean(1)

    @cached_property
    def region(self) -> Region:
        radius = 1 + 2 * longest(self.x0)
        return Region(radius, 1 + largest(self.B) * radius + longest(self.shifts.mean(1)))

    @cached_property
    def constants(self) -> Constants:
        settings, where, bend = self.settings, self.region, self.settings.bend
        swing, high = bend * SWING, float(self.D.max()) + bend * (1 + SWING)
        coupling, turning, widest = largest(self.B), largest(self.P), longest(self.P)
        h, e = float(self.hessian_factors.max()), float(self.jacobian_factors.max())
        of_h, of_e = scatter(self.hessian_factors), scatter(self.jacobian_factors)
        by_y = bend * (1 + SWING) * STEEPEST
        whole = [np.linalg.norm(a.reshape(len(a), -1), axis=-1).max() for a in (self.B, self.P)]
        noise = max(
            scatter(self.targets),
            of_h * (float(self.D.max()) * where.y_radius + bend * (1 + SWING) * settings.d_y**0.5)
            + of_e * coupling * where.x_radius
            + scatter(self.shifts),
            of_h * longest(self.D + bend * (1 + SWING)),
            of_h * swing * whole[1] + of_e * whole[0],
        )
        return Constants(
            strong_convexity=float(self.D.min()),
            lower_smoothness=high,
            upper_x_lipschitz=settings.ridge + 2 * settings.nonconvexity,
            upper_y_lipschitz=1.0,
            lower_lipschitz=math.hypot(h * high, e * coupling + h * swing * turning),
            jacobian_lipschitz=h * swing * turning * math.hypot(1, widest),
            hessian_lipschitz=h * math.hypot(by_y, swing * turning),
            upper_x_bound=settings.ridge * where.x_radius + settings.nonconvexity * settings.d_x**0.5,
            upper_y_bound=where.y_radius + longest(self.targets.mean(1)),
            noise=float(noise),
            gap=self.value(self.x0) - float(self.floors.mean()),
            jacobian_bound=coupling + swing * turning,
            mean_hessian_bound=high,
            hessian_bound=h * high,
        )


def lower(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i on a batch."""
    w = y @ block["Q"]
    swung = 1 + SWING * jnp.sin(block["P"] @ x)
    # log cosh w, without overflow
    soft = jnp.abs(w) + jnp.log1p(jnp.exp(-2 * jnp.abs(w))) - math.log(2)
    curved = 0.5 * jnp.sum(block["D"] * w**2) + block["bend"] * jnp.sum(swung * soft)
    return jnp.mean(batch["hessian_factor"]) * curved - y @ inner(x, block, batch)


@takes_fields_of(CurvedSettings)
def curved_blocks(settings: CurvedSettings) -> CurvedBlocks:
    r"""Lower problems whose Hessian and Jacobian depend on x and on y.

    .. math::
        g_i &= \text{mean of } h \big(\tfrac12 w^\top D w
            + \kappa_g \sum_k (1 + \tfrac12 \sin p_{ik}^\top x) \log\cosh w_k\big)
            - e\, y^\top B_i x - b^\top y, \qquad w = Q_i^\top y \\
        f_i &= \text{mean of } \tfrac12 \|y - c\|^2 + \tfrac{\rho}{2} \|x\|^2 + \kappa \sum_k \sin^2 x_k

    over rows (h, e, b) and c. The Hessian is :math:`Q_i (D + \kappa_g s \cosh^{-2} w) Q_i^\top`.

    Args:
      noise: standard deviation of b and c; h and e lie within 1 ± noise/(1 + noise) and have mean 1. y_i(x)
        and ∇F do not depend on it.
      conditioning: D is evenly spaced on [1, conditioning].
      coupling: the order of magnitude of ‖B_i‖.
      bend: κ_g.

    The other arguments are those of `CurvedSettings`, `QuadraticSettings` and `FamilySettings`.

    Returns:
      The family; its `least` and `solution` are None.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.curved_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> here, there = (family.lower_curvature(x, family.stacked_solution(x))[0] for x in np.eye(2))
      >>> bool(np.abs(here - there).max() > 0.1)
      True
    """
    m, d_x, d_y = settings.m, settings.d_x, settings.d_y
    draw, cast = Draws(settings), settings.cast
    Q, D = draw.orthonormal(d_y, d_y), np.tile(draw.eigenvalues(d_y), (m, 1))
    B = settings.coupling * draw.normal(d_y, d_x) / d_x**0.5
    P = draw.normal(d_y, d_x) / d_x**0.5
    shifts = draw.normal(1, d_y) + draw.deviations(d_y)
    targets = draw.normal(1, d_y) + draw.deviations(d_y)
    h, e, W = draw.factors(), draw.factors(), np.tile(np.eye(d_y), (m, 1, 1))
    bend = np.full(m, settings.bend)
    problem = Problem(
        upper,
        lower,
        settings.block_constants(Q=Q, D=D, B=B, P=P, W=W, bend=bend),
        settings.per_block(target=targets),
        settings.per_block(hessian_factor=h, jacobian_factor=e, shift=shifts),
    )
    return CurvedBlocks(
        settings=settings, problem=problem, x0=cast(np.ones(d_x)), y0=cast(np.zeros((m, d_y))),
        Q=Q, D=D, B=B, P=P, hessian_factors=h, jacobian_factors=e, shifts=shifts, targets=targets,
    )  # fmt: skip
