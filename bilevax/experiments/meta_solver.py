r"""A method of bilevax for blocks whose lower problem is quadratic: solved at every visit, by products.

.. math::
    y_i = \arg\min_y g_i(x, y), \qquad \nabla_{yy}^2 g_i\, v_i = \nabla_y f_i, \qquad
    x \leftarrow x - \eta \tfrac1I \sum_i (\nabla_x f_i - \nabla_{xy}^2 g_i v_i)

Both systems are solved by conjugate gradients, from the y and v that the block had at its visit before. What
g computes from x and the rows alone, such as the features under a linear head, is computed once for all
iterations. It is a method of one's own, as docs/own_method.md describes them: it uses public names only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import bilevax as bx
from bilevax.solvers.toolkit import (
    BlockView,
    Look,
    Memory,
    Point,
    Rates,
    Sample,
    TrackedSolve,
    Visit,
    each_block,
    gradients,
    upper_gradients,
    zeros_like,
)

Product = Callable[[Any], Any]


class Solved(TrackedSolve):
    """Stores the y and v that a step has looked at."""

    coefficients = frozenset()

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        """What to store of the visited blocks."""
        rows, y, v = visit.rows, look.points[0].y[visit.name], look.v[0][visit.name]
        assert rows.v is not None
        stored = Memory(
            y=dataclasses.replace(rows.y, value=y), v=dataclasses.replace(rows.v, value=v), visit=rows.visit
        )
        return stored, jnp.zeros((), jnp.int32)


class SolvedBlocks(bx.SOBA):
    """SOBA whose visits solve for y and v, for one level with a quadratic g that sees all rows of a block.

    Args:
      upper_step: as in `bilevax.SOBA`.
      iterations: of conjugate gradients, at most.
      tolerance: the residual at which they end, relative to the right side. (Ten times more let the layers
        under the heads grow without end on one of four seeds.)
    """

    iterations: int = eqx.field(static=True, default=60, kw_only=True)
    tolerance: float = eqx.field(static=True, default=0.003, kw_only=True)

    curvature = Solved()

    def rates(self, problem: bx.Problem, state: bx.State, name: str, touched: int, stage: Any) -> Rates:
        """Nothing to choose: y and v are solved for."""
        return Rates(1.0, None, 1.0, *[None] * 7)

    def look(self, problem: bx.Problem, state: bx.State, sample: Sample, visits: dict[str, Visit]) -> Look:
        """The gradients at the lower solutions of the visited blocks, with their multipliers."""
        ((name, visit),) = visits.items()
        assert visit.rows.v is not None

        def slopes(y: Any) -> Any:
            def one(view: BlockView, y: Any) -> Any:
                return jax.grad(lambda y: view.g(name, y))(y)

            return each_block(problem, state.x, sample, one, y)

        y = visit.rows.y.value
        slope, product = jax.linearize(slopes, y)
        y = jax.tree.map(jnp.subtract, y, self._solved(product, slope, zeros_like(y)))
        point = Point(state.x, {name: y})
        by_y = upper_gradients(problem, point, sample)[name]
        v = {name: self._solved(product, by_y, visit.rows.v.value)}
        seen = gradients(problem, point, v, sample)
        return Look(problem, sample, [point], [v], [seen])

    def _solved(self, product: Product, right: Any, start: Any) -> Any:
        return conjugate_gradients(product, right, start, self.iterations, self.tolerance)


def conjugate_gradients(product: Product, right: Any, start: Any, iterations: int, tolerance: float) -> Any:
    """The solutions of H_i u_i = r_i for every block i, along the leading axes of the arrays.

    Args:
      product: u ↦ H u, for all blocks; every H_i is symmetric and positive definite.
      right: r.
      start: where u begins.
      iterations: at most so many.
      tolerance: a block ends at ‖H u − r‖ ≤ tolerance ‖r‖, and all end when each has.

    Returns:
      u.
    """
    least = tolerance**2 * _inner(right, right)

    def goes_on(carry: Any) -> Array:
        count, _, _, _, size = carry
        return (count < iterations) & jnp.any(size > least)

    def iterate(carry: Any) -> Any:
        count, u, residual, direction, size = carry
        turned = product(direction)
        curved = _inner(direction, turned)
        moves = (curved > 0) & (size > 0)
        length = jnp.where(moves, size / jnp.where(moves, curved, 1), 0)
        u, residual = _plus(u, length, direction), _plus(residual, -length, turned)
        now = _inner(residual, residual)
        direction = _plus(residual, now / jnp.where(size > 0, size, 1), direction)
        return count + 1, u, residual, direction, jnp.where(moves, now, 0)

    residual = jax.tree.map(jnp.subtract, right, product(start))
    first = jnp.zeros((), jnp.int32), start, residual, residual, _inner(residual, residual)
    return jax.lax.while_loop(goes_on, iterate, first)[1]


def _inner(one: Any, other: Any) -> Array:
    """The inner products of two trees, by block."""
    parts = jax.tree.map(lambda a, b: jnp.sum((a * b).reshape(a.shape[0], -1), 1), one, other)
    return sum(jax.tree.leaves(parts), jnp.zeros(()))


def _plus(one: Any, factors: Array, other: Any) -> Any:
    """one + factors · other, with a factor per block."""
    return jax.tree.map(lambda a, b: a + factors.reshape(-1, *[1] * (b.ndim - 1)) * b, one, other)
