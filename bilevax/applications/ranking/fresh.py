r"""Recipes that look at every mean level after its refresh, at both points of a step.

The core's recipes take G with the means from *before* a step's refresh, as the theory does. A pair's rank is
refreshed once in hundreds of steps: by then its stored estimate belongs to another model, and STORM's
difference G − G̃ contains that whole distance. Here the mean of a visited slot is

.. math::
    \text{now:}\quad & (1-\alpha) u + \alpha c(x_t) + \gamma (c(x_t) - c(x_{t-1})) \\
    \text{before:}\quad & (1-\alpha) u + \alpha c(x_{t-1})

so that the two differ only by what x has moved in one step. Moving-average methods have the first line
alone, without γ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from bilevax._problem.levels import Mean
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._step.estimators import moving_average
from bilevax._step.lagrangian import over_blocks
from bilevax._step.slots import Memory
from bilevax._step.trackers import Look, Visit, track
from bilevax._util.trees import PyTree
from bilevax.solvers import KSONG, SONG, BSVRBv1, Recipe, State


class Fresh:
    """Put before a recipe's class, lets it see its mean levels after their refresh."""

    def look(self: Any, problem: Problem, state: State, sample: Sample, visits: dict[str, Visit]) -> Look:
        seen = dict(visits)
        for name, level in problem.levels.items():
            if isinstance(level, Mean):
                seen[name] = self._refreshed(problem, state, sample, visits[name])
        return Recipe.look(self, problem, state, sample, seen)

    def _refreshed(self: Any, problem: Problem, state: State, sample: Sample, visit: Visit) -> Visit:
        """The visit as it would be found had the slots been refreshed before both points."""
        xs = [state.x, state.x_before] if self.corrected else [state.x]
        means = [slot_means(problem, visit.name, x, sample) for x in xs]
        stored, rates = visit.rows.y, visit.rates
        rows = Memory(y=track(stored, means, rates.alpha, rates.gamma))
        if self.corrected:
            before = moving_average(stored, means[1], rates.alpha)
            just_now = jnp.broadcast_to(visit.step - 1, sample.slots[visit.name].shape)
            rows = Memory(y=rows.y, previous=before, visit=just_now)
        return dataclasses.replace(visit, rows=rows)


class FreshSONG(Fresh, SONG):
    """SONG with fresh means; its arguments are those of `bilevax.SONG`."""


class FreshKSONG(Fresh, KSONG):
    """K-SONG with fresh means; its arguments are those of `bilevax.KSONG`."""


class FreshBSVRBv1(Fresh, BSVRBv1):
    """BSVRB v1 with fresh means; its arguments are those of `bilevax.BSVRBv1`."""


def slot_means(problem: Problem, name: str, x: PyTree, sample: Sample) -> PyTree:
    """c(x) of the touched slots of a mean level."""
    level = problem.levels[name]
    assert isinstance(level, Mean)

    def one(x: PyTree, y: Any, v: Any, constants: PyTree, upper: Any, lower: Any) -> Array:
        return level.value(x, constants, lower[name].rows, lower[name].weight)

    return over_blocks(one, sample)(x, None, None, sample.constants, sample.upper, sample.lower)
