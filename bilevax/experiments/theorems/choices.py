"""`bilevax reproduce choices`: what the text leaves open, each way tuned and timed in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bilevax.experiments.report import Report, spread
from bilevax.experiments.theorems import outputs, questions
from bilevax.experiments.theorems.answers import QUESTIONS, Answer, Settings
from bilevax.experiments.theorems.fits import Exponent, fit_exponent


def run(settings: Settings, folder: str | Path, *, quick: bool = False) -> list[Answer]:
    """Answers all questions; writes tables into a folder."""
    settings = settings.quick() if quick else settings
    report = Report(folder, settings, quick=quick)
    asked = {name: getattr(questions, name) for name in QUESTIONS if name != "output"}
    answers = [one for name, ask in asked.items() if name in settings.questions for one in ask(settings)]
    if answers:
        note = (
            "T: steps until the mean of ‖∇F‖² is below ε², mean ± standard deviation over seeds, each way "
            "with the best (c, factor of η, factor of τ) of a grid, chosen on other seeds. ×: T over that of "
            "the first way."
        )
        report.table("choices", _rows(answers), "What the text leaves open", note)
    if "blocks" in settings.questions:
        growth = {"T(sampled)/T(all) in m/I": str(_growth(answers, settings)), "the paper's bounds": "0.50"}
        report.table("growth", [growth], "Sampled blocks against all of them")
    if "output" in settings.questions:
        outputs.measure(settings, report)
    report.finish()
    return answers


def _rows(answers: list[Answer]) -> list[dict[str, Any]]:
    first, rows = {}, []
    for one in answers:
        mean = first.setdefault((one.question, one.case), one.steps.mean())
        row: dict[str, Any] = {"question": one.question, "case": one.case, "way": one.way}
        there = np.isfinite(one.steps)
        row["T"] = spread(one.steps, 0) if there.all() else f"{there.sum()} of {there.size} got there"
        row["×"] = f"{one.steps.mean() / mean:.2f}" if there.all() and np.isfinite(mean) else ""
        row["c, η, τ"] = ", ".join(f"{value:g}" for value in one.best or ())
        rows.append(row)
    return rows


def _growth(answers: list[Answer], settings: Settings) -> Exponent:
    """The exponent in m/I of T with sampled blocks over T with all blocks, seed by seed."""
    of = {way: [one.steps for one in answers if one.way == way] for way in ("all, lazily", "sampled")}
    ratios = np.stack(of["sampled"]) / np.stack(of["all, lazily"])
    return fit_exponent(np.array([1 / settings.sampling(copies).ratio for copies in settings.copies]), ratios)
