"""BSVRB v1: for lower problems of low dimension, with a tracked Hessian per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

import equinox as eqx
from jax import Array

from bilevax._problem.levels import Level
from bilevax._step.coefficients import Coefficient
from bilevax._step.trackers import TrackedHessian, Tracker
from bilevax._util import checks
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class BSVRBv1(Recipe):
    r"""Blockwise stochastic variance-reduced bilevel method, version 1.

    For sampled blocks, with :math:`g^t = g_i(x_t, y_{i,t}; \tilde B_i^t)` and
    :math:`g^{t-1} = g_i(x_{t-1}, y_{i,t-1}; \tilde B_i^t)`,

    .. math::
        s_i &\leftarrow (1-\alpha) s_i + \alpha \nabla_y g^t + \gamma (\nabla_y g^t - \nabla_y g^{t-1}) \\
        H_i &\leftarrow S_\lambda[(1-\bar\alpha) H_i + \bar\alpha \nabla_{yy}^2 g^t
            + \bar\gamma (\nabla_{yy}^2 g^t - \nabla_{yy}^2 g^{t-1})] \\
        z &\leftarrow (1-\beta)(z - \tilde G) + G, \qquad
        G = \tfrac1I \sum_i \nabla_x f_i - \nabla_{xy}^2 g_i\, H_i^{-1} \nabla_y f_i

    with the H from before the refresh; then all blocks move, :math:`y_i \leftarrow y_i - \tau s_i`
    (lazily: a block catches up when it is next sampled), and :math:`x \leftarrow x - \eta z`.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ; left out, 2/(3 L) · I/m, with a scale for every entry of y.
      alpha: α in (0, 1].
      alpha_bar: ᾱ; left out, α.
      beta: β in (0, 1].
      gamma: γ; left out, (m−I)/(I(1−α)) + (1−α), at most 10.
      gamma_bar: γ̄; left out, γ if that is given, else the same formula with ᾱ.
      floor: λ, the least eigenvalue of H; left out, half the least curvature that the first batches show.
      refreshed: False moves y along s_t, as line 8 of Algorithm 1 is printed, and not along the s_{t+1} that
        this step has refreshed, as the paper's delayed update and its code do.

    All but `upper_step`, `beta` and `refreshed` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.BSVRBv1(upper_step=0.1, alpha=0.5)

    Reference:
      Hu et al., *Blockwise Stochastic Variance-Reduced Methods with Parallel Speedup for Multi-Block
      Bilevel Optimization*, ICML 2023, Algorithm 1.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: Coefficient | None = None
    alpha: Coefficient = 0.1
    alpha_bar: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.1
    gamma: Coefficient | None = None
    gamma_bar: Coefficient | None = None
    floor: Coefficient | None = None
    refreshed: bool = eqx.field(static=True, default=True)

    corrected = True
    lazy = True
    curvature = TrackedHessian()

    def __check_init__(self) -> None:
        checks.flag("refreshed", self.refreshed)

    def tracker(self, level: Level) -> Tracker | None:
        """That of the recipe, which a run with `refreshed=False` follows a step behind."""
        found = super().tracker(level)
        return found if self.refreshed or found is None else found.a_step_behind
