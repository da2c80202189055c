"""The kinds of lower level: what a block's y is, and the level's term in the scalar ℓ.

Code outside this file asks a level what it supports; it does not ask which class it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.bounds import Bound, Box, Set, as_bound, as_set, check_crossing, check_order
from bilevax._problem.reading import as_names
from bilevax._problem.rows import Batch
from bilevax._util import checks, trees

PyTree = Any

_LEAST = 0.8  # of what was seen last: as near to zero as a tracked mean of one sign may come in one visit


class Level(eqx.Module):
    """One lower level: a function per block, and the slots that hold its variables.

    Class attributes:
      kind: what the level is called in messages.
      assumption: what f, g or c must be for the level's variables to be known, in the words of messages.
      has_hessian: y is a stationary point of g, so that its multiplier v solves a linear system with the
        Hessian of g.
      own: y minimises or maximises f itself: the level has no function, and needs no multiplier.
      sign: −1 if y maximises, 0 if some of its entries do, else 1.

    Attributes:
      function: g or c.
      slots: which slots a batch touches; None if block i has slot i.
      count: how many slots there are; None for one per block.
      distinct: whether no two visits of a step touch the same slot, where the level has slots of its own.
      reads: the levels whose variables the function reads. It then takes a dict of them for y, with its own
        variable under its own name.
    """

    kind: ClassVar[str]
    assumption: ClassVar[str] = "the level's function must be smooth, and its variables must be unique"
    has_hessian: ClassVar[bool]
    own: ClassVar[bool] = False
    sign: ClassVar[int] = 1

    function: Callable[..., Any] = eqx.field(static=True)
    slots: Callable[[PyTree, PyTree], Array] | None = eqx.field(static=True, default=None)
    count: int | None = eqx.field(static=True, default=None)
    distinct: bool = eqx.field(static=True, default=False, kw_only=True)
    reads: tuple[str, ...] = eqx.field(static=True, default=(), kw_only=True)

    def __check_init__(self) -> None:
        if not self.own and not callable(self.function):
            raise TypeError(f"bilevax.{self.kind} needs a function, got {type(self.function).__name__}")
        if (self.slots is None) != (self.count is None):
            got = "count without slots" if self.slots is None else "slots without count"
            raise ValueError(
                f"slots and count go together (which slots a batch touches, and of how many), got {got}"
            )
        if self.slots is not None and not callable(self.slots):
            raise TypeError(f"slots must be a function of (block, batch), got {type(self.slots).__name__}")
        if self.count is not None:
            checks.whole_number("count", self.count, 1)
        if self.distinct and self.slots is None:
            raise ValueError("distinct says something of slots, got distinct=True without slots")

    @property
    def may_meet(self) -> bool:
        """Whether two visits of a step may touch the same slot."""
        return self.slots is not None and not self.distinct

    @property
    def is_value(self) -> bool:
        """Whether y is the value of the function: it is tracked directly, needs no start, and v = ∇_y f."""
        return not self.has_hessian and not self.own

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> PyTree:
        """The level's function on one block's batch, of its own variable or of a dict with those it reads."""
        raise NotImplementedError

    def seen_through(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Level:
        """The level with its function wrapped."""
        return self if self.own else dataclasses.replace(self, function=wrap(self.function))

    def term(self, value: Callable[[PyTree], Any], y: PyTree, v: PyTree) -> Array:
        """The level's term of the scalar ℓ, from its function of its own y, with the multiplier v."""
        raise NotImplementedError

    def shape_of_y(self, name: str, x: PyTree, earlier: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """The shapes of one block's y if the function determines them; None if y0 must.

        `earlier` is a dict of what it reads.
        """
        raise NotImplementedError

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree, earlier: PyTree) -> None:
        """Raises unless the function accepts arguments of these shapes and returns what it should."""
        raise NotImplementedError

    @property
    def centre(self) -> Callable[[PyTree], PyTree] | None:
        """a(x), if what is stored of y are offsets from it; else None."""
        return None

    @property
    def centre_is_open(self) -> bool:
        """Whether offsets may be stored unasked."""
        return False

    def signed(self, slope: PyTree) -> PyTree:
        """What y descends along, from the gradient of what it optimises: negated where y maximises."""
        return slope

    @property
    def domain(self) -> Box | Set | None:
        """The set that y, which descends, must stay in; None for none."""
        return None

    @property
    def is_bounded(self) -> bool:
        """Whether y must stay in a set."""
        return self.domain is not None

    def bounded(self, y: PyTree, slot_axes: int = 1) -> PyTree:
        """y projected onto its set, if it has one; that many leading axes count slots."""
        return y if self.domain is None else self.domain(y, slot_axes)

    def on_free(self, v: PyTree, y: PyTree) -> PyTree:
        """A multiplier on the entries of y that are free to move: zero on those that a bound holds."""
        if self.domain is None:
            return v
        return jax.tree.map(lambda a, free: jnp.where(free, a, 0), v, self.domain.free(y))


class Argmin(Level):
    """A lower level y_i(x) = argmin_y g_i(x, y). Made by `bilevax.argmin`."""

    kind = "argmin"
    assumption = "g must be smooth and strongly convex in y"
    has_hessian = True

    around: Callable[[PyTree], PyTree] | Literal[False] | None = eqx.field(static=True, default=None)
    within: Box | Set | None = eqx.field(static=True, default=None)

    @property
    def domain(self) -> Box | Set | None:
        """See `Level.domain`."""
        return self.within

    @property
    def centre(self) -> Callable[[PyTree], PyTree] | None:
        """See `Level.centre`."""
        return self.around or None

    @property
    def centre_is_open(self) -> bool:
        """See `Level.centre_is_open`."""
        return self.around is None and self.within is None and not self.reads

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> Array:
        """g_i(x, y; ζ)."""
        return batch.average(lambda rows: self.function(x, y, block, rows))

    def term(self, value: Callable[[PyTree], Any], y: PyTree, v: PyTree) -> Array:
        """−⟨v, ∇_y g⟩, as a directional derivative of g."""
        return -jax.jvp(value, (y,), (v,))[1]

    def shape_of_y(self, name: str, x: PyTree, earlier: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """None: any y is possible, so y0 must be given."""
        return None

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree, earlier: PyTree) -> None:
        """Raises unless g returns one floating scalar, and `around`, if given, what y is."""
        if self.centre is not None:
            _check_centre(name, self.centre, x, y)
        given = earlier | {name: y} if self.reads else y
        checks.scalar_output(f"lower level {name!r}", self.function, x=x, y=given, block=block, batch=rows)


class Mean(Level):
    """A lower level y_i(x) = E[c_i(x; ζ)]. Made by `bilevax.mean`."""

    kind = "mean"
    assumption = "c must be finite"
    has_hessian = False

    lower: Bound | None = eqx.field(static=True, default=None)
    upper: Bound | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_order(self.lower, self.upper)

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> PyTree:
        """c_i(x; ζ), or c_i(x, y; ζ) with what it reads."""
        earlier = (y,) if self.reads else ()
        return batch.average(lambda rows: self.function(x, *earlier, block, rows))

    def term(self, value: Callable[[PyTree], Any], y: PyTree, v: PyTree) -> Array:
        """⟨v, c⟩."""
        return trees.inner(v, value(y))

    def shape_of_y(self, name: str, x: PyTree, earlier: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """The shapes of c."""
        given = {"y": earlier} if self.reads else {}
        label = f"lower level {name!r}"
        return checks.floating_output(label, self.function, x=x, **given, block=block, batch=rows)

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree, earlier: PyTree) -> None:
        """Raises unless the bounds fit y; `shape_of_y` has called c."""
        for label, bound in (("lower", self.lower), ("upper", self.upper)):
            if bound is not None:
                bound.check(f"{label} of the mean level {name!r}", y)
        check_crossing(f"the mean level {name!r}", self.lower, self.upper, y)

    @property
    def is_bounded(self) -> bool:
        """Whether bounds were given."""
        return self.lower is not None or self.upper is not None

    def bounded(self, y: PyTree, slot_axes: int = 1) -> PyTree:
        """y projected onto [lower, upper]."""
        return Box(self.lower, self.upper)(y)


def on_one_side(y: PyTree, seen: list[PyTree], signs: PyTree) -> PyTree:
    """A refreshed mean that stays on the side of zero where c always is.

    A moving average lies between what it averages. The correction γ(c_t − c_{t−1}) can take y out of the
    range of c, past zero too, where a log, a root or a ratio ends. So y comes no nearer to zero than most of
    the way to the nearest of what it was refreshed from.

    Args:
      y: the refreshed mean.
      seen: the mean before, and the samples.
      signs: by leaf 1 if c is at least zero, −1 if it is at most zero, and 0 if it may be either.
    """

    def one(sign: int, y: Array, *seen: Array) -> Array:
        if sign == 0:
            return y
        least = functools.reduce(jnp.minimum, [sign * value for value in seen])
        return jnp.where(least >= 0, sign * jnp.maximum(sign * y, _LEAST * least), y)

    return jax.tree.map(one, signs, y, *seen)


def _check_centre(name: str, around: Callable[[PyTree], PyTree], x: PyTree, y: PyTree) -> None:
    centre = checks.floating_output(f"around of the lower level {name!r}", around, x=x)
    got = [leaf.shape for leaf in jax.tree.leaves(centre)]
    expected = [leaf.shape for leaf in jax.tree.leaves(y)]
    same = jax.tree.structure(centre) == jax.tree.structure(y)
    # A level with slots of its own has them before the axes of one y.
    if not same or any(b[len(b) - len(a) :] != a for a, b in zip(got, expected, strict=True)):
        raise ValueError(
            f"around of the lower level {name!r} must return what y is, of shapes {expected}, got {got}"
        )


def argmin(
    function: Callable[[PyTree, PyTree, PyTree, PyTree], Array],
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
    distinct: bool = False,
    around: Callable[[PyTree], PyTree] | Literal[False] | None = None,
    project: Any = None,
    reads: str | tuple[str, ...] = (),
) -> Argmin:
    r"""A lower level defined by a minimisation, :math:`y_i(x) = \arg\min_y g_i(x, y)`.

    Args:
      function: g(x, y, block, batch), a scalar: the mean over the rows of the batch.
      slots: optional slots(block, batch), the integer slots that a block's batch touches. Left out, block i
        has slot i. If several blocks touch a slot, its y minimises the mean of their g. (Under a risk over
        the blocks, each slot must belong to one block.)
      count: the number of slots, given together with `slots`.
      distinct: whether no two visits of one step ever touch the same slot. That saves to look for them, by a
        sort of all slots of a step; if it is not so, one of both visits is lost.
      around: optional a(x), of the shape of one block's y, for a y that stays near it: a prior, or the
        weights that tasks adapt. The solver then stores the offsets y_i − a(x), so that all y_i follow x at
        once. f, g, y0, `result.y`, `state.y` and the diagnostics still speak of y itself. Left out,
        `minimize` measures whether solutions move along with a part of x of that shape, and then stores
        offsets from it; False stores y itself.
      project: where y must stay, as in `minimum`: bounds (lower, upper), or a function that projects one
        block's y onto a convex set. y0 must lie in the set. The hyper-gradient is that of the problem in
        which what a bound holds is fixed: v is zero there. All methods but `RSVRB` take bounds; sets that
        are given by a projection are for `F2SA`, `F3SA` and the diagnostics. Not together with `around`.
      reads: the names of levels before this one whose variables g reads, :math:`g_i(x, \{y_1\}, y)`. The y
        of g is then a dict: theirs, and its own under its own name.

    Returns:
      The level, for `Problem(lower=…)`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> level = bx.argmin(
      ...     lambda x, y, block, batch: jnp.mean((batch @ y) ** 2) + jnp.sum((y - x) ** 2),
      ...     around=lambda x: x,
      ... )
      >>> level = bx.argmin(  # weights that are not negative
      ...     lambda x, y, block, batch: jnp.mean((batch @ y - 1) ** 2) + x * jnp.sum(y**2),
      ...     project=(0.0, None),
      ... )
    """
    if not (around is None or around is False or callable(around)):
        raise TypeError(f"around must be a function of x, False or None, got {type(around).__name__}")
    within = as_set("project", project)
    if around and within is not None:
        raise ValueError(
            "around and project do not go together: what is stored are offsets, and the set is one of y "
            "itself, got both"
        )
    return Argmin(function, slots, count, around, within, distinct=distinct, reads=as_names(reads))


def mean(
    function: Callable[..., PyTree],
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
    distinct: bool = False,
    lower: PyTree = None,
    upper: PyTree = None,
    reads: str | tuple[str, ...] = (),
) -> Mean:
    r"""A lower level that is a plain expectation, :math:`y_i(x) = \mathbb{E}[c_i(x; \zeta)]`.

    The same as `argmin` of ½‖y − c_i(x)‖², whose Hessian is the identity. It is cheaper, because its variable
    is tracked directly.

    Args:
      function: c(x, block, batch), any pytree: the mean over the rows of the batch.
      slots: as in `argmin`; the value then has the touched slots as its leading axis.
      count: the number of slots, given together with `slots`.
      distinct: as in `argmin`.
      lower: the least value of the tracked mean, a number or a tree of arrays like y, if f needs one: the
        mean is projected onto it after each refresh. A log needs a positive one, as f must be finite there.
      upper: the largest value, likewise.
      reads: the names of levels before this one whose variables c reads. It is then called as
        c(x, y, block, batch), with a dict of them for y.

    The corrected methods (`MSVR`, `BSVRBv1`, `BSVRBv2`, `BlockPAGE`) add a multiple of the change of c, which
    may take the tracked mean out of the range of c. Without bounds, the mean of a c that cannot change its
    sign (exponentials, squares, sigmoids, …) keeps it too: in one visit it comes no nearer to zero than 0.8
    times the nearest of its old value and its samples. `lower=-jnp.inf` switches that off.

    Returns:
      The level, for `Problem(lower=…)`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> level = bx.mean(lambda x, block, batch: jnp.mean(jnp.tanh(batch @ x) ** 2), lower=1e-6, upper=1.0)
    """
    bounds = as_bound("lower", lower), as_bound("upper", upper)
    return Mean(function, slots, count, *bounds, distinct=distinct, reads=as_names(reads))
