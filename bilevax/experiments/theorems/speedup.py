"""How T depends on m, I and B at one ε: the parallel speed-up of Theorem 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from bilevax.experiments import figures
from bilevax.experiments.report import Report
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.problems import make_family, noise_of_terms
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS, Method, Sizes
from bilevax.experiments.theorems.steps_to_epsilon import steps_to_epsilon
from bilevax.theory import complexity

FULL = "B at I = m"


@dataclasses.dataclass(frozen=True)
class Dependence:
    """T of one method over m, I or B.

    Attributes:
      method: its name.
      varied: "m", "I", "B", "B at I = m" (only rows are noisy), or "I = B".
      values: of the varied size.
      steps: T, (values, seeds).
      theory: the theorem's T at these values, up to a factor.
      exponent, theory_exponent: of T and of the theorem's T, over all values.
    """

    method: str
    varied: str
    values: np.ndarray
    steps: np.ndarray
    theory: np.ndarray
    exponent: Exponent
    theory_exponent: Exponent


def measure(constants: dict[str, float], options: RatesOptions, report: Report) -> list[Dependence]:
    """Varies m, I and B at `size_epsilon`; writes `sizes.csv`, `.md` and `.png`.

    Args:
      constants: the c of each method, tuned at the m, I and B of the options.
      options: of the experiment.
      report: where the table and the plot go.

    Returns:
      A dependence per method and varied size.
    """
    found = [
        _vary(METHODS[name], constants[name], varied, cases, options)
        for name in options.size_methods
        if name in constants
        for varied, cases in _cases(options).items()
    ]
    if not found:
        return found
    note = (
        f"At ε = {options.size_epsilon} (for I = m: {options.full_epsilon}), with the c tuned at m = "
        f"{options.blocks}, I = {options.blocks_per_step}, B = {options.batch_size}. Blocks are copied to "
        "vary m, so that F stays the same. exponent: over all values, ± half of the 95% confidence "
        "interval; theory: the exponent of the theorem's T at the same values."
    )
    family = make_family(False, options.blocks, options.dimension, options.rows)
    report.fact("variance of a block's term", noise_of_terms(family))
    rows = [_row(one) for one in found]
    report.table("sizes", rows, "Steps against m, I and B", note)
    caption = "Steps T over m, I and B; dotted: the theorem's, from the first point."
    report.figure("sizes", _plot(found), figures.spread_caption(caption, options.seeds))
    return found


def theory(method: Method, epsilon: float, sizes: Sizes) -> float:
    """The theorem's number of steps, up to a factor: Theorem 1, or max{m/(IB), 1/min{I, B}} ε⁻⁴."""
    if method.exponent == -3:
        return complexity(epsilon, sizes.blocks, sizes.blocks_per_step, sizes.batch_size)
    smaller = min(sizes.blocks_per_step, sizes.batch_size)
    return max(1 / (sizes.ratio * sizes.batch_size), 1 / smaller) * epsilon**-4


def _cases(options: RatesOptions) -> dict[str, list[Sizes]]:
    base, larger = options.sizes, options.blocks * max(options.block_copies[:2])
    wide = dataclasses.replace(base, blocks=larger)
    kinds = {
        "m": [dataclasses.replace(base, blocks=options.blocks * k) for k in options.block_copies],
        "I": [dataclasses.replace(wide, blocks_per_step=count) for count in options.blocks_per_steps],
        "B": [dataclasses.replace(wide, batch_size=size) for size in options.batch_sizes],
        FULL: [
            dataclasses.replace(base, blocks_per_step=base.blocks, batch_size=size)
            for size in options.full_batch_sizes
        ],
        "I = B": [
            dataclasses.replace(wide, blocks_per_step=both, batch_size=both)
            for both in options.batch_sizes
            if both in options.blocks_per_steps
        ],
    }
    return {varied: cases for varied, cases in kinds.items() if cases}


def _vary(method: Method, c: float, varied: str, cases: list[Sizes], options: RatesOptions) -> Dependence:
    # With all blocks there is less noise: at a large ε the bounds on the steps would decide, not B.
    epsilon = options.full_epsilon if varied == FULL else options.size_epsilon
    keys = jax.random.split(jax.random.key(options.seed + 3000), options.seeds)
    field = {"m": "blocks", "I": "blocks_per_step"}.get(varied, "batch_size")
    values = np.array([getattr(sizes, field) for sizes in cases])
    measured = []
    for value, sizes in zip(values, cases, strict=True):
        print(f"{method.name}: {varied} = {value}")
        measured.append(
            steps_to_epsilon(method, [c], epsilon, options, keys, options.max_steps, sizes).steps[0]
        )
    steps = np.stack(measured)
    expected = np.array([theory(method, epsilon, sizes) for sizes in cases])
    exponents = fit_exponent(values, steps), fit_exponent(values, expected[:, None])
    return Dependence(method.name, varied, values, steps, expected, *exponents)


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
    row["T over the previous T"] = ", ".join(f"{value:.2f}" for value in ratios)
    row["in theory"] = ", ".join(f"{value:.2f}" for value in one.theory[1:] / one.theory[:-1])
    return row


@figures.styled
def _plot(found: list[Dependence]) -> Any:
    kinds = list(dict.fromkeys(one.varied for one in found))
    figure, axes = figures.panels(1, len(kinds))
    styles = figures.styles_of(list(dict.fromkeys(one.method for one in found)))
    for axis, varied in zip(axes[0], kinds, strict=True):
        for one in (one for one in found if one.varied == varied):
            middle, (color, marker) = one.steps.mean(1), styles[one.method]
            spread = figures.deviation(one.steps.T)
            axis.errorbar(
                one.values, middle, spread, fmt=f"{marker}-", color=color, capsize=2, label=one.method
            )
            axis.plot(one.values, one.theory * middle[0] / one.theory[0], color=color, linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel=varied, ylabel="steps T")
        figures.mark(axis, sorted({value for one in found if one.varied == varied for value in one.values}))
    figures.legend_of_all(figure)
    return figure
