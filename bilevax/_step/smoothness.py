r"""The curvature of the lower problems, where a user leaves their steps out.

y and v descend along P ∇_y g and P (∇²_yy g v − ∇_y f), where P = 1/D is diagonal and D is the diagonal of
∇²_yy g, averaged over blocks. So the entries of y may have different units. The step is 2/(3 L), where L is
the largest eigenvalue of D^{-1/2} ∇²_yy g D^{-1/2} in any block, so that ∇²_yy g ≤ L D.

Both are estimated from products with ∇²_yy g: D from r ∘ (∇²_yy g r), which has the diagonal as its mean if
the entries of r are random signs; L by a power iteration.

Variables that optimise f itself may sit at kinks of f, such as the threshold of a CVaR, where f has no second
derivative. So L is also at least as large as the slope of f changes along a step of that length. Where there
is no curvature at all, the first guess is a step that would bring f to zero.
"""

from __future__ import annotations

import dataclasses
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
from bilevax._step.linear_algebra import one_by_one
from bilevax._step.slots import gather
from bilevax._util.per_entry import PerEntry
from bilevax._util.trees import inner, norm, result_dtype

PyTree = Any

_SAFE = 2 / 3  # τ L
_BLOCKS = 64
_PROBES, _ROUNDS, _PASSES = 8, 3, 20
_RENEWAL = 32  # steps between two looks at the curvature
_RENEWAL_PROBES, _RENEWAL_PASSES = 2, 4
_RISE, _FALL = 0.2, 0.05  # the weight of a look in D
_FORGOTTEN = 0.9  # the factor by which L falls at most, from look to look
_SHARE = 0.05  # the least entry of D, as a share of the size of its row
_NOTHING = 1e-6  # of the largest entry of D: less is no curvature, where variables optimise f
_LEAST = 1e-12  # the least entry of D, as a share of the largest
_GROWN = 4.0  # the growth of f beside its recent average that asks for a look
_RECENT = 0.1  # the weight of a step in that average
_DOUBLINGS = 20  # how often L of a saddle point may be doubled at the start
_SHORTER = 40  # how often the first step of variables that optimise f may be shortened


class Smoothness(eqx.Module):
    """An estimate of the curvature of a level, and what shows when it is no longer right.

    Attributes:
      value: L.
      scales: P, one slot's.
      recent: |f|, averaged over the latest steps; 0 before the first.
      inverse: whether v moves with P, too; not if the user gave a step for it.
      due: whether it is time for another look.
      renewed: whether the estimate changes during a run; not if the user gave it.
    """

    value: Array
    scales: PyTree
    recent: Array
    due: Array
    inverse: bool = eqx.field(static=True, default=True)
    renewed: bool = eqx.field(static=True, default=True)

    @classmethod
    def given(cls, steps: PerEntry, inverse: bool) -> Smoothness:
        """Steps that the user gave: `value` is then τ itself."""
        value = jnp.asarray(steps.step)
        scales = jax.tree.map(lambda a: jnp.asarray(a, value.dtype), steps.scales)
        return cls(value, scales, jnp.zeros_like(value), jnp.zeros((), bool), inverse, renewed=False)

    def step(self, chance: float) -> Array:
        """τ; lazy slots move in every step, and are visited with this chance."""
        return _SAFE * chance / self.value if self.renewed else self.value

    def after(self, step: Array, objective: Array) -> Smoothness:
        """After step t, which saw this f: says whether another look is due.

        It is every few steps. If steps have become too long for the curvature, y runs away, and f with it:
        then it is immediately.
        """
        if not self.renewed:
            return self
        size = jnp.abs(objective).astype(self.recent.dtype)
        growing = (size > _GROWN * self.recent) & (self.recent > 0)
        recent = self.recent + _RECENT * (size - self.recent)
        due = self.due | growing | ((step + 1) % _RENEWAL == 0)
        return dataclasses.replace(self, recent=recent, due=due)

    @property
    def bound(self) -> Array:
        """L max D, which no curvature of g in y exceeds."""
        least = jnp.min(jnp.stack([jnp.min(leaf) for leaf in jax.tree.leaves(self.scales)]))
        return self.value / least


def estimate_smoothness(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sampler: Sampler,
    inverse: bool = True,
    unknown: frozenset[str] = frozenset(),
) -> Smoothness:
    """The curvature of what the variable of a level optimises, over sampled blocks.

    Args:
      problem: the problem.
      name: the level.
      x: where to look.
      y: per level the slots' variables, where to look.
      sampler: its batch size is used: steps must be stable on what they see.
      inverse: whether v is to move with P, too.
      unknown: the mean levels whose y is not known yet: their value on the sample is taken.
    """
    sample = _probe(problem, sampler)
    rows = {level: gather(y[level], sample.slots[level]) for level in y}
    if problem.levels[name].own:
        rows |= {n: each_block(problem, x, sample, lambda view, n=n: view.c(n)) for n in unknown}
    keys = _keys(jax.random.key(0), sample, sampler)
    axes = sample.slots[name].ndim
    begin = jax.tree.map(lambda a: jnp.ones(a.shape[axes:], result_dtype(y[name])), rows[name])
    if problem.levels[name].own:
        guess = _guess(problem, name, x, rows, sample, sampler, axes)
        begin = jax.tree.map(lambda a, like: a.astype(like.dtype), guess, begin)

    def improve(number: Array, known: PyTree) -> PyTree:
        fresh = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        found = _diagonal(problem, name, x, rows, sample, sampler, fresh, _PROBES, known)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), found, known)

    diagonal = jax.lax.fori_loop(0, _ROUNDS, improve, begin)
    if problem.levels[name].own:
        diagonal = _where_curved(diagonal, begin)
    scales = jax.tree.map(lambda d: 1 / d, diagonal)
    largest = _largest_curvature(problem, name, x, rows, sample, sampler, keys, _PASSES, scales)
    value = jnp.where(largest > 0, largest, 1)
    if problem.levels[name].own:
        value = _overshooting(problem, name, x, rows, sample, sampler, scales, largest)
    if problem.levels[name].sign == 0:
        value = _contracting(problem, name, x, rows, sample, sampler, keys, scales, value, _DOUBLINGS)
    return Smoothness(value, scales, jnp.zeros_like(value), jnp.zeros((), bool), inverse)


def renew_smoothness(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    known: Smoothness,
    step: Array,
    rescale: bool = True,
) -> Smoothness:
    """The estimate after another look at some blocks: x changes the curvature of the lower problems.

    L rises at once, and falls slowly.

    Args:
      problem: the problem.
      name: the level.
      x: where to look.
      y: per level the variables of the sample's slots, where to look.
      sample: the blocks and rows to look at.
      sampler: the plan of sampling.
      known: the estimate so far.
      step: t.
      rescale: whether P is renewed, too.
    """
    # Not the run's own key: a run over all blocks and all rows must not depend on it.
    keys = _keys(jax.random.fold_in(jax.random.key(0), step), sample, sampler)
    look = (problem, name, x, y, sample, sampler, keys)
    before = jax.tree.map(lambda scale: 1 / scale, known.scales)
    found = _diagonal(*look, _RENEWAL_PROBES, before)
    if problem.levels[name].own:
        found = _where_curved(found, before)
    # Rows that are rare, but bend g much, must not be forgotten between their visits.
    diagonal = jax.tree.map(
        lambda old, new: old + jnp.where(new > old, _RISE, _FALL) * (new - old), before, found
    )
    scales = jax.tree.map(lambda d, like: (1 / d).astype(like.dtype), diagonal, known.scales)
    scales = scales if rescale else known.scales
    largest = _largest_curvature(*look, _RENEWAL_PASSES, scales).astype(known.value.dtype)
    if problem.levels[name].own:
        change = _change_of_slope(problem, name, x, y, sample, sampler, scales, known.value)
        largest = jnp.maximum(largest, change.astype(largest.dtype))
    value = jnp.maximum(largest, _FORGOTTEN * known.value)
    if problem.levels[name].sign == 0:
        value = _contracting(*look, scales, value, 1)
    return dataclasses.replace(known, value=value, scales=scales, due=jnp.zeros((), bool))


def _keys(key: Array, sample: Sample, sampler: Sampler) -> Array:
    """A key per sampled block, the same on any number of devices."""
    here = sample.blocks.shape[0]
    first = 0 if sampler.axis is None else jax.lax.axis_index(sampler.axis) * here
    return jax.random.split(key, here * sampler.devices)[first + jnp.arange(here)]


def _diagonal(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    keys: Array,
    probes: int,
    known: PyTree,
) -> PyTree:
    """D of one slot, over sampled blocks, from an earlier estimate, which stays if there is no curvature.

    A product with random signs mixes an entry with all others, and is rough where their units are very
    different. So they are looked at in units in which the earlier estimate is one.
    """
    roots = jax.tree.map(lambda d: 1 / jnp.sqrt(d), known)

    def one(view: BlockView, y: dict[str, PyTree], key: Array) -> tuple[PyTree, PyTree]:
        def probe(key: Array) -> PyTree:
            signs = random_like(key, y[name], jax.random.rademacher)
            image = scaled(_product(view, name, y, scaled(signs, roots)), roots)
            return jax.tree.map(jnp.multiply, signs, image)

        found = jax.lax.map(probe, jax.random.split(key, probes))
        return jax.tree.map(lambda a: jnp.mean(a, 0), (found, jax.tree.map(jnp.square, found)))

    axes = tuple(range(sample.slots[name].ndim))
    means = each_block(problem, x, sample, one, y, keys)
    means = jax.tree.map(lambda a: jnp.mean(a, axes, dtype=jnp.promote_types(a.dtype, jnp.float32)), means)
    diagonal, squares = sampler.mean(means)
    diagonal = jax.tree.map(
        lambda d, s, old: old * jnp.maximum(d, _SHARE * jnp.sqrt(s)), diagonal, squares, known
    )
    most = jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(diagonal)]))
    return jax.tree.map(
        lambda d, old: jnp.where(most > 0, jnp.maximum(d, _LEAST * most), old), diagonal, known
    )


def _largest_curvature(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    keys: Array,
    passes: int,
    scales: PyTree,
) -> Array:
    """The largest eigenvalue, by size, of P ∇²_yy g in any of the sampled blocks: a power iteration.

    Few passes give too little, but a step of 2/(3 L) is stable with a third of the true L.
    """

    def one(view: BlockView, y: dict[str, PyTree], key: Array) -> Array:
        def iterate(_: Any, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            v, _size = carry
            image = scaled(_product(view, name, y, v), scales)
            size = norm(image)
            return jax.tree.map(lambda a: a / jnp.where(size > 0, size, 1).astype(a.dtype), image), size

        start = random_like(key, y[name])
        start = jax.tree.map(lambda a: a / norm(start).astype(a.dtype), start)
        return jax.lax.fori_loop(0, passes, iterate, (start, jnp.zeros((), norm(start).dtype)))[1]

    return sampler.largest(jnp.max(each_block(problem, x, sample, one, y, keys)))


def scaled(tree: PyTree, scales: PyTree) -> PyTree:
    """Every slot's entries multiplied by one slot's scales; None stands for ones."""
    if scales is None:
        return tree
    return jax.tree.map(lambda a, scale: a * scale.astype(a.dtype), tree, scales)


def unscaled(tree: PyTree, scales: PyTree) -> PyTree:
    """The inverse of `scaled`."""
    return tree if scales is None else scaled(tree, jax.tree.map(lambda scale: 1 / scale, scales))


def _slope(view: BlockView, name: str, y: dict[str, PyTree], own: PyTree) -> PyTree:
    """What the variable of a level descends along in one block, at another value of its own."""
    gradient = jax.grad(lambda own: view.optimised(name, y | {name: own}))(own)
    return view.problem.levels[name].signed(gradient)


def _product(view: BlockView, name: str, y: dict[str, PyTree], v: PyTree) -> PyTree:
    """∇²_yy g v of one block."""
    return jax.jvp(lambda own: _slope(view, name, y, own), (y[name],), (v,))[1]


def _contracting(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    keys: Array,
    scales: PyTree,
    value: Array,
    most: int,
) -> Array:
    """L of a saddle point, doubled until steps of 2/(3 L) contract in every block; at most so often.

    Where p and q are coupled more strongly than they are curved, y circles around the saddle point, and only
    steps that are short beside the curvature come nearer. The longest that do so make no headway: so L is
    doubled once more.
    """

    def one(view: BlockView, y: dict[str, PyTree], key: Array, value: Array) -> Array:
        step = _SAFE / value

        def iterate(_: Any, e: PyTree) -> PyTree:
            image = scaled(_product(view, name, y, e), scales)
            return jax.tree.map(lambda a, b: a - step.astype(a.dtype) * b, e, image)

        half = jax.lax.fori_loop(0, _PASSES, iterate, random_like(key, y[name]))
        return norm(jax.lax.fori_loop(0, _PASSES, iterate, half)) / norm(half)

    def growth(value: Array) -> Array:
        every = jnp.broadcast_to(value, keys.shape[:1])
        return sampler.largest(jnp.max(each_block(problem, x, sample, one, y, keys, every)))

    def grows(carry: tuple[Array, Array]) -> Array:
        return ~(growth(carry[0]) < 1) & (carry[1] < most)

    found, count = jax.lax.while_loop(
        grows, lambda carry: (2 * carry[0], carry[1] + 1), (value, jnp.zeros((), jnp.int32))
    )
    return jnp.where(count > 0, 2 * found, found)


def _overshooting(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    scales: PyTree,
    local: Array,
) -> Array:
    """L of variables that optimise f: raised from the local curvature until no step overshoots."""

    def shorten(_: Any, value: Array) -> Array:
        change = _change_of_slope(problem, name, x, y, sample, sampler, scales, value)
        return jnp.maximum(value, change.astype(value.dtype))

    return jax.lax.fori_loop(0, _SHORTER, shorten, jnp.where(local > 0, local, 1))


def _guess(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    axes: int,
) -> PyTree:
    """A diagonal for variables that optimise f where it has no curvature: s²/(2 |f|), of a slot.

    It has the units of a curvature, and is that of a parabola with its minimum at f = 0.
    """

    def one(view: BlockView, y: dict[str, PyTree]) -> tuple[PyTree, Array]:
        return jax.tree.map(jnp.square, _slope(view, name, y, y[name])), jnp.abs(view.f(y))

    squares, values = each_block(problem, x, sample, one, y)
    squares = jax.tree.map(lambda a: jnp.mean(a, tuple(range(axes))), squares)
    squares, value = sampler.mean((squares, jnp.mean(values)))

    def guess(square: Array) -> Array:
        known = (square > 0) & (value > 0)
        return jnp.where(known, square / jnp.where(value > 0, 2 * value, 1), 1)

    return jax.tree.map(guess, squares)


def _where_curved(diagonal: PyTree, otherwise: PyTree) -> PyTree:
    """A diagonal, with something else where it is nothing beside its largest entry."""
    most = jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(diagonal)]))
    return jax.tree.map(
        lambda d, o: jnp.where(d > _NOTHING * most, d, o.astype(d.dtype)), diagonal, otherwise
    )


def _change_of_slope(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    scales: PyTree,
    value: Array,
) -> Array:
    """By how much the slope changes along a step that L = `value` allows, as L: a mean over the blocks.

    It is ⟨d, s(y) − s(y − τd)⟩ / (τ ⟨d, D d⟩) with the slope s, d = P s and τ = 2/(3 L).
    """
    step = _SAFE / value

    def one(view: BlockView, y: dict[str, PyTree]) -> tuple[Array, Array]:
        slope = _slope(view, name, y, y[name])
        d = scaled(slope, scales)
        then = _slope(view, name, y, jax.tree.map(lambda a, b: a - step.astype(a.dtype) * b, y[name], d))
        return inner(d, jax.tree.map(jnp.subtract, slope, then)), inner(d, slope)

    change, size = sampler.mean(jax.tree.map(jnp.mean, each_block(problem, x, sample, one, y)))
    return jnp.where(size > 0, change / jnp.where(size > 0, step * size, 1), 0)


def random_like(key: Array, like: PyTree, draw: Any = jax.random.normal) -> PyTree:
    """A tree of random entries of the same shapes."""
    leaves, structure = jax.tree.flatten(like)
    parts = jax.random.split(key, len(leaves))
    drawn = [draw(part, leaf.shape, leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


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
        every = sampler.random.at(POWER)
        random, blocks = sampler.stream(every, place), place * size + chosen
        return sampler.visit(problem, blocks, random, sampler.batch_size, common=every)

    return sampler.by_stratum(of_stratum)
