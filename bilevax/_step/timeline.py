r"""How far a row has moved since a step, where no step has touched it in between.

Such a move is a few numbers, the same for all rows: with a plain upper step, r and q of :math:`z_t = r z_s`
and :math:`x_t = x_s - q z_s`. Two moves, one after the other, are one move. What the numbers are, and how
they join, the rule of the rows knows (`_step/plain_rows.py`, `_step/adam_rows.py`); here they are kept.

Those to the present are kept for each of the latest steps. To advance all of them in every step would take
too long, so they are kept in two parts: from a step to the end of its stretch of steps, and from there to the
present. Only the stretch that a step is in, and the second parts, change.
"""

from __future__ import annotations

from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

_TOGETHER = 32  # rows that may be caught up in each step because they get too old
_LEAST, _MOST = 64, 1024  # stretches; and squared steps, whose numbers a float32 can hold


class Moves(Protocol):
    """What the numbers of a move are."""

    @property
    def still(self) -> tuple[float, ...]:
        """The move that changes nothing."""
        ...

    def join(self, first: Array, then: Array) -> Array:
        """Two moves as one; the numbers are along the last axis."""
        ...


class Timeline(eqx.Module):
    """The moves since the latest steps, each of which is known by its place: its number modulo their count.

    Attributes:
      within: (stretches, steps, numbers): from a step to the end of its stretch, or to the present in the
        last one.
      since: (stretches, numbers): from the end of a stretch to the present.
      moves: what the numbers are.
    """

    within: Array
    since: Array
    moves: Moves = eqx.field(static=True)

    @staticmethod
    def start(moves: Moves, rows: int, dtype: Any) -> Timeline:
        """The timeline before step 0, for tables of at most so many rows."""
        size, numbers = _LEAST, len(moves.still)
        while size < _MOST and size * size * _TOGETHER < rows:
            size *= 2
        return Timeline(jnp.zeros((size, size, numbers), dtype), jnp.zeros((size, numbers), dtype), moves)

    @property
    def size(self) -> int:
        """The steps of a stretch, and the stretches."""
        return self.since.shape[0]

    @property
    def reach(self) -> int:
        """After so many steps at most a row must be touched again."""
        return self.size * (self.size - 2)

    def place(self, step: Array) -> Array:
        """The place of a step."""
        return step % self.size**2

    def advance(self, place: Array, move: Array) -> Timeline:
        """The timeline after the step at a place, which makes this move."""
        still = jnp.asarray(self.moves.still, self.since.dtype)
        stretch, last = place // self.size, place % self.size
        # What is there from the last time around is forgotten.
        here = jax.lax.dynamic_index_in_dim(self.within, stretch, keepdims=False)
        here = jnp.where(jnp.arange(self.size)[:, None] < last, here, still)
        within = jax.lax.dynamic_update_index_in_dim(self.within, self.moves.join(here, move), stretch, 0)
        now = jnp.arange(self.size)[:, None] == stretch
        return Timeline(within, jnp.where(now, still, self.moves.join(self.since, move)), self.moves)

    def passed(self, stamps: Array, step: Array) -> Array:
        """The moves from steps at stamped places to the present one."""
        within = self.within.reshape(-1, self.within.shape[-1])
        first = within.at[stamps].get(mode="promise_in_bounds")
        then = self.since.at[stamps // self.size].get(mode="promise_in_bounds")
        just_now = stamps == self.place(step)
        still = jnp.asarray(self.moves.still, first.dtype)
        return jnp.where(just_now[..., None], still, self.moves.join(first, then))
