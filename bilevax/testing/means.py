"""Mean blocks: compositional problems with affine inner maps."""

from __future__ import annotations

import numpy as np

from bilevax import Problem, mean
from bilevax.testing.draws import Draws
from bilevax.testing.quadratic_upper import QuadraticSettings, QuadraticUpper, inner, upper
from bilevax.testing.settings import takes_fields_of


@takes_fields_of(QuadraticSettings)
def mean_blocks(settings: QuadraticSettings) -> QuadraticUpper:
    r"""Mean lower levels under a quadratic upper function (FCCO).

    .. math::
        y_i(x) &= \text{mean of } e B_i x + b \\
        f_i &= \text{mean of } \tfrac12 (y - c)^\top W_i (y - c) + \tfrac{\rho}{2} \|x\|^2
            + \kappa \sum_k \sin^2 x_k

    over rows (e, b) and c. The constants are those of the same problem written with
    g_i = ½‖y − c_i(x)‖²: λ = L_g = 1. `LinearBlocks` and `QuadraticUpper` say which are exact.

    Args:
      noise: standard deviation of b and c; e lies within 1 ± noise/(1 + noise) and has mean 1.
      conditioning: the eigenvalues of each W_i are evenly spaced on [1, conditioning].
      coupling: the order of magnitude of ‖B_i‖.

    The other arguments are those of `QuadraticSettings` and `FamilySettings`.

    Returns:
      The family; its y0 is None.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.mean_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> family.lower_solution(family.x0).shape
      (3, 2)
    """
    m, d_x, d_y = settings.m, settings.d_x, settings.d_y
    draw = Draws(settings)
    W = draw.positive_definite(d_y)
    B = settings.coupling * draw.normal(d_y, d_x) / d_x**0.5
    shifts = draw.normal(1, d_y) + draw.deviations(d_y)
    targets = draw.normal(1, d_y) + draw.deviations(d_y)
    e = draw.factors()
    problem = Problem(
        upper,
        mean(inner),
        settings.block_constants(B=B, W=W),
        settings.per_block(target=targets),
        settings.per_block(jacobian_factor=e, shift=shifts),
    )
    return QuadraticUpper(
        settings=settings, problem=problem, x0=settings.cast(np.ones(d_x)), y0=None,
        A=np.tile(np.eye(d_y), (m, 1, 1)), B=B, W=W, hessian_factors=np.ones_like(e), jacobian_factors=e,
        shifts=shifts, targets=targets,
    )  # fmt: skip
