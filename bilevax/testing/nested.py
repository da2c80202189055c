"""Three levels per block that read one another, the first within bounds, with a closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem, argmin, checks, mean
from bilevax.testing.block_algebra import largest, longest, solve, times
from bilevax.testing.draws import Draws
from bilevax.testing.family import Family, Region
from bilevax.testing.settings import FamilySettings, takes_fields_of
from bilevax.theory import Constants

LEVELS = ("first", "second", "third")


@dataclass(frozen=True, kw_only=True)
class NestedSettings(FamilySettings):
    """`FamilySettings` with a smaller d_y, the length of the variable of each of the three levels.

    Attributes:
      bound: no entry of the first level exceeds this in size; None for no bounds.
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
class Nested(Family):
    """The levels stacked: A y = B x + C y + b, with a C that is zero but for levels that read earlier ones.

    The paper's assumptions have no levels that read others: there are no `constants`.
    """

    settings: NestedSettings
    A: np.ndarray
    B: np.ndarray
    C: np.ndarray
    shifts: np.ndarray
    targets: np.ndarray

    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        d, most = self.settings.d_y, self.settings.bound
        y, pull = np.zeros((self.settings.m, 3 * d)), self.B @ x + self.shifts.mean(1)
        for level in (slice(0, d), slice(d, 2 * d), slice(2 * d, 3 * d)):
            y[:, level] = solve(self.A[:, level, level], (pull + times(self.C, y))[:, level])
            if level.start == 0 and most is not None:  # the first level has a diagonal Hessian
                y[:, level] = np.clip(y[:, level], -most, most)
        return y

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        spread = np.sum((self.targets - self.targets.mean(1, keepdims=True)) ** 2, -1).mean(1)
        fit = np.sum((y - self.targets.mean(1)) ** 2, -1)
        return 0.5 * (fit + spread) + 0.5 * self.settings.ridge * x @ x

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.broadcast_to(self.settings.ridge * x, (self.settings.m, x.size)), y - self.targets.mean(1)

    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A − C, and B without the rows of entries that a bound holds."""
        return self.A - self.C, self._free(y)[..., None] * self.B

    def gradient(self, x: Any) -> np.ndarray:
        """∇F(x) = 1/m Σ_i ∇_x f_i + B_iᵀ v_i."""
        x = self.point(x)
        f_x, _ = self.upper_slopes(x, self.stacked_solution(x))
        return (f_x + times(self.B.transpose(0, 2, 1), self._multipliers(x))).mean(0)

    def inverse_solution(self, x: Any) -> Any:
        return self.by_level(self._multipliers(self.point(x)))

    def by_level(self, stacked: np.ndarray) -> dict[str, Any]:
        return dict(zip(LEVELS, np.split(stacked, 3, 1), strict=True))

    def _multipliers(self, x: np.ndarray) -> np.ndarray:
        """From the last level to the first: (A − C)ᵀ v = ∇_y f, and zero where a bound holds y."""
        y = self.stacked_solution(x)
        transposed = (self.A - self.C).transpose(0, 2, 1)
        return self._free(y) * solve(transposed, self.upper_slopes(x, y)[1])

    def _free(self, y: np.ndarray) -> np.ndarray:
        free = np.ones_like(y)
        if self.settings.bound is not None:
            free[:, : self.settings.d_y] = np.abs(y[:, : self.settings.d_y]) < self.settings.bound
        return free

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
        slopes = np.linalg.solve(self.A - self.C, self.B)
        start = self.stacked_solution(np.zeros(self.settings.d_x))
        return Region(radius, 1 + largest(slopes) * radius + longest(start))

    @cached_property
    def constants(self) -> Constants:
        raise NotImplementedError("the paper's assumptions have no levels that read others: no constants")


def upper(x: Array, y: dict[str, Array], block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """f_i on a batch."""
    stacked = jnp.concatenate([y[name] for name in LEVELS])
    return 0.5 * jnp.mean(jnp.sum((stacked - batch["target"]) ** 2, -1)) + 0.5 * block["ridge"] * x @ x


def first(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i of the first level on a batch."""
    curved = 0.5 * jnp.mean(batch["hessian_factor"]) * (y @ block["A_first"] @ y)
    pull = jnp.mean(batch["jacobian_factor"]) * (block["B_first"] @ x)
    return curved - y @ (pull + jnp.mean(batch["first_shift"], 0))


def second(x: Array, y: dict[str, Array], block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """c_i of the second level on a batch."""
    seen = block["B_second"] @ x + block["C_second"] @ y["first"]
    return jnp.mean(batch["jacobian_factor"]) * seen + jnp.mean(batch["second_shift"], 0)


def third(x: Array, y: dict[str, Array], block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i of the third level on a batch."""
    own = y["third"]
    curved = 0.5 * jnp.mean(batch["hessian_factor"]) * (own @ block["A_third"] @ own)
    seen = block["B_third"] @ x + block["C_third"] @ jnp.concatenate([y["first"], y["second"]])
    pull = jnp.mean(batch["jacobian_factor"]) * seen
    return curved - own @ (pull + jnp.mean(batch["third_shift"], 0))


@takes_fields_of(NestedSettings)
def nested_blocks(settings: NestedSettings) -> Nested:
    r"""Three named levels: "first", "second", which reads it, and "third", which reads both.

    .. math::
        g_i &= \text{mean of } \tfrac12 h\, p^\top A_i p - p^\top (e B_i x + b) \\
        c_i &= \text{mean of } e (B_i' x + C_i' p) + b' \\
        g_i'' &= \text{mean of } \tfrac12 h\, r^\top A_i'' r - r^\top (e (B_i'' x + C_i'' (p, q)) + b'') \\
        f_i &= \text{mean of } \tfrac12 \|(p, q, r) - c\|^2 + \tfrac{\rho}{2} \|x\|^2

    p and r minimise their g, p within ±bound; q is the mean of c. A_i is diagonal, so that bounds hold the
    entries of p one by one.

    Args:
      noise: standard deviation of the rows; h and e lie within 1 ± noise/(1 + noise) and have mean 1.
      conditioning: the curvatures of g are evenly spaced on [1, conditioning].
      coupling: how strongly the levels depend on x and on one another.

    The other arguments are those of `NestedSettings` and `FamilySettings`.

    Returns:
      The family; y0 and `lower_solution` are dicts. It is not in `FAMILIES`, for want of constants.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.nested_blocks(m=3, d_x=2, d_y=2, rows=4, bound=0.5)
      >>> abs(family.lower_solution(family.x0)["first"]).max() <= 0.5
      np.True_
    """
    m, d_x, d = settings.m, settings.d_x, settings.d_y
    draw, cast, part = (
        Draws(settings),
        settings.cast,
        {n: slice(k * d, (k + 1) * d) for k, n in enumerate(LEVELS)},
    )
    A, C = np.zeros((m, 3 * d, 3 * d)), np.zeros((m, 3 * d, 3 * d))
    A[:, part["first"], part["first"]] = np.diag(draw.eigenvalues(d))
    A[:, part["second"], part["second"]] = np.eye(d)
    A[:, part["third"], part["third"]] = draw.positive_definite(d)
    B = settings.coupling * draw.normal(3 * d, d_x) / d_x**0.5
    C[:, part["second"], :d] = settings.coupling * draw.normal(d, d) / d**0.5
    C[:, part["third"], : 2 * d] = settings.coupling * draw.normal(d, 2 * d) / (2 * d) ** 0.5
    shifts, targets = (draw.normal(1, 3 * d) + draw.deviations(3 * d) for _ in range(2))
    blocks = {"ridge": np.full(m, settings.ridge)}
    for name, own in part.items():
        blocks |= {f"A_{name}": A[:, own, own], f"B_{name}": B[:, own], f"C_{name}": C[:, own, : own.start]}
    most = settings.bound
    problem = Problem(
        upper,
        {
            "first": argmin(first, project=None if most is None else (-most, most)),
            "second": mean(second, reads="first"),
            "third": argmin(third, reads=("first", "second")),
        },
        {name: cast(array) for name, array in blocks.items()},
        settings.per_block(target=targets),
        settings.per_block(
            hessian_factor=draw.factors(),
            jacobian_factor=draw.factors(),
            **{f"{name}_shift": shifts[..., own] for name, own in part.items()},
        ),
    )
    zero = cast(np.zeros((m, d)))
    return Nested(
        settings=settings,
        problem=problem,
        x0=cast(np.ones(d_x)),
        y0={"first": zero, "second": None, "third": zero},
        A=A,
        B=B,
        C=C,
        shifts=shifts,
        targets=targets,
    )
