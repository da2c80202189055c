"""How T depends on m, I and B, at one ε: the parallel speed-up that Theorem 1 promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from bilevax.experiments.report import Report
from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task, noise_of_terms
from bilevax.experiments.theorems.scalings import METHODS, Method, Sizes
from bilevax.experiments.theorems.truth import Truth
from bilevax.theory import complexity

FULL = "B at I = m"


@dataclasses.dataclass(frozen=True)
class Dependence:
    """T of one method over m, I or B.

    Attributes:
      method: its name.
      varied: "m", "I", "B", "B at I = m" (no noise but that of rows), or "I = B".
      values: of what is varied.
      steps: T, (values, seeds).
      theory: the theorem's T at these values, up to a factor.
      exponent: of T, and of the theorem's T, over all values.
    """

    method: str
    varied: str
    values: np.ndarray
    steps: np.ndarray
    theory: np.ndarray
    exponent: Exponent
    theory_exponent: Exponent


def measure(constants: dict[str, float], settings: Any, report: Report) -> list[Dependence]:
    """Varies m, I and B at `size_epsilon`; writes `sizes.csv`, `.md` and `.png`.

    Args:
      constants: the tuned c of each method, as it is at the settings' own m, I and B.
      settings: `rates.Settings`.
      report: of the whole command.

    Returns:
      A dependence per method and varied size.
    """
    found = [
        _vary(METHODS[name], constants[name], varied, samplings, settings)
        for name in settings.size_methods
        if name in constants
        for varied, samplings in _samplings(settings).items()
    ]
    if not found:
        return found
    note = (
        f"At ε = {settings.size_epsilon} (with I = m at {settings.full_epsilon}), with the c tuned at m = "
        f"{settings.blocks}, I = {settings.blocks_per_step}, B = {settings.batch_size}. Blocks are copied to "
        "vary m, so that F stays the same. Exponents over all values, ± half of the 95% confidence "
        "interval; theory is that of the theorem's T at the same values."
    )
    family = make_family(False, settings.blocks, settings.dimension, settings.rows)
    report.fact("variance of a block's term", noise_of_terms(family))
    rows = [_row(one) for one in found]
    report.table("sizes", rows, "Steps against m, I and B", note)
    report.figure("sizes", _plot(found))
    return found


def theory(method: Method, epsilon: float, sampling: Sizes) -> float:
    """The theorem's number of steps, up to a factor: Theorem 1, or max{m/(IB), 1/min{I, B}} ε⁻⁴."""
    sizes = sampling.blocks, sampling.blocks_per_step, sampling.batch_size
    if method.exponent == -3:
        return complexity(epsilon, *sizes)
    return max(1 / (sampling.ratio * sizes[2]), 1 / min(sizes[1:])) * epsilon**-4


def _samplings(settings: Any) -> dict[str, list[Sizes]]:
    base, most = settings.sampling, settings.blocks * max(settings.block_copies[:2])
    wide = dataclasses.replace(base, blocks=most)
    kinds = {
        "m": [dataclasses.replace(base, blocks=settings.blocks * k) for k in settings.block_copies],
        "I": [dataclasses.replace(wide, blocks_per_step=count) for count in settings.blocks_per_steps],
        "B": [dataclasses.replace(wide, batch_size=size) for size in settings.batch_sizes],
        FULL: [
            dataclasses.replace(base, blocks_per_step=base.blocks, batch_size=size)
            for size in settings.full_batch_sizes
        ],
        "I = B": [
            dataclasses.replace(wide, blocks_per_step=both, batch_size=both)
            for both in settings.batch_sizes
            if both in settings.blocks_per_steps
        ],
    }
    return {varied: samplings for varied, samplings in kinds.items() if samplings}


def _vary(method: Method, c: float, varied: str, samplings: list[Sizes], settings: Any) -> Dependence:
    # With all blocks there is less noise: at a large ε the bounds on the steps would decide, not B.
    epsilon = settings.full_epsilon if varied == FULL else settings.size_epsilon
    keys = jax.random.split(jax.random.key(settings.seed + 3000), settings.seeds)
    field = {"m": "blocks", "I": "blocks_per_step"}.get(varied, "batch_size")
    values = np.array([getattr(sampling, field) for sampling in samplings])
    steps = []
    for value, sampling in zip(values, samplings, strict=True):
        print(f"{method.name}: {varied} = {value}")
        copies = sampling.blocks // settings.blocks
        family = make_family(method.mean, settings.blocks, settings.dimension, settings.rows, copies)
        solver = method.make(c, epsilon, sampling, family.constants)
        task = make_task(family, sampling, initial_rows(epsilon))
        measured = lanes.steps_until(
            task, [solver], keys, Truth.of(family).squared_gradient, epsilon**2, settings.most
        )
        steps.append(measured.steps[0])
    expected = np.array([theory(method, epsilon, sampling) for sampling in samplings])
    of_theory = fit_exponent(values, expected[:, None])
    return Dependence(
        method.name,
        varied,
        values,
        np.stack(steps),
        expected,
        fit_exponent(values, np.stack(steps)),
        of_theory,
    )


def _row(one: Dependence) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": one.method,
        "varied": one.varied,
        "exponent": str(one.exponent),
        "theory": f"{one.theory_exponent.slope:.2f}",
        "values": ", ".join(str(value) for value in one.values),
    }
    mean = one.steps.mean(1)
    row["T"] = ", ".join(f"{value:.0f}" if np.isfinite(value) else "not reached" for value in mean)
    ratios = mean[1:] / mean[:-1]
    row["T over the one before"] = ", ".join(f"{value:.2f}" for value in ratios)
    row["theory's"] = ", ".join(f"{value:.2f}" for value in one.theory[1:] / one.theory[:-1])
    return row


def _plot(found: list[Dependence]) -> Any:
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(one.varied for one in found))
    figure = Figure(figsize=(4 * len(kinds), 3.8), layout="constrained")
    for axis, varied in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for one in (one for one in found if one.varied == varied):
            middle = one.steps.mean(1)
            bars = axis.errorbar(
                one.values, middle, one.steps.std(1), fmt="o-", markersize=4, label=one.method
            )
            color = bars.lines[0].get_color()
            axis.plot(one.values, one.theory * middle[0] / one.theory[0], color=color, linestyle=":")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel=varied,
            ylabel="steps T",
            title=f"T over {varied} (dotted: theory)",
        )
        axis.legend(fontsize=8)
    return figure
