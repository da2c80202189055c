"""Mean blocks: coupled compositional problems with linear inner maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax import Problem, mean
from bilevax.testing.quadratic_upper import QuadraticUpper, inner, upper
from bilevax.testing.settings import Draws, Settings, number


def mean_blocks(
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
    r"""Mean lower levels under a quadratic upper one (FCCO).

    .. math::
        y_i(x) &= \text{mean of } e B_i x + b \\
        f_i &= \text{mean of } \tfrac12 (y - c)^\top W_i (y - c) + \tfrac{\rho}{2} \|x\|^2
            + \kappa \sum_k \sin^2 x_k

    over rows (e, b) and c. The constants are those of the same problem written with
    g_i = ½‖y − c_i(x)‖²: λ = L_g = 1. See `LinearBlocks` and `QuadraticUpper` for which are exact.

    Args:
      conditioning: the eigenvalues of each W_i are evenly spread over [1, conditioning].
      m, d_x, d_y, rows, noise, coupling, nonconvexity, ridge, seed, dtype: as in `quadratic_blocks`.

    Returns:
      The family; its y0 is None.

    Raises:
      ValueError, TypeError: for arguments that cannot be.

    Example:
      >>> import bilevax.testing
      >>> family = bilevax.testing.mean_blocks(m=3, d_x=2, d_y=2, rows=4)
      >>> family.lower_solution(family.x0).shape
      (3, 2)
    """
    settings = Settings(
        m=m, d_x=d_x, d_y=d_y, rows=rows, noise=noise, conditioning=conditioning, coupling=coupling,
        seed=seed, dtype=dtype,
    )  # fmt: skip
    draw, cast = Draws(settings), settings.cast
    W = draw.positive_definite(d_y)
    B = coupling * draw.normal(d_y, d_x) / d_x**0.5
    shifts = draw.normal(1, d_y) + draw.deviations(d_y)
    targets = draw.normal(1, d_y) + draw.deviations(d_y)
    e = draw.factors()
    constants = {
        "ridge": np.full(m, number("ridge", ridge, 0)),
        "nonconvexity": np.full(m, number("nonconvexity", nonconvexity, 0)),
    }
    problem = Problem(
        upper,
        mean(inner),
        {name: cast(array) for name, array in {"B": B, "W": W, **constants}.items()},
        settings.per_block(target=targets),
        settings.per_block(jacobian_factor=e, shift=shifts),
    )
    return QuadraticUpper(
        settings=settings, problem=problem, x0=cast(np.ones(d_x)), y0=None,
        A=np.tile(np.eye(d_y), (m, 1, 1)), B=B, W=W, hessian_factors=np.ones_like(e), jacobian_factors=e,
        shifts=shifts, targets=targets, ridge=ridge, nonconvexity=nonconvexity,
    )  # fmt: skip
