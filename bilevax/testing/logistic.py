"""Logistic regressions; their strengths of regularisation are learnt on validation rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem
from bilevax.testing.block_algebra import solve
from bilevax.testing.draws import Draws
from bilevax.testing.logistic_loss import THIRD, losses, mean_gram, row_curvature, row_noise, sigmoid, slopes
from bilevax.testing.regularised import RegularisedBlocks, RegularisedSettings, penalty
from bilevax.testing.settings import takes_fields_of
from bilevax.theory import Constants

_FLIPPED = 0.2  # share of labels that contradict the teacher


@dataclass(frozen=True, eq=False, kw_only=True)
class LogisticBlocks(RegularisedBlocks):
    """Logistic regressions; y_i(x) by Newton's method. Made by `logistic_blocks`.

    The minimum is unknown. Exact: L_fx = C_fx = 0. All other constants are bounds on the region; Δ ≤ F(x0)
    because the loss is positive. The arrays hold −label · features, (m, rows, observations, d_y).
    """

    training: np.ndarray
    validation: np.ndarray

    @property
    def solution(self) -> None:
        return None

    @property
    def least(self) -> None:
        return None

    def stacked_solution(self, x: np.ndarray) -> np.ndarray:
        """Newton's method with step halving, to ‖∇_y g_i‖ ≤ 1e-12 (1 + ‖∇_y g_i(x, 0)‖)."""
        strengths = self.strengths(x)

        def value(y: np.ndarray) -> np.ndarray:
            return losses(self.training, y) + 0.5 * np.sum(strengths * y**2, -1)

        y = np.zeros((self.settings.m, self.settings.d_y))
        goal = 1e-12 * (1 + np.linalg.norm(slopes(self.training, y), axis=-1))
        for _ in range(100):
            slope = slopes(self.training, y) + strengths * y
            if np.all(np.linalg.norm(slope, axis=-1) <= goal):
                return y
            step = solve(self.lower_curvature(x, y)[0], slope)
            before, length = value(y), np.ones(len(y))
            for _ in range(30):
                # The slack accepts steps whose decrease is below the rounding error of g.
                bad = value(y - length[:, None] * step) > before + 1e-14 * (1 + before)
                if not bad.any():
                    break
                length[bad] /= 2
            y = y - length[:, None] * step
        raise RuntimeError(f"Newton's method did not solve every block in 100 steps at x = {x}")

    def upper_values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return losses(self.validation, y)

    def upper_slopes(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(y), len(x))), slopes(self.validation, y)

    def lower_curvature(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = sigmoid(self.training, y)
        shape = (len(y), -1, y.shape[1])
        flat, weights = self.training.reshape(shape), (p * (1 - p)).reshape(len(y), -1)
        hessian = (flat * weights[..., None]).transpose(0, 2, 1) @ flat / flat.shape[1]
        return hessian + np.diag(self.strengths(x)), self.negative_jacobian(x, y)

    def solution_bound(self, strongest: float) -> float:
        # By strong convexity from ∇g(0), and from g(y) ≤ g(0) = log 2.
        start = slopes(self.training, np.zeros((self.settings.m, self.settings.d_y)))
        by_slope = np.linalg.norm(start, axis=-1).max() * strongest
        return float(min(by_slope, math.sqrt(2 * math.log(2) * strongest)))

    @cached_property
    def constants(self) -> Constants:
        strongest, size = self.strongest, self.region.y_radius
        jacobian, jacobian_lipschitz, hessian_lipschitz = self.penalty_constants()
        lengths = np.linalg.norm(self.training, axis=-1)
        row_high = row_curvature(self.training).max() + strongest
        high = np.linalg.eigvalsh(mean_gram(self.training) / 4).max() + strongest
        bend = THIRD * float(np.mean(lengths**3, -1).max())
        noise = (*row_noise(self.training, size), row_noise(self.validation, size)[0])
        return Constants(
            strong_convexity=1 / strongest,
            lower_smoothness=float(high),
            upper_x_lipschitz=0.0,
            upper_y_lipschitz=float(row_curvature(self.validation).max()),
            lower_lipschitz=math.hypot(row_high, jacobian),
            jacobian_lipschitz=jacobian_lipschitz,
            hessian_lipschitz=math.hypot(bend, hessian_lipschitz),
            upper_x_bound=0.0,
            upper_y_bound=float(np.linalg.norm(self.validation, axis=-1).mean((1, 2)).max()),
            noise=max(noise),
            gap=self.value(self.x0),
            jacobian_bound=jacobian,
            mean_hessian_bound=float(high),
            hessian_bound=float(row_high),
        )


def upper(x: Array, y: Array, block: Array, batch: dict[str, Array]) -> Array:
    """f_i on a batch of validation rows."""
    return jnp.mean(jax.nn.softplus(batch["signed"] @ y))


def lower(x: Array, y: Array, block: Array, batch: dict[str, Array]) -> Array:
    """g_i on a batch of training rows."""
    return upper(x, y, block, batch) + penalty(x, y, block)


@takes_fields_of(RegularisedSettings)
def logistic_blocks(settings: RegularisedSettings) -> LogisticBlocks:
    r"""Logistic regressions with learnt strengths of regularisation.

    .. math::
        g_i &= \text{mean of } \log(1 + e^{-l a^\top y})
            + \tfrac12 \sum_j e^{\omega x_{j \bmod d_x}} y_j^2, \qquad
        f_i = \text{mean of } \log(1 + e^{-l c^\top y})

    over training observations (a, l) and validation observations (c, l). A row holds 2 d_y observations. A
    fifth of the labels contradict the block's teacher.

    Args:
      noise: standard deviation of the features about those of the block; labels have none.
      conditioning: of the noise-free Gram matrices of the features.
      coupling: ω.

    The other arguments are those of `RegularisedSettings` and `FamilySettings`.

    Returns:
      The family; its `least` and `solution` are None.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.logistic_blocks(m=3, d_x=2, d_y=4, rows=5)
      >>> family.lower_solution(family.x0).shape
      (3, 4)
    """
    m, d_x, d_y = settings.m, settings.d_x, settings.d_y
    draw, cast, seen = Draws(settings), settings.cast, 2 * d_y
    teachers = draw.normal(d_y)

    def signed() -> np.ndarray:
        features = draw.design(seen, d_y) * seen**0.5
        labels = np.where(np.einsum("mij,mj->mi", features, teachers) > 0, 1.0, -1.0)
        labels *= np.where(draw.means.random(labels.shape) < _FLIPPED, -1, 1)
        return -labels[:, None, :, None] * (features[:, None] + draw.deviations(seen, d_y))

    training, validation = signed(), signed()
    problem = Problem(
        upper,
        lower,
        cast(np.full(m, settings.coupling)),
        settings.per_block(signed=validation),
        settings.per_block(signed=training),
    )
    return LogisticBlocks(
        settings=settings, problem=problem, x0=cast(np.zeros(d_x)), y0=cast(np.zeros((m, d_y))),
        training=training, validation=validation,
    )  # fmt: skip
