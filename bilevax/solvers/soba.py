"""SOBA, block by block: plain stochastic steps of x, y and v together."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

from bilevax._step.coefficients import Coefficient, LowerStep
from bilevax._step.trackers import TrackedSolve
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class SOBA(Recipe):
    r"""SOBA on sampled blocks: nothing is averaged.

    .. math::
        y_i \leftarrow y_i - \tau \nabla_y g_i, \qquad
        v_i \leftarrow \Pi_V[v_i - \bar\tau (\nabla_{yy}^2 g_i v_i - \nabla_y f_i)], \qquad
        x \leftarrow x - \eta \tfrac1I \sum_i (\nabla_x f_i - \nabla_{xy}^2 g_i v_i)

    all at the same point. Mean levels are replaced by their newest sample.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation; left
        out, `automatic_step()`.
      lower_step: τ, or an optax transformation; left out, 2/(3 L), with a scale for every entry of y.
      inverse_step: τ̄; left out, τ, or 2/(3 L) if y moves by a transformation.
      radius: V ≥ ‖v_i‖; left out, v is not projected.

    All but `upper_step` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.SOBA(upper_step=0.01)

    Reference:
      Dagréou et al., *A framework for bilevel optimization that enables stochastic and global variance
      reduction algorithms*, NeurIPS 2022.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    inverse_step: Coefficient | None = None
    radius: Coefficient | None = None

    alpha: ClassVar[float] = 1.0
    beta: ClassVar[float] = 1.0
    corrected = False
    lazy = False
    curvature = TrackedSolve()
