"""Newton steps on many small convex problems at once, safe where a whole step is too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_MOST = 50
_SHORTENED = (0.3, 0.1, 0.03, 0.01, 0.001)
_NEARLY = 0.15  # a last step of this size leaves an error of its square, which F does not see to first order
_GAIN = 0.2  # of the expected decrease: the least that a whole step must have

Value = Callable[[Array], Array]  # (problems,), at the variables of all problems
Direction = Callable[[Array], tuple[Array, ...]]  # a step, by how much it lowers a parabola, and more


def minimise(
    value: Value, direction: Direction, sure: Value | None, start: Array, *, nearly: bool = False
) -> tuple[Array, Array, tuple[Array, ...]]:
    """The minimisers, their values, and the last direction, which is that before the last step.

    The best of some lengths of a step is taken; or, where that is better, a `sure` step, by the curvature of
    a parabola above the loss, which always goes down.

    Args:
      value: of all problems.
      direction: what to subtract from the variables, its gain, and what else is to be returned.
      sure: a step that goes down where `direction` may not; None if there is none.
      start: (problems, …).
      nearly: whether steps end earlier, in single precision.
    """
    inner = tuple(range(1, start.ndim))
    enough, rounding = (1e-2, 1e-6) if start.dtype == jnp.float32 else (1e-6, 1e-14)
    if nearly and start.dtype == jnp.float32:
        enough = _NEARLY
    lengths = jnp.asarray([1.0, *_SHORTENED, 0.0], start.dtype)

    def by_problem(factors: Array) -> Array:
        return factors.reshape(-1, *(1,) * len(inner))

    def unfinished(carry: Any) -> Array:
        return carry[-1] & (carry[-2] < _MOST)

    def newton(carry: Any) -> Any:
        here, now, _, count, _ = carry
        found = direction(here)
        step, gain = found[:2]
        then = value(here - step)

        def search() -> tuple[Array, Array]:
            tried = jax.lax.map(lambda length: value(here - length * step), lengths[1:])
            tried = jnp.concatenate([then[None], tried])
            tried = jnp.where(jnp.isfinite(tried), tried, jnp.inf)
            moved, best = by_problem(lengths[jnp.argmin(tried, 0)]) * step, jnp.min(tried, 0)
            if sure is None:
                return moved, best
            safe = sure(here)
            below = value(here - safe)
            lower = below < best
            return jnp.where(by_problem(lower), safe, moved), jnp.where(lower, below, best)

        # Most whole steps go down as far as they should: shorter ones are looked at if one does not.
        fine = then <= now - _GAIN * gain + rounding * (1 + jnp.abs(now))
        moved, now = jax.lax.cond(jnp.all(fine), lambda: (step, then), search)
        left = jnp.max(jnp.abs(moved), inner) > enough * (1 + jnp.max(jnp.abs(here), inner))
        return here - moved, now, found, count + 1, jnp.any(left)

    blank = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(direction, start))
    carry = start, value(start), blank, jnp.zeros((), jnp.int32), jnp.ones((), bool)
    here, now, found, _, _ = jax.lax.while_loop(unfinished, newton, carry)
    return here, now, found
