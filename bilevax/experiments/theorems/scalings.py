r"""Each method's parameters from ε, by the scaling of its theorem, up to one constant c.

With w = 1(I<m)/I + 1/B,

- BSVRB v1 and v2 (Theorem 1), and MSVR-v2: α = c²Bε², ᾱ = β = c²ε²/w, and τ, τ̄, η ∝ (I/m)√β ∝ ε;
- RSVRB: β = c²ε²I/m, and τ, η ∝ √(βI/m) ∝ ε (no speed-up by B);
- K-SONG and MMBO-v2: β = c²ε²/w, lower and inverse steps and ᾱ of H ∝ c²Bε², η ∝ min{β, τI/m} ∝ ε², and
  plain SGD steps of y and v (α = 1), as in the original methods;
- SONG: the tracked mean has α ∝ c²Bε²; the rest is as for K-SONG.

c is tuned per method. The other factors are the same for all methods of a kind (`UPPER`, `LOWER`), in units
of 1/L_F and 1/L_g, and were set once by hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import bilevax as bx
from bilevax.solvers.toolkit import msvr_gamma
from bilevax.theory import Constants

# η L_F and τ L_g, divided by the rate: for variance-reduced methods, and for moving averages.
UPPER, LOWER = 6.0, 3.0
AVERAGED_UPPER, AVERAGED_LOWER = 0.8, 3.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """m, I and B.

    Attributes:
      blocks: m.
      blocks_per_step: I.
      batch_size: B.
    """

    blocks: int
    blocks_per_step: int
    batch_size: int

    @property
    def ratio(self) -> float:
        """I/m."""
        return self.blocks_per_step / self.blocks

    @property
    def spread(self) -> float:
        """w = 1(I<m)/I + 1/B."""
        return (self.ratio < 1) / self.blocks_per_step + 1 / self.batch_size


MakeSolver = Callable[[float, float, Sizes, Constants], Any]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method, its scaling, and the exponent of its theorem.

    Attributes:
      name: as in the tables.
      exponent: of T in ε.
      make: makes the solver from c, ε, the sizes and the problem's constants.
      mean: whether it runs on mean blocks; otherwise on those of argmin levels.
      speeds_up: whether its theorem promises fewer steps for larger I and B.
    """

    name: str
    exponent: int
    make: MakeSolver
    mean: bool = False
    speeds_up: bool = True


def bsvrb_v1(
    c: float, epsilon: float, sizes: Sizes, constants: Constants, upper: float = UPPER
) -> bx.BSVRBv1:
    """BSVRB v1 by Theorem 1."""
    coefficients = variance_reduced(c, epsilon, sizes, constants, upper)
    del coefficients["inverse_step"]
    return bx.BSVRBv1(**coefficients, floor=constants.strong_convexity)


def bsvrb_v2(
    c: float, epsilon: float, sizes: Sizes, constants: Constants, upper: float = UPPER
) -> bx.BSVRBv2:
    """BSVRB v2 by Theorem 1."""
    return bx.BSVRBv2(**variance_reduced(c, epsilon, sizes, constants, upper))


def msvr(c: float, epsilon: float, sizes: Sizes, constants: Constants) -> bx.MSVR:
    """MSVR-v2, on mean blocks."""
    coefficients = variance_reduced(c, epsilon, sizes, constants)
    return bx.MSVR(**{name: coefficients[name] for name in ("alpha", "beta", "gamma", "upper_step")})


def rsvrb(c: float, epsilon: float, sizes: Sizes, constants: Constants) -> bx.RSVRB:
    """RSVRB, whose noise is m/I times larger for any B."""
    beta = min(0.5, c**2 * epsilon**2 * sizes.ratio)
    lower, upper = _steps(math.sqrt(beta * sizes.ratio), sizes, constants)
    return bx.RSVRB(upper_step=upper, lower_step=lower, beta=beta, floor=constants.strong_convexity)


def ksong(c: float, epsilon: float, sizes: Sizes, constants: Constants) -> bx.KSONG:
    """K-SONG, with SGD steps of y."""
    coefficients = averaged(c, epsilon, sizes, constants)
    coefficients["alpha_bar"] = min(1.0, c**2 * sizes.batch_size * epsilon**2)
    return bx.KSONG(**coefficients, alpha=1.0, floor=constants.strong_convexity)


def mmbo(c: float, epsilon: float, sizes: Sizes, constants: Constants) -> bx.MMBO:
    """MMBO-v2, with SGD steps of y and v."""
    coefficients = averaged(c, epsilon, sizes, constants)
    return bx.MMBO(**coefficients, alpha=1.0, inverse_step=coefficients["lower_step"])


def song(c: float, epsilon: float, sizes: Sizes, constants: Constants) -> bx.SONG:
    """SONG, on mean blocks."""
    coefficients = averaged(c, epsilon, sizes, constants)
    return bx.SONG(
        upper_step=coefficients["upper_step"], alpha=coefficients["lower_step"], beta=coefficients["beta"]
    )


def variance_reduced(
    c: float,
    epsilon: float,
    sizes: Sizes,
    constants: Constants,
    upper: float = UPPER,
    lower: float = LOWER,
) -> dict[str, Any]:
    """α, ᾱ, β, γ, γ̄, τ, τ̄ and η of Theorem 1, with c² in place of its 1/(12 C₁₀)."""
    alpha = min(0.5, c**2 * sizes.batch_size * epsilon**2)
    beta = min(0.5, c**2 * epsilon**2 / sizes.spread)
    rate = sizes.ratio * math.sqrt(beta)
    lower_step, upper_step = _steps(rate, sizes, constants, upper, lower)
    steps = {"lower_step": lower_step, "inverse_step": lower_step, "upper_step": upper_step}
    # Given, because the library's own default is at most 10.
    gammas = {
        "gamma": float(msvr_gamma(alpha, sizes.ratio)),
        "gamma_bar": float(msvr_gamma(beta, sizes.ratio)),
    }
    return {"alpha": alpha, "alpha_bar": beta, "beta": beta, **gammas, **steps}


def averaged(c: float, epsilon: float, sizes: Sizes, constants: Constants) -> dict[str, float]:
    """β, τ and η of moving averages."""
    beta = min(1.0, c**2 * epsilon**2 / sizes.spread)
    rows = min(1.0, c**2 * sizes.batch_size * epsilon**2)
    lower = min(1.0, AVERAGED_LOWER * rows, 2 / 3) / constants.lower_smoothness
    upper = AVERAGED_UPPER * min(beta, sizes.ratio * rows) / constants.upper_smoothness
    return {"beta": beta, "lower_step": lower, "upper_step": upper}


def _steps(
    rate: float, sizes: Sizes, constants: Constants, upper: float = UPPER, lower: float = LOWER
) -> tuple[float, float]:
    """τ ≤ (2/(3L_g)) I/m, and η ≤ 1/(2L_F)."""
    lower_step = min(lower * rate, 2 / 3 * sizes.ratio) / constants.lower_smoothness
    return lower_step, min(upper * rate, 0.5) / constants.upper_smoothness


METHODS = {
    method.name: method
    for method in (
        Method("BSVRB v1", -3, bsvrb_v1),
        Method("BSVRB v2", -3, bsvrb_v2),
        Method("RSVRB", -3, rsvrb, speeds_up=False),
        Method("MSVR-v2", -3, msvr, mean=True),
        Method("K-SONG", -4, ksong),
        Method("MMBO-v2", -4, mmbo),
        Method("SONG", -4, song, mean=True),
    )
}
