"""Problems with known solutions, for tests of convergence."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import bilevax as bx


def upper(x, y, block, batch):
    return 0.5 * jnp.mean(jnp.sum((y - batch["target"]) ** 2, -1)) + 0.5 * block["ridge"] * x @ x


def lower(x, y, block, batch):
    return 0.5 * y @ block["A"] @ y - y @ (block["B"] @ x + jnp.mean(batch["shift"], 0))


def inner(x, block, batch):
    return block["B"] @ x + jnp.mean(batch["shift"], 0)


class Quadratic:
    """g_i = ½ yᵀA_i y − yᵀ(B_i x + b_row), f_i = ½‖y − c_row‖² + ½ρ‖x‖²: y_i(x), F and ∇F in closed form."""

    def __init__(self, m=50, rows=200, d_y=10, d_x=10, ridge=0.1, coupling=1.0, seed=0, dtype=np.float32):
        rng = np.random.default_rng(seed)
        eigenvalues = np.linspace(1.0, 3.0, d_y)
        bases = np.linalg.qr(rng.normal(size=(m, d_y, d_y)))[0]
        self.A = np.einsum("mij,j,mkj->mik", bases, eigenvalues, bases)
        self.B = coupling * rng.normal(size=(m, d_y, d_x)) / np.sqrt(d_x)
        self.targets = rng.normal(size=(m, rows, d_y)) + rng.normal(size=(m, 1, d_y))
        self.shifts = rng.normal(size=(m, rows, d_y))
        self.ridge, self.m, self.d_x, self.d_y = ridge, m, d_x, d_y
        offsets = np.arange(m + 1) * rows
        self.problem = bx.Problem(
            upper,
            lower,
            {"A": self.A.astype(dtype), "B": self.B.astype(dtype), "ridge": np.full(m, ridge, dtype)},
            bx.PerBlock({"target": self.targets.reshape(-1, d_y).astype(dtype)}, offsets),
            bx.PerBlock({"shift": self.shifts.reshape(-1, d_y).astype(dtype)}, offsets),
        )
        self.x0, self.y0 = jnp.ones(d_x, dtype), jnp.zeros((m, d_y), dtype)
        self.slopes, self.base = self.lower_jacobians()
        curvature = np.einsum("mij,mik->jk", self.slopes, self.slopes) / m + ridge * np.eye(d_x)
        self.solution = np.linalg.solve(curvature, -self.gradient(np.zeros(d_x)))
        self.least = self.value(self.solution)

    def lower_jacobians(self):
        """y_i(x) = slope x + base."""
        return np.linalg.solve(self.A, self.B), np.linalg.solve(self.A, self.shifts.mean(1)[..., None])[
            ..., 0
        ]

    def lower_solution(self, x):
        return self.slopes @ np.asarray(x, float) + self.base

    def value(self, x):
        x = np.asarray(x, float)
        errors = self.lower_solution(x)[:, None] - self.targets
        return 0.5 * np.mean(np.sum(errors**2, -1)) + 0.5 * self.ridge * x @ x

    def gradient(self, x):
        x = np.asarray(x, float)
        errors = self.lower_solution(x) - self.targets.mean(1)
        return np.einsum("mij,mi->j", self.slopes, errors) / self.m + self.ridge * x


class LinearMean(Quadratic):
    """The same f with mean lower levels, c_i(x; row) = B_i x + b_row."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        data = self.problem
        self.problem = bx.Problem(upper, bx.mean(inner), data.blocks, data.upper_data, data.lower_data[0])
        self.y0 = None

    def lower_jacobians(self):
        return self.B, self.shifts.mean(1)
