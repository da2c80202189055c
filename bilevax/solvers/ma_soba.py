"""MA-SOBA: SOBA with a moving average of the hyper-gradient alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import ClassVar

from jax import Array

from bilevax.solvers.toolkit import Coefficient, LowerStep, Recipe, TrackedSolve, UpperStep


class MASOBA(Recipe):
    r"""MA-SOBA on sampled blocks: plain steps of y and v, momentum for x.

    .. math::
        y_i \leftarrow y_i - \tau \nabla_y g_i, \qquad
        v_i \leftarrow \Pi_V[v_i - \bar\tau (\nabla_{yy}^2 g_i v_i - \nabla_y f_i)], \qquad
        z \leftarrow (1-\beta) z + \beta \tfrac1I \sum_i (\nabla_x f_i - \nabla_{xy}^2 g_i v_i)

    all at the same point, then :math:`x \leftarrow x - \eta z`. Mean levels are replaced by their newest
    sample. (The paper moves x along the z from before this average: one step later.)

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ, or an optax transformation; left out, 2/(3 L), with a scale for every entry of y.
      inverse_step: τ̄; left out, τ, or 2/(3 L) if y moves by a transformation.
      beta: β in (0, 1].
      radius: V ≥ ‖v_i‖; left out, v is not projected.

    All but `upper_step` and `beta` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.MASOBA(upper_step=0.01)

    Reference:
      Chen et al., *Optimal Algorithms for Stochastic Bilevel Optimization under Relaxed Smoothness
      Conditions*, JMLR 2024.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    inverse_step: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.1
    radius: Coefficient | None = None

    alpha: ClassVar[float] = 1.0
    corrected = False
    lazy = False
    curvature = TrackedSolve()
