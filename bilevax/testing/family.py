"""What every family offers: a problem, its exact solution and its constants."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bilevax import Problem
from bilevax.testing.block_algebra import solve, times
from bilevax.testing.settings import FamilySettings
from bilevax.theory import Constants


@dataclass(frozen=True)
class Region:
    """The points at which a family's constants hold: ‖x‖ ≤ x_radius and ‖y_i‖ ≤ y_radius (levels stacked).

    They include x0, the solution if it is known, y0 = 0, and y_i(x) for every x of the region.
    """

    x_radius: float
    y_radius: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Family(abc.ABC):
    r"""A problem with known truth, :math:`F(x) = \frac1m \sum_i f_i(x, y_i(x))` on all rows.

    The truth is computed with NumPy in float64, from the data before they are rounded to `settings.dtype`.
    It shares no code with the solvers or the diagnostics.

    Attributes:
      settings: sizes and difficulty.
      problem: the `bilevax.Problem`.
      x0, y0: a start for solvers; y0 is None for mean levels, and a dict if the levels have names.
    """

    settings: FamilySettings
    problem: Problem
    x0: np.ndarray
    y0: Any

    @property
    @abc.abstractmethod
    def solution(self) -> np.ndarray | None:
        """A minimiser of F; None if unknown."""

    @property
    @abc.abstractmethod
    def least(self) -> float | None:
        """min F; None if unknown."""

    @cached_property
    @abc.abstractmethod
    def region(self) -> Region:
        """The points at which `constants` hold."""

    @cached_property
    @abc.abstractmethod
    def constants(self) -> Constants:
        """The constants of the paper's assumptions on `region`; each family documents which are exact."""

    def value(self, x: Any) -> float:
        """F(x)."""
        x = self.point(x)
        return float(self.upper_values(x, self.stacked_solution(x)).mean())

    def gradient(self, x: Any) -> np.ndarray:
        """∇F(x) = 1/m Σ_i ∇_x f_i − ∇²_xy g_i v_i."""
        x = self.point(x)
        y = self.stacked_solution(x)
        f_x, f_y = self.upper_slopes(x, y)
        hessian, jacobian = self.lower_curvature(x, y)
        return (f_x + times(jacobian.transpose(0, 2, 1), solve(hessian, f_y))).mean(0)

    def lower_solution(self, x: Any) -> Any:
        """y_i(x), with leading axis m; a dict if the levels have names."""
        return self.by_level(self.stacked_solution(self.point(x)))

    def inverse_solution(self, x: Any) -> Any:
        """v_i = [∇²_yy g_i]⁻¹ ∇_y f_i at (x, y_i(x)), like `lower_solution`; ∇_y f_i for a mean level."""
        x = self.point(x)
        y = self.stacked_solution(x)
        return self.by_level(solve(self.lower_curvature(x, y)[0], self.upper_slopes(x, y)[1]))

    @abc.abstractmethod
    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        """y_i(x) as (m, d), with named levels concatenated."""

    @abc.abstractmethod
    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """f_i(x, y_i), (m,)."""

    @abc.abstractmethod
    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """∇_x f_i, (m, d_x), and ∇_y f_i, (m, d)."""

    @abc.abstractmethod
    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """∇²_yy g_i, (m, d, d), and −∇²_yx g_i, (m, d, d_x): their quotient is y_i'(x)."""

    def by_level(self, stacked: np.ndarray) -> Any:
        """(m, d) in the structure of `problem`'s y: a dict if the levels have names."""
        return stacked

    def point(self, x: Any) -> np.ndarray:
        """x in float64; raises ValueError if its shape is wrong."""
        x = np.asarray(x, float)
        if x.shape != (self.settings.d_x,):
            raise ValueError(f"x must be a vector of length {self.settings.d_x}, got shape {x.shape}")
        return x
