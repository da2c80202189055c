"""Lower problems whose strengths of regularisation are learnt: x holds their logarithms."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.testing.block_algebra import longest
from bilevax.testing.family import Family, Region
from bilevax.testing.settings import FamilySettings, check_narrow


@dataclass(frozen=True, kw_only=True)
class RegularisedSettings(FamilySettings):
    """Settings of families that learn strengths of regularisation; they need d_x ≤ d_y."""

    d_x: int = 5
    noise: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_narrow(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class RegularisedBlocks(Family):
    r"""Blocks with the penalty ½ Σ_j exp(ω x_{j mod d_x}) y_j², where ω is the coupling.

    Entries of y share a strength if their indices are equal modulo d_x. On ‖x‖ ≤ R the penalty's curvature
    lies between exp(−ωR) and exp(ωR), which are attained only if x points along one axis.
    """

    @property
    def groups(self) -> np.ndarray:
        """The index of the entry of x that each entry of y uses."""
        return np.arange(self.settings.d_y) % self.settings.d_x

    def strengths(self, x: np.ndarray) -> np.ndarray:
        """exp(ω x) for each entry of y."""
        return np.exp(self.settings.coupling * x)[self.groups]

    def negative_jacobian(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """−∇²_yx g_i, (m, d_y, d_x)."""
        member = self.groups[:, None] == np.arange(self.settings.d_x)
        return -self.settings.coupling * (self.strengths(x) * y)[..., None] * member

    @abc.abstractmethod
    def solution_bound(self, strongest: float) -> float:
        """A bound on ‖y_i(x)‖, for strengths of at least 1/strongest."""

    @cached_property
    def strongest(self) -> float:
        """exp(ωR)."""
        return math.exp(self.settings.coupling * self.region.x_radius)

    @cached_property
    def region(self) -> Region:
        known = 0.0 if self.solution is None else longest(self.solution)
        radius = 1 + max(longest(self.x0), known)
        return Region(radius, 1 + self.solution_bound(math.exp(self.settings.coupling * radius)))

    def penalty_constants(self) -> tuple[float, float, float]:
        """Bounds on C_gxy, L_gxy, and the Lipschitz constant of ∇²_yy g in x."""
        slope = self.settings.coupling * self.strongest
        size = self.region.y_radius
        return slope * size, slope * math.hypot(self.settings.coupling * size, 1), slope


def penalty(x: Array, y: Array, coupling: Array) -> Array:
    """½ Σ_j exp(ω x_{j mod d_x}) y_j²."""
    return 0.5 * jnp.sum(jnp.exp(coupling * x)[jnp.arange(y.shape[0]) % x.shape[0]] * y**2)
