"""What the text leaves open: each question with the ways that there are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import bilevax as bx
from bilevax.experiments.theorems.answers import Answer, Make, Settings, answer
from bilevax.experiments.theorems.problems import initial_rows, stationary_point, with_common_factor
from bilevax.experiments.theorems.variants import (
    EagerBSVRBv2,
    ExtraBatchBSVRBv1,
    SameBatchBSVRBv1,
    SampledBSVRBv2,
)


def blocks(settings: Settings) -> list[Answer]:
    """All blocks move, lazily, against only the sampled ones: the claim of √(m/I)."""
    found = []
    for copies in settings.copies:
        ratio = settings.sampling(copies).ratio

        def sampled(numbers: dict[str, float], ratio: float = ratio) -> Any:
            # A block that moves only when it is sampled has one step for m/I of those of the others.
            steps = {name: numbers[name] / ratio for name in ("lower_step", "inverse_step")}
            return SampledBSVRBv2(**numbers | steps)

        for way, make in (("all, lazily", version_2), ("sampled", sampled)):
            found.append(answer("blocks", way, make, settings, copies))
    return found


def gamma(settings: Settings) -> list[Answer]:
    """MSVR's γ, STORM's, and none."""

    def storm(numbers: dict[str, float]) -> Any:
        gammas = {"gamma": 1 - numbers["alpha"], "gamma_bar": 1 - numbers["alpha_bar"]}
        return bx.BSVRBv2(**numbers, **gammas)

    def none(numbers: dict[str, float]) -> Any:
        return bx.BSVRBv2(**numbers, gamma=0.0, gamma_bar=0.0)

    ways = (("by the formula", version_2), ("1 − α (STORM)", storm), ("0", none))
    return [
        answer("gamma", way, make, settings, copies) for copies in settings.copies[:3:2] for way, make in ways
    ]


def hessian(settings: Settings) -> list[Answer]:
    """H from before the refresh, against the refreshed one on the same rows or on rows of its own."""
    family = settings.family(settings.copies[0])
    floor = family.constants.strong_convexity

    def version_1(kind: Any, rates: dict[str, float]) -> Make:
        def make(numbers: dict[str, float]) -> Any:
            own = {name: value for name, value in numbers.items() if name != "inverse_step"}
            return kind(**own | rates, floor=floor)

        return make

    ways = {
        "before the refresh (v1)": bx.BSVRBv1,
        "refreshed, same rows": SameBatchBSVRBv1,
        "refreshed, rows of its own": ExtraBatchBSVRBv1,
    }
    # Correlated: each row scales Hessian and Jacobian alike. The larger ᾱ, the more of H is the newest batch.
    correlated = with_common_factor(family)
    cases = {
        "independent noise": (family, {}),
        "correlated noise": (correlated, {}),
        "correlated, ᾱ = 0.2": (correlated, {"alpha_bar": 0.2}),
    }
    return [
        answer("hessian", way, version_1(kind, rates), settings, settings.copies[0], case, one)
        for case, (one, rates) in cases.items()
        for way, kind in ways.items()
    ]


def projection(settings: Settings) -> list[Answer]:
    """v projected once per visit, or in every step; in the ball that just holds all v_i where runs end."""
    copies = settings.copies[min(1, len(settings.copies) - 1)]
    family = settings.family(copies)
    at_end = family.inverse_solution(stationary_point(family))
    radius = float(np.linalg.norm(at_end, axis=1).max())
    ways: dict[str, Make] = {
        "when caught up": lambda numbers: bx.BSVRBv2(**numbers, radius=radius),
        "in every step": lambda numbers: EagerBSVRBv2(**numbers, radius=radius),
        "none": version_2,
    }
    case = f"V = {radius:.2f}"
    return [answer("projection", way, make, settings, copies, case) for way, make in ways.items()]


def start(settings: Settings) -> list[Answer]:
    """The rows per block of the first estimators."""
    epsilon, copies = settings.start_epsilon, settings.copies[0]
    most = round(settings.most * (settings.epsilon / epsilon) ** 3)
    small = dataclasses.replace(settings, epsilon=epsilon, most=most)
    rows: dict[str, Any] = {
        f"4/ε = {initial_rows(epsilon)} rows": initial_rows(epsilon),
        "all rows": "all",
        f"B = {settings.batch_size} rows": None,
        "none": 0,
    }
    case = f"ε = {epsilon:g}"
    return [answer("start", way, version_2, small, copies, case, initial=rows) for way, rows in rows.items()]


def version_2(numbers: dict[str, float]) -> Any:
    """BSVRB v2 as it is."""
    return bx.BSVRBv2(**numbers)
