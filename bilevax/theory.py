"""Parameters of Theorems 1 and 2 of the paper, from the constants of its assumptions.

The proofs bound worst cases and their constants multiply: these parameters suffice, and are very
small. They show how rates and steps scale with ε, m, I and B; they are not tuned values. Where a
statement and its proof differ, the proof is followed, and a comment names the equation.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import Any, SupportsFloat

from bilevax._util.checks import whole_number

__all__ = ["Constants", "Parameters", "complexity", "theorem_1", "theorem_2"]

_FROM_THE_OTHERS: Any = None
# τL_g. C_8 ∝ 1/(2τ) − 3L_g/4 vanishes at the allowed τ = 2/(3L_g); half of that maximises C_8 τ².
_TAU = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the paper's Assumptions 1 to 3, and of the start.

    Lipschitz constants are those of one row's derivatives, in (x, y) together. Where left out,

        L_y = C_gxy/λ,   L_F = (1 + L_y) (L_fx + L_fy C_gxy/λ + C_fy (L_gxy/λ + L_gyy C_gxy/λ²)),

    and C_gxy, C_gyy and C̃_gyy are L_gy. Raises `ValueError` for constants that cannot be.

    Reference:
      Hu et al., ICML 2023; Ghadimi and Wang, arXiv:1802.02246, Lemma 2.2 (L_y and L_F).
    """

    strong_convexity: float  #: λ, of g_i in y
    lower_smoothness: float  #: L_g, of g_i in y
    upper_x_lipschitz: float  #: L_fx, of ∇_x f_i
    upper_y_lipschitz: float  #: L_fy, of ∇_y f_i
    lower_lipschitz: float  #: L_gy, of ∇_y g_i
    jacobian_lipschitz: float  #: L_gxy, of ∇²_xy g_i
    hessian_lipschitz: float  #: L_gyy, of ∇²_yy g_i
    upper_x_bound: float  #: C_fx ≥ ‖∇_x f_i‖
    upper_y_bound: float  #: C_fy ≥ ‖∇_y f_i‖
    noise: float  #: σ, the standard deviation of each derivative of one row
    gap: float  #: Δ = F(x_1) − min F
    jacobian_bound: float = _FROM_THE_OTHERS  #: C_gxy ≥ ‖∇²_xy g_i‖
    mean_hessian_bound: float = _FROM_THE_OTHERS  #: C_gyy ≥ ‖∇²_yy g_i‖
    hessian_bound: float = _FROM_THE_OTHERS  #: C̃_gyy ≥ ‖∇²_yy g_i‖ of one row (version 2)
    solution_lipschitz: float = _FROM_THE_OTHERS  #: L_y, of y_i(x)
    upper_smoothness: float = _FROM_THE_OTHERS  #: L_F, of F
    pl: float | None = None  #: μ of the Polyak-Łojasiewicz condition μ (F − min F) ≤ ‖∇F‖²

    def __post_init__(self) -> None:
        def settle(name: str, default: float | None = None) -> None:
            value = default if getattr(self, name) is None else getattr(self, name)
            strict = name in ("strong_convexity", "gap", "pl")
            object.__setattr__(self, name, _number(name, value, strict))

        for field in fields(self)[:14]:  # up to the bounds on the Jacobian and the Hessian
            settle(field.name, self.lower_lipschitz if field.default is None else None)
        low, jacobian = self.strong_convexity, self.jacobian_bound
        for name in ("lower_smoothness", "lower_lipschitz", "mean_hessian_bound", "hessian_bound"):
            if (value := getattr(self, name)) < low:  # the Hessian's eigenvalues are at least λ
                raise ValueError(f"{name} must be at least strong_convexity={low}, got {value}")
        settle("solution_lipschitz", jacobian / low)
        inverse = self.jacobian_lipschitz + self.hessian_lipschitz * jacobian / low
        through_y = self.upper_y_lipschitz * jacobian + self.upper_y_bound * inverse
        partial = self.upper_x_lipschitz + through_y / low
        settle("upper_smoothness", (1 + self.solution_lipschitz) * partial)
        if self.pl is not None:
            settle("pl")


@dataclass(frozen=True)
class Parameters:
    """Parameters of a run of BSVRB, or of a stage of RE-BSVRB; v belongs to version 2 only."""

    alpha: float  #: α_t, of s
    alpha_bar: float  #: ᾱ_t, of H or u
    beta: float  #: β_t, of z
    gamma: float  #: γ_t = (m − I)/(I(1 − α_t)) + (1 − α_t)
    gamma_bar: float  #: γ̄_t, the same with ᾱ_t
    lower_step: float  #: τ τ_t, of y
    upper_step: float  #: η_t, of x
    steps: int  #: T, which suffices
    inverse_step: float | None = None  #: τ̄_t, of v
    radius: float | None = None  #: V ≥ ‖v‖

    def solver_arguments(self) -> dict[str, float]:
        """All but `steps`, by the names of the solvers' arguments: `bx.BSVRBv2(**...)`."""
        names = (field.name for field in fields(self) if field.name != "steps")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def theorem_1(
    constants: Constants,
    epsilon: float,
    blocks: int,
    blocks_per_step: int,
    batch_size: int,
    version: int = 2,
) -> Parameters:
    """Parameters with which BSVRB reaches mean ‖∇F(x_t)‖² ≤ ε², in expectation.

    With w = 1(I<m)/I + 1/B, and given good first estimators (one large batch),

        α = O(B ε²),   ᾱ = β = O(ε²/w),   τ_t, τ̄_t, η = O((I/m) ε/√w),   T = 6Δ/(η ε²).

    Args:
      constants: of the problem.
      epsilon, blocks, blocks_per_step, batch_size: ε, m, I, and B rows per sampled block.
      version: 1 tracks the Hessian, 2 the solution v.

    Returns:
      The parameters, constant over the run.

    Example:
      >>> constants = Constants(**{field.name: 1.0 for field in fields(Constants)})
      >>> theorem_1(constants, 0.1, blocks=10, blocks_per_step=5, batch_size=8).radius
      1.0

    Reference:
      Hu et al., ICML 2023, Theorem 1; in its appendix thm:6 (version 1) and thm:5 (version 2).
    """
    ratio, spread = _sampling(epsilon, blocks, blocks_per_step, batch_size)
    proof = _proof(constants, version)
    each = epsilon**2 / (proof.noise_shares * proof.noise)
    # thm:6 prints min{I, B} for 1/w in β: too large by up to 2, and too small at I = m < B.
    alpha, beta = min(0.5, batch_size * each), min(0.5, each / spread)
    # 2Δ/(ηT) ≤ ε²/3: √C_11 divides in T; version 1 prints it as a factor, without ε⁻³.
    return _parameters(constants, proof, ratio, alpha, beta, 6 * constants.gap / epsilon**2, 0.0)


def theorem_2(
    constants: Constants,
    epsilon: float,
    blocks: int,
    blocks_per_step: int,
    batch_size: int,
    version: int = 2,
) -> list[Parameters]:
    """Stages with which RE-BSVRB reaches F(x) − min F ≤ ε in expectation, under the PL condition.

    With w = 1(I<m)/I + 1/B, ε_k = ε_1/2^(k−1) and the proof's noise constant C, stage k has

        α = ᾱ = β = μ ε_k/(21 C w),   τ_t, τ̄_t, η from them as in Theorem 1,
        T = max{28/(μη), 7C m/(Iβ), 7C/τ_t, 7C/τ̄_t},   k = 1..K,   K = 1 + ⌈log₂(ε_1/ε)⌉.

    ε_1 is Δ, or less if β would exceed 1/2. The first T has 14Δ/(με_1η) for 28/(μη), and takes the
    first estimators to be as good as a stage before would leave them: δ ≤ 2με_1.

    Args:
      constants: of the problem, with `pl`.
      epsilon: ε, of F.
      blocks, blocks_per_step, batch_size, version: as in `theorem_1`.

    Returns:
      The parameters of each stage; a stage starts from the state in which the last one ended.

    Example:
      >>> constants = Constants(**{field.name: 1.0 for field in fields(Constants)})
      >>> len(theorem_2(constants, 0.25, blocks=10, blocks_per_step=5, batch_size=8))
      3

    Reference:
      Hu et al., ICML 2023, Theorem 2; in its appendix thm:6_RE (version 1), thm:5_RE (version 2).
    """
    ratio, spread = _sampling(epsilon, blocks, blocks_per_step, batch_size)
    proof, mu = _proof(constants, version), _number("constants.pl", constants.pl, strict=True)
    # (30) enlarges C_9': as τ̄² ≤ ᾱI²/m² ≤ 1, the four factors of δ_v and δ_u add up to at most 4.
    noise = proof.noise if version == 1 else 4 * proof.noise
    scale, gap, stages = 21 * noise * spread / mu, constants.gap, []
    beta = min(0.5, gap / scale)
    for _ in range(1 + max(0, math.ceil(math.log2(scale * beta / epsilon)))):
        # με_k/7 for the gap, 2με_k/7 for the inherited δ. The printed T_1 = 7Δ/(μη_1) lacks 1/ε_1.
        weights = 14 * gap / (mu * scale * beta), 7 * noise
        stages.append(_parameters(constants, proof, ratio, beta, beta, *weights))
        gap, beta = scale * beta, beta / 2
    return stages


def complexity(
    epsilon: float, blocks: int, blocks_per_step: int, batch_size: int, pl: float | None = None
) -> float:
    """How the paper's number of steps scales, by Theorem 1, or 2 if μ is given, but for constants.

        (m 1(I<m)/(I√I) + m/(I√B)) ε⁻³,   m/(I μ^{3/2} ε^{1/2}) (1(I<m)/I + 1/B)^{1/2} + m/(I μ ε)

    Args:
      epsilon, blocks, blocks_per_step, batch_size, pl: ε, m, I, B, and μ for Theorem 2.

    Returns:
      The expression, to be compared with itself at other arguments.

    Example:
      >>> complexity(0.5, blocks=4, blocks_per_step=4, batch_size=16)
      2.0
    """
    ratio, spread = _sampling(epsilon, blocks, blocks_per_step, batch_size)
    if pl is None:
        sampled = (blocks_per_step < blocks) / math.sqrt(blocks_per_step)
        return (sampled + 1 / math.sqrt(batch_size)) / (ratio * epsilon**3)
    mu = _number("pl", pl, strict=True)
    return (math.sqrt(spread * epsilon / mu) + 1) / (ratio * mu * epsilon)


@dataclass(frozen=True)
class _Proof:
    lower: float  # C_8, C_8': of τ_t²
    upper: float  # C_9, C_10': of η²
    noise: float  # C_10, C_9'
    noise_shares: int  # the parts of ε², of which each noise term takes one
    inverse: float = math.inf  # C_τ̄: of τ̄_t²
    inverse_most: float = math.inf  # the bounds on τ̄_t that do not depend on ᾱ
    radius: float | None = None


def _parameters(
    c: Constants, proof: _Proof, ratio: float, alpha: float, beta: float, gap: float, error: float
) -> Parameters:
    """The largest steps for ᾱ = β; T = max{gap/η, error · max(m/(Iβ), 1/τ_t, 1/τ̄_t)}."""
    # Statements have √(I/m) in τ_t, displays I²ᾱ/m² in τ_t²; their Iβ/m and β are not less: ᾱ = β.
    rate = ratio * math.sqrt(min(alpha, beta))  # roots throughout: the squares may underflow
    tau_bar = min(proof.inverse_most, ratio * math.sqrt(proof.inverse * beta))
    # lem:3 needs τ_t ≤ 1, which the paper leaves out; it holds by itself if L_g ≤ L_gy.
    tau_t = min(1.0, math.sqrt(proof.lower) * min(rate, tau_bar))
    # thm:6's C_11 = C_8/(12 C_10) has lost C_9; thm:5_RE's proof the root, its statement has m τ².
    eta = math.sqrt(proof.upper) * min(rate, tau_t, tau_bar)
    eta = min(eta, 0.5 / c.upper_smoothness) if c.upper_smoothness else eta
    # (28), (30) put m/I into C_10, C_9' and miss the stated complexity; only δ_s, δ_H, δ_u have it.
    steps = max(gap / eta, error * max(1 / (ratio * beta), 1 / tau_t, 1 / tau_bar))
    gamma, gamma_bar = ((1 / ratio - 1) / (1 - a) + (1 - a) for a in (alpha, beta))
    rates, lower_step = (alpha, beta, beta, gamma, gamma_bar), _TAU / c.lower_smoothness * tau_t
    inverse = (None, None) if proof.radius is None else (tau_bar, proof.radius)
    return Parameters(*rates, lower_step, eta, math.ceil(steps), *inverse)


def _proof(c: Constants, version: int) -> _Proof:
    if version not in (1, 2):
        raise ValueError(f"version must be 1 or 2, got {version!r}")
    squares = tuple(value**2 for value in astuple(c)[:15])  # of all but L_F and μ, as declared
    return _proof_1(c, squares) if version == 1 else _proof_2(c, squares)


def _proof_1(c: Constants, squares: tuple[float, ...]) -> _Proof:
    lam, _, l_fx, l_fy, l_gy, l_gxy, l_gyy, c_fx, c_fy, sigma, _, c_gxy, _, _, l_y = squares
    low, tau = c.strong_convexity, _TAU / c.lower_smoothness
    c3, c4 = 2 * l_fx + 6 * (l_gxy * c_fy + c_gxy * l_fy) / lam, 6 * c_gxy * c_fy / lam**2
    c5 = max(16 * (c_fx + c_gxy * c_fy / lam), 4 * sigma * (1 + 2 * (c_gxy + c_fy) / lam))
    # lem:301 drops the 6 of L_gxy² C_fy²/λ². (20_1) enlarges C_1 to 2C_1 + 1 and C_2 to 2C_2.
    c1, c2 = 2 * (c3 + 2 * c4 * l_gyy) + 1, 4 * c4
    c6, c7 = 64 * c1 / lam + 1, 2 * c2 + 1 + 12 * c4  # as Iᾱ²/(mβ) ≤ 1/2
    # Of ‖y_t − y_{t+1}‖², less two that 8C_6 L_gy² and 8C_7 L_gyy² exceed; (306) drops a C_4.
    terms = max(6 * c3, 54 * c4 * l_gyy, 8 * c6 * l_gy, 8 * c7 * l_gyy)
    # Six terms share 8C_1/(λm) (…): a factor 8/6, not 48; the I of (303) and C_8 is not in lem:3.
    c8 = 8 * c1 / low * (0.5 / tau - 0.75 * c.lower_smoothness) / (6 * terms)
    c9 = 1 / (14 * max(terms, 32 * l_y * c1 / (tau**2 * lam)))
    c10 = max(3, 4 * c1 / (tau * low), c6, c7, 6 * c5, 2 * sigma * max(6 * c4, c6, c7))
    return _Proof(lower=c8, upper=c9, noise=c10, noise_shares=12)


def _proof_2(c: Constants, squares: tuple[float, ...]) -> _Proof:
    lam, _, l_fx, l_fy, l_gy, l_gxy, l_gyy, c_fx, c_fy, sigma, _, c_gxy, c_gyy, c_h, l_y = squares
    low, tau, radius = c.strong_convexity, _TAU / c.lower_smoothness, math.sqrt(c_fy / lam)
    # What is printed as L_φv is its square; (25) has σ² for the variance 2(1 + V²)σ² found before.
    l_phi, sigma_u = max(4 * l_gyy * radius**2 + 2 * l_fy, 4 * c_h), 2 * (1 + radius**2) * sigma
    l_v = (math.sqrt(l_fy * c_gyy) + math.sqrt(c_fy * l_gyy)) ** 2 / lam**2
    c3, c4 = 2 * l_fx + 4 * l_gxy * c_fy / lam, 4 * c_gxy
    c5 = max(16 * (c_fx + c_gxy * radius**2), 4 * sigma * (1 + radius**2))
    c1, c2 = 2 * (c3 + 8 * c_gxy * l_v) + 1, 16 * c_gxy + 1  # enlarged in (20)
    # lem:204 (b) takes τ̄⟨·,·⟩ for λτ̄⟨·,·⟩: its 10λτ̄ must be 10τ̄/λ, so the 40 of (23) 40/λ².
    c6 = (4 + 160 * l_phi / lam) * max(1, l_phi)
    inverse = min(1, 1 / (32 * c6 * l_phi))  # at most 1, or m²τ̄²/(BI²) exceeds its share ᾱ/B
    # C_2' ≥ 80C_2' + 1 cannot be: meant are these coefficients of δ_s, δ_u, like C_6, C_7 of thm:6.
    c_s, c_u = 64 * c1 / lam + 1, 80 * c2 / lam + 1
    # 80C_2' L_gyy² has L_φv by (D2d), and is then below 8 c_u L_φv²; 512 lacks the C_1' of c_s.
    c7 = max(18 * c4, 24 * c_u * l_phi) * (80 * l_v * l_phi / lam + 1)
    terms = max(6 * c3, 20 * c2 * l_v / lam, 8 * c_s * l_gy, c7)
    c8 = 8 * c1 / low * (0.5 / tau - 0.75 * c.lower_smoothness) / (9 * terms)
    c10 = 1 / (20 * max(terms, 32 * c1 * l_y / (tau**2 * lam)))
    c9 = max(3, 6 * c5, 4 * c1 / (tau * low), 4 * c2 / low, 16 * c7 * l_phi / low)
    c9 = 11 * max(c9, c_s * max(1, 2 * sigma), max(c_u, 2 * c7 * c6) * max(1, 2 * sigma_u))
    most = min(low / (8 * l_phi), low / 2, 1 / low, 0.5 / math.sqrt(c6))
    return _Proof(c8, c10, c9, 18, inverse, most, radius)


def _sampling(epsilon: float, m: int, i: int, b: int) -> tuple[float, float]:
    """I/m, and w: with all blocks, only the noise of the rows is left."""
    _number("epsilon", epsilon, strict=True)
    whole_number("blocks", m, 1)
    whole_number("blocks_per_step", i, 1, m)
    whole_number("batch_size", b, 1)
    return i / m, (i < m) / i + 1 / b


def _number(name: str, value: Any, strict: bool = False) -> float:
    number = float(value) if isinstance(value, SupportsFloat) else math.nan
    if not 0 <= number < math.inf or (strict and number == 0):
        bound = "greater than" if strict else "of at least"
        raise ValueError(f"{name} must be a finite number {bound} 0, got {value!r}")
    return number
