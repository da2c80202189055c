"""Variables of a block's own, which minimise or maximise f itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.bounds import Box, Set, as_set
from bilevax._problem.levels import Level
from bilevax._problem.rows import Batch

PyTree = Any


class Own(Level):
    """Variables that optimise f. Made by `bilevax.minimum` and `bilevax.maximum`."""

    assumption = "f must be convex in the variables of a `minimum`, and concave in those of a `maximum`"
    has_hessian = False
    own = True

    function: Any = eqx.field(static=True, default=None)
    within: Box | Set | None = eqx.field(static=True, default=None)

    @property
    def domain(self) -> Box | Set | None:
        """See `Level.domain`."""
        return self.within

    def value(self, x: PyTree, y: PyTree, block: PyTree, batch: Batch) -> PyTree:
        """There is none: y optimises f."""
        raise TypeError(f"a {self.kind} level has no function of its own")

    def term(self, value: Callable[[PyTree], Any], y: PyTree, v: PyTree) -> Any:
        """Nothing: at the optimum ∇_y f = 0, so that a change of y does not change f."""
        return 0.0

    def shape_of_y(self, name: str, x: PyTree, earlier: PyTree, block: PyTree, rows: PyTree) -> PyTree:
        """None: any y is possible, so y0 must be given."""
        return None

    def check(self, name: str, x: PyTree, y: PyTree, block: PyTree, rows: PyTree, earlier: PyTree) -> None:
        """There is no function to check."""

    def signed(self, slope: PyTree) -> PyTree:
        """See `Level.signed`."""
        return slope if self.sign > 0 else jax.tree.map(jnp.negative, slope)


class Minimum(Own):
    """Variables that minimise f. Made by `bilevax.minimum`."""

    kind = "minimum"
    sign = 1


class Maximum(Own):
    """Variables that maximise f. Made by `bilevax.maximum`."""

    kind = "maximum"
    sign = -1


def minimum(
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
    distinct: bool = False,
    project: Any = None,
) -> Minimum:
    r"""Variables of a block's own that minimise f itself, :math:`\min_y f_i(x, y)`.

    Thresholds of a CVaR or a partial AUC, temperatures, the duals of a log-sum-exp. They need no second
    derivative and no multiplier: at the optimum ∇_y f = 0, so that ∇F is the gradient of f by x alone.

    Args:
      slots: as in `argmin`.
      count: the number of slots, given together with `slots`.
      distinct: as in `argmin`.
      project: where y must stay: bounds (lower, upper), each a number, a tree of arrays like one block's y or
        None; or a function that projects one block's y onto a convex set. Methods whose blocks all move
        project a block when it is next visited, after the sum of its steps.

    Returns:
      The level, for `Problem(lower=…)`.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> rows = jnp.arange(20.0).reshape(4, 5)
      >>> problem = bx.Problem(  # the threshold of a block minimises its CVaR at 40%
      ...     upper=lambda x, y, block, batch: y + jnp.mean(jax.nn.relu(batch * x - y)) / 0.4 + x**2,
      ...     lower=bx.minimum(project=(0.0, None)),
      ...     blocks=4,
      ...     upper_data=bx.PerBlock(rows.reshape(-1), [0, 5, 10, 15, 20]),
      ... )
    """
    return Minimum(None, slots, count, as_set("project", project), distinct=distinct)


def maximum(
    *,
    slots: Callable[[PyTree, PyTree], Array] | None = None,
    count: int | None = None,
    distinct: bool = False,
    project: Any = None,
) -> Maximum:
    r"""Variables of a block's own that maximise f itself, :math:`\max_y f_i(x, y)`: the max part of MMBO.

    Otherwise as `minimum`. A problem with both has the saddle point of f in them.

    Args:
      slots: as in `argmin`.
      count: the number of slots, given together with `slots`.
      distinct: as in `argmin`.
      project: where y must stay, as in `minimum`.

    Returns:
      The level, for `Problem(lower=…)`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y["dual"] * (y["model"] - block) - y["dual"] ** 2),
      ...     lower={
      ...         "model": lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...         "dual": bx.maximum(project=(-1.0, 1.0)),
      ...     },
      ...     blocks=jnp.ones((4, 2)),
      ... )
    """
    return Maximum(None, slots, count, as_set("project", project), distinct=distinct)
