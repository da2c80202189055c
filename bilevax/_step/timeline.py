r"""How far x and z of a row have moved since a step, where no step has touched it in between.

Such a z only decays, and x moves along it: :math:`z_{t+1} = d_t z_t` and :math:`x_{t+1} = x_t - \eta_t
z_{t+1}`, with :math:`d_t = 1 - \beta_t`. So from a step s to a later one t

.. math:: z_t = r z_s, \quad x_t = x_s - q z_s, \qquad r = \prod_{k=s}^{t-1} d_k, \quad
    q = \sum_{k=s}^{t-1} \eta_k \prod_{j=s}^{k} d_j

for any schedules. r and q to the present are kept for each of the latest steps. All their terms are positive,
so that nothing cancels, and nothing that underflows is divided by. To advance all of them in every step would
take too long, so they are kept in two parts: from a step to the end of its stretch of steps, and from there
to the present. Only the stretch that a step is in, and the second parts, change.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

_TOGETHER = 32  # rows that may be caught up in each step because they get too old
_LEAST, _MOST = 64, 1024  # stretches; and squared steps, whose numbers a float32 can hold


class Timeline(eqx.Module):
    """r and q of the latest steps, each of which is known by its place: its number modulo their count.

    Attributes:
      within: (stretches, steps, 2): from a step to the end of its stretch, or to the present in the last one.
      since: (stretches, 2): from the end of a stretch to the present.
    """

    within: Array
    since: Array

    @staticmethod
    def start(rows: int, dtype: Any) -> Timeline:
        """The timeline before step 0, for tables of at most so many rows."""
        size = _LEAST
        while size < _MOST and size * size * _TOGETHER < rows:
            size *= 2
        return Timeline(jnp.zeros((size, size, 2), dtype), jnp.zeros((size, 2), dtype))

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

    def advance(self, place: Array, keep: Any, amount: Array) -> Timeline:
        """The timeline after the step at a place.

        It multiplies z by `keep`, and moves x by `amount` along what it makes of it.
        """
        unmoved = jnp.asarray([1, 0], self.since.dtype)
        stretch, last = place // self.size, place % self.size

        def moved(known: Array) -> Array:
            r = jnp.asarray(keep, known.dtype) * known[..., 0]
            return jnp.stack([r, known[..., 1] + amount.astype(known.dtype) * r], -1)

        # What is there from the last time around is forgotten.
        here = jax.lax.dynamic_index_in_dim(self.within, stretch, keepdims=False)
        here = moved(jnp.where(jnp.arange(self.size)[:, None] < last, here, unmoved))
        within = jax.lax.dynamic_update_index_in_dim(self.within, here, stretch, 0)
        now = jnp.arange(self.size)[:, None] == stretch
        return Timeline(within, jnp.where(now, unmoved, moved(self.since)))

    def passed(self, stamps: Array, step: Array) -> tuple[Array, Array]:
        """r and q from steps at stamped places to the present one."""
        first = self.within.reshape(-1, 2).at[stamps].get(mode="promise_in_bounds")
        then = self.since.at[stamps // self.size].get(mode="promise_in_bounds")
        r, q = first[..., 0] * then[..., 0], first[..., 1] + first[..., 0] * then[..., 1]
        just_now = stamps == self.place(step)
        return jnp.where(just_now, 1, r), jnp.where(just_now, 0, q)
