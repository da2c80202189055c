r"""An upper step with nothing to tune: whether x keeps its direction says how fast it may go.

.. math::
    m \leftarrow m + b (z - m), \qquad
    d = \operatorname{clip}(m / \sqrt{n}, -1, 1), \qquad
    x \leftarrow x - \frac{r}{\sqrt{t + t_0}}\, d

where n averages m² over about the last third of the steps, entry by entry, so that all entries of x move at
about the same speed. At the end of each window of steps, the displacement D of x is compared with that of the
window before:

- if x went on in the same direction (their cosine is large), and f still falls along the displacement of the
  window before by more than its noise, r grows, in the first windows faster if f has hardly fallen yet;
- if x turned back (their cosine is negative), f rose by more than its noise, or y stayed behind, r shrinks;
- in between, noise decides where x goes: r stays, and the steps shrink as 1/√t, which averages noise out.

Where f is certain to have risen, by more than z says that it should have fallen, the window ends at once. If
x has caused it, or has left the best window far behind, x returns to where this window began, or, if f was
already too large there, to where the best one began: x may have run onto a plateau, from where no slope leads
back. There it waits for y and v. What f and the lag of y
still do while x waits is theirs: later windows are forgiven as much, and less and less, as 1/t.

If y lags behind y(x), f is not F. To first order the difference is ⟨v, ∇_y g⟩, which a step knows, and by
which f is corrected here. If the difference grows from one window to the next by more than its noise, and by
more than what f falls by between two visits of a block, y does not follow x: r does not grow, or shrinks.
(The size of the difference says little: noise in y and v leaves some where x does not move at all.)

While y and v still settle, f and the difference change by themselves, and less and less so. A change that is
far larger than what z predicts for the displacement of x, but smaller than the change of f before, was not
caused by x, and does not count. Nor does a rise of f that goes on as before, apart from the decrease that z
predicts, while x goes farther, or less far, than before.

The noise is that of the newest batches, z_t − (1−β) z_{t−1} over β, where β is their weight in z: z itself
remembers its noise from step to step, and noise alone would then look like a direction.

Nothing in this depends on a common unit of all entries of x, or on that of F. Entries of x in very different
units are moved as if they had the same.

The lower variables of a block move only when the block is visited, with probability p per step. A window
lasts several visits, so they can follow x, and what a window shows is not the effect of the one before. At
first x waits for them, until f hardly changes from one window to the next, or some windows have passed; then
r begins such that z predicts a small decrease of f, and that x moves by a thousandth of its size at most.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._step.linear_algebra import change_if
from bilevax._util import checks
from bilevax._util.trees import PyTree, zeros_like

_MOMENTUM = 0.1  # b
_EARLY = 100  # t₀
_FIRST_DECREASE = 1e-3  # of f, that z predicts for the first window
_LEAST_WEIGHT = 0.1  # of the newest batch in z: less is of methods whose z has little noise
_FIRST_MOVE = 1e-3  # of the size of x, at most; where f is zero, exactly
_BY_CHANCE = 1e-6  # of that, which the size of f should not make it fall below
_NEAR = (
    0.1  # of the size of x, or 1: a window in which x goes farther is no longer followed by a far faster one
)
_SHORTEST = 25  # steps of a window
_VISITS = 5  # of a block, in a window
_SHARE = 0.1  # of all steps so far, in a window
_WAIT, _LONGEST_WAIT = 2, 8  # windows
_SETTLED = 0.2  # the share of f that it may change by from one window to the next before x begins to move
_GROW, _SHRINK = 1.6, 0.5
_FASTEST, _AMPLE = 4.0, 0.01  # growth in the first windows, up to a decrease of f by this share in a window
_FIRST_WINDOWS = 16  # shortest ones
_SAME, _BACK = 0.5, -0.1  # cosines
_SURE = 2.0  # standard errors of the slopes of f
_BEHIND, _LOST = 1.25, 2.5  # visits' decrease of f, by which the lag of y may grow while r grows; at all
_PART = 0.08  # of a window's decrease of f, which counts as that of a visit where a window has many
_CAUSED = 30.0  # times the predicted change of f: more was not caused by x
_RISE = 2.0  # standard errors of f
_CERTAIN = 6.0  # standard errors of f, by which it is certain to have risen
_ABOVE = 3.0  # standard errors of f, by which it may be above the best window
_TELLING = 1.1  # times as far as in the window before: whether a rise of f responds to that


class Pace(NamedTuple):
    """The state of `automatic_step`.

    Attributes:
      count: t.
      average: m.
      squares: n.
      scale: r; 0 while x waits.
      origin: x at the start of this window.
      covered_before: D, the displacement of x in the window before; its first direction in the first one.
      values: of f in this window: how many, their mean, and the sum of their squared deviations from it.
      values_before: those of the window before.
      end: the step at which this window ends.
      slopes: those of f on the newest batches, along the displacement of the window before: how many in this
        window, their mean, and the sum of their squared deviations from it.
      slope: that of z, at the latest step.
      lags: how far f was above F in this window, to first order: how many values, their mean, and the sum of
        their squared deviations from it.
      lags_before: those of the window before.
      trend: by how much f had risen at the end of the window before, beside what z predicts, and how far x
        had gone for that.
      squares_then: n at the start of this window.
      resume: the step until which x waits, after it has returned to the start of a window.
      drift: by how much f and the size of its lag grew by step while x waited.
      best: the values of f in the window with the lowest mean since x last returned; none at first.
      best_origin: x at the start of that window.
      first: f at the start of this window.
    """

    count: Array
    average: PyTree
    squares: PyTree
    scale: Array
    origin: PyTree
    covered_before: PyTree
    values: Array
    values_before: Array
    end: Array
    slopes: Array
    slope: Array
    lags: Array
    lags_before: Array
    trend: Array
    squares_then: PyTree
    resume: Array
    drift: Array
    best: Array
    best_origin: PyTree
    first: Array


def automatic_step(speed: Any = 1.0) -> optax.GradientTransformationExtraArgs:
    """An upper step with nothing to tune; a solver whose `upper_step` is left out uses it.

    All entries of x move at about the same speed. The speed grows while x keeps its direction, shrinks when x
    turns back, and falls as 1/√t in between. The result does not depend on a common unit of the entries of x,
    nor on that of F; entries in very different units should be rescaled.

    Args:
      speed: multiplies all steps.

    Returns:
      A transformation of z. As an optax transformation it can be part of a chain, or of `averaged`. Its
      update takes more arguments, which solvers pass: `value`, the mean of f over the batch, `lag`, by how
      much that would fall if y were y(x), `chance`, the probability that a step visits a block, and
      `weight`, that of a new batch in z.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.BSVRBv2(upper_step=bx.automatic_step(speed=0.5))
    """
    checks.coefficient("speed", speed, optional=False)

    def init(params: PyTree) -> Pace:
        zeros = jax.tree.map(lambda a: jnp.zeros_like(_wide(a)), params)
        dtype = jnp.result_type(*jax.tree.leaves(zeros))
        zero, none, start = jnp.zeros((), dtype), jnp.zeros(3, dtype), jnp.zeros((), jnp.int32)
        origin = jax.tree.map(_wide, params)
        return Pace(
            start, zeros, zeros, zero, origin, zeros, none, none, start, none, zero, none, none, none[:2],
            zeros, start, none[:2], none, origin, zero,
        )  # fmt: skip

    def update(
        updates: PyTree,
        state: Pace,
        params: PyTree = None,
        *,
        value: Array | float = 1.0,
        lag: Array | float = 0.0,
        chance: float = 1.0,
        weight: Array | float = 1.0,
        **others: Any,
    ) -> tuple[PyTree, Pace]:
        if params is None:
            raise ValueError("automatic_step needs params, the x of the step, got None")
        dtype, shortest = state.scale.dtype, shortest_window(chance)
        certain = _has_certainly_risen(state, shortest) & (state.count > state.resume)
        ended = (state.count >= state.end) | certain
        # All that reads x as a whole beside the step itself is done at the ends of windows only.
        state, back = change_if(
            ended, lambda kept: _turned(kept[0], params, certain, chance), (state, jnp.zeros((), bool))
        )
        count = state.count.astype(dtype)
        recent, longer = jnp.maximum(_MOMENTUM, 1 / (count + 1)), 3 / (count + 3)
        average = jax.tree.map(lambda m, z: m + recent * (_wide(z) - m), state.average, updates)
        squares = jax.tree.map(lambda n, m: n + longer * (jnp.square(m) - n), state.squares, average)
        # x waits for three windows: from the second to the third f and the lag change by themselves.
        left = state.resume - state.count
        drift = jnp.where(left == 0, _drift(state), state.drift)
        opened = ended | (left == 0) | (left == shortest) | (left == 2 * shortest)
        size = jnp.where(left > 0, 0, speed * state.scale / jnp.sqrt(count + _EARLY))
        moves = jax.tree.map(
            lambda m, n, z: (-size * _unit(m, n)).astype(z.dtype),
            average,
            squares,
            updates,
        )
        moves = change_if(back, lambda moves: jax.tree.map(_way_back, moves, params, state.origin), moves)

        along = _inner(jax.tree.map(_wide, updates), state.covered_before)
        fresh = state.slope + (along - state.slope) / jnp.maximum(weight, _LEAST_WEIGHT)
        length = jnp.maximum(shortest, _SHARE * count).astype(jnp.int32)
        above = jnp.asarray(value - lag, dtype)
        return moves, state._replace(
            count=state.count + 1,
            average=average,
            squares=squares,
            # After a return f begins anew: what it was before may have been on the way to where y settles.
            values=jnp.where(back, 0, _with(jnp.where(opened, 0, state.values), above)),
            values_before=jnp.where(back, 0, jnp.where(opened, state.values, state.values_before)),
            end=jnp.where(ended, jnp.maximum(state.count, state.resume) + length, state.end),
            # The slope before was along another displacement.
            slopes=jnp.where(ended | (left > 0), 0, _with(state.slopes, fresh)),
            slope=along,
            lags=jnp.where(back, 0, _with(jnp.where(opened, 0, state.lags), jnp.asarray(lag, dtype))),
            lags_before=jnp.where(opened & ~back, state.lags, state.lags_before),
            drift=drift,
            first=jnp.where(opened, above, state.first),
        )

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def paces(optimizer: PyTree) -> list[Pace]:
    """The states of `automatic_step` in that of an upper step."""
    leaves = jax.tree.leaves(optimizer, is_leaf=lambda one: isinstance(one, Pace))
    return [one for one in leaves if isinstance(one, Pace)]


def shortest_window(chance: float) -> int:
    """How many steps a window has at least: enough for several visits of a block."""
    return max(_SHORTEST, math.ceil(_VISITS / chance))


def _turned(state: Pace, params: PyTree, certain: Array, chance: float) -> tuple[Pace, Array]:
    """The state after the end of a window, and whether x returns; `certain`: f is certain to have risen."""
    here, shortest = jax.tree.map(_wide, params), shortest_window(chance)
    covered = jax.tree.map(jnp.subtract, state.origin, here)
    now = _by_itself(state, covered)
    change, risen = _change(state, covered, _goes_on(now, state.trend), chance)
    back = risen & (certain | _is_lost(state))
    best, best_origin = _best(state)
    too_large = (state.best[0] > 0) & (state.first > state.best[1])
    returned = state._replace(
        average=zeros_like(state.average),
        squares=state.squares_then,
        scale=state.scale * change,
        origin=_either(too_large, state.best_origin, state.origin),
        resume=state.count + 3 * shortest,
        best=jnp.zeros_like(state.best),
    )
    went_on = state._replace(
        scale=state.scale * change,
        origin=here,
        covered_before=covered,
        trend=now,
        squares_then=state.squares,
        best=best,
        best_origin=best_origin,
    )
    return _begun(_either(back, returned, went_on), here, shortest), back


def _begun(state: Pace, here: PyTree, shortest: int) -> Pace:
    """The state with a first speed, if x has waited until y and v have settled.

    While x waits, n begins anew with every window: what z was on the way there may have been far larger.
    """
    size_of_f = jnp.maximum(jnp.abs(state.values[1]), jnp.abs(state.values_before[1]))
    settled = (jnp.abs(_rise(state)) <= _SETTLED * size_of_f) & (state.count >= _WAIT * shortest)
    waited = (state.scale == 0) & (settled | (state.count >= _LONGEST_WAIT * shortest))
    direction = jax.tree.map(lambda m, n: _unit(m, n), state.average, state.squares)
    first = _first_scale(state, _inner(state.average, direction), here, shortest)
    moving = state._replace(scale=first.astype(state.scale.dtype), covered_before=direction)
    squares = jax.tree.map(jnp.square, state.average)
    waiting = state._replace(squares=_either(state.scale == 0, squares, state.squares))
    return _either(waited, moving, waiting)


def _best(state: Pace) -> tuple[Array, PyTree]:
    """The values of f in the best window so far, this one included, and x at its start."""
    better = (state.scale > 0) & ((state.best[0] == 0) | (state.values[1] < state.best[1]))
    return _either(better, (state.values, state.origin), (state.best, state.best_origin))


def _first_scale(state: Pace, slope: Array, params: PyTree, shortest: int) -> Array:
    """r of the first window in which x moves, from the slope of f along its direction."""
    dtype = state.scale.dtype
    decrease = _FIRST_DECREASE * jnp.abs(state.values[1])
    by_f, by_x = decrease / jnp.where(slope > 0, slope, jnp.inf), _FIRST_MOVE * _size(params, dtype)
    # Where f is so near zero that a tiny move of x changes it by far more, its size is by chance. Where it is
    # so flat that x would have to go far, its size says nothing either: a constant may have been added to it.
    first = jnp.where(by_f < _BY_CHANCE * by_x, by_x, jnp.minimum(by_f, jnp.maximum(by_x, _FIRST_MOVE)))
    return math.sqrt(_EARLY) / shortest * first


def _change(state: Pace, covered: PyTree, by_itself: Array, chance: float) -> tuple[Array, Array]:
    """The factor of r after a window, from the displacements of x in it and in the one before.

    And whether f rose because of x.
    """
    inner = _inner(covered, state.covered_before)
    sizes = _inner(covered, covered) * _inner(state.covered_before, state.covered_before)
    cosine = inner / jnp.sqrt(jnp.where(sizes > 0, sizes, 1))
    mean = state.values[1]
    mean_before = jnp.where(state.values_before[0] > 0, state.values_before[1], mean)
    noise = _RISE * _error(state.values, state.values_before)
    forgiven, forgiven_lag = _forgiven(state)
    rise = _rise(state) - noise - forgiven
    many, slope, spread = state.slopes
    downhill = slope * many > _SURE * jnp.sqrt(spread)
    grown = jnp.abs(state.lags[1]) - jnp.abs(state.lags_before[1])
    behind = grown - _SURE * _error(state.lags, state.lags_before) - forgiven_lag
    # What z predicts counts as far as the noise of f does not contradict it: f may be too noisy to tell.
    believed = jnp.where(by_itself, slope, jnp.minimum(slope, mean_before - mean + noise + forgiven))
    decrease = jnp.maximum(mean_before - mean, believed)
    visits = jnp.maximum(state.lags[0] * chance, 1)
    by_visit = jnp.maximum(decrease, 0) * jnp.maximum(1 / visits, _PART)
    # Where y and v settle, f changes far more than z predicts, and less and less.
    worst = jnp.maximum(rise, behind)
    ours = (worst <= _CAUSED * jnp.abs(slope)) | (worst > jnp.abs(state.trend[0]) * _apart(state))
    onward = (cosine > _SAME) & downhill & ~(ours & (behind > _BEHIND * by_visit))
    risen = ours & (rise > 0) & ~by_itself
    too_fast = (cosine < _BACK) | risen | (ours & (behind > _LOST * by_visit))
    # What f may have fallen by in the window, its noise included, says how much faster x may go at first.
    fallen = jnp.maximum(mean_before - mean, slope) + noise
    ample = jnp.clip(_AMPLE * jnp.abs(mean) / jnp.where(fallen > 0, fallen, jnp.inf), _GROW, _FASTEST)
    near = _size(covered, mean.dtype, 0.0) < _NEAR * jnp.maximum(_size(state.origin, mean.dtype), 1)
    grow = jnp.where(near & (state.count < _FIRST_WINDOWS * shortest_window(chance)), ample, _GROW)
    return jnp.where(too_fast, _SHRINK, jnp.where(onward, grow, 1.0)), risen


def _has_certainly_risen(state: Pace, shortest: int) -> Array:
    """Whether f is above the window before, by more than its noise, and than it should have fallen by."""
    rise = state.values[1] - state.values_before[1] - _forgiven(state)[0]
    known = (state.scale > 0) & (state.values[0] >= shortest) & (state.values_before[0] > 0)
    sure = rise > _CERTAIN * _error(state.values, state.values_before)
    return known & sure & (rise > jnp.abs(state.slopes[1]))


def _is_lost(state: Pace) -> Array:
    """Whether f is far above the best window, by its noise."""
    above = state.values[1] - state.best[1] - _forgiven(state)[0]
    return (state.best[0] > 0) & (above > _ABOVE * _error(state.values, state.best))


def _error(one: Array, other: Array) -> Array:
    """The standard error of the difference of two means, from their counts and squared deviations."""
    (many, _, spread), (many_other, _, spread_other) = one, other
    return jnp.sqrt(spread / jnp.maximum(many, 1) ** 2 + spread_other / jnp.maximum(many_other, 1) ** 2)


def _drift(state: Pace) -> Array:
    """By how much f, and the size of its lag, grew by step from the window before to this one."""
    lags = jnp.abs(state.lags[1]) - jnp.abs(state.lags_before[1])
    return jnp.stack([state.values[1] - state.values_before[1], lags]) / _apart(state)


def _forgiven(state: Pace) -> Array:
    """By how much f, and the size of its lag, may have grown by themselves since the window before."""
    age = state.resume / jnp.maximum(state.count, 1)
    return jnp.maximum(state.drift, 0) * (age * _apart(state))


def _way_back(move: Array, here: Array, origin: Array) -> Array:
    return (origin - _wide(here)).astype(move.dtype)


def _by_itself(state: Pace, covered: PyTree) -> Array:
    """By how much f rose beside the decrease that z predicts, and how far x went for that.

    Both by step, since windows grow. f rises from the mean of a window to that of the next: on the way from
    middle to middle.
    """
    before = jnp.sqrt(_inner(state.covered_before, state.covered_before))
    way = (jnp.sqrt(_inner(covered, covered)) + before) / 2
    predicted = state.slopes[1] * way / jnp.where(before > 0, before, jnp.inf)
    now = jnp.stack([_rise(state) + predicted, way]) / _apart(state)
    return now.astype(state.trend.dtype)


def _apart(state: Pace) -> Array:
    """How many steps there are from the middle of the window before to that of this one."""
    return jnp.maximum(state.values[0] + state.values_before[0], 1) / 2


def _goes_on(now: Array, before: Array) -> Array:
    """Whether f rises as it did before, though x goes farther, or less far, by a factor than before."""
    (rise, way), (rise_before, way_before) = now, before
    farther = way / jnp.where(way_before > 0, way_before, jnp.inf)
    between = rise_before * jnp.sqrt(farther)  # between a rise by itself and one that x causes
    same = jnp.where(farther < 1, (rise > between) & (rise <= _TELLING * rise_before), rise < between)
    return (rise_before > 0) & same & ((farther < 1 / _TELLING) | (farther > _TELLING))


def _rise(state: Pace) -> Array:
    """By how much f was larger in this window than in the one before."""
    return jnp.where(state.values_before[0] > 0, state.values[1] - state.values_before[1], 0)


def _size(params: PyTree, dtype: Any, nothing: float = 1.0) -> Array:
    """The root mean square of the entries of a tree; where they are all zero, what is given for that."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.size]
    total = sum((jnp.sum(jnp.square(_wide(leaf))) for leaf in leaves), jnp.zeros(()))
    size = jnp.sqrt(total / max(sum(leaf.size for leaf in leaves), 1))
    return jnp.where(size > 0, size, nothing).astype(dtype)


def _with(values: Array, value: Array) -> Array:
    """Count, mean and sum of squared deviations with one more value (Welford)."""
    many, mean, spread = values
    change = value - mean
    mean += change / (many + 1)
    return jnp.stack([many + 1, mean, spread + change * (value - mean)])


def _either(condition: Array, one: Any, other: Any) -> Any:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b).astype(b.dtype), one, other)


def _wide(a: Array) -> Array:
    return jnp.asarray(a).astype(jnp.promote_types(jnp.result_type(a), jnp.float32))


def _unit(m: Array, n: Array) -> Array:
    return jnp.where(n > 0, jnp.clip(m * jax.lax.rsqrt(n), -1, 1), 0)


def _inner(one: PyTree, other: PyTree) -> Array:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.asarray(sum(jnp.vdot(a, b, precision="highest") for a, b in pairs))
