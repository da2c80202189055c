"""How often a run has called f and g: gradients, products with second derivatives, rows."""

from __future__ import annotations

import dataclasses

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


def count_steps(per_visit: Oracles, problem: Problem, sampler: Sampler, steps: int) -> Oracles:
    """The calls of some steps, each of which visits I blocks."""
    visits = steps * sampler.per_step
    return per_visit * visits + count_rows(problem, sampler.batch_size, visits)


def count_pass(per_block: Oracles, problem: Problem, rows: int | None) -> Oracles:
    """The calls of one pass over all blocks, on that many rows or (None) all of them."""
    return per_block * problem.count + count_rows(problem, rows, problem.count)


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
