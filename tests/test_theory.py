"""The parameters of Theorems 1 and 2 scale as stated and satisfy every inequality of the proofs.

The constants and coefficients below are written again from the proofs' displays, term by term, and
share no code with the module.
"""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest

from bilevax.theory import Constants, Parameters, complexity, theorem_1, theorem_2

REQUIRED = [field.name for field in fields(Constants)][:11]
ONES = Constants(**dict.fromkeys(REQUIRED, 1.0), pl=1.0)
SETTINGS = [(1, 1, 1), (7, 7, 3), (100, 10, 32), (100, 99, 1), (1000, 2, 500)]
SLACK = 1 + 1e-9


def random_constants(draw: random.Random) -> Constants:
    """Constants that differ by orders of magnitude: every term of a proof leads somewhere."""
    spread = draw.choice([1, 3, 6])

    def positive() -> float:
        return 10 ** draw.uniform(-spread, spread)

    values = {name: positive() if draw.random() < 0.7 else 0.0 for name in REQUIRED}
    values["strong_convexity"], values["gap"] = 10 ** draw.uniform(-6 + spread / 2, 2), positive()
    for name in ("lower_smoothness", "lower_lipschitz", "mean_hessian_bound", "hessian_bound"):
        values[name] = values["strong_convexity"] * 10 ** draw.choice([0, draw.uniform(0, 4)])
    values["jacobian_bound"] = values["lower_lipschitz"] * draw.choice([0, 1e-3, 1])
    return Constants(**values, pl=positive())


class Displays:
    """What the proofs call C_1, C_2, ..., from the lemmas, and their sums, term by term."""

    def __init__(self, c: Constants, p: Parameters, blocks: int, sampled: int, rows: int, version: int):
        self.c, self.p, self.m, self.i, self.b, self.version = c, p, blocks, sampled, rows, version
        self.w = (1 / sampled if sampled < blocks else 0) + 1 / rows
        self.tau = 1 / (3 * c.lower_smoothness)
        self.tau_t = p.lower_step / self.tau
        self.lam = lam = c.strong_convexity
        l_fx, l_fy = c.upper_x_lipschitz, c.upper_y_lipschitz
        c_fy, c_gxy, l_gxy = c.upper_y_bound, c.jacobian_bound, c.jacobian_lipschitz
        l_gyy, sigma = c.hessian_lipschitz, c.noise
        if version == 1:
            first = 2 * l_fx**2 + 6 * (l_gxy * c_fy / lam) ** 2 + 6 * (c_gxy * l_fy / lam) ** 2
            self.c1 = 2 * (first + 12 * (c_gxy * c_fy * l_gyy / lam**2) ** 2) + 1
            self.c2 = 2 * 12 * (c_gxy * c_fy / lam**2) ** 2
            self.c3, self.c4 = first, 6 * (c_gxy * c_fy / lam**2) ** 2
            blockwise = 8 * (2 * c.upper_x_bound**2 + 2 * (c_gxy * c_fy / lam) ** 2)
            self.c5 = max(blockwise, 4 * sigma**2 + 8 * (c_gxy**2 + c_fy**2) / lam**2 * sigma**2)
            self.of_s = 64 * self.c1 / lam**2 + 1
            estimator = 24 * self.c4 * sampled * p.alpha_bar**2 / (blocks * p.beta)
            self.of_h = 2 * self.c2 + 1 + estimator
        else:
            radius = c_fy / lam
            self.l_phi = math.sqrt(max(4 * (l_gyy * radius) ** 2 + 2 * l_fy**2, 4 * c.hessian_bound**2))
            self.l_v = (l_fy * c.mean_hessian_bound + c_fy * l_gyy) / lam**2
            self.c3, self.c4 = 2 * l_fx**2 + 4 * (l_gxy * c_fy / lam) ** 2, 4 * c_gxy**2
            self.c1 = 2 * (self.c3 + 8 * (c_gxy * self.l_v) ** 2) + 1
            self.c2 = 2 * 8 * c_gxy**2 + 1
            blockwise = 8 * (2 * c.upper_x_bound**2 + 2 * (c_gxy * radius) ** 2)
            self.c5 = max(blockwise, 4 * sigma**2 + 4 * (sigma * radius) ** 2)
            self.c6 = (4 + 160 * (self.l_phi / lam) ** 2) * max(1, self.l_phi**2)
            self.sigma_u = math.sqrt(2 * (1 + radius**2)) * sigma
            self.of_s, self.of_u = 64 * self.c1 / lam**2 + 1, 80 * self.c2 / lam**2 + 1

    @property
    def of_v(self) -> float:
        """The coefficient of Σ‖v_t − v_{t+1}‖² before (29) is put in."""
        tilde = 80 * self.c2 * self.l_phi**2 / (self.m * self.c.strong_convexity**2)
        tracked = 8 * self.of_u * self.m * self.l_phi**2 / (self.p.alpha_bar * self.i**2)
        return 6 * self.c4 / (self.m * self.p.beta) + tilde + tracked

    def movement(self) -> tuple[float, float]:
        """The coefficient of Σ‖x_t − x_{t+1}‖², and m times that of Σ‖y_t − y_{t+1}‖²: both ≤ 0."""
        c, p, m, i = self.c, self.p, self.m, self.i
        lam, l_gy = c.strong_convexity, c.lower_lipschitz
        common = 6 * self.c3 / p.beta + 64 * self.c1 * (l_gy / lam) ** 2
        common += 8 * m**2 * self.of_s * l_gy**2 / (p.alpha * i**2)
        if self.version == 1:
            l_gyy = c.hessian_lipschitz
            common += 54 * self.c4 * m * l_gyy**2 / (i * p.beta) + 2 * self.c2 * l_gyy**2
            common += 8 * m**2 * self.of_h * l_gyy**2 / (p.alpha_bar * i**2)
        else:
            assert p.inverse_step is not None
            common += 20 * self.c2 * (self.l_v / (lam * p.inverse_step)) ** 2
            common += 80 * self.c2 * (self.l_phi / lam) ** 2
            common += 8 * m**2 * self.of_u * self.l_phi**2 / (p.alpha_bar * i**2)
            inner = 80 * (self.l_phi * self.l_v / lam) ** 2 + 2 * self.c6 * p.inverse_step**2
            inner += 16 * self.c6 * (p.inverse_step * m * self.l_phi / i) ** 2 / p.alpha_bar
            common += m * self.of_v * inner
        x = common + 32 * self.c1 * (c.solution_lipschitz / (self.tau_t * self.tau * lam)) ** 2
        pull = 0.5 / self.tau - 0.75 * c.lower_smoothness
        return x * p.upper_step**2 - 0.5, common - 8 * self.c1 * pull / (self.tau_t**2 * lam)

    def noise(self) -> float:
        """Everything that is multiplied by T on the right."""
        c, p, rows = self.c, self.p, self.b
        total = 6 * p.beta * self.c5 * self.w + 2 * self.of_s * p.alpha * c.noise**2 / rows
        if self.version == 1:
            total += 2 * self.of_h * p.alpha_bar * c.noise**2 / rows
            between = 12 * self.c4 * self.i * p.alpha_bar**2 * c.noise**2
            return total + between / (self.m * p.beta * rows)
        assert p.inverse_step is not None
        total += 2 * self.of_u * p.alpha_bar * self.sigma_u**2 / rows
        last = 4 * self.c6 * p.inverse_step**2 * self.m * p.alpha_bar * self.sigma_u**2 / rows
        return total + self.of_v * last

    def inherited(self) -> float:
        """The largest factor of δ_z, δ_y/m, δ_s/m, and δ_H/m or δ_u/m and δ_v/m on the right."""
        p, m, i, lam = self.p, self.m, self.i, self.c.strong_convexity
        factors = [3 / p.beta, 4 * self.c1 / (self.tau_t * self.tau * lam)]
        factors.append(self.of_s * m / (i * p.alpha))
        if self.version == 1:
            return max(*factors, self.of_h * m / (i * p.alpha_bar))
        assert p.inverse_step is not None
        of_u = self.of_u * m / (i * p.alpha_bar)
        of_u += self.of_v * m * 2 * m * self.c6 * p.inverse_step**2 / (i * p.alpha_bar)
        of_v = 4 * self.c2 / (lam * p.inverse_step)
        of_v += self.of_v * m * 16 * self.l_phi**2 * p.inverse_step / lam
        return max(*factors, of_u, of_v)

    def check_steps(self) -> None:
        """The conditions of the lemmas, and the signs of the coefficients."""
        c, p, m, i = self.c, self.p, self.m, self.i
        assert all(0 < rate <= 0.5 for rate in (p.alpha, p.alpha_bar, p.beta))
        assert 0 < self.tau_t <= SLACK
        assert p.upper_step > 0
        assert p.upper_step * c.upper_smoothness <= 0.5 * SLACK
        # Lemma MSVR: these choices cancel its two inner products.
        for rate, gamma in ((p.alpha, p.gamma), (p.alpha_bar, p.gamma_bar)):
            assert m - i + i * (1 - rate) * (1 - rate - gamma) == pytest.approx(0, abs=1e-9 * m)
        x, y = self.movement()
        assert x <= 1e-9
        assert y <= 0
        if self.version == 2:
            assert p.inverse_step is not None
            lam, square = c.strong_convexity, p.inverse_step**2
            bounds = lam / (8 * self.l_phi**2), lam / 2, 1 / lam
            assert 0 < p.inverse_step <= min(bounds) * SLACK
            assert self.c6 * square <= 0.25 * SLACK
            tracked = 8 * self.c6 * square * (m * self.l_phi / i) ** 2 / p.alpha_bar
            assert tracked <= 0.25 * SLACK


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_theorem_1_satisfies_the_inequalities_of_its_proof(
    setting: tuple[int, int, int], version: int
) -> None:
    draw = random.Random(0)
    for _ in range(400):
        constants, epsilon = random_constants(draw), 10 ** draw.uniform(-4, 12)
        parameters = theorem_1(constants, epsilon, *setting, version)
        displays = Displays(constants, parameters, *setting, version)
        displays.check_steps()
        assert displays.noise() <= epsilon**2 / 3 * SLACK
        gap = 2 * constants.gap / (parameters.upper_step * parameters.steps)
        assert gap <= epsilon**2 / 3 * SLACK
        # One step less would not do: the number is not padded.
        fewer = parameters.upper_step * epsilon**2 * (parameters.steps - 1)
        assert fewer < 6 * constants.gap * SLACK


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_stage_of_theorem_2_keeps_the_induction(setting: tuple[int, int, int], version: int) -> None:
    draw = random.Random(1)
    for _ in range(100):
        constants = random_constants(draw)
        constants = replace(constants, gap=constants.gap * draw.choice([1, 1e20]))
        mu, gap = constants.pl, constants.gap
        assert mu is not None
        goal = epsilon_1(constants, setting, version)
        epsilon, error = goal / 50, 2 * mu * goal
        stages = theorem_2(constants, epsilon, *setting, version)
        # ε_6 = ε_1/32 is not enough, ε_7 is.
        assert len(stages) == 7
        assert goal <= gap * SLACK
        for stage in stages:
            displays = Displays(constants, stage, *setting, version)
            displays.check_steps()
            assert stage.alpha == stage.alpha_bar == stage.beta
            reached = 2 * gap / (stage.upper_step * stage.steps)
            reached += displays.inherited() * error / stage.steps + displays.noise()
            # Then F(x_k) − min F ≤ ε_k by the PL condition, and the next stage inherits δ ≤ με_k.
            assert reached <= mu * goal * SLACK
            gap, error, goal = goal, mu * goal, goal / 2
        assert gap <= epsilon


def epsilon_1(constants: Constants, setting: tuple[int, int, int], version: int) -> float:
    """ε_1 = 21 C β_1 w/μ; 12 C w = ε²/β by Theorem 1 (18 for version 2, whose C grows by 4)."""
    first = theorem_2(constants, 1.0, *setting, version)[0]
    noise_times_spread = 1e-20 / theorem_1(constants, 1e-10, *setting, version).beta
    assert constants.pl is not None
    return 21 * first.beta / constants.pl * noise_times_spread / (12 if version == 1 else 18 / 4)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_theorem_1_takes_the_largest_values_of_its_displays(
    setting: tuple[int, int, int], version: int
) -> None:
    blocks, sampled, rows = setting
    draw = random.Random(2)
    for _ in range(200):
        c, epsilon = random_constants(draw), 10 ** draw.uniform(-4, 4)
        got = theorem_1(c, epsilon, *setting, version)
        d = Displays(c, got, *setting, version)
        l_gy, l_gyy, l_y, lam = c.lower_lipschitz, c.hessian_lipschitz, c.solution_lipschitz, d.lam
        pull, sigma, share = 0.5 / d.tau - 0.75 * c.lower_smoothness, c.noise**2, sampled / blocks
        terms = [6 * d.c3, 64 * d.c1 * (l_gy / lam) ** 2, 8 * d.of_s * l_gy**2]
        through_y = 32 * l_y**2 * d.c1 / (d.tau * lam) ** 2
        noise = [3, 6 * d.c5, 4 * d.c1 / (d.tau * lam), d.of_s, 2 * d.of_s * sigma]
        if version == 1:
            of_h = 2 * d.c2 + 1 + 24 * d.c4 / 2
            terms += [54 * d.c4 * l_gyy**2, 2 * d.c2 * l_gyy**2, 8 * of_h * l_gyy**2]
            noise += [of_h, 12 * d.c4 * sigma, 2 * of_h * sigma]
            alpha, beta = rows * epsilon**2 / 12 / max(noise), epsilon**2 / 12 / max(noise) / d.w
            c8, c9 = 4 * d.c1 / (3 * lam) * pull / max(terms), 1 / 14 / max(*terms, through_y)
        else:
            sigma_u, phi = d.sigma_u**2, d.l_phi**2
            tilde = 80 * d.c2 * phi / lam**2
            c7 = 3 * max(6 * d.c4, tilde, 8 * d.of_u * phi) * (80 * (d.l_v / lam) ** 2 * phi + 1)
            terms += [20 * d.c2 * (d.l_v / lam) ** 2, tilde, 8 * d.of_u * phi, c7]
            noise += [4 * d.c2 / lam, d.of_u, 2 * d.of_u * sigma_u, 16 * c7 * phi / lam]
            each = 11 * max(*noise, 2 * c7 * d.c6, 4 * c7 * d.c6 * sigma_u)
            alpha, beta = rows * epsilon**2 / 18 / each, epsilon**2 / 18 / each / d.w
            c8, c9 = 8 * d.c1 / (9 * lam) * pull / max(terms), 1 / 20 / max(*terms, through_y)
        assert got.alpha == pytest.approx(min(0.5, alpha))
        assert got.beta == got.alpha_bar == pytest.approx(min(0.5, beta))
        rates = [share * math.sqrt(got.alpha), share * math.sqrt(got.beta)]
        if version == 2:
            caps = lam / (8 * phi), lam / 2, 1 / lam, 0.5 / math.sqrt(d.c6)
            tau_bar = min(*caps, min(1, 1 / math.sqrt(32 * d.c6 * phi)) * rates[1])
            assert got.inverse_step == pytest.approx(tau_bar)
            rates.append(tau_bar)
        tau_t = min(1, math.sqrt(c8) * min(rates))
        assert d.tau_t == pytest.approx(tau_t)
        eta = min(math.sqrt(c9) * min(*rates, tau_t), 0.5 / (c.upper_smoothness or 1e-300))
        assert got.upper_step == pytest.approx(eta)


def test_version_1_by_hand() -> None:
    zeros = dict.fromkeys(REQUIRED[2:], 0.0)
    zeros.update(lower_lipschitz=1.0, gap=1.0)
    constants = Constants(strong_convexity=1.0, lower_smoothness=1.0, **zeros)
    # C_1 = 1, C_2 = … = C_5 = 0, C_6 = 65, C_7 = 1; C_8 = (4/3)(3/4)/(8·65), C_9 = 1/(112·65),
    # C_10 = 65; L_y = 1, so that 32 L_y² C_1/τ² = 288 is less than 8·65.
    epsilon, alpha = 0.1, 0.1**2 / (12 * 65)
    got = theorem_1(constants, epsilon, 1, 1, 1, version=1)
    assert (got.alpha, got.alpha_bar, got.beta) == pytest.approx((alpha, alpha, alpha))
    assert got.gamma == got.gamma_bar == pytest.approx(1 - alpha)
    assert got.lower_step == pytest.approx(math.sqrt(alpha / 520) / 3)
    assert got.upper_step == pytest.approx(math.sqrt(alpha / 520 / 7280))
    assert got.steps == math.ceil(600 * math.sqrt(520 * 7280 / alpha))
    assert got.inverse_step is None
    assert got.radius is None


def test_version_2_by_hand() -> None:
    zeros = dict.fromkeys(REQUIRED[2:], 0.0)
    zeros.update(lower_lipschitz=1.0, gap=1.0, jacobian_bound=0.0)
    constants = Constants(strong_convexity=1.0, lower_smoothness=1.0, **zeros)
    # C_1' = C_2' = 1, C_3' = C_4' = C_5' = 0, L_φv² = 4, L_v = 0, C_6' = 644·4, c_s = 65, c_u = 81,
    # C_7' = 24·81·4; C_8' = 6/(9 C_7'), C_10' = 1/(20 C_7'), C_9' = 11·2 C_7' C_6'.
    c6, c7 = 2576, 7776
    beta = 0.1**2 / (18 * 22 * c6 * c7)
    got = theorem_1(constants, 0.1, 1, 1, 1, version=2)
    tau_bar = math.sqrt(beta / (32 * c6 * 4))
    assert (got.alpha, got.alpha_bar, got.beta) == pytest.approx((beta, beta, beta))
    assert got.inverse_step == pytest.approx(tau_bar)
    assert got.lower_step == pytest.approx(math.sqrt(6 / (9 * c7)) * tau_bar / 3)
    assert got.upper_step == pytest.approx(3 * got.lower_step / math.sqrt(20 * c7))
    assert got.radius == 0.0


@pytest.mark.parametrize("version", [1, 2])
def test_halving_epsilon_takes_eight_times_the_steps(version: int) -> None:
    at = [theorem_1(ONES, epsilon, 100, 10, 32, version) for epsilon in (0.02, 0.01)]
    assert at[1].steps / at[0].steps == pytest.approx(8)
    for name, power in (("alpha", 2), ("beta", 2), ("alpha_bar", 2), ("lower_step", 1)):
        assert getattr(at[0], name) / getattr(at[1], name) == pytest.approx(2**power)
    assert at[0].upper_step / at[1].upper_step == pytest.approx(2)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("blocks", "sampled", "rows"), [(100, 10, 32), (100, 50, 4), (64, 64, 8)])
def test_steps_scale_with_the_sampling_as_the_formula(
    version: int, blocks: int, sampled: int, rows: int
) -> None:
    def steps(blocks: int, sampled: int, rows: int) -> float:
        return theorem_1(ONES, 1e-3, blocks, sampled, rows, version).steps

    def formula(blocks: int, sampled: int, rows: int) -> float:
        return blocks / sampled * math.sqrt((sampled < blocks) / sampled + 1 / rows)

    here = blocks, sampled, rows
    for other in ((blocks, sampled, 2 * rows), (2 * blocks, sampled, rows), (blocks, 1, rows)):
        assert steps(*other) / steps(*here) == pytest.approx(formula(*other) / formula(*here))
    if 2 * sampled <= blocks:
        other = blocks, 2 * sampled, rows
        assert steps(*other) / steps(*here) == pytest.approx(formula(*other) / formula(*here))


@pytest.mark.parametrize("version", [1, 2])
def test_sampling_all_blocks_leaves_the_rows_noise_only(version: int) -> None:
    full, most = (theorem_1(ONES, 1e-3, 100, sampled, 400, version) for sampled in (100, 99))
    assert full.beta == pytest.approx(full.alpha)
    assert most.beta == pytest.approx(most.alpha / (400 / 99 + 1))
    assert full.steps / theorem_1(ONES, 1e-3, 100, 100, 100, version).steps == pytest.approx(0.5)


@pytest.mark.parametrize("version", [1, 2])
def test_large_epsilon_is_capped_at_one_half(version: int) -> None:
    parameters = theorem_1(ONES, 1e9, 10, 5, 2, version)
    assert parameters.alpha == parameters.alpha_bar == parameters.beta == 0.5
    assert parameters.gamma == pytest.approx(1 / 0.5 + 0.5)
    assert parameters.steps == 1


def test_the_upper_step_is_at_most_half_over_the_smoothness() -> None:
    rough = theorem_1(replace(ONES, upper_smoothness=1e25), 1.0, 10, 5, 2)
    assert rough.upper_step == pytest.approx(0.5e-25)
    assert rough.steps == pytest.approx(6 / 0.5e-25)
    assert theorem_1(replace(ONES, upper_smoothness=0.0), 1.0, 10, 5, 2).upper_step > 0


@pytest.mark.parametrize("version", [1, 2])
def test_stages_halve_rates_shrink_steps_by_root_two_and_double_in_length(version: int) -> None:
    stages = theorem_2(ONES, 2.0**-40, 100, 10, 32, version)
    assert len(stages) == 41
    for stage, after in pairwise(stages):
        assert after.beta == stage.beta / 2 == after.alpha == after.alpha_bar
        for name in ("lower_step", "upper_step", "inverse_step")[: version + 1]:
            assert getattr(stage, name) / getattr(after, name) == pytest.approx(math.sqrt(2))
    assert stages[-1].steps / stages[-2].steps == pytest.approx(2, rel=1e-3)
    # 28/(μη) grows by √2 only, and leads where μ is small.
    slow = theorem_2(replace(ONES, pl=1e-60), 0.25, 100, 10, 32, version)
    assert slow[2].steps / slow[1].steps == pytest.approx(math.sqrt(2), rel=1e-3)
    assert slow[2].steps == pytest.approx(28e60 / slow[2].upper_step)


@pytest.mark.parametrize("version", [1, 2])
def test_stages_have_the_stated_complexity(version: int) -> None:
    def total(epsilon: float, blocks: int, sampled: int, mu: float) -> int:
        constants = replace(ONES, pl=mu)
        return sum(s.steps for s in theorem_2(constants, epsilon, blocks, sampled, 32, version))

    small, tiny = 2.0**-60, 2.0**-62
    assert total(tiny, 64, 8, 1.0) / total(small, 64, 8, 1.0) == pytest.approx(4, rel=1e-3)
    assert total(small, 64, 8, 0.5) / total(small, 64, 8, 1.0) == pytest.approx(2, rel=1e-3)
    # m/I enters once, not squared.
    assert total(small, 128, 8, 1.0) / total(small, 64, 8, 1.0) == pytest.approx(2, rel=1e-3)


def test_an_easy_goal_takes_one_stage() -> None:
    assert len(theorem_2(ONES, 5.0, 10, 5, 8)) == 1


def test_a_large_gap_starts_at_rates_of_one_half() -> None:
    constants = replace(ONES, gap=1e30)
    first, second = theorem_2(constants, 1e3, 10, 5, 8)[:2]
    assert (first.beta, second.beta) == (0.5, 0.25)


def test_complexity_is_the_paper_s_expression() -> None:
    assert complexity(0.1, 100, 25, 16) == pytest.approx((100 / (25 * 5) + 100 / (25 * 4)) * 1e3)
    assert complexity(0.1, 25, 25, 16) == pytest.approx(250)
    assert complexity(0.05, 100, 25, 16) == pytest.approx(8 * complexity(0.1, 100, 25, 16))
    root = math.sqrt(1 / 25 + 1 / 16)
    expected = 4 / (0.25**1.5 * 0.1) * root + 4 / (0.25 * 0.01)
    assert complexity(0.01, 100, 25, 16, pl=0.25) == pytest.approx(expected)
    assert complexity(0.01, 25, 25, 16, pl=0.25) == pytest.approx(1 / 0.125 / 0.1 / 4 + 400)


def test_the_theorem_s_steps_stay_within_root_two_of_the_complexity() -> None:
    for setting in ((100, 10, 1), (100, 10, 32), (100, 10, 10), (1000, 999, 7)):
        both = theorem_1(ONES, 1e-3, *setting).steps, theorem_1(ONES, 1e-3, 10, 10, 1).steps
        stated = complexity(1e-3, *setting) / complexity(1e-3, 10, 10, 1)
        assert 1 / math.sqrt(2) <= both[0] / both[1] / stated * SLACK <= SLACK**2


def test_arguments_are_those_of_the_solvers() -> None:
    first, second = (theorem_1(ONES, 0.1, 10, 5, 8, version) for version in (1, 2))
    names = {"alpha", "alpha_bar", "beta", "gamma", "gamma_bar", "lower_step", "upper_step"}
    assert set(first.solver_arguments()) == names
    assert set(second.solver_arguments()) == names | {"inverse_step", "radius"}
    assert all(second.solver_arguments()[name] == getattr(second, name) for name in names)
    assert second.radius == 1.0


def test_a_bound_of_zero_on_the_solution_is_still_an_argument() -> None:
    still = theorem_1(replace(ONES, upper_y_bound=0.0), 0.1, 10, 5, 8)
    assert still.solver_arguments()["radius"] == 0.0


def test_constants_left_out_follow_from_the_others() -> None:
    values = dict.fromkeys(REQUIRED, 1.0)
    values.update(strong_convexity=0.5, lower_lipschitz=2.0, upper_x_lipschitz=3.0)
    constants = Constants(**values)
    for name in ("jacobian_bound", "mean_hessian_bound", "hessian_bound"):
        assert getattr(constants, name) == 2
    assert constants.solution_lipschitz == 4
    assert constants.upper_smoothness == (1 + 4) * (3 + 1 * 4 + 1 * (1 / 0.5 + 1 * 2 / 0.25))
    given = Constants(**values, jacobian_bound=1.0, solution_lipschitz=7.0)
    assert given.upper_smoothness == (1 + 7) * (3 + 1 * 2 + 1 * (1 / 0.5 + 1 * 1 / 0.25))
    assert Constants(**values, jacobian_bound=1.0).solution_lipschitz == 2
    assert Constants(**values, upper_smoothness=7).upper_smoothness == 7


@pytest.mark.parametrize("slope", [0.3, 1.0, 4.0])
def test_the_smoothness_bounds_that_of_an_objective(slope: float) -> None:
    # f = log cosh y + cos(x), g = ½(y − slope·x)²: F'' is largest, slope² + 1, near 0 and π.
    values = dict.fromkeys(REQUIRED, 1.0)
    values.update(jacobian_lipschitz=0.0, hessian_lipschitz=0.0, lower_lipschitz=1 + slope)
    constants = Constants(**values, jacobian_bound=slope)

    def slope_of_f(x: float) -> float:
        return slope * math.tanh(slope * x) - math.sin(x)

    points = [n / 100 for n in range(-700, 700)]
    steepest = max(abs(slope_of_f(x + 0.01) - slope_of_f(x)) / 0.01 for x in points)
    assert steepest <= constants.upper_smoothness
    assert slope**2 <= slope * constants.solution_lipschitz * SLACK


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None])
def test_bad_constants_are_named(name: str, value: Any) -> None:
    values: dict[str, Any] = dict.fromkeys(REQUIRED, 1.0)
    with pytest.raises(ValueError, match=rf"{name} must be a finite number .* 0, got {value!r}"):
        Constants(**{**values, name: value})


@pytest.mark.parametrize("name", ["strong_convexity", "gap", "pl"])
def test_zero_is_refused_where_the_theory_divides_by_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite number greater than 0, got 0"):
        replace(ONES, **{name: 0.0})


@pytest.mark.parametrize(
    "name", ["lower_smoothness", "lower_lipschitz", "mean_hessian_bound", "hessian_bound"]
)
def test_a_bound_below_the_strong_convexity_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least strong_convexity=1.0, got 0.5"):
        replace(ONES, **{name: 0.5})


@pytest.mark.parametrize("function", [theorem_1, theorem_2, lambda _, *rest: complexity(*rest)])
def test_bad_arguments_are_named(function: Any) -> None:
    with pytest.raises(ValueError, match="epsilon must be a finite number greater than 0, got 0"):
        function(ONES, 0, 10, 5, 8)
    with pytest.raises(ValueError, match=r"blocks must be .* got 0"):
        function(ONES, 0.1, 0, 5, 8)
    with pytest.raises(ValueError, match=r"blocks_per_step must be .* got 11"):
        function(ONES, 0.1, 10, 11, 8)
    with pytest.raises(ValueError, match=r"batch_size must be .* got 0"):
        function(ONES, 0.1, 10, 5, 0)


@pytest.mark.parametrize("function", [theorem_1, theorem_2])
def test_the_version_is_1_or_2(function: Any) -> None:
    with pytest.raises(ValueError, match="version must be 1 or 2, got 3"):
        function(ONES, 0.1, 10, 5, 8, version=3)


def test_theorem_2_needs_the_pl_constant() -> None:
    with pytest.raises(ValueError, match=r"constants\.pl must be a finite number .* got None"):
        theorem_2(replace(ONES, pl=None), 0.1, 10, 5, 8)
