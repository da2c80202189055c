"""MSVR-v2: variance reduction for mean lower levels (coupled compositional problems)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

from jax import Array

from bilevax._step.coefficients import Coefficient, LowerStep
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class MSVR(Recipe):
    r"""Multi-block single-probe variance-reduced method, MSVR-v2.

    For mean lower levels :math:`y_i(x) = \mathbb{E}[c_i(x; \zeta)]`. For sampled blocks

    .. math::
        y_i &\leftarrow (1-\alpha) y_i + \alpha c_i(x_t) + \gamma (c_i(x_t) - c_i(x_{t-1})) \\
        z &\leftarrow (1-\beta)(z - \tilde G) + G, \qquad
        G = \tfrac1I \sum_i \nabla_x f_i(x_t, y_i) + \nabla c_i(x_t)^\top \nabla_y f_i(x_t, y_i)

    with the y from before the refresh; then :math:`x \leftarrow x - \eta z`.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: the step of `minimum` and `maximum` levels, along a tracked ∇_y f, or an optax
        transformation of it; left out, 2/(3 L), with scales for the entries of y; may be
        a dict by lower level.
      alpha: α in (0, 1].
      beta: β in (0, 1].
      gamma: γ; left out, (m−I)/(I(1−α)) + (1−α), at most 10.

    `alpha` and `gamma` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.MSVR(upper_step=0.1, alpha=0.5)

    Reference:
      Jiang et al., *Multi-block-Single-probe Variance Reduced Estimator for Coupled Compositional
      Optimization*, NeurIPS 2022.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    alpha: Coefficient = 0.1
    beta: float | Callable[[Array], Array] = 0.1
    gamma: Coefficient | None = None

    corrected = True
    lazy = False
    curvature = None
