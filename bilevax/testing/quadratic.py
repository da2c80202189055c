"""Quadratic blocks: the plainest argmin level, with noise in every derivative."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax import Problem
from bilevax.testing.quadratic_upper import QuadraticUpper, lower, upper
from bilevax.testing.settings import Draws, Settings, number


def quadratic_blocks(
    *,
    m: int = 50,
    d_x: int = 10,
    d_y: int = 10,
    rows: int = 100,
    noise: float = 1.0,
    conditioning: float = 3.0,
    coupling: float = 1.0,
    nonconvexity: float = 0.0,
    ridge: float = 0.1,
    seed: int = 0,
    dtype: Any = np.float32,
) -> QuadraticUpper:
    r"""Quadratic lower problems under a quadratic upper one.

    .. math::
        g_i &= \text{mean of } \tfrac12 h\, y^\top A_i y - e\, y^\top B_i x - b^\top y \\
        f_i &= \text{mean of } \tfrac12 \|y - c\|^2 + \tfrac{\rho}{2} \|x\|^2 + \kappa \sum_k \sin^2 x_k

    over rows (h, e, b) and c. See `LinearBlocks` and `QuadraticUpper` for which constants are exact.

    Args:
      m, d_x, d_y, rows: blocks, lengths of x and of y_i, rows per block of either data.
      noise: standard deviation of b and c; h and e lie within 1 ± noise/(1 + noise), and their mean is 1.
        The solution, A_i, B_i and y_i(x) are the same at every noise.
      conditioning: the eigenvalues of each A_i are evenly spread over [1, conditioning].
      coupling: ‖B_i‖ is of this order.
      nonconvexity: κ; F is non-convex from about (μ of κ = 0)/4 on, and then its minimum is not known.
      ridge: ρ.
      seed: of all draws.
      dtype: of the problem; float64 needs JAX's x64 mode.

    Returns:
      The family.

    Raises:
      ValueError, TypeError: for arguments that cannot be.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.quadratic_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> family.value(family.x0) > family.least, family.constants.strong_convexity.__round__(6)
      (True, 1.0)
    """
    settings = Settings(
        m=m, d_x=d_x, d_y=d_y, rows=rows, noise=noise, conditioning=conditioning, coupling=coupling,
        seed=seed, dtype=dtype,
    )  # fmt: skip
    draw, cast = Draws(settings), settings.cast
    A = draw.positive_definite(d_y)
    B = coupling * draw.normal(d_y, d_x) / d_x**0.5
    shifts = draw.normal(1, d_y) + draw.deviations(d_y)
    targets = draw.normal(1, d_y) + draw.deviations(d_y)
    h, e, W = draw.factors(), draw.factors(), np.tile(np.eye(d_y), (m, 1, 1))
    constants = {
        "ridge": np.full(m, number("ridge", ridge, 0)),
        "nonconvexity": np.full(m, number("nonconvexity", nonconvexity, 0)),
    }
    problem = Problem(
        upper,
        lower,
        {name: cast(array) for name, array in {"A": A, "B": B, "W": W, **constants}.items()},
        settings.per_block(target=targets),
        settings.per_block(hessian_factor=h, jacobian_factor=e, shift=shifts),
    )
    return QuadraticUpper(
        settings=settings, problem=problem, x0=cast(np.ones(d_x)), y0=cast(np.zeros((m, d_y))),
        A=A, B=B, W=W, hessian_factors=h, jacobian_factors=e, shifts=shifts, targets=targets,
        ridge=ridge, nonconvexity=nonconvexity,
    )  # fmt: skip
