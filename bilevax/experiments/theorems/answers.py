"""One way to do a thing, tuned: the steps it takes with the best parameters of a grid."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bilevax.experiments.theorems import lanes
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task
from bilevax.experiments.theorems.scalings import LOWER, UPPER, Sizes, variance_reduced
from bilevax.experiments.theorems.truth import Truth
from bilevax.testing.quadratic_upper import QuadraticUpper


@dataclasses.dataclass(frozen=True)
class Grid:
    """The parameters to choose from: c, and multiples of the factors of η and τ, of `variance_reduced`."""

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
    "projection": Grid((0.5, 0.7, 1.0)),
    "start": Grid((0.35, 0.5, 0.7)),
    "output": Grid((0.35, 0.5, 0.7, 1.0)),
}
QUESTIONS = tuple(GRIDS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bilevax reproduce choices` is run with.

    Attributes:
      questions: of `QUESTIONS`.
      epsilon: T is the steps until the mean of ‖∇F‖² is below ε².
      start_epsilon: the ε of the question about the start, which matters most when ε is small.
      grids: the parameters to choose from, by question.
      copies: m as multiples of `blocks`, for the question about blocks; γ takes the first and the third of
        them, the projection the second, the others the first.
      tuning_seeds: runs per setting that the best one is chosen by.
      seeds: runs of the best setting, with other keys.
      seed: of the first of them.
      most: the most steps of a run at the least m; more in proportion to m.
      blocks, blocks_per_step, batch_size: m, I, B.
      dimension, rows: d_x = d_y, and rows per block.
    """

    questions: tuple[str, ...] = QUESTIONS
    epsilon: float = 0.2
    start_epsilon: float = 0.1
    grids: dict[str, Grid] = dataclasses.field(default_factory=lambda: dict(GRIDS))
    copies: tuple[int, ...] = (1, 2, 4, 8)
    tuning_seeds: int = 2
    seeds: int = 8
    seed: int = 0
    most: int = 20_000
    blocks: int = 20
    blocks_per_step: int = 5
    batch_size: int = 4
    dimension: int = 5
    rows: int = 100

    def __post_init__(self) -> None:
        for name in self.questions:
            if name not in QUESTIONS:
                raise ValueError(f"questions must be among {list(QUESTIONS)}, got {name!r}")

    def quick(self) -> Settings:
        """One setting of the parameters, few seeds, two values of m and a large ε."""
        grids = {name: Grid((0.5,), (0.35,), (0.3,)) for name in GRIDS}
        return dataclasses.replace(
            self, epsilon=0.4, start_epsilon=0.4, grids=grids, copies=(1, 2), seeds=2, most=2000
        )

    def sampling(self, copies: int) -> Sizes:
        """m, I and B."""
        return Sizes(self.blocks * copies, self.blocks_per_step, self.batch_size)

    def family(self, copies: int) -> QuadraticUpper:
        """The problem with so many copies of each block."""
        return make_family(False, self.blocks, self.dimension, self.rows, copies)


Make = Callable[[dict[str, float]], Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One way to do it.

    Attributes:
      question, way, case: what is asked, which way this is, and where it is asked.
      steps: T per seed; infinite where a run did not get there.
      best: the c and the factors of η and τ that were chosen; None if none got there.
    """

    question: str
    way: str
    case: str
    steps: np.ndarray
    best: tuple[float, float, float] | None


def answer(
    question: str,
    way: str,
    make: Make,
    settings: Settings,
    copies: int,
    case: str | None = None,
    family: QuadraticUpper | None = None,
    initial: Any = "by ε",
) -> Answer:
    """T of one way with its best parameters.

    Args:
      question, way: what is asked, and the name of this way.
      make: the solver, from the numbers of `variance_reduced`.
      settings: of the experiment.
      copies: of each block.
      case: where it is asked; left out, m/I.
      family: the problem; left out, the usual one.
      initial: rows per block of the first estimators; left out, O(1/ε).

    Returns:
      The answer.
    """
    family, sampling = family or settings.family(copies), settings.sampling(copies)
    case = case or f"m/I = {1 / sampling.ratio:g}"
    print(f"{question}: {way}, {case}")
    points = settings.grids[question].points()
    solvers = [
        make(variance_reduced(c, settings.epsilon, sampling, family.constants, UPPER * up, LOWER * low))
        for c, up, low in points
    ]
    task = make_task(family, sampling, initial_rows(settings.epsilon) if initial == "by ε" else initial)
    squared, goal, most = Truth.of(family).squared_gradient, settings.epsilon**2, settings.most * copies
    best = 0
    if len(solvers) > 1:
        keys = jax.random.split(jax.random.key(settings.seed + 1000), settings.tuning_seeds)
        tuning = lanes.steps_until(task, solvers, keys, squared, goal, most, race=True).steps.mean(1)
        if not np.isfinite(tuning).any():
            return Answer(question, way, case, np.full(settings.seeds, np.inf), None)
        best = int(np.argmin(tuning))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    steps = lanes.steps_until(task, [solvers[best]], keys, squared, goal, 3 * most).steps[0]
    return Answer(question, way, case, steps, points[best])
