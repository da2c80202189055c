"""The kinds of lower level: what a block's y is, and the level's term in the scalar ℓ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from bilevax._problem.rows import average
from bilevax._util import checks, trees

PyTree = Any


class Level(eqx.Module):
    """One lower level: a function per block, and the slots in which its variables live."""

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

    def pairing(
        self, x: PyTree, y: PyTree, v: PyTree, block: PyTree, rows: PyTree, weight: Array | None
    ) -> Array:
        """The level's term of the scalar ℓ."""
        raise NotImplementedError


class Argmin(Level):
    """A lower level y_i(x) = argmin_y g_i(x, y). Made by `bilevax.argmin`."""

    def pairing(
        self, x: PyTree, y: PyTree, v: PyTree, block: PyTree, rows: PyTree, weight: Array | None
    ) -> Array:
        """−⟨v, ∇_y g⟩: the level's term of the scalar ℓ, a directional derivative of g."""
        return -jax.jvp(lambda y: self.value(x, y, block, rows, weight), (y,), (v,))[1]

    def value(self, x: PyTree, y: PyTree, block: PyTree, rows: PyTree, weight: Array | None) -> Array:
        """g_i(x, y; ζ)."""
        return average(lambda rows: self.function(x, y, block, rows), rows, weight)


class Mean(Level):
    """A lower level y_i(x) = E[c_i(x; ζ)]. Made by `bilevax.mean`."""

    def pairing(
        self, x: PyTree, y: PyTree, v: PyTree, block: PyTree, rows: PyTree, weight: Array | None
    ) -> Array:
        """⟨v, c⟩: the level's term of the scalar ℓ."""
        return trees.inner(v, self.value(x, block, rows, weight))

    def value(self, x: PyTree, block: PyTree, rows: PyTree, weight: Array | None) -> PyTree:
        """c_i(x; ζ)."""
        return average(lambda rows: self.function(x, block, rows), rows, weight)


def argmin(
    function: Callable[[PyTree, PyTree, PyTree, PyTree], Array],
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
) -> Argmin:
    r"""A lower level defined by a minimisation, :math:`y_i(x) = \arg\min_y g_i(x, y)`.

    Args:
      function: g(x, y, block, batch), a scalar: the mean over the rows of the batch.
      slots: optional slots(block, batch), the integer slots that a block's batch touches. A data source
        for them must draw so that no slot occurs twice in a step: of two visits one is lost. Left out,
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

    The same as `argmin` of ½‖y − c_i(x)‖², with the identity for its Hessian: cheaper, and its
    variable is tracked directly.

    Args:
      function: c(x, block, batch), any pytree: the mean over the rows of the batch.
      slots: as in `argmin`; the value then has the touched slots as its leading axis.
      count: the number of slots, given together with `slots`.

    Returns:
      The level, for `Problem(lower=…)`.
    """
    return Mean(function, slots, count)
