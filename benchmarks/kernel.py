"""A reference for speed: BSVRB v2 written by hand for one problem, one core and sparse rows.

The problem is hyper-parameter optimisation with m temperatures. With a = −label/temperature_i and the
score r = row · y_i,

    f_i = mean over B validation rows of softplus(a r)
    g_i = mean over B training rows of sigmoid(x_j) softplus(a r) + reg/2 |y_i|²

With w = sigmoid(x_j), p = sigmoid(a r) and h = row · v_i, each row adds 1/B times

    a p · row                 to ∇_y f_i
    w a p · row               to ∇_y g_i, which also has the term reg y_i
    w a² p (1 − p) h · row    to ∇²_yy g_i v_i, which also has the term reg v_i
    −w (1 − w) a p h          to ∂/∂x_j of −⟨v_i, ∇_y g_i⟩

One pass over a row's nonzeros gives its products with y and v at both points, x_{t−1} = x_t + η z_t is
never stored, and blocks catch up lazily. `python -m benchmarks.kernel` checks it against dense NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numba import njit


class SparseRows(NamedTuple):
    """Sparse rows with their labels."""

    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    labels: np.ndarray


class Coefficients(NamedTuple):
    """The coefficients of the method, the regularisation of the problem, and I and B."""

    upper_step: float
    lower_step: float
    inverse_step: float
    alpha: float
    beta: float
    gamma: float
    regularization: float
    blocks_per_step: int
    batch_size: int


class State(NamedTuple):
    """The state of a run; the arrays are updated in place."""

    x: np.ndarray
    z: np.ndarray
    y: np.ndarray
    s: np.ndarray
    v: np.ndarray
    u: np.ndarray
    visit: np.ndarray
    order: np.ndarray
    step: np.ndarray
    random: np.ndarray
    rows: np.ndarray


def as_rows(matrix: sp.csr_matrix, labels: np.ndarray, dtype: Any = np.float32) -> SparseRows:
    """Converts a scipy matrix for the kernel."""
    matrix = sp.csr_matrix(matrix)
    return SparseRows(matrix.indptr, matrix.indices, matrix.data.astype(dtype), labels.astype(dtype))


def start(train: SparseRows, features: int, blocks: int, coefficients: Coefficients, seed: int = 0) -> State:
    """The state before the first step: zeros."""
    dtype = train.values.dtype
    per_block = [np.zeros((blocks, features), dtype) for _ in range(4)]
    n = len(train.labels)
    return State(
        np.zeros(n, dtype), np.zeros(n, dtype), *per_block, np.zeros(blocks, np.int64), np.arange(blocks),
        np.zeros(1, np.int64), np.array([seed + 1], np.uint64),
        np.zeros((2, coefficients.blocks_per_step, coefficients.batch_size), np.int64),
    )  # fmt: skip


@njit(inline="always")
def _random(state):
    value = state[0]
    value ^= value << np.uint64(13)
    value ^= value >> np.uint64(7)
    value ^= value << np.uint64(17)
    state[0] = value
    return value >> np.uint64(11)


@njit(inline="always")
def _sigmoid(value, one):
    return one / (one + np.exp(-value))


@njit(fastmath=True, cache=True)
def advance(state, coefficients, train, validation, temperatures, steps):
    """Takes steps, in place."""
    x, z, y, s, v, u = state.x, state.z, state.y, state.s, state.v, state.u
    blocks, features = y.shape
    one = x.dtype.type(1)
    eta, tau, tau_bar = (
        one * coefficients.upper_step,
        one * coefficients.lower_step,
        one * coefficients.inverse_step,
    )
    alpha, beta, gamma = one * coefficients.alpha, one * coefficients.beta, one * coefficients.gamma
    reg, share = one * coefficients.regularization, one / coefficients.batch_size
    per_epoch = blocks // coefficients.blocks_per_step
    n = len(x)
    change = np.zeros((coefficients.blocks_per_step, coefficients.batch_size), x.dtype)
    y1, y0, v1, v0 = (
        np.empty(features, x.dtype),
        np.empty(features, x.dtype),
        np.empty(features, x.dtype),
        np.empty(features, x.dtype),
    )
    g1, g0, p1, p0 = (
        np.empty(features, x.dtype),
        np.empty(features, x.dtype),
        np.empty(features, x.dtype),
        np.empty(features, x.dtype),
    )
    for _ in range(steps):
        step = state.step[0]
        place = step % per_epoch
        if place == 0:
            for i in range(blocks - 1, 0, -1):
                j = _random(state.random) % np.uint64(i + 1)
                state.order[i], state.order[j] = state.order[j], state.order[i]
        for k in range(coefficients.blocks_per_step):
            i = state.order[place * coefficients.blocks_per_step + k]
            gap = one * (step - state.visit[i])
            last = max(gap - one, one * 0)
            for c in range(features):
                y1[c], y0[c] = y[i, c] - gap * tau * s[i, c], y[i, c] - last * tau * s[i, c]
                v1[c], v0[c] = v[i, c] - gap * tau_bar * u[i, c], v[i, c] - last * tau_bar * u[i, c]
                g1[c], g0[c], p1[c], p0[c] = reg * y1[c], reg * y0[c], reg * v1[c], reg * v0[c]
            for b in range(coefficients.batch_size):
                j = _random(state.random) % np.uint64(n)
                state.rows[0, k, b] = j
                a = -train.labels[j] / temperatures[i]
                r1, r0, h1, h0 = one * 0, one * 0, one * 0, one * 0
                for e in range(train.starts[j], train.starts[j + 1]):
                    c, value = train.columns[e], train.values[e]
                    r1 += value * y1[c]
                    r0 += value * y0[c]
                    h1 += value * v1[c]
                    h0 += value * v0[c]
                w1, w0 = _sigmoid(x[j], one), _sigmoid(x[j] + eta * z[j], one)
                if step == 0:
                    w0 = w1
                q1, q0 = _sigmoid(a * r1, one), _sigmoid(a * r0, one)
                d1, d0 = share * w1 * a * q1, share * w0 * a * q0
                e1, e0 = d1 * a * (one - q1) * h1, d0 * a * (one - q0) * h0
                change[k, b] = -(one - w1) * d1 * h1 + (one - beta) * (one - w0) * d0 * h0
                for e in range(train.starts[j], train.starts[j + 1]):
                    c, value = train.columns[e], train.values[e]
                    g1[c] += value * d1
                    g0[c] += value * d0
                    p1[c] += value * e1
                    p0[c] += value * e0
            for b in range(coefficients.batch_size):
                j = _random(state.random) % np.uint64(len(validation.labels))
                state.rows[1, k, b] = j
                a = -validation.labels[j] / temperatures[i]
                r1, r0 = one * 0, one * 0
                for e in range(validation.starts[j], validation.starts[j + 1]):
                    c, value = validation.columns[e], validation.values[e]
                    r1 += value * y1[c]
                    r0 += value * y0[c]
                d1, d0 = share * a * _sigmoid(a * r1, one), share * a * _sigmoid(a * r0, one)
                for e in range(validation.starts[j], validation.starts[j + 1]):
                    c, value = validation.columns[e], validation.values[e]
                    p1[c] -= value * d1
                    p0[c] -= value * d0
            for c in range(features):
                s[i, c] = (one - alpha) * s[i, c] + alpha * g1[c] + gamma * (g1[c] - g0[c])
                u[i, c] = (one - alpha) * u[i, c] + alpha * p1[c] + gamma * (p1[c] - p0[c])
                y[i, c], v[i, c] = y1[c], v1[c]
            state.visit[i] = step
        for j in range(n):
            z[j] *= one - beta
        for k in range(coefficients.blocks_per_step):
            for b in range(coefficients.batch_size):
                z[state.rows[0, k, b]] += change[k, b] / coefficients.blocks_per_step
        for j in range(n):
            x[j] -= eta * z[j]
        state.step[0] += 1


def check(steps: int = 30, seed: int = 0) -> float:
    """The largest difference from an eager, dense NumPy version, relative to the largest entry."""
    rng = np.random.default_rng(seed)
    m, features, n = 6, 9, 30
    coefficients = Coefficients(0.3, 0.2, 0.1, 0.3, 0.2, 2.0, 0.05, 3, 4)
    dense = [(rng.random((rows, features)) < 0.4) * rng.normal(size=(rows, features)) for rows in (n, 20)]
    labels = [rng.choice([-1.0, 1.0], len(rows)) for rows in dense]
    train, validation = (
        as_rows(sp.csr_matrix(r), label, np.float64) for r, label in zip(dense, labels, strict=True)
    )
    temperatures = rng.uniform(1, 3, m)
    state = start(train, features, m, coefficients, seed)

    def sigmoid(value):
        return 1 / (1 + np.exp(-value))

    def sample(i, x, y, v, rows, held):
        a, b = -labels[0][rows] / temperatures[i], -labels[1][held] / temperatures[i]
        w, p, h = sigmoid(x[rows]), sigmoid(a * (dense[0][rows] @ y)), dense[0][rows] @ v
        g = dense[0][rows].T @ (w * a * p) / len(rows) + coefficients.regularization * y
        u = dense[0][rows].T @ (w * a**2 * p * (1 - p) * h) / len(rows) + coefficients.regularization * v
        u -= dense[1][held].T @ (b * sigmoid(b * (dense[1][held] @ y))) / len(held)
        gx = np.zeros(n)
        np.add.at(gx, rows, -w * (1 - w) * a * p * h / len(rows))
        return g, u, gx

    x, z = np.zeros(n), np.zeros(n)
    y, s, v, u = (np.zeros((m, features)) for _ in range(4))
    old = (x.copy(), y.copy(), v.copy())
    for t in range(steps):
        advance(state, coefficients, train, validation, temperatures, 1)
        place = t % (m // 3) * 3
        now, total = (x.copy(), y.copy(), v.copy()), np.zeros(n)
        for k, i in enumerate(state.order[place : place + 3]):
            rows, held = state.rows[0, k], state.rows[1, k]
            g1, p1, x1 = sample(i, now[0], now[1][i], now[2][i], rows, held)
            g0, p0, x0 = sample(i, old[0], old[1][i], old[2][i], rows, held)
            s[i] += coefficients.alpha * (g1 - s[i]) + coefficients.gamma * (g1 - g0)
            u[i] += coefficients.alpha * (p1 - u[i]) + coefficients.gamma * (p1 - p0)
            total += (x1 - (1 - coefficients.beta) * x0) / 3
        z = (1 - coefficients.beta) * z + total
        y, v, x = (
            y - coefficients.lower_step * s,
            v - coefficients.inverse_step * u,
            x - coefficients.upper_step * z,
        )
        old = now
    pairs = [(state.x, x), (state.z, z), (state.s, s), (state.u, u)]
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


if __name__ == "__main__":
    print(f"largest relative difference from dense NumPy: {check():.2e}")
