"""The exact derivatives of curved blocks, as functions that JAX can trace."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax.experiments.theorems.truth import Truth
from bilevax.testing.curved import SWING, CurvedBlocks
from bilevax.testing.quadratic_upper import QuadraticUpper

_NEWTON = 8  # steps: the error is squared in each; float32 needs six from the start below


class CurvedTruth(eqx.Module):
    """What `Truth` offers, for `curved_blocks`: Hessian and Jacobian depend on x and y.

    With w = Q_iᵀ y: ∇_y g_i = Q_i (D w + κ s_i(x) tanh w) − B_i x − b_i, and c_i is the target of f_i.
    """

    Q: Array
    D: Array
    B: Array
    P: Array
    b: Array
    c: Array
    bend: Array
    ridge: Array
    nonconvexity: Array

    @staticmethod
    def of(family: CurvedBlocks) -> CurvedTruth:
        """The truth of `curved_blocks`."""
        arrays: dict[str, Any] = {name: getattr(family, name) for name in ("Q", "D", "B", "P")}
        arrays |= {"b": family.shifts.mean(1), "c": family.targets.mean(1)}
        arrays |= {name: getattr(family.settings, name) for name in ("bend", "ridge", "nonconvexity")}
        return CurvedTruth(**{name: jnp.asarray(family.settings.cast(a)) for name, a in arrays.items()})

    def gradient(self, x: Array) -> Array:
        """∇F(x)."""
        y = self.lower_solution(x)
        return self.mean_term(x, y, self.inverse_solution(x, y))

    def squared_gradient(self, x: Array) -> Array:
        """‖∇F(x)‖²."""
        return jnp.sum(self.gradient(x) ** 2)

    def lower_solution(self, x: Array) -> Array:
        """y_i(x), by Newton's method; see `CurvedBlocks.stacked_solution`."""
        right, bend = self._turned(self.B @ x + self.b), self._bend(x)

        def newton(_: int, w: Array) -> Array:
            t = jnp.tanh(w)
            return w + (right - self.D * w - bend * t) / (self.D + bend * (1 - t**2))

        return self._back(jax.lax.fori_loop(0, _NEWTON, newton, right / (self.D + bend), unroll=True))

    def lower_gradient(self, x: Array, y: Array) -> Array:
        """∇_y g_i(x, y_i)."""
        w = self._turned(y)
        return self._back(self.D * w + self._bend(x) * jnp.tanh(w)) - self.B @ x - self.b

    def upper_slope(self, y: Array) -> Array:
        """∇_y f_i(x, y_i)."""
        return y - self.c

    def hessian(self, x: Array, y: Array) -> Array:
        """∇²_yy g_i(x, y_i)."""
        return jnp.einsum("mij,mj,mkj->mik", self.Q, self._diagonal(x, y), self.Q)

    def inverse_solution(self, x: Array, y: Array) -> Array:
        """v_i(x, y_i) = [∇²_yy g_i]⁻¹ ∇_y f_i."""
        return self._back(self._turned(self.upper_slope(y)) / self._diagonal(x, y))

    def inverse_gradient(self, x: Array, y: Array, v: Array) -> Array:
        """∇_v φ_i = ∇²_yy g_i v_i − ∇_y f_i."""
        return self._back(self._diagonal(x, y) * self._turned(v)) - self.upper_slope(y)

    def mean_term(self, x: Array, y: Array, v: Array) -> Array:
        """Δ = 1/m Σ_i ∇_x f_i − ∇²_xy g_i v_i, which z tracks."""
        moved = self.bend * SWING * jnp.cos(self.P @ x) * jnp.tanh(self._turned(y)) * self._turned(v)
        through = jnp.einsum("mij,mi->j", self.B, v) - jnp.einsum("mij,mi->j", self.P, moved)
        return self.ridge * x + self.nonconvexity * jnp.sin(2 * x) + through / self.B.shape[0]

    def _bend(self, x: Array) -> Array:
        return self.bend * (1 + SWING * jnp.sin(self.P @ x))

    def _diagonal(self, x: Array, y: Array) -> Array:
        return self.D + self._bend(x) * (1 - jnp.tanh(self._turned(y)) ** 2)

    def _turned(self, y: Array) -> Array:
        return jnp.einsum("mji,mj->mi", self.Q, y)

    def _back(self, w: Array) -> Array:
        return jnp.einsum("mij,mj->mi", self.Q, w)


def truth_of(family: QuadraticUpper | CurvedBlocks) -> Truth | CurvedTruth:
    """The traced truth of a family of these experiments."""
    return CurvedTruth.of(family) if isinstance(family, CurvedBlocks) else Truth.of(family)
