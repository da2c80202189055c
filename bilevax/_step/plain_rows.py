r"""Rows of a table that move by plain upper steps.

A z that no step touches only decays, and x moves along it: :math:`z_{t+1} = d_t z_t` and
:math:`x_{t+1} = x_t - \eta_t z_{t+1}`, with :math:`d_t = 1 - \beta_t`. So from a step s to a later one t

.. math:: z_t = r z_s, \quad x_t = x_s - q z_s, \qquad r = \prod_{k=s}^{t-1} d_k, \quad
    q = \sum_{k=s}^{t-1} \eta_k \prod_{j=s}^{k} d_j

for any schedules. All terms are positive, so that nothing cancels, and nothing that underflows is divided by.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

_SURE = "promise_in_bounds"


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """The rule of rows that have x and z; a move is (r, q), and the pace of a step is η."""

    moving: ClassVar[int] = 1  # how many numbers of a pace say how far x moves
    averages: ClassVar[bool] = False

    @property
    def parts(self) -> int:
        """How many arrays a row has."""
        return 2

    @property
    def still(self) -> tuple[float, ...]:
        """The move that changes nothing."""
        return 1.0, 0.0

    @property
    def at_rest(self) -> tuple[float, ...]:
        """The pace of a step that does not move x."""
        return (0.0,)

    def start(self, x: Array, z: Array) -> list[Array]:
        """The parts of rows before step 0."""
        return [x, z]

    def join(self, first: Array, then: Array) -> Array:
        """Two moves as one."""
        (r, q), (r_then, q_then) = jnp.moveaxis(first, -1, 0), jnp.moveaxis(then, -1, 0)
        return jnp.stack([r * r_then, q + r * q_then], -1)

    def move(self, keep: Any, pace: Array) -> Array:
        """The move of rows that a step does not touch; `keep` is 1 − β."""
        keep = jnp.asarray(keep, pace.dtype)
        return jnp.stack([keep, pace[0] * keep])

    def carried(self, parts: list[Array], move: Array, pace: Array) -> tuple[list[Array], Array]:
        """Rows after a move, and their x one step earlier; `pace` is that of the latest step."""
        (x, z), (r, q) = parts, jnp.moveaxis(move[:, None], -1, 0)
        x, z = x - q * z, r * z
        return [x, z], x + pace[0] * z

    def put(
        self, table: Array, at: Array, parts: list[Array], new: Array, keep: Any, pace: Array, stamp: Any
    ) -> Array:
        """A table after a step that touches some rows, and adds `new` to z of the first of them."""
        x, z = parts
        z = jnp.asarray(keep, table.dtype) * z
        table = table.at[at].set(as_rows([x - pace[0] * z, z], stamp), mode=_SURE)
        # All is linear in what is added: a row that was looked up twice gets both.
        return table.at[at[: len(new)]].add(as_rows([-pace[0] * new, new], 0), mode=_SURE)


def as_rows(parts: list[Array], stamp: Any) -> Array:
    """All that is stored of rows."""
    return jnp.concatenate([*parts, jnp.full_like(parts[0][:, :1], stamp)], axis=1)
