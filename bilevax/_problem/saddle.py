"""Lower levels that are min-max problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.levels import Argmin
from bilevax._problem.reading import as_names
from bilevax._util import checks

PyTree = Any


class Saddle(Argmin):
    """A lower level y = (p, q), where p minimises g and q maximises it. Made by `bilevax.saddle`."""

    kind = "saddle"
    assumption = (
        "g must be smooth, strongly convex in what minimises it and strongly concave in what maximises it"
    )
    sign = 0

    def signed(self, slope: PyTree) -> PyTree:
        """See `Level.signed`."""
        p, q = slope
        return p, jax.tree.map(jnp.negative, q)

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree, earlier: PyTree) -> None:
        """Raises unless y is a pair, and g returns one floating scalar."""
        pair = isinstance(y, tuple) and len(y) == 2
        if not (pair and all(jax.tree.leaves(part) for part in y)):
            got = "a part without arrays" if pair else checks.kind_of(y)
            raise ValueError(
                f"y0 of the saddle level {name!r} must be a pair (p, q), of what minimises g and what "
                f"maximises it, got {got}"
            )
        super().check(name, x, y, block, rows, earlier)


def saddle(
    function: Callable[[PyTree, Any, PyTree, PyTree], Array],
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
    distinct: bool = False,
    reads: str | tuple[str, ...] = (),
) -> Saddle:
    r"""A lower level defined by a min-max problem, :math:`\min_p \max_q g_i(x, (p, q))`.

    f sees the saddle point y = (p, q). Its multiplier solves the same system as that of `argmin`, with a
    Hessian that is not definite. g must be strongly convex in p and strongly concave in q.

    Args:
      function: g(x, y, block, batch), a scalar, of the pair y = (p, q): the mean over the rows of the batch.
      slots: as in `argmin`.
      count: the number of slots, given together with `slots`.
      distinct: as in `argmin`.
      reads: as in `argmin`; the y of g is then a dict.

    Returns:
      The level, for `Problem(lower=…)`. Its y0 is a pair, too.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> def g(x, y, block, batch):
      ...     p, q = y
      ...     return jnp.sum((p - x) ** 2) + jnp.sum(p * q) - jnp.sum((q - block) ** 2)
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y[0] ** 2) + jnp.sum(x**2),
      ...     lower=bx.saddle(g),
      ...     blocks=jnp.ones((4, 2)),
      ... )
    """
    return Saddle(function, slots, count, False, distinct=distinct, reads=as_names(reads))
