"""Methods of others for one block, as their papers state them, in plain JAX: SOBA, SABA, SRBA and AmIGO.

With ℓ(x, y, v) = f(x, y; ξ) − ⟨v, ∇_y g(x, y; ζ)⟩ all of them move along estimates of

    D = (∂ℓ/∂x, ∇_y g = −∂ℓ/∂v, ∇²_yy g v − ∇_y f = −∂ℓ/∂y)

of x, y and v. SOBA takes D of one batch; SABA corrects it by stored gradients (SAGA); SRBA adds changes of D
to the last estimate, and computes it from all rows once in a period (SARAH); AmIGO takes ten plain steps of
y, then of v, for one of x. They get what ours get: fast random numbers, tables that are updated in place,
passes in pieces that fit into a cache, and the same transformations of the upper gradient.

    Dagréou et al., NeurIPS 2022 (SOBA, SABA) and AISTATS 2024 (SRBA); Arbel and Mairal, ICLR 2022 (AmIGO)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import bilevax as bx
from bilevax._step.ordering import after, read_once

PIECE = 4096
INNER = 10  # steps of y and of v that AmIGO takes for one of x


class Data(NamedTuple):
    """The rows of f and of g, as dense arrays."""

    upper: Any
    lower: Any


class Carry(NamedTuple):
    """The state of a run; `memory` is the method's own."""

    step: Array
    x: Any
    y: Any
    v: Any
    optimizer: Any
    memory: Any


class Peer(NamedTuple):
    """A method on one problem.

    Attributes:
      name: SOBA, SABA, SRBA or AmIGO.
      f, g: functions of (x, y, rows).
      optimizer: the transformation of the upper gradient.
      batch: rows of a batch.
      period: the steps from one pass over all rows to the next (SRBA).
      by_x: whether f reads x.
    """

    name: str
    f: Any
    g: Any
    optimizer: optax.GradientTransformation
    batch: int
    period: int
    by_x: bool

    def start(self, data: Data, x: Any, y: Any) -> Carry:
        """The state before the first step; SABA's table is filled from all rows."""
        v, memory = jax.tree.map(jnp.zeros_like, y), None
        point = (x, y, v)
        if self.name == "SRBA":
            memory = (point, jax.tree.map(jnp.zeros_like, point))
        if self.name == "SABA":
            memory = self._table(data, point)
        return Carry(jnp.zeros((), jnp.int32), x, y, v, self.optimizer.init(x), memory)

    def step(self, data: Data, seed: Array, lower_step: Array, now: Carry) -> Carry:
        """One step of x."""
        random = bx.Stream(seed, jnp.uint32(1)).at(now.step)
        point = (now.x, now.y, now.v)
        if self.name == "AmIGO":
            return self._amigo(data, random, lower_step, now)
        groups = [self._draw(random.at(k), rows) for k, rows in enumerate(data)]
        memory = now.memory
        if self.name == "SABA":
            found, memory = self._reduced(data, groups, point, memory)
        elif self.name == "SRBA":
            before, last = memory
            found = jax.lax.cond(
                now.step % self.period == 0,
                lambda: self._whole(data, point),
                lambda: jax.tree.map(
                    lambda d, a, b: d + a - b, last, *(self._at(data, groups, p) for p in (point, before))
                ),
            )
            memory = (point, found)
        else:
            found = self._at(data, groups, point)
        y, v = (_down(a, lower_step, d) for a, d in zip(point[1:], found[1:], strict=True))
        x, optimizer = self._upper(found[0], now)
        return Carry(now.step + 1, x, y, v, optimizer, memory)

    def rows(self, data: Data, steps: int) -> float:
        """Rows read, times the points at which they are evaluated."""
        whole = sum(_count(rows) for rows in data)
        if self.name == "AmIGO":
            return steps * self.batch * (INNER + 2 * INNER + 2)
        if self.name == "SRBA":
            return 4 * self.batch * steps + whole * -(-steps // self.period)
        return 2 * self.batch * steps + whole * (self.name == "SABA")

    def _amigo(self, data: Data, random: Any, lower_step: Array, now: Carry) -> Carry:
        def inner(k: Array, y: Any) -> Any:
            rows = self._take(data.lower, self._draw(random.at(2 * k), data.lower))
            return _down(y, lower_step, jax.grad(self.g, 1)(now.x, y, rows))

        y = jax.lax.fori_loop(0, INNER, inner, now.y)

        def solve(k: Array, v: Any) -> Any:
            groups = [self._draw(random.at(1000 + 2 * k + place), rows) for place, rows in enumerate(data)]
            return _down(v, lower_step, self._at(data, groups, (now.x, y, v))[2])

        v = jax.lax.fori_loop(0, INNER, solve, now.v)
        groups = [self._draw(random.at(3000 + place), rows) for place, rows in enumerate(data)]
        x, optimizer = self._upper(self._at(data, groups, (now.x, y, v))[0], now)
        return Carry(now.step + 1, x, y, v, optimizer, None)

    def _upper(self, gradient: Any, now: Carry) -> tuple[Any, Any]:
        updates, optimizer = self.optimizer.update(gradient, now.optimizer, now.x)
        return optax.apply_updates(now.x, updates), optimizer

    def _draw(self, random: Any, rows: Any) -> Array:
        """The number of a group of rows."""
        return random.integers((), _count(rows) // self.batch)

    def _take(self, rows: Any, group: Array) -> Any:
        first = group * self.batch
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, self.batch), rows)

    def _at(self, data: Data, groups: list[Array], point: Any) -> Any:
        """D on a batch."""
        of_f = self._upper_slopes(point, self._take(data.upper, groups[0]))
        of_g = self._lower_slopes(point, self._take(data.lower, groups[1]))
        return self._together(of_f, of_g)

    def _upper_slopes(self, point: Any, rows: Any) -> Any:
        """∂f/∂x (None if f does not read x) and ∂f/∂y."""
        x, y, _ = point
        if not self.by_x:
            return None, jax.grad(self.f, 1)(x, y, rows)
        return jax.grad(self.f, (0, 1))(x, y, rows)

    def _lower_slopes(self, point: Any, rows: Any) -> Any:
        """Those of ⟨v, ∇_y g⟩ by x, y and v."""

        def product(x: Any, y: Any, v: Any) -> Array:
            return jax.jvp(lambda y: self.g(x, y, rows), (y,), (v,))[1]

        return jax.grad(product, (0, 1, 2))(*point)

    def _together(self, of_f: Any, of_g: Any) -> Any:
        by_x = jax.tree.map(jnp.negative, of_g[0])
        if of_f[0] is not None:
            by_x = jax.tree.map(jnp.add, by_x, of_f[0])
        return by_x, of_g[2], jax.tree.map(jnp.subtract, of_g[1], of_f[1])

    def _whole(self, data: Data, point: Any) -> Any:
        """D on all rows."""
        return self._together(
            self._mean(self._upper_slopes, data.upper, point),
            self._mean(self._lower_slopes, data.lower, point),
        )

    def _mean(self, slopes: Any, rows: Any, point: Any) -> Any:
        """The gradients of a part on all rows."""
        count = _count(rows)
        length = min(PIECE, count)
        pieces, rest = divmod(count, length)

        def piece(first: Any, size: int) -> Any:
            taken = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, size), rows)
            return jax.tree.map(lambda a: a * (size / count), slopes(point, taken))

        def add(k: Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, piece(k * length, length))

        first = piece(pieces * length, rest) if rest else jax.tree.map(jnp.zeros_like, piece(0, length))
        return jax.lax.fori_loop(0, pieces, add, first)

    def _table(self, data: Data, point: Any) -> Any:
        """By part, the stored gradients of all groups and their mean."""
        found = []
        for slopes, rows in zip((self._upper_slopes, self._lower_slopes), data, strict=True):
            groups = jnp.arange(_count(rows) // self.batch)
            stored = jax.lax.map(lambda k, s=slopes, r=rows: s(point, self._take(r, k)), groups)
            found.append((stored, jax.tree.map(lambda a: a.mean(0), stored)))
        return found

    def _reduced(self, data: Data, groups: list[Array], point: Any, memory: Any) -> tuple[Any, Any]:
        reduced, kept = [], []
        for slopes, rows, group, (stored, mean) in zip(
            (self._upper_slopes, self._lower_slopes), data, groups, memory, strict=True
        ):
            fresh, count = slopes(point, self._take(rows, group)), _count(rows) // self.batch
            at = group[None]
            old = read_once(lambda a=stored, k=at: jax.tree.map(lambda leaf: leaf[k[0]], a), at)
            change = jax.tree.map(jnp.subtract, fresh, old)
            reduced.append(jax.tree.map(jnp.add, mean, change))
            mean = jax.tree.map(lambda a, c, n=count: a + c / n, mean, change)
            # Read before it is written, or the compiler copies the table.
            place = after(at, count, (reduced[-1], mean))[0]
            stored = jax.tree.map(lambda a, b, k=place: a.at[k].set(b), stored, fresh)
            kept.append((stored, mean))
        return self._together(*reduced), kept


PEERS = ("SOBA", "SABA", "SRBA", "AmIGO")


@functools.partial(jax.jit, static_argnums=0)
def peer_start(peer: Peer, data: Data, x: Any, y: Any) -> Carry:
    """The state before the first step."""
    return peer.start(data, x, y)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def peer_advance(peer: Peer, data: Data, seed: Array, lower_step: Array, now: Carry, steps: Any) -> Carry:
    """Some steps."""
    return jax.lax.fori_loop(0, steps, lambda _, now: peer.step(data, seed, lower_step, now), now)


def _down(tree: Any, step: Array, slope: Any) -> Any:
    return jax.tree.map(lambda a, d: a - step * d, tree, slope)


def _count(rows: Any) -> int:
    return int(np.shape(jax.tree.leaves(rows)[0])[0])
