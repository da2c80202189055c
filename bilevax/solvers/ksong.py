"""K-SONG: moving averages with a tracked Hessian per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY

from jax import Array

from bilevax._step.coefficients import Coefficient, LowerStep
from bilevax._step.trackers import TrackedHessian
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep


class KSONG(Recipe):
    r"""K-SONG, for any lower problem of low dimension.

    Moving averages in place of variance reduction; only the sampled blocks move:

    .. math::
        s_i &\leftarrow (1-\alpha) s_i + \alpha \nabla_y g_i, \qquad
        H_i \leftarrow S_\lambda[(1-\bar\alpha) H_i + \bar\alpha \nabla_{yy}^2 g_i], \qquad
        y_i \leftarrow y_i - \tau s_i \\
        z &\leftarrow (1-\beta) z + \beta G, \qquad
        G = \tfrac1I \sum_i \nabla_x f_i - \nabla_{xy}^2 g_i\, H_i^{-1} \nabla_y f_i

    with the H and y from before the refresh. With ``alpha=1`` the lower step is plain SGD, as in the
    original method for thresholds.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ, or an optax transformation; left out, 2/(3 L), with a scale for every entry of y.
      alpha: α in (0, 1].
      alpha_bar: ᾱ; left out, α.
      beta: β in (0, 1].
      floor: λ, the least eigenvalue of H; left out, half the least curvature that the first batches show.

    All but `upper_step` and `beta` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.KSONG(upper_step=0.1)

    Reference:
      Qiu et al., *Large-scale Stochastic Optimization of NDCG Surrogates for Deep Learning with
      Provable Convergence*, ICML 2022, Algorithm 2.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    alpha: Coefficient = 0.9
    alpha_bar: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.1
    floor: Coefficient | None = None

    corrected = False
    lazy = False
    curvature = TrackedHessian()
