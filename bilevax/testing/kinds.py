"""A saddle point, a minimum and a maximum per block, with a closed form: levels of every kind that moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem, checks, maximum, minimum, saddle
from bilevax.testing.block_algebra import largest, longest, solve, times
from bilevax.testing.draws import Draws
from bilevax.testing.family import Family, Region
from bilevax.testing.settings import FamilySettings, takes_fields_of
from bilevax.theory import Constants


@dataclass(frozen=True, kw_only=True)
class KindsSettings(FamilySettings):
    """`FamilySettings` with a smaller d_y, the length of each of the four parts of a block's variables.

    Attributes:
      bound: no entry of the minimum and of the maximum exceeds this in size; None for no bounds.
      ridge: ρ.
    """

    d_y: int = 3
    bound: float | None = None
    ridge: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("ridge", self.ridge, 0)
        if self.bound is not None:
            checks.number("bound", self.bound, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Kinds(Family):
    """The levels stacked: (p, q) of the saddle point, the minimum and the maximum.

    The paper's assumptions have no saddle points and no variables that optimise f: there are no `constants`.
    """

    settings: KindsSettings
    H: np.ndarray
    B: np.ndarray
    shifts: np.ndarray
    targets: np.ndarray

    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        pull = self.B @ x + self.shifts.mean(1)
        n, most = 2 * self.settings.d_y, self.settings.bound
        # The minimum has curvature 2 in f, and the maximum −1.
        own = pull[:, n:] / np.repeat([2.0, 1.0], self.settings.d_y)
        own = own if most is None else np.clip(own, -most, most)
        return np.concatenate([solve(self.H, pull[:, :n]), own], 1)

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        fit, minimum, maximum, (of_minimum, of_maximum) = self._parts(x, y)
        spread = np.sum((self.targets - self.targets.mean(1, keepdims=True)) ** 2, -1).mean(1)
        noise = np.sum(self._minimum_scatter**2, -1).mean(1)
        value = np.sum(fit**2, -1) + spread + np.sum((minimum - of_minimum) ** 2 + minimum**2, -1) + noise
        value += 2 * np.sum(maximum * of_maximum, -1) - np.sum(maximum**2, -1)
        return 0.5 * value + 0.5 * self.settings.ridge * x @ x

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fit, minimum, maximum, (of_minimum, of_maximum) = self._parts(x, y)
        n, d = 2 * self.settings.d_y, self.settings.d_y
        P, Q = self.B[:, n : n + d], self.B[:, n + d :]
        f_x = times(P.transpose(0, 2, 1), of_minimum - minimum) + times(Q.transpose(0, 2, 1), maximum)
        f_y = np.concatenate([fit, 2 * minimum - of_minimum, of_maximum - maximum], 1)
        return f_x + self.settings.ridge * x, f_y

    def gradient(self, x: Any) -> np.ndarray:
        """∇F(x): variables that optimise f have no multiplier."""
        x, n = self.point(x), 2 * self.settings.d_y
        f_x, f_y = self.upper_slopes(x, self.stacked_solution(x))
        return (f_x + times(self.B[:, :n].transpose(0, 2, 1), solve(self.H, f_y[:, :n]))).mean(0)

    def inverse_solution(self, x: Any) -> Any:
        """v of the saddle point, a pair; None for the others."""
        x, n, d = self.point(x), 2 * self.settings.d_y, self.settings.d_y
        v = solve(self.H, self.upper_slopes(x, self.stacked_solution(x))[1][:, :n])
        return {"saddle": (v[:, :d], v[:, d:]), "minimum": None, "maximum": None}

    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the saddle point alone."""
        n = 2 * self.settings.d_y
        return self.H, self.B[:, :n]

    def by_level(self, stacked: np.ndarray) -> dict[str, Any]:
        p, q, minimum, maximum = np.split(stacked, 4, 1)
        return {"saddle": (p, q), "minimum": minimum, "maximum": maximum}

    def _parts(self, x: np.ndarray, y: np.ndarray) -> Any:
        """a − c̄, both variables that optimise f, and what they are pulled to."""
        n = 2 * self.settings.d_y
        pull = (self.B @ x + self.shifts.mean(1))[:, n:]
        return y[:, :n] - self.targets.mean(1), *np.split(y[:, n:], 2, 1), np.split(pull, 2, 1)

    @cached_property
    def _minimum_scatter(self) -> np.ndarray:
        """How far the rows of the minimum's pull are from their mean."""
        n, d = 2 * self.settings.d_y, self.settings.d_y
        rows = self.shifts[..., n : n + d]
        return rows - rows.mean(1, keepdims=True)

    @cached_property
    def solution(self) -> np.ndarray | None:
        """The minimiser of F, which is quadratic; None with bounds."""
        if self.settings.bound is not None:
            return None
        first = self.gradient(np.zeros(self.settings.d_x))
        curvature = np.stack([self.gradient(e) - first for e in np.eye(self.settings.d_x)])
        return np.linalg.solve(curvature, -first)

    @cached_property
    def least(self) -> float | None:
        return None if self.solution is None else self.value(self.solution)

    @cached_property
    def region(self) -> Region:
        radius = 1 + 2 * max(longest(self.x0), 0.0 if self.solution is None else longest(self.solution))
        slopes = np.linalg.solve(self.H, self.B[:, : self.H.shape[1]])
        start = self.stacked_solution(np.zeros(self.settings.d_x))
        return Region(radius, 1 + (largest(slopes) + largest(self.B)) * radius + longest(start))

    @cached_property
    def constants(self) -> Constants:
        raise NotImplementedError(
            "the paper's assumptions have no saddle points and no variables that optimise f: no constants"
        )


def upper(x: Array, y: dict[str, Any], block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """f_i on a batch."""
    low, high = y["minimum"], y["maximum"]
    fit = jnp.sum((jnp.concatenate(y["saddle"]) - batch["target"]) ** 2, -1)
    below = jnp.sum((low - block["P"] @ x - batch["minimum_shift"]) ** 2, -1) + low @ low
    above = 2 * (block["Q"] @ x + batch["maximum_shift"]) @ high - high @ high
    return 0.5 * jnp.mean(fit + below + above) + 0.5 * block["ridge"] * x @ x


def lower(x: Array, y: tuple[Array, Array], block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i of the saddle point on a batch."""
    a = jnp.concatenate(y)
    curved = 0.5 * jnp.mean(batch["hessian_factor"]) * (a @ block["H"] @ a)
    return curved - jnp.mean(batch["jacobian_factor"]) * (a @ block["B"] @ x) - jnp.mean(batch["shift"] @ a)


@takes_fields_of(KindsSettings)
def kinds_blocks(settings: KindsSettings) -> Kinds:
    r"""Three named levels: "saddle", "minimum" and "maximum", under an f that is quadratic.

    .. math::
        g_i &= \text{mean of } \tfrac12 h\, a^\top H_i a - e\, a^\top B_i x - b^\top a, \qquad a = (p, q) \\
        f_i &= \text{mean of } \tfrac12 \|a - c\|^2 + \tfrac12 \|r - P_i x - w\|^2 + \tfrac12 \|r\|^2
            + s^\top (Q_i x + u) - \tfrac12 \|s\|^2 + \tfrac{\rho}{2} \|x\|^2

    p minimises g and q maximises it; r minimises f and s maximises it, within ±bound. H_i is positive
    definite in p, negative definite in q, and couples both with a norm of `coupling`.

    Args:
      noise: standard deviation of the rows; h and e lie within 1 ± noise/(1 + noise) and have mean 1.
      conditioning: the curvatures of g in p and in −q are evenly spaced on [1, conditioning].
      coupling: how strongly p and q, and all of them and x, are coupled.

    The other arguments are those of `KindsSettings` and `FamilySettings`.

    Returns:
      The family; y0 and `lower_solution` are dicts. It is not in `FAMILIES`, for want of constants.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.kinds_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> sorted(family.lower_solution(family.x0))
      ['maximum', 'minimum', 'saddle']
    """
    m, d_x, d = settings.m, settings.d_x, settings.d_y
    draw, cast = Draws(settings), settings.cast
    convex, concave = draw.positive_definite(d), draw.positive_definite(d)
    between = settings.coupling * draw.orthonormal(d, d)
    H = np.block([[convex, between], [between.transpose(0, 2, 1), -concave]])
    B = settings.coupling * draw.normal(4 * d, d_x) / d_x**0.5
    shifts = draw.normal(1, 4 * d) + draw.deviations(4 * d)
    targets = draw.normal(1, 2 * d) + draw.deviations(2 * d)
    h, e, most = draw.factors(), draw.factors(), settings.bound
    box = None if most is None else (-most, most)
    blocks = {"H": H, "B": B[:, : 2 * d], "P": B[:, 2 * d : 3 * d], "Q": B[:, 3 * d :]}
    blocks["ridge"] = np.full(m, settings.ridge)
    own = {"minimum_shift": shifts[..., 2 * d : 3 * d], "maximum_shift": shifts[..., 3 * d :]}
    problem = Problem(
        upper,
        {"saddle": saddle(lower), "minimum": minimum(project=box), "maximum": maximum(project=box)},
        {name: cast(array) for name, array in blocks.items()},
        settings.per_block(target=targets, **own),
        {"saddle": settings.per_block(hessian_factor=h, jacobian_factor=e, shift=shifts[..., : 2 * d])},
    )
    zero = cast(np.zeros((m, d)))
    y0 = {"saddle": (zero, zero), "minimum": zero, "maximum": zero}
    return Kinds(
        settings=settings,
        problem=problem,
        x0=cast(np.ones(d_x)),
        y0=y0,
        H=H,
        B=B,
        shifts=shifts,
        targets=targets,
    )
