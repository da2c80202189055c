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

import bilevax as bx
from bilevax.solvers.toolkit import BlockView, Look, Memory, Sample, Visit, each_block, moving_average, track


class Fresh:
    """Put before a recipe's class, lets it see its mean levels after their refresh."""

    def look(
        self: Any, problem: bx.Problem, state: bx.State, sample: Sample, visits: dict[str, Visit]
    ) -> Look:
        seen = dict(visits)
        for name, level in problem.levels.items():
            if not level.has_hessian:
                seen[name] = self._refreshed(problem, state, sample, visits[name])
        return bx.Recipe.look(self, problem, state, sample, seen)

    def _refreshed(self: Any, problem: bx.Problem, state: bx.State, sample: Sample, visit: Visit) -> Visit:
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


class FreshSONG(Fresh, bx.SONG):
    """SONG with fresh means; its arguments are those of `bilevax.SONG`."""


class FreshKSONG(Fresh, bx.KSONG):
    """K-SONG with fresh means; its arguments are those of `bilevax.KSONG`."""


class FreshBSVRBv1(Fresh, bx.BSVRBv1):
    """BSVRB v1 with fresh means; its arguments are those of `bilevax.BSVRBv1`."""


def slot_means(problem: bx.Problem, name: str, x: Any, sample: Sample) -> Any:
    """c(x) of the touched slots of a mean level."""

    def one(view: BlockView) -> Any:
        return view.c(name)

    return each_block(problem, x, sample, one)
