"""Estimates of L_g and λ, the extreme curvatures of the lower problems, where a user leaves them out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import POWER, Sample, Sampler
from bilevax._problem.stream import Stream, permuted
from bilevax._problem.view import BlockView, each_block
from bilevax._step.lagrangian import Point, hessians
from bilevax._step.linear_algebra import one_by_one, run_if
from bilevax._step.slots import gather
from bilevax._util.trees import norm

PyTree = Any

_BLOCKS = 64
_PASSES = 20
_RENEWAL = 32  # steps between two looks at the curvature
_RENEWAL_PASSES = 4
_FORGOTTEN = 0.9  # the factor by which an estimate falls at most, from look to look
_GROWN = 4.0  # the growth of the slopes beside their recent average that asks for a look
_RECENT = 0.1  # the weight of a step in that average


class Smoothness(eqx.Module):
    """An estimate of L_g, and what shows when it is no longer right.

    Attributes:
      value: the estimate.
      gradient: the root mean square of ‖(∂ℓ/∂v, ∂ℓ/∂y)‖ over the visited blocks, averaged over the latest
        steps; 0 before the first.
    """

    value: Array
    gradient: Array


def estimate_smoothness(
    problem: Problem, x: PyTree, y: dict[str, PyTree], sampler: Sampler
) -> dict[str, Array]:
    """The largest curvature of each argmin level, by power iteration over sampled blocks.

    Args:
      problem: the problem.
      x: where to look.
      y: per level the slots' variables, where to look.
      sampler: its batch size is used: steps must be stable on what they see.

    Returns:
      L_g by level; mean levels, whose Hessian is the identity, are left out.
    """
    sample = _probe(problem, sampler)
    # Not the run's own key: a run over all blocks and all rows must not depend on it.
    here = sample.blocks.shape[0]
    first = 0 if sampler.axis is None else jax.lax.axis_index(sampler.axis) * here
    keys = jax.random.split(jax.random.key(0), here * sampler.devices)[first + jnp.arange(here)]
    out = {}
    for name, level in problem.levels.items():
        if level.has_hessian:
            rows = gather(y[name], sample.slots[name])
            look = functools.partial(_largest_curvature, name, _PASSES)
            worst = sampler.largest(jnp.max(each_block(problem, x, sample, look, rows, keys)))
            out[name] = jnp.where(worst > 0, worst, 1)
    return out


def renew_smoothness(
    problem: Problem,
    name: str,
    point: Point,
    slopes: tuple[PyTree, PyTree],
    draw: Callable[[], Sample],
    sampler: Sampler,
    known: Smoothness,
    step: Array,
) -> Smoothness:
    """The estimate of L_g after a step: the visited blocks are looked at again every few steps.

    x changes the curvature of the lower problems. If steps have become too long for it, the slopes grow from
    step to step: then the blocks are looked at immediately. The estimate rises at once, and falls slowly.

    Args:
      problem: the problem.
      name: the level.
      point: where the step looked.
      slopes: per visited block ∂ℓ/∂v and ∂ℓ/∂y.
      draw: returns the visited blocks and their rows. They are drawn again: if the program of a step had to
        keep them for a look that is rarely taken, it could not merge drawing them with using them.
      sampler: the plan of sampling.
      known: the estimate so far.
      step: t.
    """

    def compute() -> Array:
        sample, look = draw(), functools.partial(_largest_curvature, name, _RENEWAL_PASSES)
        keys = jnp.broadcast_to(jax.random.key(0), sample.blocks.shape)
        found = jnp.max(each_block(problem, point.x, sample, look, point.y[name], keys))
        return jnp.maximum(sampler.largest(found).astype(known.value.dtype), _FORGOTTEN * known.value)

    share = norm(slopes) / jax.tree.leaves(slopes)[0].shape[0] ** 0.5
    gradient = sampler.root_mean_square(share).astype(known.gradient.dtype)
    growing = (gradient > _GROWN * known.gradient) & (known.gradient > 0)
    value = run_if((step % _RENEWAL == 0) | growing, compute, known.value)
    return Smoothness(value, known.gradient + _RECENT * (gradient - known.gradient))


def _largest_curvature(name: str, passes: int, view: BlockView, y: PyTree, key: Array) -> Array:
    """The largest eigenvalue, by size, of one block's ∇²_yy g: a power iteration.

    Few passes give too little, but a step of 2/(3 L_g) is stable with a third of the true L_g.
    """
    gradient = jax.grad(lambda y: view.g(name, y))

    def iterate(_: Any, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        v, _size = carry
        image = jax.jvp(gradient, (y,), (v,))[1]
        size = norm(image)
        return jax.tree.map(lambda a: a / jnp.where(size > 0, size, 1).astype(a.dtype), image), size

    leaves, structure = jax.tree.flatten(y)
    parts = jax.random.split(key, len(leaves))
    start = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(parts, leaves, strict=True)]
    start = jax.tree.unflatten(structure, start)
    start = jax.tree.map(lambda a: a / norm(start).astype(a.dtype), start)
    return jax.lax.fori_loop(0, passes, iterate, (start, jnp.zeros((), norm(start).dtype)))[1]


def estimate_floor(
    problem: Problem, name: str, x: PyTree, y: dict[str, PyTree], sampler: Sampler, smoothness: Array
) -> Array:
    """A floor λ for the tracked Hessians of a level: half the least curvature that a batch shows.

    In most directions a batch of few rows has the curvature of the regulariser alone, and λ must not exceed
    that. If some direction has no curvature at all, the floor is a thousandth of L_g.
    """
    sample = _probe(problem, sampler)
    point = Point(x, {level: gather(y[level], sample.slots[level]) for level in y})
    eigenvalues = jax.vmap(one_by_one(lambda matrix: jnp.linalg.eigvalsh(matrix)))
    least = -sampler.largest(-jnp.min(eigenvalues(hessians(problem, name, point, sample))))
    return jnp.where(least > 1e-6 * smoothness, least / 2, 1e-3 * smoothness)


def _probe(problem: Problem, sampler: Sampler) -> Sample:
    """Some blocks, with the run's batch size: steps must be stable on what they see."""
    size = sampler.stratum_size
    count = min(size, -(-_BLOCKS // ((sampler.strata or 1) * sampler.devices)))

    def of_stratum(place: Any) -> Sample:
        chosen = permuted(sampler.stream(Stream.start(jax.random.key(0)), place), jnp.arange(count), size)
        random = sampler.stream(sampler.random.at(POWER), place)
        return sampler.visit(problem, place * size + chosen, random, sampler.batch_size)

    return sampler.by_stratum(of_stratum)
