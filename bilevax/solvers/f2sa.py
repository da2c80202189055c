"""F2SA and F3SA: first-order penalty methods, without second derivatives."""

# No `from __future__ import annotations` here: equinox reads abstract fields from real annotations.

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import equinox as eqx
from jax import Array

from bilevax.solvers.toolkit import (
    BlockView,
    Coefficient,
    Gradients,
    Look,
    LowerStep,
    Oracles,
    Rates,
    Recipe,
    TrackedSolve,
    UpperStep,
    Visit,
    checks,
    combine,
    evaluate,
)


class PenaltyRates(Rates):
    """The coefficients of a level, with the penalty ρ."""

    penalty: Any


class Pair(TrackedSolve):
    """y descends g; the second variable w, stored in place of v, descends f/ρ + g."""

    multiplier = False
    indefinite = False
    sets = "any"
    twin = True
    oracles = Oracles(gradients=4)  # of g by x and by y, at y and at w

    def first_v(self, y: Any) -> Any:
        return y

    def lower_gradient(self, seen: Gradients, visit: Visit) -> Any:
        return _over(seen.y[visit.name], -visit.rates.penalty)

    def solve_gradient(self, seen: Gradients, visit: Visit) -> Any:
        return _over(seen.v[visit.name], visit.rates.penalty)

    def multipliers(self, visit: Visit, look: Look) -> Any:
        """ρ (y − w), which tends to v."""
        penalty = visit.rates.penalty
        return combine((penalty, look.points[0].y[visit.name]), (-penalty, look.v[0][visit.name]))


class Penalty(Recipe):
    """What F2SA and F3SA share: the penalty in place of ℓ, and a pair of variables per block."""

    penalty: eqx.AbstractVar[Coefficient]
    curvature = Pair()
    means = None

    def __check_init__(self) -> None:
        checks.coefficient("penalty", self.penalty, by_level=True)

    def rates(self, problem: Any, state: Any, name: str, touched: int, stage: Array | int) -> PenaltyRates:
        """The coefficients of a level, with the penalty."""
        known = vars(super().rates(problem, state, name, touched, stage))
        return PenaltyRates(**known, penalty=evaluate(self.penalty, state.step, name))

    def scalar(self, view: BlockView, y: Any, v: Any, rates: Any) -> tuple[Array, Array]:
        """f(w) + Σ ρ (g(w) − g(y)), and f(w); v holds w, and nothing for variables that optimise f."""
        w = {n: y[n] if one is None else one for n, one in v.items()}
        f = view.f(w)
        pairs = [n for n, one in v.items() if one is not None]
        return sum((rates[n].penalty * (view.g(n, w[n], w) - view.g(n, y[n], w)) for n in pairs), f), f


class F2SA(Penalty):
    r"""Fully first-order stochastic approximation, on sampled blocks.

    The bilevel problem is replaced by a penalty, :math:`\min_{x, w} f_i(x, w) + \rho (g_i(x, w) - \min_y
    g_i(x, y))`, whose gradient in x differs from ∇F by O(1/ρ):

    .. math::
        y_i &\leftarrow y_i - \tau \nabla_y g_i(x, y_i), \qquad
        w_i \leftarrow w_i - \bar\tau (\tfrac1\rho \nabla_y f_i(x, w_i) + \nabla_y g_i(x, w_i)) \\
        x &\leftarrow x - \eta \tfrac1I \sum_i \nabla_x f_i(x, w_i)
            + \rho (\nabla_x g_i(x, w_i) - \nabla_x g_i(x, y_i))

    all at the same point. It needs gradients only. y and w stay in the set of their level, if it has one. A
    level that reads others sees their w, for its own y, too. Mean levels are rejected.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation; left
        out, `automatic_step()`.
      lower_step: τ, or an optax transformation; left out, 2/(3 L), with a scale for every entry of y.
      inverse_step: τ̄; left out, τ, or the same transformation.
      penalty: ρ, a number or a growing schedule. The bias of ∇F falls with 1/ρ; its noise grows with ρ.

    All but `upper_step` may be dicts by lower level. The objective of the history is f at w.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.F2SA(upper_step=0.01, penalty=10.0)

    Reference:
      Kwon et al., *A Fully First-Order Method for Stochastic Bilevel Optimization*, ICML 2023.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: LowerStep | None = None
    inverse_step: Coefficient | None = None
    penalty: Coefficient = 10.0

    alpha: ClassVar[float] = 1.0
    beta: ClassVar[float] = 1.0
    corrected = False
    lazy = False


class F3SA(Penalty):
    r"""F2SA with variance-reduced estimators, on all blocks: its corrected, lazy form.

    As `F2SA`, but the gradients that y and w descend along are tracked by MSVR and that of x by STORM, as in
    `BSVRBv2`, and all blocks move.

    Args:
      upper_step: η: a float, a schedule of the step number, or an optax transformation of z;
        left out, `automatic_step()`.
      lower_step: τ; left out, 2/(3 L) · I/m, with a scale for every entry of y.
      inverse_step: τ̄; left out, τ.
      penalty: ρ, as in `F2SA`.
      alpha: α in (0, 1].
      alpha_bar: ᾱ; left out, α.
      beta: β in (0, 1].
      gamma: γ; left out, (m−I)/(I(1−α)) + (1−α).
      gamma_bar: γ̄; left out, γ if that is given, else the same formula with ᾱ.

    All but `upper_step` and `beta` may be dicts by lower level.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.F3SA(upper_step=0.01, penalty=10.0)

    Reference:
      Kwon et al., *A Fully First-Order Method for Stochastic Bilevel Optimization*, ICML 2023, for the
      penalty and the momentum; the blocks and their correction are BSVRB's.
    """

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: Coefficient | None = None
    inverse_step: Coefficient | None = None
    penalty: Coefficient = 10.0
    alpha: Coefficient = 0.1
    alpha_bar: Coefficient | None = None
    beta: float | Callable[[Array], Array] = 0.1
    gamma: Coefficient | None = None
    gamma_bar: Coefficient | None = None

    corrected = True
    lazy = True


def _over(tree: Any, number: Any) -> Any:
    return combine((1 / number, tree))
