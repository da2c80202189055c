r"""Rows of a table that move by Adam, lazily; see `lazy_adam` for the equations.

Between two touches all of a row but its x and v is linear in what it was, with numbers that are the same for
all rows, and so is x once the divisor is fixed:

.. math::
    z_t &= r z_s, & m_t &= p m_s + q z_s, & v_t &= u v_s + w z_s^2, & D &= \sqrt{v_s + o z_s^2} + \epsilon' \\
    x_t &= \rho x_s - (a m_s + c z_s) / D, & \bar x_t &= A \bar x_s + B x_s - (E m_s + F z_s) / D
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from bilevax._step.plain_rows import as_rows

_SURE = "promise_in_bounds"


@dataclasses.dataclass(frozen=True)
class AdamRows:
    """The rule of rows that have x, z, m and v; and the average of x, if there is one.

    A move is (r, p, q, u, w, o, ρ, a, c), and with an average also (A, B, E, F). The pace of a step is
    (η', ρ, ε', b₁, b₂), and with an average its share: η' = η √(1 − b₂ᵗ) / (1 − b₁ᵗ), ε' = ε √(1 − b₂ᵗ).

    Attributes:
      averages: whether x is averaged.
    """

    moving: ClassVar[int] = 2  # how many numbers of a pace say how far x moves
    averages: bool = False

    @property
    def parts(self) -> int:
        """How many arrays a row has."""
        return 5 if self.averages else 4

    @property
    def still(self) -> tuple[float, ...]:
        """The move that changes nothing."""
        return (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0) + ((1.0, 0.0, 0.0, 0.0) if self.averages else ())

    @property
    def at_rest(self) -> tuple[float, ...]:
        """The pace of a step that does not move x."""
        return (0.0, 1.0, 1.0, 0.0, 0.0) + ((0.0,) if self.averages else ())

    def start(self, x: Array, z: Array) -> list[Array]:
        """The parts of rows before step 0."""
        return [x, z, jnp.zeros_like(x), jnp.zeros_like(x)] + ([x] if self.averages else [])

    def join(self, first: Array, then: Array) -> Array:
        """Two moves as one."""
        r, p, q, u, w, o, rho, a, c, *average = jnp.moveaxis(first, -1, 0)
        r2, p2, q2, u2, w2, o2, rho2, a2, c2, *average2 = jnp.moveaxis(then, -1, 0)
        joined = [r * r2, p * p2, q * p2 + r * q2, u * u2, w * u2 + r**2 * w2, o + r**2 * o2]
        joined += [rho * rho2, rho2 * a + p * a2, rho2 * c + q * a2 + r * c2]
        if self.averages:
            (A, B, E, F), (A2, B2, E2, F2) = average, average2
            joined += [A * A2, A2 * B + rho * B2, A2 * E + a * B2 + p * E2]
            joined += [A2 * F + c * B2 + q * E2 + r * F2]
        return jnp.stack(jnp.broadcast_arrays(*joined), -1)

    def move(self, keep: Any, pace: Array) -> Array:
        """The move of rows that a step does not touch; `keep` is 1 − β."""
        step, rho, _, b1, b2, *share = pace
        r = jnp.asarray(keep, pace.dtype)
        q, w, still = (1 - b1) * r, (1 - b2) * r**2, jnp.zeros_like(r)
        numbers = [r, b1, q, b2, w, w, rho, step * b1, step * q]
        return jnp.stack(numbers + ([1 - share[0], share[0], still, still] if self.averages else []))

    def carried(self, parts: list[Array], move: Array, pace: Array) -> tuple[list[Array], Array]:
        """Rows after a move, and their x one step earlier; `pace` is that of the latest step."""
        x, z, m, v, *mean = parts
        r, p, q, u, w, o, rho, a, c, *average = jnp.moveaxis(move[:, None], -1, 0)
        divisor = jnp.sqrt(v + o * z**2) + pace[2]
        new = [rho * x - (a * m + c * z) / divisor, r * z, p * m + q * z, u * v + w * z**2]
        if self.averages:
            A, B, E, F = average
            new.append(A * mean[0] + B * x - (E * m + F * z) / divisor)
        return new, (new[0] + pace[0] * new[2] / divisor) / pace[1]

    def put(
        self, table: Array, at: Array, parts: list[Array], new: Array, keep: Any, pace: Array, stamp: Any
    ) -> Array:
        """A table after a step that touches some rows, and adds `new` to z of the first of them."""
        x, z, *others = parts
        width = x.shape[1]
        step, rho, least, b1, b2, *share = pace
        # A row may be looked up twice, and its moments need the whole of its z: it is summed in place first.
        table = table.at[at].set(as_rows([x, jnp.asarray(keep, table.dtype) * z, *others], stamp), mode=_SURE)
        table = table.at[at[: len(new)], width : 2 * width].add(new, mode=_SURE)
        z = table.at[at, width : 2 * width].get(mode=_SURE)
        m, v, *mean = others
        m, v = b1 * m + (1 - b1) * z, b2 * v + (1 - b2) * z**2
        mean = [mean[0] + share[0] * (x - mean[0])] if self.averages else []
        x = rho * x - step * m / (jnp.sqrt(v) + least)
        return table.at[at].set(as_rows([x, z, m, v, *mean], stamp), mode=_SURE)
