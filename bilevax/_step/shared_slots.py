"""Slots that several visits of one step touch: each of them sees the mean of what all have seen there.

The variable of such a slot belongs to a lower problem that is a mean over the blocks that touch it, and an
estimator that is refreshed with the mean of their samples is the same whichever of them writes it last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._util.trees import PyTree, spread


def averaged_over_visits(problem: Problem, sample: Sample, seen: dict[str, PyTree]) -> dict[str, PyTree]:
    """By level, what the visits of a step have seen, averaged over those of the same slot.

    Args:
      problem: the problem.
      sample: the visits.
      seen: per level a tree whose leading axes are the visited slots; levels may be missing.
    """
    return {
        name: _averaged(sample.slots[name], tree) if problem.levels[name].may_meet else tree
        for name, tree in seen.items()
    }


def _averaged(slots: Array, tree: PyTree) -> PyTree:
    flat = slots.reshape(-1)
    order = jnp.argsort(flat)
    ordered = flat[order]
    first = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    group = jnp.zeros_like(flat).at[order].set(jnp.cumsum(first).astype(flat.dtype), unique_indices=True)
    visits = jnp.zeros(flat.shape, jnp.float32).at[group].add(1.0)[group]

    def mean(leaf: Array) -> Array:
        rows = leaf.reshape(flat.shape + leaf.shape[slots.ndim :])
        total = jnp.zeros_like(rows).at[group].add(rows)[group]
        return (total / spread(visits.astype(leaf.dtype), total)).reshape(leaf.shape)

    return jax.tree.map(mean, tree)
