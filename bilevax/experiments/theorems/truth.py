"""The exact derivatives and values of a problem family, as functions that JAX can trace."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.testing.pl import PLBlocks
from bilevax.testing.quadratic_upper import QuadraticUpper


class Truth(eqx.Module):
    """The exact derivatives of linear blocks under a quadratic f, on all rows.

    Closed forms from the family's float64 arrays, rounded to the problem's dtype. A_i is ∇²_yy g_i, B_i is
    −∇²_yx g_i, and b_i the shift of g_i; W_i and c_i are the metric and the target of f_i.
    """

    A: Array
    inverse: Array
    B: Array
    b: Array
    W: Array
    c: Array
    slopes: Array
    bases: Array
    curvature: Array
    constant: Array
    ridge: Array
    nonconvexity: Array

    @staticmethod
    def of(family: QuadraticUpper) -> Truth:
        """The truth of `quadratic_blocks` or `mean_blocks`."""
        arrays: dict[str, Any] = {
            "A": family.A,
            "inverse": np.linalg.inv(family.A),
            "B": family.B,
            "b": family.shifts.mean(1),
            "W": family.W,
            "c": family.mean_targets,
            "slopes": family.slopes,
            "bases": family.bases,
            "curvature": family.curvature,
            "constant": family.gradient(np.zeros(family.settings.d_x)),
            "ridge": family.settings.ridge,
            "nonconvexity": family.settings.nonconvexity,
        }
        return Truth(**{name: jnp.asarray(family.settings.cast(array)) for name, array in arrays.items()})

    def gradient(self, x: Array) -> Array:
        """∇F(x)."""
        return self.curvature @ x + self.constant + self.nonconvexity * jnp.sin(2 * x)

    def squared_gradient(self, x: Array) -> Array:
        """‖∇F(x)‖²."""
        return jnp.sum(self.gradient(x) ** 2)

    def lower_solution(self, x: Array) -> Array:
        """y_i(x)."""
        return self.slopes @ x + self.bases

    def lower_gradient(self, x: Array, y: Array) -> Array:
        """∇_y g_i(x, y_i)."""
        return jnp.einsum("mij,mj->mi", self.A, y) - self.B @ x - self.b

    def upper_slope(self, y: Array) -> Array:
        """∇_y f_i(x, y_i)."""
        return jnp.einsum("mij,mj->mi", self.W, y - self.c)

    def hessian(self, x: Array, y: Array) -> Array:
        """∇²_yy g_i(x, y_i)."""
        return self.A

    def inverse_solution(self, x: Array, y: Array) -> Array:
        """v_i(x, y_i) = [∇²_yy g_i]⁻¹ ∇_y f_i."""
        return jnp.einsum("mij,mj->mi", self.inverse, self.upper_slope(y))

    def inverse_gradient(self, x: Array, y: Array, v: Array) -> Array:
        """∇_v φ_i = ∇²_yy g_i v_i − ∇_y f_i."""
        return jnp.einsum("mij,mj->mi", self.A, v) - self.upper_slope(y)

    def mean_term(self, x: Array, y: Array, v: Array) -> Array:
        """Δ = 1/m Σ_i ∇_x f_i − ∇²_xy g_i v_i, which z tracks; −∇²_xy g_i = B_iᵀ."""
        through = jnp.einsum("mij,mi->j", self.B, v) / self.B.shape[0]
        return self.ridge * x + self.nonconvexity * jnp.sin(2 * x) + through


class Gap(eqx.Module):
    """F − min F of `pl_blocks`: w̄ Σ_k h(x_k − x*_k) with h(t) = t² + κ sin² t, accurate near zero."""

    optimum: Array
    weight: Array
    nonconvexity: Array

    @staticmethod
    def of(family: PLBlocks) -> Gap:
        """The gap of a PL family."""
        arrays: dict[str, Any] = {
            "optimum": family.optimum,
            "weight": family.mean_weight,
            "nonconvexity": family.settings.nonconvexity,
        }
        return Gap(**{name: jnp.asarray(family.settings.cast(array)) for name, array in arrays.items()})

    def __call__(self, x: Array) -> Array:
        t = x - self.optimum
        return self.weight * jnp.sum(t**2 + self.nonconvexity * jnp.sin(t) ** 2)
