r"""The curvature of the lower problems, where a user leaves their steps out.

y and v descend along P ∇_y g and P (∇²_yy g v − ∇_y f), where P = 1/D is diagonal and D is the diagonal of
∇²_yy g, averaged over blocks. So the entries of y may have different units. The step is 2/(3 L), where L is
the largest eigenvalue of D^{-1/2} ∇²_yy g D^{-1/2} in any block, so that ∇²_yy g ≤ L D.

Both are estimated from products with ∇²_yy g: D from r ∘ (∇²_yy g r), which has the diagonal as its mean if
the entries of r are random signs; L by a power iteration. Both are turns of one loop, so that the product is
compiled once.

Variables that optimise f itself may sit at kinks of f, such as the threshold of a CVaR, where f has no second
derivative. So L is also at least as large as the slope of f changes along a step of that length. Where there
is no curvature at all, the first guess is a step that would bring f to zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import POWER, Sample, Sampler
from bilevax._problem.stream import Stream, permuted
from bilevax._problem.view import BlockView, each_block, with_means
from bilevax._step.lagrangian import Point, hessians
from bilevax._step.linear_algebra import one_by_one
from bilevax._step.slots import gather
from bilevax._util.host import numpy_of
from bilevax._util.per_entry import PerEntry
from bilevax._util.trees import inner, norm, result_dtype

PyTree = Any

_ROUNDING = 1e-5  # of the size of an error after many steps
_SAFE = 2 / 3  # τ L
_BLOCKS = 64
_PROBES, _ROUNDS, _PASSES = 8, 3, 20
_RENEWAL = 32  # steps between two looks at the curvature, at first
_LOOKS = 64  # later: at least so many in as many steps as all before
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
      lower: whether y moves with P; not if an optax transformation moves it.
    """

    value: Array
    scales: PyTree
    recent: Array
    due: Array
    inverse: bool = eqx.field(static=True, default=True)
    renewed: bool = eqx.field(static=True, default=True)
    lower: bool = eqx.field(static=True, default=True)

    @classmethod
    def given(cls, steps: PerEntry, inverse: bool, lower: bool = True) -> Smoothness:
        """Steps that the user gave: `value` is then τ itself."""
        value = jnp.asarray(steps.step)
        scales = jax.tree.map(lambda a: jnp.asarray(a, value.dtype), steps.scales)
        blank = jnp.zeros_like(value), jnp.zeros((), bool)
        return cls(value, scales, *blank, inverse, renewed=False, lower=lower)

    def step(self, chance: float) -> Array:
        """τ; lazy slots move in every step, and are visited with this chance."""
        return _SAFE * chance / self.value if self.renewed else self.value

    def after(self, step: Array, objective: Array) -> Smoothness:
        """After step t, which saw this f: says whether another look is due.

        It is every few steps, and less often in long runs, in which x moves less and less. If steps have
        become too long for the curvature, y runs away, and f with it: then it is immediately.
        """
        if not self.renewed:
            return self
        size = jnp.abs(objective).astype(self.recent.dtype)
        growing = (size > _GROWN * self.recent) & (self.recent > 0)
        recent = self.recent + _RECENT * (size - self.recent)
        due = self.due | growing | _is_time(step + 1)
        return dataclasses.replace(self, recent=recent, due=due)

    @property
    def bound(self) -> Array:
        """L max D, which no curvature of g in y exceeds."""
        least = [leaf.min() for leaf in jax.tree.leaves(self.scales)]
        return self.value / functools.reduce(numpy_of(self.value).minimum, least)


def _is_time(step: Array) -> Array:
    """Whether to look before step t: every 32 steps, every 64 after 4096, every 128 after 8192, …"""
    doubled = jnp.maximum(31 - jax.lax.clz(step // (_RENEWAL * _LOOKS)), 0)
    return step & ((_RENEWAL << doubled) - 1) == 0


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
    rows = _rows(problem, name, x, y, sample, unknown)
    streams = _streams(_fixed(), sample, sampler)
    axes = sample.slots[name].ndim
    begin = jax.tree.map(lambda a: jnp.ones(a.shape[axes:], result_dtype(y[name])), rows[name])
    if problem.levels[name].own:
        guess = _guess(problem, name, x, rows, sample, sampler, axes)
        begin = jax.tree.map(lambda a, like: a.astype(like.dtype), guess, begin)

    def settle(diagonal: PyTree) -> PyTree:
        found = _where_curved(diagonal, begin) if problem.levels[name].own else diagonal
        return jax.tree.map(lambda d: 1 / d, _common_unit(problem, name, found))

    look = (problem, name, x, rows, sample, sampler, streams)
    scales, largest = _curvature(*look, begin, settle, _ROUNDS, _PROBES, _PASSES)
    value = jnp.where(largest > 0, largest, 1)
    if problem.levels[name].own:
        value = _overshooting(problem, name, x, rows, sample, sampler, scales, largest)
    if problem.levels[name].sign == 0:
        value = _contracting(*look, scales, value, _DOUBLINGS)
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
    look = (problem, name, x, y, sample, sampler, _streams(_fixed().at(step), sample, sampler))
    before = jax.tree.map(lambda scale: 1 / scale, known.scales)

    def settle(found: PyTree) -> PyTree:
        if not rescale:
            return known.scales
        found = _where_curved(found, before) if problem.levels[name].own else found
        # Rows that are rare, but bend g much, must not be forgotten between their visits.
        diagonal = jax.tree.map(
            lambda old, new: old + jnp.where(new > old, _RISE, _FALL) * (new - old), before, found
        )
        diagonal = _common_unit(problem, name, diagonal)
        return jax.tree.map(lambda d, like: (1 / d).astype(like.dtype), diagonal, known.scales)

    scales, largest = _curvature(*look, before, settle, 1, _RENEWAL_PROBES, _RENEWAL_PASSES)
    largest = largest.astype(known.value.dtype)
    if problem.levels[name].own:
        change = _change_of_slope(problem, name, x, y, sample, sampler, scales, known.value)
        largest = jnp.maximum(largest, change.astype(largest.dtype))
    value = jnp.maximum(largest, _FORGOTTEN * known.value)
    if problem.levels[name].sign == 0:
        value = _contracting(*look, scales, value, 1)
    return dataclasses.replace(known, value=value, scales=scales, due=jnp.zeros((), bool))


def _fixed() -> Stream:
    """The same random numbers in every run: what is estimated must not depend on the run's key."""
    return Stream(np.uint32(0xF29A4FA7), np.uint32(0xFA843692))


def _streams(random: Stream, sample: Sample, sampler: Sampler) -> Stream:
    """A stream per sampled block, the same on any number of devices."""
    here = sample.blocks.shape[0]
    first = 0 if sampler.axis is None else jax.lax.axis_index(sampler.axis) * here
    return random.at(first + jnp.arange(here))


def _curvature(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    sampler: Sampler,
    streams: Stream,
    diagonal: PyTree,
    settle: Callable[[PyTree], PyTree],
    rounds: int,
    probes: int,
    passes: int,
) -> tuple[PyTree, Array]:
    """P of one slot, over sampled blocks, and the largest eigenvalue, by size, of P ∇²_yy g in any of them.

    A loop with one product per turn. First come rounds of probes, each of which improves an estimate of D. A
    product with random signs mixes an entry with all others, and is rough where their units are very
    different; so a round looks in units in which the estimate before is one. Then follows a power iteration.
    Few passes give too little, but a step of 2/(3 L) is stable with a third of the true L.

    Args:
      problem: the problem.
      name: the level.
      x: where to look.
      y: per level the variables of the sample's slots, where to look.
      sample: the blocks and rows to look at.
      sampler: the plan of sampling.
      streams: a stream of random numbers per block.
      diagonal: the first estimate of D.
      settle: P from the last estimate of D.
      rounds: how often D is improved.
      probes: the products of a round.
      passes: those of the power iteration.
    """
    axes = tuple(range(sample.slots[name].ndim))
    like = diagonal

    def turn(number: Array, carry: Any) -> Any:
        sums, diagonal, scales, v, _size = carry
        probing = number < rounds * probes
        roots = jax.tree.map(lambda d: 1 / jnp.sqrt(d), diagonal)
        signs = jax.vmap(_signs)(streams.at(number), v)
        along = jax.tree.map(lambda r, v: jnp.where(probing, r, v), scaled(signs, roots), v)
        image = each_block(problem, x, sample, lambda view, *given: _product(view, name, *given), y, along)

        found = jax.tree.map(jnp.multiply, signs, scaled(image, roots))
        seen = jax.tree.map(lambda a: jnp.mean(_wide(a), axes), (found, jax.tree.map(jnp.square, found)))
        sums = jax.tree.map(lambda total, one: total + one / probes, sums, seen)
        ended = probing & ((number + 1) % probes == 0)
        better = _improved(diagonal, *sampler.mean(sums))
        diagonal = jax.tree.map(lambda new, old: jnp.where(ended, new, old), better, diagonal)
        sums = jax.tree.map(lambda total: jnp.where(ended, 0, total), sums)
        scales = jax.tree.map(lambda new, old: jnp.where(ended, new, old), settle(diagonal), scales)

        image = scaled(image, scales)
        size = jax.vmap(norm)(image)
        image = jax.vmap(_divided)(image, jnp.where(size > 0, size, 1))
        v = jax.tree.map(lambda old, new: jnp.where(probing, old, new), v, image)
        return sums, diagonal, scales, v, size

    begin = jax.vmap(random_like)(streams.at(rounds * probes), y[name])
    begin = jax.vmap(_divided)(begin, jax.vmap(norm)(begin))
    none = jax.tree.map(lambda d: jnp.zeros_like(_wide(d)), (like, like))
    start = none, diagonal, settle(diagonal), begin, jax.vmap(norm)(begin)
    _, _, scales, _, size = jax.lax.fori_loop(0, rounds * probes + passes, turn, start)
    return scales, sampler.largest(jnp.max(size))


def _improved(diagonal: PyTree, means: PyTree, squares: PyTree) -> PyTree:
    """D, from its estimate so far and what was seen in units of that; it stays if there is no curvature."""
    found = jax.tree.map(
        lambda d, s, old: old * jnp.maximum(d, _SHARE * jnp.sqrt(s)), means, squares, diagonal
    )
    most = jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(found)]))
    return jax.tree.map(
        lambda d, old: jnp.where(most > 0, jnp.maximum(d, _LEAST * most), old).astype(old.dtype),
        found,
        diagonal,
    )


def _divided(tree: PyTree, size: Array) -> PyTree:
    return jax.tree.map(lambda a: a / size.astype(a.dtype), tree)


def _wide(a: Array) -> Array:
    """In 32 bits at least."""
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


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
    streams: Stream,
    scales: PyTree,
    value: Array,
    most: int,
) -> Array:
    """L of a saddle point, doubled until steps of 2/(3 L) contract in every block; at most so often.

    Where p and q are coupled more strongly than they are curved, y circles around the saddle point, and only
    steps that are short beside the curvature come nearer. The longest that do so make no headway: so L is
    doubled once more.
    """

    def one(view: BlockView, y: dict[str, PyTree], stream: Stream, value: Array) -> Array:
        step = _SAFE / value

        def iterate(_: Any, e: PyTree) -> PyTree:
            image = scaled(_product(view, name, y, e), scales)
            return jax.tree.map(lambda a, b: a - step.astype(a.dtype) * b, e, image)

        def size(e: PyTree) -> Array:  # in the units of P, in which e does not grow where it circles
            return norm(unscaled(e, jax.tree.map(jnp.sqrt, scales)))

        half = jax.lax.fori_loop(0, _PASSES, iterate, random_like(stream, y[name]))
        return size(jax.lax.fori_loop(0, _PASSES, iterate, half)) / size(half)

    def growth(value: Array) -> Array:
        every = jnp.broadcast_to(value, streams.first.shape)
        return sampler.largest(jnp.max(each_block(problem, x, sample, one, y, streams, every)))

    def grows(carry: tuple[Array, Array]) -> Array:
        # Steps that are far too short leave everything as it is, but for rounding: that is not growth.
        return ~(growth(carry[0]) < 1 + _ROUNDING) & (carry[1] < most)

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


def _common_unit(problem: Problem, name: str, diagonal: PyTree) -> PyTree:
    """D, with one entry for all if y is projected onto a set that is no box.

    Steps with a scale for every entry would end elsewhere on its boundary: where P times the slope, and not
    the slope itself, is normal to the set.
    """
    domain = problem.levels[name].domain
    if domain is None or domain.entrywise:
        return diagonal
    most = jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(diagonal)]))
    return jax.tree.map(lambda d: jnp.full_like(d, most), diagonal)


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


def random_like(stream: Stream, like: PyTree) -> PyTree:
    """A tree of random entries of the same shapes: of either sign, and at least a half, so never zero."""
    return _drawn(stream, like, lambda bits: (bits >> 1).astype(jnp.float32) / 2.0**32 + 0.5)


def _signs(stream: Stream, like: PyTree) -> PyTree:
    """A tree of random signs of the same shapes."""
    return _drawn(stream, like, lambda bits: jnp.ones(bits.shape))


def _drawn(stream: Stream, like: PyTree, size: Callable[[Array], Array]) -> PyTree:
    """Random signs, the lowest bits, times a size that the others give."""
    leaves, structure = jax.tree.flatten(like)
    drawn = []
    for number, leaf in enumerate(leaves):
        bits = stream.at(number).bits(leaf.shape)
        drawn.append(jnp.where(bits & 1 == 0, size(bits), -size(bits)).astype(leaf.dtype))
    return jax.tree.unflatten(structure, drawn)


def estimate_floor(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sampler: Sampler,
    smoothness: Array,
    unknown: frozenset[str] = frozenset(),
) -> Array:
    """A floor λ for the tracked Hessians of a level: half the least curvature that a batch shows.

    In most directions a batch of few rows has the curvature of the regulariser alone, and λ must not exceed
    that. If some direction has no curvature at all, the floor is a thousandth of L_g.
    """
    sample = _probe(problem, sampler)
    point = Point(x, _rows(problem, name, x, y, sample, unknown))
    eigenvalues = jax.vmap(one_by_one(lambda matrix: jnp.linalg.eigvalsh(matrix)))
    least = -sampler.largest(-jnp.min(eigenvalues(hessians(problem, name, point, sample))))
    return jnp.where(least > 1e-6 * smoothness, least / 2, 1e-3 * smoothness)


def _rows(
    problem: Problem,
    name: str,
    x: PyTree,
    y: dict[str, PyTree],
    sample: Sample,
    unknown: frozenset[str],
) -> dict[str, PyTree]:
    """The variables of a sample's slots; means that are not known yet, where the level needs them."""
    rows = {level: gather(y[level], sample.slots[level]) for level in y}
    if problem.levels[name].own or problem.levels[name].reads:
        return with_means(problem, x, sample, rows, unknown)
    return rows


def _probe(problem: Problem, sampler: Sampler) -> Sample:
    """Some blocks, with the run's batch size: steps must be stable on what they see."""
    size = sampler.stratum_size
    count = min(size, -(-_BLOCKS // ((sampler.strata or 1) * sampler.devices)))

    def of_stratum(place: Any) -> Sample:
        chosen = permuted(sampler.stream(_fixed(), place), np.arange(count), size)
        every = sampler.random.at(POWER)
        random, blocks = sampler.stream(every, place), jnp.asarray(place * size + chosen)
        return sampler.visit(problem, blocks, random, sampler.batch_size, common=every)

    return sampler.probe(problem, lambda: sampler.by_stratum(of_stratum))
