"""The kinds of lower level: what a block's y is, and the level's term in the scalar ℓ.

Code outside this file asks a level what it supports; it does not ask which class it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
from jax import Array

from bilevax._problem.rows import Batch
from bilevax._util import checks, trees

PyTree = Any


class Level(eqx.Module):
    """One lower level: a function per block, and the slots that hold its variables.

    Class attributes:
      kind: what the level is called in messages.
      has_hessian: y minimises g, so that its multiplier v solves a linear system with the Hessian of g and y
        needs a start. Otherwise y is tracked directly, and v = ∇_y f.
    """

    kind: ClassVar[str]
    has_hessian: ClassVar[bool]

    function: Callable[..., Any] = eqx.field(static=True)
    slots: Callable[[PyTree, PyTree], Array] | None = eqx.field(static=True, default=None)
    count: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a lower level needs a function, got {type(self.function).__name__}")
        if (self.slots is None) != (self.count is None):
            got = "count without slots" if self.slots is None else "slots without count"
            raise ValueError(
                f"slots and count go together (which slots a batch touches, and of how many), got {got}"
            )
        if self.slots is not None and not callable(self.slots):
            raise TypeError(f"slots must be a function of (block, batch), got {type(self.slots).__name__}")
        if self.count is not None:
            checks.whole_number("count", self.count, 1)

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> PyTree:
        """The level's function on one block's batch."""
        raise NotImplementedError

    def term(self, x: PyTree, y: PyTree, v: PyTree, block: PyTree, batch: Batch) -> Array:
        """The level's term of the scalar ℓ, with the multiplier v."""
        raise NotImplementedError

    def shape_of_y(self, name: str, x: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """The shapes of one block's y if the function determines them; None if y0 must."""
        raise NotImplementedError

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree) -> None:
        """Raises unless the function accepts arguments of these shapes and returns what it should."""
        raise NotImplementedError


class Argmin(Level):
    """A lower level y_i(x) = argmin_y g_i(x, y). Made by `bilevax.argmin`."""

    kind = "argmin"
    has_hessian = True

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> Array:
        """g_i(x, y; ζ)."""
        return batch.average(lambda rows: self.function(x, y, block, rows))

    def term(self, x: PyTree, y: PyTree, v: PyTree, block: PyTree, batch: Batch) -> Array:
        """−⟨v, ∇_y g⟩, as a directional derivative of g."""
        return -jax.jvp(lambda y: self.value(x, y, block, batch), (y,), (v,))[1]

    def shape_of_y(self, name: str, x: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """None: any y is possible, so y0 must be given."""
        return None

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree) -> None:
        """Raises unless g returns one floating scalar."""
        checks.scalar_output(f"lower level {name!r}", self.function, x=x, y=y, block=block, batch=rows)


class Mean(Level):
    """A lower level y_i(x) = E[c_i(x; ζ)]. Made by `bilevax.mean`."""

    kind = "mean"
    has_hessian = False

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> PyTree:
        """c_i(x; ζ), whatever y is."""
        return batch.average(lambda rows: self.function(x, block, rows))

    def term(self, x: PyTree, y: PyTree, v: PyTree, block: PyTree, batch: Batch) -> Array:
        """⟨v, c⟩."""
        return trees.inner(v, self.value(x, y, block, batch))

    def shape_of_y(self, name: str, x: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """The shapes of c."""
        return checks.floating_output(f"lower level {name!r}", self.function, x=x, block=block, batch=rows)

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree) -> None:
        """Nothing left to check: `shape_of_y` has called c."""


def argmin(
    function: Callable[[PyTree, PyTree, PyTree, PyTree], Array],
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
) -> Argmin:
    r"""A lower level defined by a minimisation, :math:`y_i(x) = \arg\min_y g_i(x, y)`.

    Args:
      function: g(x, y, block, batch), a scalar: the mean over the rows of the batch.
      slots: optional slots(block, batch), the integer slots that a block's batch touches. The data source
        must not draw the same slot twice in one step: one of the two visits would be lost. Left out,
        block i has slot i.
      count: the number of slots, given together with `slots`.

    Returns:
      The level, for `Problem(lower=…)`.
    """
    return Argmin(function, slots, count)


def mean(
    function: Callable[[PyTree, PyTree, PyTree], PyTree],
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
) -> Mean:
    r"""A lower level that is a plain expectation, :math:`y_i(x) = \mathbb{E}[c_i(x; \zeta)]`.

    The same as `argmin` of ½‖y − c_i(x)‖², whose Hessian is the identity. It is cheaper, because its variable
    is tracked directly.

    Args:
      function: c(x, block, batch), any pytree: the mean over the rows of the batch.
      slots: as in `argmin`; the value then has the touched slots as its leading axis.
      count: the number of slots, given together with `slots`.

    Returns:
      The level, for `Problem(lower=…)`.
    """
    return Mean(function, slots, count)
