"""A problem with an exact F, for how well a run does with nothing given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import bilevax as bx

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, where a run starts, and how much of it a step sees.

    Attributes:
      problem: the problem.
      x0: where x starts.
      y0: where the lower variables start.
      steps: of a run.
      blocks_per_step: I.
      batch_size: B.
      value: F(x), exactly.
      value_and_gradient: both, for L-BFGS; None if that does not apply.
      evaluations: of L-BFGS.
    """

    problem: bx.Problem
    x0: PyTree
    y0: PyTree
    steps: int
    blocks_per_step: int | None
    batch_size: int | None
    value: Callable[[PyTree], float]
    value_and_gradient: Callable[[PyTree], tuple[float, PyTree]] | None
    evaluations: int = 200


def solved(problem: bx.Problem, x0: PyTree, y0: PyTree, steps: int, blocks: int, rows: int) -> Case:
    """A case whose F is computed by the diagnostics, each evaluation from the y of the one before."""
    latest = [y0]

    def both(x: PyTree) -> tuple[float, PyTree]:
        value, gradient, latest[0] = bx.value_and_hypergradient(problem, x, latest[0])
        return float(value), gradient

    def value(x: PyTree) -> float:
        return float(bx.objective(problem, x, y0))

    return Case(problem, x0, y0, steps, blocks, rows, value, both)
