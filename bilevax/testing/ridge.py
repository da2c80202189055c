"""Ridge regressions; their strengths of regularisation are learnt on validation rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem
from bilevax.testing.block_algebra import largest, longest, scatter, solve, times
from bilevax.testing.draws import Draws
from bilevax.testing.regularised import RegularisedBlocks, RegularisedSettings, penalty
from bilevax.testing.settings import takes_fields_of
from bilevax.theory import Constants


@dataclass(frozen=True, eq=False, kw_only=True)
class RidgeBlocks(RegularisedBlocks):
    """Ridge regressions with a known best x. Made by `ridge_blocks`.

    Exact: x*, min F, Δ, L_fx = C_fx = 0, L_fy. All other constants are bounds on the region.
    """

    training: tuple[np.ndarray, np.ndarray]  # features (m, rows, d_y, d_y) and labels (m, rows, d_y)
    validation: tuple[np.ndarray, np.ndarray]
    optimum: np.ndarray

    @property
    def solution(self) -> np.ndarray:
        return self.optimum

    @cached_property
    def least(self) -> float:
        return self.value(self.optimum)

    @cached_property
    def normal_equations(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean AᵀA and Aᵀb of the training rows."""
        return gram(self.training[0]).mean(1), moment(*self.training).mean(1)

    @cached_property
    def validation_fit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean CᵀC of the validation rows, the minimiser of f_i, and its least value."""
        features, labels = self.validation
        matrix = gram(features).mean(1)
        best = solve(matrix, moment(features, labels).mean(1))
        errors = predict(features, best) - labels
        return matrix, best, 0.5 * np.sum(errors**2, -1).mean(1)

    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        matrix, right = self.normal_equations
        return solve(matrix + np.diag(self.strengths(x)), right)

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        matrix, best, floors = self.validation_fit
        return floors + 0.5 * np.sum(times(matrix, y - best) * (y - best), -1)

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        matrix, best, _ = self.validation_fit
        return np.zeros((len(y), len(x))), times(matrix, y - best)

    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.normal_equations[0] + np.diag(self.strengths(x)), self.negative_jacobian(x, y)

    def solution_bound(self, strongest: float) -> float:
        matrix, right = self.normal_equations
        low = np.linalg.eigvalsh(matrix)[:, 0] + 1 / strongest
        return float(np.max(np.linalg.norm(right, axis=-1) / low))

    @cached_property
    def constants(self) -> Constants:
        strongest, size = self.strongest, self.region.y_radius
        eigenvalues = np.linalg.eigvalsh(self.normal_equations[0])
        high, row_high = float(eigenvalues.max()) + strongest, largest(self.training[0]) ** 2 + strongest
        jacobian, jacobian_lipschitz, hessian_lipschitz = self.penalty_constants()
        grams, fit = gram(self.training[0]), gram(self.validation[0])
        moments, fit_moments = moment(*self.training), moment(*self.validation)
        slopes = (scatter(g) * size + scatter(c) for g, c in ((grams, moments), (fit, fit_moments)))
        return Constants(
            strong_convexity=float(eigenvalues.min()) + 1 / strongest,
            lower_smoothness=high,
            upper_x_lipschitz=0.0,
            upper_y_lipschitz=largest(fit),
            lower_lipschitz=math.hypot(row_high, jacobian),
            jacobian_lipschitz=jacobian_lipschitz,
            hessian_lipschitz=hessian_lipschitz,
            upper_x_bound=0.0,
            upper_y_bound=largest(fit.mean(1)) * size + longest(fit_moments.mean(1)),
            noise=max(*slopes, scatter(grams)),
            gap=self.value(self.x0) - self.least,
            jacobian_bound=jacobian,
            mean_hessian_bound=high,
            hessian_bound=row_high,
        )


def gram(features: np.ndarray) -> np.ndarray:
    """AᵀA of each row."""
    return features.swapaxes(-1, -2) @ features


def moment(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Aᵀb of each row."""
    return times(features.swapaxes(-1, -2), labels)


def predict(features: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A y_i of each row."""
    return times(features, y[:, None])


def squares(y: Array, batch: dict[str, Array]) -> Array:
    """½‖A y − b‖², mean over rows."""
    return 0.5 * jnp.mean(jnp.sum((batch["features"] @ y - batch["labels"]) ** 2, -1))


def upper(x: Array, y: Array, block: Array, batch: dict[str, Array]) -> Array:
    """f_i on a batch of validation rows."""
    return squares(y, batch)


def lower(x: Array, y: Array, block: Array, batch: dict[str, Array]) -> Array:
    """g_i on a batch of training rows."""
    return squares(y, batch) + penalty(x, y, block)


@takes_fields_of(RegularisedSettings)
def ridge_blocks(settings: RegularisedSettings) -> RidgeBlocks:
    r"""Ridge regressions with learnt strengths of regularisation; y_i(x) is in closed form, F non-convex.

    .. math::
        g_i &= \text{mean of } \tfrac12 \|A y - b\|^2 + \tfrac12 \sum_j e^{\omega x_{j \bmod d_x}} y_j^2 \\
        f_i &= \text{mean of } \tfrac12 \|C y - d\|^2

    over training rows (A, b) and validation rows (C, d). A row holds d_y observations, so that y is
    determined even if all rows are equal. Validation labels are C y_i(x*) + r with r orthogonal to the range
    of C. So y_i(x*) minimises f_i, x* minimises F, and min F = ½ mean ‖r‖² is known.

    Args:
      noise: standard deviation of features (times d_y^(-1/2)) and labels about those of the block.
      conditioning: of the noise-free AᵀA and CᵀC, whose smallest eigenvalue is 1.
      coupling: ω, positive.

    The other arguments are those of `RegularisedSettings` and `FamilySettings`.

    Returns:
      The family.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.ridge_blocks(m=3, d_x=2, d_y=4, rows=5)
      >>> family.value(family.x0) > family.least
      True
    """
    m, d_x, d_y, coupling = settings.m, settings.d_x, settings.d_y, settings.coupling
    if coupling == 0:
        raise ValueError("coupling must be positive in this family, got 0: F would be constant")
    draw, cast = Draws(settings), settings.cast
    teachers, optimum = draw.normal(d_y), draw.means.normal(size=d_x) / d_x**0.5
    A, C = (draw.design(d_y, d_y)[:, None] + draw.deviations(d_y, d_y) / d_y**0.5 for _ in range(2))
    training = A, predict(A, teachers) + draw.deviations(d_y)
    parts: dict[str, Any] = {"settings": settings, "x0": cast(np.zeros(d_x)), "training": training}
    matrix, right = gram(A).mean(1), moment(*training).mean(1)
    best = solve(matrix + np.diag(np.exp(coupling * optimum)[np.arange(d_y) % d_x]), right)
    rest = draw.deviations(d_y)
    for _ in range(2):  # one projection leaves a rounding error
        rest = rest - predict(C, solve(gram(C).sum(1), moment(C, rest).sum(1)))
    validation = C, predict(C, best) + rest
    problem = Problem(
        upper,
        lower,
        cast(np.full(m, coupling)),
        settings.per_block(features=C, labels=validation[1]),
        settings.per_block(features=A, labels=training[1]),
    )
    return RidgeBlocks(
        **parts, problem=problem, y0=cast(np.zeros((m, d_y))), validation=validation, optimum=optimum
    )
