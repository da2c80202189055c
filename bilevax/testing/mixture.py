"""One argmin level and one mean level per block, coupled by f."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax import Problem, argmin, mean
from bilevax.testing import quadratic_upper
from bilevax.testing.draws import Draws
from bilevax.testing.settings import takes_fields_of


@dataclass(frozen=True, kw_only=True)
class MixtureSettings(quadratic_upper.QuadraticSettings):
    """`QuadraticSettings` with a smaller d_y, the length of each of the two levels."""

    d_y: int = 5


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixture(quadratic_upper.QuadraticUpper):
    """The two levels stacked: A = diag(A_i, I). Constants that are exact for one level may be bounds here."""

    def by_level(self, stacked: np.ndarray) -> dict[str, np.ndarray]:
        half = self.settings.d_y
        return {"argmin": stacked[:, :half], "mean": stacked[:, half:]}


def upper(x: Array, y: dict[str, Array], block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """f_i of the stacked levels."""
    return quadratic_upper.upper(x, jnp.concatenate([y["argmin"], y["mean"]]), block, batch)


def lower(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i of the level "argmin"."""
    seen = {"shift": batch["argmin_shift"]}
    seen |= {name: batch[name] for name in ("hessian_factor", "jacobian_factor")}
    return quadratic_upper.lower(x, y, {"A": block["A"], "B": block["argmin_B"]}, seen)


def inner(x: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """c_i of the level "mean"."""
    seen = {"jacobian_factor": batch["jacobian_factor"], "shift": batch["mean_shift"]}
    return quadratic_upper.inner(x, {"B": block["mean_B"]}, seen)


@takes_fields_of(MixtureSettings)
def mixture_blocks(settings: MixtureSettings) -> Mixture:
    r"""Two named levels, "argmin" and "mean", each of length d_y, on the same lower rows.

    .. math::
        g_i &= \text{mean of } \tfrac12 h\, y_a^\top A_i y_a - e\, y_a^\top B_i x - b^\top y_a, \qquad
        y_{b,i}(x) = \text{mean of } e C_i x + d \\
        f_i &= \text{mean of } \tfrac12 \|y_a - c_a\|^2 + \tfrac12 \|y_b - c_b\|^2
            + (y_a - c_a)^\top K_i (y_b - c_b)
            + \tfrac{\rho}{2} \|x\|^2 + \kappa \sum_k \sin^2 x_k

    with ‖K_i‖ = ½, so that ∇_y f of each level depends on the other level. The constants are those of the
    stacked levels; see `LinearBlocks` and `QuadraticUpper`.

    Args:
      noise: standard deviation of b, d and c; h and e lie within 1 ± noise/(1 + noise) and have mean 1.
      conditioning: the eigenvalues of each A_i are evenly spaced on [1, conditioning].
      coupling: the order of magnitude of ‖B_i‖ and ‖C_i‖.

    The other arguments are those of `MixtureSettings`, `QuadraticSettings` and `FamilySettings`.

    Returns:
      The family; y0, `lower_solution` and `inverse_solution` are dicts.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.mixture_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> sorted(family.lower_solution(family.x0))
      ['argmin', 'mean']
    """
    m, d_x, d_y = settings.m, settings.d_x, settings.d_y
    draw, cast, one, none = Draws(settings), settings.cast, np.eye(d_y), np.zeros((m, d_y, d_y))
    curved, K = draw.positive_definite(d_y), 0.5 * draw.orthonormal(d_y, d_y)
    B = settings.coupling * draw.normal(2 * d_y, d_x) / d_x**0.5
    shifts = draw.normal(1, 2 * d_y) + draw.deviations(2 * d_y)
    targets = draw.normal(1, 2 * d_y) + draw.deviations(2 * d_y)
    h, e = draw.factors(), draw.factors()
    W = np.block([[none + one, K], [K.transpose(0, 2, 1), none + one]])
    problem = Problem(
        upper,
        {"argmin": argmin(lower), "mean": mean(inner)},
        settings.block_constants(A=curved, W=W, argmin_B=B[:, :d_y], mean_B=B[:, d_y:]),
        settings.per_block(target=targets),
        settings.per_block(
            hessian_factor=h, jacobian_factor=e, argmin_shift=shifts[..., :d_y], mean_shift=shifts[..., d_y:]
        ),
    )
    return Mixture(
        settings=settings, problem=problem, x0=cast(np.ones(d_x)),
        y0={"argmin": cast(np.zeros((m, d_y))), "mean": None},
        A=np.block([[curved, none], [none, none + one]]), B=B, W=W, hessian_factors=h, jacobian_factors=e,
        shifts=shifts, targets=targets,
    )  # fmt: skip
