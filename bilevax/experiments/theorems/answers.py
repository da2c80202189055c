"""The steps that one variant takes, with the best parameters of a grid."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.base_options import TheoremOptions
from bilevax.experiments.theorems.curved_truth import truth_of
from bilevax.experiments.theorems.problems import (
    FAMILIES,
    TheoremFamily,
    initial_rows,
    make_family,
    make_task,
    step_constants,
)
from bilevax.experiments.theorems.scalings import LOWER, UPPER, Sizes, variance_reduced


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid of parameters: c, and multiples of the factors of η and τ in `variance_reduced`."""

    constants: tuple[float, ...]
    uppers: tuple[float, ...] = (1.0,)
    lowers: tuple[float, ...] = (1.0,)

    def points(self) -> list[tuple[float, float, float]]:
        """All combinations."""
        return list(itertools.product(self.constants, self.uppers, self.lowers))


GRIDS = {
    "blocks": Grid((0.5, 0.7, 1.0, 1.4), (0.35, 1.0, 2.0, 4.0), (0.03, 0.1, 0.3, 1.0)),
    "gamma": Grid((0.5, 0.7, 1.0, 1.4, 2.0, 2.8), (0.03, 0.1, 0.3, 1.0)),
    "hessian": Grid((0.5, 0.7, 1.0), (0.5, 1.0, 2.0)),
    "slope": Grid((0.5, 0.7, 1.0), (0.5, 1.0, 2.0), (0.3, 1.0)),
    "projection": Grid((0.5, 0.7, 1.0)),
    "start": Grid((0.35, 0.5, 0.7)),
    "output": Grid((0.35, 0.5, 0.7, 1.0)),
}
QUESTIONS = tuple(GRIDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoicesOptions(TheoremOptions):
    """The options of `bilevax reproduce choices`, besides `TheoremOptions`.

    Attributes:
      questions: names from `QUESTIONS`.
      family: "quadratic", or "curved": blocks whose Hessian and Jacobian move with x and y.
      epsilon: T is the number of steps until the mean of ‖∇F‖² is at most ε².
      start_epsilon: the ε of the question "start", which matters most when ε is small.
      grids: the grid of parameters, by question.
      copies: multiples of `blocks` for m, in the question "blocks". "gamma" and "slope" use the first and
        the third, "projection" the second, the others the first.
      tuning_seeds: runs per point of the grid; `seeds` are run at the best one.
      max_steps: maximum number of steps of a run at the smallest m; proportionally more for larger m.
    """

    questions: tuple[str, ...] = QUESTIONS
    family: str = "quadratic"
    epsilon: float = 0.2
    start_epsilon: float = 0.1
    grids: dict[str, Grid] = dataclasses.field(default_factory=lambda: dict(GRIDS))
    copies: tuple[int, ...] = (1, 2, 4, 8)
    tuning_seeds: int = 2
    max_steps: int = 20_000

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be among {list(FAMILIES)}, got {self.family!r}")
        for name in self.questions:
            if name not in QUESTIONS:
                raise ValueError(f"questions must be among {list(QUESTIONS)}, got {name!r}")

    def quick(self) -> ChoicesOptions:
        """A short check: one point of the grid, few seeds, two values of m and a large ε."""
        grids = {name: Grid((0.5,), (0.35,), (0.3,)) for name in GRIDS}
        return dataclasses.replace(
            self, epsilon=0.4, start_epsilon=0.4, grids=grids, copies=(1, 2), seeds=2, max_steps=2000
        )

    def sizes_with(self, copies: int) -> Sizes:
        """m, I and B, with `copies` of each block."""
        return dataclasses.replace(self.sizes, blocks=self.blocks * copies)

    def blocks_with(self, copies: int) -> TheoremFamily:
        """The problem with `copies` of each block."""
        return make_family(self.family, self.blocks, self.dimension, self.rows, copies)


MakeVariant = Callable[[dict[str, Any]], Any]  # from the coefficients of `variance_reduced`


@dataclasses.dataclass(frozen=True)
class Answer:
    """The steps of one variant.

    Attributes:
      question, variant, case: the question, the name of the variant, and the problem or size it was run at.
      steps: T per seed; infinite where a run did not reach ε².
      best: the best c and factors of η and τ; None if no point of the grid reached ε².
    """

    question: str
    variant: str
    case: str
    steps: np.ndarray
    best: tuple[float, float, float] | None


@dataclasses.dataclass(frozen=True)
class Asked:
    """One variant whose steps are asked for.

    Attributes:
      question, variant: the question and the name of the variant.
      make: makes the solver from the coefficients of `variance_reduced`.
      options: of the experiment.
      copies: of each block.
      named: the case that is shown in the table; m/I by default.
      family: the problem; that of the options by default.
      initial: rows per block of the initial estimators; O(1/ε) by default.
    """

    question: str
    variant: str
    make: MakeVariant
    options: ChoicesOptions
    copies: int
    named: str | None = None
    family: TheoremFamily | None = None
    initial: Any = "by ε"

    @property
    def case(self) -> str:
        """The problem or the size."""
        return self.named or f"m/I = {1 / self.options.sizes_with(self.copies).ratio:g}"

    @property
    def name(self) -> str:
        """The name by which the answer is kept."""
        return f"{self.question}: {self.variant}, {self.case}"

    def known(self, found: dict[str, Any]) -> Answer:
        """The answer, from what `answer` found."""
        best = None if found["best"] is None else tuple(found["best"])
        return Answer(self.question, self.variant, self.case, np.array(found["steps"], float), best)


def answer(asked: Asked) -> dict[str, Any]:
    """T of one variant with its best parameters: "steps" and "best" of `Answer`, to be kept."""
    options, copies = asked.options, asked.copies
    family, sizes = asked.family or options.blocks_with(copies), options.sizes_with(copies)
    print(asked.name)
    points, known = options.grids[asked.question].points(), step_constants(family)
    solvers = [
        asked.make(variance_reduced(c, options.epsilon, sizes, known, UPPER * up, LOWER * low))
        for c, up, low in points
    ]
    initial = initial_rows(options.epsilon) if asked.initial == "by ε" else asked.initial
    task = make_task(family, sizes, initial)
    squared, goal = truth_of(family).squared_gradient, options.epsilon**2
    max_steps = options.max_steps * copies
    best = 0
    if len(solvers) > 1:
        keys = jax.random.split(jax.random.key(options.seed + 1000), options.tuning_seeds)
        tuning = lanes.steps_until(task, solvers, keys, squared, goal, max_steps, race=True).steps.mean(1)
        if not np.isfinite(tuning).any():
            return {"steps": np.full(options.seeds, np.inf), "best": None}
        best = int(np.argmin(tuning))
    keys = jax.random.split(jax.random.key(options.seed), options.seeds)
    steps = lanes.steps_until(task, [solvers[best]], keys, squared, goal, 3 * max_steps).steps[0]
    return {"steps": steps, "best": points[best]}
