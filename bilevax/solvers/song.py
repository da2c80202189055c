"""SONG / SOX: moving averages for mean lower levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

from jax import Array

from bilevax._step.coefficients import Coefficient, LowerStep
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class SONG(Recipe):
    r"""SONG (SOX): moving averages for mean lower levels.

    For sampled blocks

    .. math::
        y_i &\leftarrow (1-\alpha) y_i + \alpha c_i(x_t) \\
        z &\leftarrow (1-\beta) z + \beta G, \qquad
        G = \tfrac1I \sum_i \nabla_x f_i(x_t, y_i) + \nabla c_i(x_t)^\top \nabla_y f_i(x_t, y_i)

    with the y from before the refresh; then :math:`x \leftarrow x - \eta z`.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: the step of `minimum` and `maximum` levels, along a tracked ∇_y f, or an optax
        transformation of it; left out, 2/(3 L), with scales for the entries of y; may be
        a dict by lower level.
      alpha: α in (0, 1]; may be a dict by lower level.
      beta: β in (0, 1].

    Example:
      >>> import bilevax as bx
      >>> solver = bx.SONG(upper_step=0.1)

    Reference:
      Qiu et al., *Large-scale Stochastic Optimization of NDCG Surrogates for Deep Learning with
      Provable Convergence*, ICML 2022, Algorithm 1; Wang and Yang, *Finite-Sum Coupled Compositional
      Stochastic Optimization*, ICML 2022.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    alpha: Coefficient = 0.9
    beta: float | Callable[[Array], Array] = 0.1

    corrected = False
    lazy = False
    curvature = None
