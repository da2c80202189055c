"""`bilevax reproduce choices`: tunes and compares variants that the paper leaves open."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from bilevax.experiments import figures
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report, spread
from bilevax.experiments.theorems import outputs, questions
from bilevax.experiments.theorems.answers import QUESTIONS, Answer, ChoicesOptions, answer
from bilevax.experiments.theorems.fits import Exponent, fit_exponent


def run(
    options: ChoicesOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    processes: int = 1,
) -> list[Answer]:
    """Answers all questions; writes tables and a plot to a folder.

    Every answer is kept in `kept.json` as it comes; `resume` looks only for those that are missing there.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    answers = compute(options, report.folder, resume=resume, processes=processes)
    if answers:
        note = (
            "T: steps until the mean of ‖∇F‖² is at most ε², mean ± standard deviation over seeds. Each "
            "variant uses the best (c, factor of η, factor of τ) of a grid, chosen on other seeds. "
            "×: T divided by that of the first variant."
        )
        report.table("choices", _rows(answers), "Choices that the paper leaves open", note)
        caption = "Steps T until the mean of ‖∇F‖² is at most ε²; no bar: not reached."
        report.figure("choices", _plot(answers), figures.spread_caption(caption, options.seeds))
    if "blocks" in options.questions:
        growth = {"T(sampled)/T(all) in m/I": str(_growth(answers, options)), "the paper's bounds": "0.50"}
        report.table("growth", [growth], "Moving sampled blocks against moving all blocks")
    if "output" in options.questions:
        outputs.measure(options, report)
    report.finish()
    return answers


def compute(
    options: ChoicesOptions, folder: Path, *, resume: bool = False, processes: int = 1
) -> list[Answer]:
    """The answers to all questions but that of the output: everything that takes long."""
    # Which questions were asked is not part of an answer.
    kept = Kept(folder / "kept.json", dataclasses.replace(options, questions=()), resume=resume)
    asked = [
        (name, place, one)
        for name in QUESTIONS
        if name != "output" and name in options.questions
        for place, one in enumerate(getattr(questions, name)(options))
    ]
    tasks = {one.name: functools.partial(_answered, name, place, options) for name, place, one in asked}
    found = kept.fill(tasks, processes)
    return [one.known(found[one.name]) for _, _, one in asked]


def _answered(name: str, place: int, options: ChoicesOptions) -> dict[str, Any]:
    """One answer to a question. Variants are functions, which other processes cannot be sent."""
    return answer(getattr(questions, name)(options)[place])


def _rows(answers: list[Answer]) -> list[dict[str, Any]]:
    first, rows = {}, []
    for one in answers:
        mean = first.setdefault((one.question, one.case), one.steps.mean())
        row: dict[str, Any] = {"question": one.question, "case": one.case, "variant": one.variant}
        done = np.isfinite(one.steps)
        row["T"] = spread(one.steps, 0) if done.all() else f"{done.sum()} of {done.size} reached ε²"
        row["×"] = f"{one.steps.mean() / mean:.2f}" if done.all() and np.isfinite(mean) else ""
        row["c, η, τ"] = ", ".join(f"{value:g}" for value in one.best or ())
        rows.append(row)
    return rows


@figures.styled
def _plot(answers: list[Answer]) -> Any:
    asked = list(dict.fromkeys(one.question for one in answers))
    columns = min(len(asked), 3)
    figure, axes = figures.panels(-(-len(asked) // columns), columns, height=2.6)
    for axis in axes.flat[len(asked) :]:
        axis.remove()
    for axis, question in zip(axes.flat, asked, strict=False):
        shown = [one for one in answers if one.question == question]
        cases = list(dict.fromkeys(one.case for one in shown))
        variants = list(dict.fromkeys(one.variant for one in shown))
        steps = {(one.case, one.variant): one.steps for one in shown if np.isfinite(one.steps).all()}
        series = {name: [steps.get((case, name), np.array([np.nan])) for case in cases] for name in variants}
        styles = dict(zip(variants, figures.shades(len(variants)), strict=True))
        figures.bars(axis, cases, series, styles)
        axis.set_xticks(range(len(cases)), cases, rotation=25, ha="right", rotation_mode="anchor")
        axis.set(title=question, ylabel="steps T")
        # Below the slanted labels.
        figures.legend_below(axis, columns=1, drop=0.25 + 0.023 * max(len(case) for case in cases))
    return figure


def _growth(answers: list[Answer], options: ChoicesOptions) -> Exponent:
    """The exponent in m/I of T with sampled blocks over T with all blocks, seed by seed."""
    sampled, lazy = (
        np.stack([one.steps for one in answers if one.variant == variant])
        for variant in ("sampled", "all, lazily")
    )
    ratios = np.array([1 / options.sizes_with(copies).ratio for copies in options.copies])
    return fit_exponent(ratios, sampled / lazy)
