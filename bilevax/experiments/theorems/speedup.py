"""How T depends on m, I and B at one ε: the parallel speed-up of Theorem 1."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from bilevax.experiments import figures
from bilevax.experiments.kept import Task
from bilevax.experiments.report import Report
from bilevax.experiments.theorems.fits import Exponent, fit_exponent
from bilevax.experiments.theorems.problems import make_family, noise_of_terms
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS, Method, Sizes
from bilevax.experiments.theorems.steps_to_epsilon import cell
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


def tasks(constants: dict[str, float], options: RatesOptions) -> dict[str, Task]:
    """The runs at every m, I and B, at `size_epsilon`.

    Args:
      constants: the c of each method, tuned at the m, I and B of the options.
      options: of the experiment.

    Returns:
      What computes each of them, by name.
    """
    found = {}
    for method, varied, cases in _varied(constants, options):
        c, epsilon = constants[method], _epsilon(varied, options)
        for sizes in cases:
            found[_name(method, varied, sizes)] = functools.partial(
                cell, method, c, epsilon, options, 3000, options.max_steps, sizes
            )
    return found


def write(
    results: dict[str, Any], constants: dict[str, float], options: RatesOptions, report: Report
) -> list[Dependence]:
    """Writes `sizes.csv`, `.md` and `.png` from the results of the tasks; returns a dependence per row."""
    found = [_dependence(*case, results, options) for case in _varied(constants, options)]
    if not found:
        return found
    note = (
        f"At ε = {options.size_epsilon} (for I = m: {options.full_epsilon}), with the c tuned at m = "
        f"{options.blocks}, I = {options.blocks_per_step}, B = {options.batch_size}. Blocks are copied to "
        "vary m, so that F stays the same. exponent: over all values, ± half of the 95% confidence "
        "interval; theory: the exponent of the theorem's T at the same values (RSVRB: that of Table 1, mε⁻³)."
    )
    family = make_family(options.family, options.blocks, options.dimension, options.rows)
    report.fact("variance of a block's term", noise_of_terms(family))
    report.table("sizes", [_row(one) for one in found], "Steps against m, I and B", note)
    caption = "Steps T over m, I and B; dotted: the theorem's, from the first point."
    report.figure("sizes", _plot(found), figures.spread_caption(caption, options.seeds))
    return found


def theory(method: Method, epsilon: float, sizes: Sizes) -> float:
    """The theorem's number of steps, up to a factor: Theorem 1, m ε⁻³, or max{m/(IB), 1/min{I, B}} ε⁻⁴."""
    if not method.speeds_up:
        return sizes.blocks * epsilon**-3
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


def _varied(constants: dict[str, float], options: RatesOptions) -> list[tuple[str, str, list[Sizes]]]:
    """Methods, what is varied, and the sizes."""
    names = [name for name in options.size_methods if name in constants]
    return [(name, varied, cases) for name in names for varied, cases in _cases(options).items()]


def _epsilon(varied: str, options: RatesOptions) -> float:
    # With all blocks there is less noise: at a large ε the bounds on the steps would decide, not B.
    return options.full_epsilon if varied == FULL else options.size_epsilon


def _value(varied: str, sizes: Sizes) -> int:
    return getattr(sizes, {"m": "blocks", "I": "blocks_per_step"}.get(varied, "batch_size"))


def _name(method: str, varied: str, sizes: Sizes) -> str:
    return f"{method}: {varied} = {_value(varied, sizes)}"


def _dependence(
    name: str, varied: str, cases: list[Sizes], results: dict[str, Any], options: RatesOptions
) -> Dependence:
    values = np.array([_value(varied, sizes) for sizes in cases])
    steps = np.stack([results[_name(name, varied, sizes)]["steps"] for sizes in cases])
    expected = np.array([theory(METHODS[name], _epsilon(varied, options), sizes) for sizes in cases])
    exponents = fit_exponent(values, steps), fit_exponent(values, expected[:, None])
    return Dependence(name, varied, values, steps, expected, *exponents)


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
