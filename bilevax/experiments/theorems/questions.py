"""The choices that the paper leaves open: one function per question, with its variants."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import bilevax as bx
from bilevax.experiments.theorems.answers import Answer, ChoicesOptions, MakeVariant, answer
from bilevax.experiments.theorems.problems import initial_rows, stationary_point, with_common_factor
from bilevax.experiments.theorems.variants import (
    EagerBSVRBv2,
    ExtraBatchBSVRBv1,
    SameBatchBSVRBv1,
    SampledBSVRBv2,
)


def blocks(options: ChoicesOptions) -> list[Answer]:
    """Moving all blocks lazily, against moving only the sampled blocks: the claim of √(m/I)."""
    found = []
    for copies in options.copies:
        ratio = options.sizes_with(copies).ratio

        def sampled(coefficients: dict[str, float], ratio: float = ratio) -> Any:
            # A block that moves only when it is sampled takes one step where the others take m/I.
            steps = {name: coefficients[name] / ratio for name in ("lower_step", "inverse_step")}
            return SampledBSVRBv2(**coefficients | steps)

        for variant, make in (("all, lazily", version_2), ("sampled", sampled)):
            found.append(answer("blocks", variant, make, options, copies))
    return found


def gamma(options: ChoicesOptions) -> list[Answer]:
    """MSVR's γ, STORM's, and none."""

    def storm(coefficients: dict[str, float]) -> Any:
        gammas = {"gamma": 1 - coefficients["alpha"], "gamma_bar": 1 - coefficients["alpha_bar"]}
        return bx.BSVRBv2(**coefficients, **gammas)

    def none(coefficients: dict[str, float]) -> Any:
        return bx.BSVRBv2(**coefficients, gamma=0.0, gamma_bar=0.0)

    variants = (("by the formula", version_2), ("1 − α (STORM)", storm), ("0", none))
    return [
        answer("gamma", variant, make, options, copies)
        for copies in options.copies[:3:2]
        for variant, make in variants
    ]


def hessian(options: ChoicesOptions) -> list[Answer]:
    """H before its refresh, against H refreshed on the same rows or on separate rows."""
    family = options.family(options.copies[0])
    floor = family.constants.strong_convexity

    def version_1(kind: Any, rates: dict[str, float]) -> MakeVariant:
        def make(coefficients: dict[str, float]) -> Any:
            used = {name: value for name, value in coefficients.items() if name != "inverse_step"}
            return kind(**used | rates, floor=floor)

        return make

    variants = {
        "before the refresh (v1)": bx.BSVRBv1,
        "refreshed, same rows": SameBatchBSVRBv1,
        "refreshed, separate rows": ExtraBatchBSVRBv1,
    }
    # The larger ᾱ, the more H depends on the latest batch, and the more correlation matters.
    correlated = with_common_factor(family)
    cases = {
        "independent noise": (family, {}),
        "correlated noise": (correlated, {}),
        "correlated, ᾱ = 0.2": (correlated, {"alpha_bar": 0.2}),
    }
    return [
        answer("hessian", variant, version_1(kind, rates), options, options.copies[0], case, one)
        for case, (one, rates) in cases.items()
        for variant, kind in variants.items()
    ]


def projection(options: ChoicesOptions) -> list[Answer]:
    """v projected once per visit or in every step. The ball just contains all v_i of a stationary point."""
    copies = options.copies[min(1, len(options.copies) - 1)]
    family = options.family(copies)
    at_end = family.inverse_solution(stationary_point(family))
    radius = float(np.linalg.norm(at_end, axis=1).max())
    variants: dict[str, MakeVariant] = {
        "once per visit": lambda coefficients: bx.BSVRBv2(**coefficients, radius=radius),
        "in every step": lambda coefficients: EagerBSVRBv2(**coefficients, radius=radius),
        "none": version_2,
    }
    case = f"V = {radius:.2f}"
    return [answer("projection", variant, make, options, copies, case) for variant, make in variants.items()]


def start(options: ChoicesOptions) -> list[Answer]:
    """The number of rows per block of the initial estimators."""
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
    return [
        answer("start", variant, version_2, small, copies, case, initial=initial)
        for variant, initial in rows.items()
    ]


def version_2(coefficients: dict[str, float]) -> Any:
    """BSVRB v2 without changes."""
    return bx.BSVRBv2(**coefficients)
