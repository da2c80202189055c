"""MMBO-v2: moving averages with Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

from jax import Array

from bilevax._step.coefficients import Coefficient, LowerStep
from bilevax._step.trackers import TrackedSolve
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class MMBO(Recipe):
    r"""MMBO-v2: the multi-block bilevel method with moving averages and Hessian-vector products.

    Only the sampled blocks move:

    .. math::
        s_i &\leftarrow (1-\alpha) s_i + \alpha \nabla_y g_i, \qquad y_i \leftarrow y_i - \tau s_i \\
        u_i &\leftarrow (1-\bar\alpha) u_i + \bar\alpha (\nabla_{yy}^2 g_i v_i - \nabla_y f_i), \qquad
        v_i \leftarrow \Pi_V[v_i - \bar\tau u_i] \\
        z &\leftarrow (1-\beta) z + \beta G, \qquad G = \tfrac1I \sum_i \nabla_x f_i - \nabla_{xy}^2 g_i v_i

    with the y and v from before the refresh.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ, or an optax transformation; left out, 2/(3 L), with a scale for every entry of y.
      inverse_step: τ̄; left out, τ, or 2/(3 L) if y moves by a transformation.
      alpha: α in (0, 1].
      alpha_bar: ᾱ; left out, α.
      beta: β in (0, 1].
      radius: V ≥ ‖v_i‖; left out, v is not projected.

    All but `upper_step` and `beta` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.MMBO(upper_step=0.1)

    Reference:
      Hu et al., *Multi-block Min-max Bilevel Optimization with Applications in Multi-task Deep AUC
      Maximization*, NeurIPS 2022.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    inverse_step: Coefficient | None = None
    alpha: Coefficient = 0.9
    alpha_bar: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.1
    radius: Coefficient | None = None

    corrected = False
    lazy = False
    curvature = TrackedSolve()
