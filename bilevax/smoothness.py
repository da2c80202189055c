"""An estimate of L_g, the smoothness of the lower problems, from which steps left out are set."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bilevax.lagrangian import over_blocks
from bilevax.memory import gather
from bilevax.problem import Argmin, Problem
from bilevax.sampling import POWER, Sampler, permuted
from bilevax.trees import norm

PyTree = Any

_BLOCKS = 64
_PASSES = 20


def estimate_smoothness(
    problem: Problem, x: PyTree, y: dict[str, PyTree], sampler: Sampler
) -> dict[str, Array]:
    """The largest curvature of each argmin level, by power iteration over sampled blocks.

    Args:
      problem: the problem.
      x: where to look.
      y: per level the slots' variables, where to look.
      sampler: gives the batch size: what a step sees is what must be stable.

    Returns:
      L_g by level; mean levels, whose Hessian is the identity, are left out.
    """
    key = sampler.stream(POWER, 0)
    count = min(problem.count, _BLOCKS)
    blocks = jnp.arange(count) if count == problem.count else permuted(key, jnp.arange(count), problem.count)
    sample = sampler.visit(problem, blocks, key, sampler.batch_size)
    out = {}
    for name, level in problem.levels.items():
        if not isinstance(level, Argmin):
            continue

        def largest(x: Any, y: Any, key: Any, constants: Any, upper: Any, lower: Any, name=name, level=level) -> Array:
            def gradient(y: PyTree) -> PyTree:
                return jax.grad(lambda y: level.value(x, y, constants, lower[name].rows, lower[name].weight))(y)

            def iterate(_: Any, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
                v, _size = carry
                image = jax.jvp(gradient, (y,), (v,))[1]
                size = norm(image)
                return jax.tree.map(lambda a: a / jnp.where(size > 0, size, 1).astype(a.dtype), image), size

            leaves, structure = jax.tree.flatten(y)
            keys = jax.random.split(key, len(leaves))
            start = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
            start = jax.tree.unflatten(structure, start)
            start = jax.tree.map(lambda a: a / norm(start).astype(a.dtype), start)
            return jax.lax.fori_loop(0, _PASSES, iterate, (start, jnp.zeros((), norm(start).dtype)))[1]

        keys = jax.random.split(jax.random.fold_in(key, 1), count)
        rows = gather(y[name], sample.slots[name])
        sizes = over_blocks(largest, sample)(x, rows, keys, sample.constants, sample.upper, sample.lower)
        worst = jnp.max(sizes)
        out[name] = jnp.where(worst > 0, worst, 1)
    return out
