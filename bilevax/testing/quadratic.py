"""Quadratic blocks: the simplest argmin level, with noise in every derivative."""

from __future__ import annotations

import numpy as np

from bilevax import Problem
from bilevax.testing.draws import Draws
from bilevax.testing.quadratic_upper import QuadraticSettings, QuadraticUpper, lower, upper
from bilevax.testing.settings import takes_fields_of


@takes_fields_of(QuadraticSettings)
def quadratic_blocks(settings: QuadraticSettings) -> QuadraticUpper:
    r"""Quadratic lower problems under a quadratic upper one.

    .. math::
        g_i &= \text{mean of } \tfrac12 h\, y^\top A_i y - e\, y^\top B_i x - b^\top y \\
        f_i &= \text{mean of } \tfrac12 \|y - c\|^2 + \tfrac{\rho}{2} \|x\|^2 + \kappa \sum_k \sin^2 x_k

    over rows (h, e, b) and c. `LinearBlocks` and `QuadraticUpper` say which constants are exact.

    Args:
      noise: standard deviation of b and c; h and e lie within 1 ± noise/(1 + noise) and have mean 1. The
        solution, A_i, B_i and y_i(x) do not depend on it.
      conditioning: the eigenvalues of each A_i are evenly spaced on [1, conditioning].
      coupling: the order of magnitude of ‖B_i‖.

    The other arguments are those of `QuadraticSettings` and `FamilySettings`.

    Returns:
      The family.

    Raises:
      ValueError, TypeError: if an argument is invalid.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.quadratic_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> family.value(family.x0) > family.least, family.constants.strong_convexity.__round__(6)
      (True, 1.0)
    """
    m, d_x, d_y = settings.m, settings.d_x, settings.d_y
    draw, cast = Draws(settings), settings.cast
    A = draw.positive_definite(d_y)
    B = settings.coupling * draw.normal(d_y, d_x) / d_x**0.5
    shifts = draw.normal(1, d_y) + draw.deviations(d_y)
    targets = draw.normal(1, d_y) + draw.deviations(d_y)
    h, e, W = draw.factors(), draw.factors(), np.tile(np.eye(d_y), (m, 1, 1))
    problem = Problem(
        upper,
        lower,
        settings.block_constants(A=A, B=B, W=W),
        settings.per_block(target=targets),
        settings.per_block(hessian_factor=h, jacobian_factor=e, shift=shifts),
    )
    return QuadraticUpper(
        settings=settings, problem=problem, x0=cast(np.ones(d_x)), y0=cast(np.zeros((m, d_y))),
        A=A, B=B, W=W, hessian_factors=h, jacobian_factors=e, shifts=shifts, targets=targets,
    )  # fmt: skip
