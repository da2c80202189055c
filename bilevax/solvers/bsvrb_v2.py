"""BSVRB v2: for lower problems of high dimension, with Hessian-vector products only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

import equinox as eqx
from jax import Array

from bilevax._problem.levels import Level
from bilevax._step.coefficients import Coefficient
from bilevax._step.trackers import TrackedSolve, Tracker
from bilevax._util import checks
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class BSVRBv2(Recipe):
    r"""Blockwise stochastic variance-reduced bilevel method, version 2.

    As version 1, but :math:`v_i \approx [\nabla_{yy}^2 g_i]^{-1} \nabla_y f_i` is a variable of its own: the
    minimiser of :math:`\phi_i(v) = \tfrac12 v^\top \nabla_{yy}^2 g_i v - v^\top \nabla_y f_i`. For sampled
    blocks

    .. math::
        s_i &\leftarrow (1-\alpha) s_i + \alpha \nabla_y g^t + \gamma (\nabla_y g^t - \nabla_y g^{t-1}) \\
        u_i &\leftarrow (1-\bar\alpha) u_i + \bar\alpha \nabla_v \phi^t
            + \bar\gamma (\nabla_v \phi^t - \nabla_v \phi^{t-1}) \\
        z &\leftarrow (1-\beta)(z - \tilde G) + G, \qquad
        G = \tfrac1I \sum_i \nabla_x f_i - \nabla_{xy}^2 g_i v_i

    then all blocks move lazily, :math:`y_i \leftarrow y_i - \tau s_i` and
    :math:`v_i \leftarrow \Pi_V[v_i - \bar\tau u_i]`, and :math:`x \leftarrow x - \eta z`. The projection of a
    block that catches up is applied once, after the sum of its steps.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ; left out, 2/(3 L) · I/m, with a scale for every entry of y.
      inverse_step: τ̄; left out, τ.
      alpha: α in (0, 1].
      alpha_bar: ᾱ; left out, α.
      beta: β in (0, 1].
      gamma: γ; left out, (m−I)/(I(1−α)) + (1−α), at most 10.
      gamma_bar: γ̄; left out, γ if that is given, else the same formula with ᾱ.
      radius: V ≥ ‖v_i‖, e.g. C_fy/λ; left out, v is not projected.
      refreshed: False moves y and v along s_t and u_t, as lines 8 and 9 of Algorithm 2 are printed, and not
        along the s_{t+1} and u_{t+1} that this step has refreshed, as the paper's delayed update and its
        code do.

    All but `upper_step`, `beta` and `refreshed` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.BSVRBv2(upper_step=0.1, alpha=0.5)

    Reference:
      Hu et al., *Blockwise Stochastic Variance-Reduced Methods with Parallel Speedup for Multi-Block
      Bilevel Optimization*, ICML 2023, Algorithm 2.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: Coefficient | None = None
    inverse_step: Coefficient | None = None
    alpha: Coefficient = 0.1
    alpha_bar: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.1
    gamma: Coefficient | None = None
    gamma_bar: Coefficient | None = None
    radius: Coefficient | None = None
    refreshed: bool = eqx.field(static=True, default=True)

    corrected = True
    lazy = True
    curvature = TrackedSolve()

    def __check_init__(self) -> None:
        checks.flag("refreshed", self.refreshed)

    def tracker(self, level: Level) -> Tracker | None:
        """That of the recipe, which a run with `refreshed=False` follows a step behind."""
        found = super().tracker(level)
        return found if self.refreshed or found is None else found.a_step_behind
