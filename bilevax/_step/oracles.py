"""What a run has asked of f and g: gradients, products with second derivatives, rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Rows, Shared
from bilevax._problem.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Oracles:
    """Oracle calls, each for one block on one batch.

    Attributes:
      gradients: of f by x, of f by y, of g by y; values of c for mean levels.
      products: of ∇²_yy g or ∇²_xy g with a vector (for mean levels, of a vector with ∇c).
      matrices: whole Hessians ∇²_yy g and Jacobians ∇²_xy g.
      rows: rows drawn for them, of the upper and of the lower data.
    """

    gradients: int = 0
    products: int = 0
    matrices: int = 0
    rows: int = 0

    def __add__(self, other: Oracles) -> Oracles:
        return Oracles(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __mul__(self, times: float) -> Oracles:
        return Oracles(*(round(times * value) for value in self._values()))

    def _values(self) -> tuple[int, ...]:
        return dataclasses.astuple(self)


def count_oracles(
    problem: Problem, solver: Any, sampler: Sampler, steps: int, first_rows: int | None
) -> Oracles | None:
    """What a run has asked for after some steps, its first pass included.

    The estimate of L_g, made once where a step was left out, is not counted.

    Args:
      problem: the problem.
      solver: the solver; one that does not say what it asks for (`oracles`) is not counted.
      sampler: the plan of sampling.
      steps: the steps taken.
      first_rows: rows per block of the first pass; None for all of them, 0 for no pass.
    """
    method = getattr(solver, "solver", solver)
    if not hasattr(method, "oracles"):
        return None
    count = getattr(method, "count_oracles", functools.partial(count_visits, method))
    return count(problem, sampler, steps, first_rows)


def count_visits(
    method: Any, problem: Problem, sampler: Sampler, steps: int, first_rows: int | None
) -> Oracles:
    """The visits of a method that looks at all blocks first, and at I of them in a step."""
    visits = steps * sampler.per_step
    total = method.oracles(problem) * visits + count_rows(problem, sampler.batch_size, visits)
    return total if first_rows == 0 else total + count_pass(method, problem, first_rows)


def count_pass(method: Any, problem: Problem, rows: int | None) -> Oracles:
    """A look at all blocks, at one point, on so many rows or (None) all of them."""
    points = 2 if getattr(method, "corrected", True) else 1
    return method.oracles(problem) * (problem.count / points) + count_rows(problem, rows, problem.count)


def count_rows(problem: Problem, size: int | None, visits: int) -> Oracles:
    """The rows that so many visits draw."""
    return Oracles(rows=round(visits * rows_per_visit(problem, size)))


def rows_per_visit(problem: Problem, size: int | None) -> float:
    """The rows that a visit draws on average, from all sources."""
    return sum(_per_visit(source, size) for source in (problem.upper_data, *problem.lower_data))


def _per_visit(source: Rows | None, size: int | None) -> float:
    if source is None:
        return 0
    if size is not None:
        return size
    if isinstance(source, PerBlock):
        return source.average
    return source.count if isinstance(source, Shared) else getattr(source, "count", 0)
