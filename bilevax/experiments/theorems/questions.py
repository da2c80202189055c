"""The choices that the paper leaves open: one function per question, with its variants."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.experiments.theorems.answers import Asked, ChoicesOptions, MakeVariant
from bilevax.experiments.theorems.problems import (
    initial_rows,
    stationary_point,
    with_common_factor,
)
from bilevax.experiments.theorems.scalings import Sizes
from bilevax.experiments.theorems.variants import (
    EagerBSVRBv2,
    ExtraBatchBSVRBv1,
    SameBatchBSVRBv1,
    SampledBSVRBv2,
)
from bilevax.theory import Constants


def blocks(options: ChoicesOptions) -> list[Asked]:
    """Moving all blocks lazily, against moving only the sampled blocks: the claim of √(m/I)."""
    found = []
    for copies in options.copies:
        ratio = options.sizes_with(copies).ratio

        def sampled(coefficients: dict[str, Any], ratio: float = ratio) -> Any:
            # A block that moves only when it is sampled takes one step where the others take m/I.
            steps = {name: coefficients[name] / ratio for name in ("lower_step", "inverse_step")}
            return SampledBSVRBv2(**coefficients | steps)

        for variant, make in (("all, lazily", version_2), ("sampled", sampled)):
            found.append(Asked("blocks", variant, make, options, copies))
    return found


def gamma(options: ChoicesOptions) -> list[Asked]:
    """MSVR's γ, STORM's, and none."""

    def storm(coefficients: dict[str, Any]) -> Any:
        gammas = {"gamma": 1 - coefficients["alpha"], "gamma_bar": 1 - coefficients["alpha_bar"]}
        return bx.BSVRBv2(**coefficients | gammas)

    def none(coefficients: dict[str, Any]) -> Any:
        zero: dict[str, Any] = {"gamma": 0.0, "gamma_bar": 0.0}
        return bx.BSVRBv2(**coefficients | zero)

    variants = (("by the formula", version_2), ("1 − α (STORM)", storm), ("0", none))
    return [
        Asked("gamma", variant, make, options, copies)
        for copies in options.copies[:3:2]
        for variant, make in variants
    ]


def hessian(options: ChoicesOptions) -> list[Asked]:
    """H before its refresh, against H refreshed on the same rows or on separate rows."""
    family = options.blocks_with(options.copies[0])
    floor = family.constants.strong_convexity

    def version_1(kind: Any, rates: dict[str, Any]) -> MakeVariant:
        def make(coefficients: dict[str, Any]) -> Any:
            used = {name: value for name, value in coefficients.items() if name != "inverse_step"}
            return kind(**used | rates, floor=floor)

        return make

    variants = {
        "before the refresh (v1)": bx.BSVRBv1,
        "refreshed, same rows": SameBatchBSVRBv1,
        "refreshed, separate rows": ExtraBatchBSVRBv1,
    }
    # The larger ᾱ, the more H depends on the latest batch, and the more correlation matters. The larger m/I,
    # the older is the H of a block.
    correlated, first = with_common_factor(family), options.copies[0]
    cases: dict[str, tuple[Any, dict[str, Any], int]] = {
        "independent noise": (family, {}, first),
        "correlated noise": (correlated, {}, first),
        "correlated, ᾱ = 0.2": (correlated, {"alpha_bar": 0.2}, first),
    }
    for copies in options.copies[2:3]:
        ratio = 1 / options.sizes_with(copies).ratio
        cases[f"independent noise, m/I = {ratio:g}"] = (options.blocks_with(copies), {}, copies)
    return [
        Asked("hessian", variant, version_1(kind, rates), options, copies, case, one)
        for case, (one, rates, copies) in cases.items()
        for variant, kind in variants.items()
    ]


def slope(options: ChoicesOptions) -> list[Asked]:
    """y and v along the refreshed s_{t+1} and u_{t+1}, against along s_t and u_t, as printed."""
    floor = options.blocks_with(options.copies[0]).constants.strong_convexity

    def version_1(coefficients: dict[str, Any], refreshed: bool) -> Any:
        used = {name: value for name, value in coefficients.items() if name != "inverse_step"}
        return bx.BSVRBv1(**used, floor=floor, refreshed=refreshed)

    def version_2(coefficients: dict[str, Any], refreshed: bool) -> Any:
        return bx.BSVRBv2(**coefficients, refreshed=refreshed)

    found = []
    for copies in options.copies[:3:2]:
        ratio = 1 / options.sizes_with(copies).ratio
        for version, make in (("v1", version_1), ("v2", version_2)):
            for variant, refreshed in (("s_{t+1}", True), ("s_t, as printed", False)):
                made = functools.partial(make, refreshed=refreshed)
                case = f"{version}, m/I = {ratio:g}"
                found.append(Asked("slope", variant, made, options, copies, case))
    return found


def projection(options: ChoicesOptions) -> list[Asked]:
    """v projected once per visit or in every step. The ball just contains all v_i of a stationary point."""
    copies = options.copies[min(1, len(options.copies) - 1)]
    family = options.blocks_with(copies)
    at_end = family.inverse_solution(stationary_point(family))
    radius = float(np.linalg.norm(at_end, axis=1).max())
    variants: dict[str, MakeVariant] = {
        "once per visit": lambda coefficients: bx.BSVRBv2(**coefficients, radius=radius),
        "in every step": lambda coefficients: EagerBSVRBv2(**coefficients, radius=radius),
        "none": version_2,
    }
    case = f"V = {radius:.2f}"
    return [Asked("projection", variant, make, options, copies, case) for variant, make in variants.items()]


def start(options: ChoicesOptions) -> list[Asked]:
    """The number of rows per block of the initial estimators; and parameters that decrease instead."""
    epsilon, copies = options.start_epsilon, options.copies[0]
    max_steps = round(options.max_steps * (options.epsilon / epsilon) ** 3)
    small = dataclasses.replace(options, epsilon=epsilon, max_steps=max_steps)
    rows: dict[str, Any] = {
        f"4/ε = {initial_rows(epsilon)} rows": initial_rows(epsilon),
        "all rows": "all",
        f"B = {options.batch_size} rows": None,
        "none": 0,
    }
    case = f"ε = {epsilon:g}"
    found = [
        Asked("start", variant, version_2, small, copies, case, initial=initial)
        for variant, initial in rows.items()
    ]

    def decreasing(coefficients: dict[str, Any]) -> Any:
        return falling(
            coefficients, epsilon, options.sizes_with(copies), options.blocks_with(copies).constants
        )

    return found + [
        Asked("start", f"{variant}, decreasing", decreasing, small, copies, case, initial=rows[variant])
        for variant in list(rows)[2:]
    ]


def falling(coefficients: dict[str, Any], epsilon: float, sizes: Sizes, constants: Constants) -> bx.BSVRBv2:
    """BSVRB v2 whose parameters follow those of Theorem 1 for ε_t = 2 t^(−1/3), until that is ε and beyond.

    α, ᾱ and β fall as t^(−2/3), the steps as t^(−1/3); those that the theorem bounds begin at their bounds.
    """
    horizon = (2 / epsilon) ** 3
    lower = 2 / 3 * sizes.ratio / constants.lower_smoothness
    most = {"lower_step": lower, "inverse_step": lower, "upper_step": 0.5 / constants.upper_smoothness}
    schedules: dict[str, Any] = {
        name: Falling(value, most.get(name, 0.5), horizon, 1 / 3 if name in most else 2 / 3)
        for name, value in coefficients.items()
        if not name.startswith("gamma")  # they follow α
    }
    return bx.BSVRBv2(**schedules)


class Falling(eqx.Module):
    """min(most, value · (horizon/(t+1))^power)."""

    value: float
    most: float
    horizon: float
    power: float

    def __call__(self, step: Array) -> Array:
        return jnp.minimum(self.most, self.value * (self.horizon / (step + 1)) ** self.power)


def version_2(coefficients: dict[str, Any]) -> Any:
    """BSVRB v2 without changes."""
    return bx.BSVRBv2(**coefficients)
