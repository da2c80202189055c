"""Problems that users bring, with levels and risks of every kind, against a truth found in another way.

Nothing is given but the problem, where to start and the number of steps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import bilevax as bx

pytestmark = pytest.mark.usefixtures("steps_alone")


def per_block(m, **rows):
    """Rows with leading axes (m, n), as rows of the blocks."""
    n = next(iter(rows.values())).shape[1]
    flat = {name: a.reshape(-1, *a.shape[2:]).astype(np.float32) for name, a in rows.items()}
    return bx.PerBlock(flat, np.arange(0, m * n + 1, n))


def portfolios(m=8, d=4):
    """Every investor holds between nothing and a half of an asset; x is what a planner pays for holdings."""
    random = np.random.default_rng(0)
    root = 0.4 * random.normal(size=(m, d, d))
    S, mu, aim = root @ root.transpose(0, 2, 1) + 0.3 * np.eye(d), 0.6 * random.normal(size=(m, d)), 0.3

    def lower(x, y, block, batch):
        return 0.5 * y @ block["S"] @ y - y @ (block["mu"] + x)

    def upper(x, y, block, batch):
        return jnp.sum((y - aim) ** 2) + 0.02 * x @ x + 0.05 * x @ y

    def exact(x):
        total = 0
        for one, pull in zip(S, mu + x, strict=True):
            root = np.linalg.cholesky(one)
            y = scipy.optimize.lsq_linear(root.T, np.linalg.solve(root, pull), (0, 0.5), tol=1e-12).x
            total += np.sum((y - aim) ** 2) + 0.02 * x @ x + 0.05 * x @ y
        return total / m

    blocks = {"S": jnp.asarray(S, jnp.float32), "mu": jnp.asarray(mu, jnp.float32)}
    problem = bx.Problem(upper, bx.argmin(lower, project=(0.0, 0.5)), blocks)
    return problem, np.zeros(d), jnp.full((m, d), 0.1), exact


def regressions(m, n, d, noise):
    random = np.random.default_rng(0)
    rows = random.normal(size=(m, n, d))
    scale = np.exp(0.5 * random.normal(size=(m, 1)))
    return rows, rows @ random.normal(size=d) + scale * noise(random, (m, n))


def temperatures(m=16, n=20, d=3, radius=0.3):
    """The worst mean of a block's losses in a ball of the KL divergence: s and t ≥ 0.2 minimise its dual."""
    a, b = regressions(m, n, d, lambda random, shape: random.normal(size=shape))

    def upper(x, y, block, batch):
        loss, s, t = 0.5 * (batch["a"] @ x - batch["b"]) ** 2, y["s"], y["t"]
        return s + t * radius + t * jnp.mean(jnp.exp((loss - s) / t) - 1)

    def exact(x):
        def of_one(loss):
            def dual(log_t):
                t, most = np.exp(log_t), loss.max()
                return t * radius + t * np.log(np.mean(np.exp((loss - most) / t))) + most

            return scipy.optimize.minimize_scalar(dual, bounds=(np.log(0.2), 8), method="bounded").fun

        return np.mean([of_one(loss) for loss in 0.5 * (a @ x - b) ** 2])

    level = bx.minimum(project=({"s": -np.inf, "t": 0.2}, None))
    start = {"s": jnp.full(m, 5.0), "t": jnp.full(m, 5.0)}
    return bx.Problem(upper, level, m, per_block(m, a=a, b=b)), np.zeros(d), start, exact


def deviations(m=16, n=20, d=3):
    """The logarithm of the mean loss of a block plus its standard deviation: a mean that reads a mean."""
    a, b = regressions(m, n, d, lambda random, shape: random.standard_t(4, size=shape))

    def loss(x, batch):
        return 0.5 * (batch["a"] @ x - batch["b"]) ** 2

    def square(x, y, block, batch):
        return jnp.mean((loss(x, batch) - y["mean"]) ** 2)

    levels = {"mean": bx.mean(lambda x, block, batch: jnp.mean(loss(x, batch)))}
    levels["square"] = bx.mean(square, reads="mean")

    def upper(x, y, block, batch):
        return jnp.log(y["mean"] + jnp.sqrt(y["square"]))

    def exact(x):
        found = 0.5 * (a @ x - b) ** 2
        return np.mean(np.log(found.mean(1) + found.std(1)))

    return bx.Problem(upper, levels, m, lower_data=per_block(m, a=a, b=b)), np.zeros(d), None, exact


def adversaries(m=10, n=8, d=3, cost=8.0):
    """Ridge regressions against an adversary who shifts the features at a cost; x are the log penalties."""
    random = np.random.default_rng(0)
    w, a = random.normal(size=(m, d)) * [1.0, 0.5, 0.0], random.normal(size=(m, 2 * n, d))
    b = np.einsum("mnd,md->mn", a, w) + 0.7 * random.normal(size=(m, 2 * n))

    def fit(p, q, batch):
        return 0.5 * jnp.mean(((batch["a"] + q) @ p - batch["b"]) ** 2)

    def lower(x, y, block, batch):
        p, q = y
        return fit(p, q, batch) + 0.5 * jnp.sum(jnp.exp(x) * p**2) - 0.5 * cost * q @ q

    def exact(x):
        total = 0
        for rows, target in zip(a, b, strict=True):

            def slopes(z, rows=rows[:n], target=target[:n]):
                p, q = z[:d], z[d:]
                left = (rows + q) @ p - target
                return np.concatenate([(rows + q).T @ left / n + np.exp(x) * p, p * left.mean() - cost * q])

            p = scipy.optimize.root(slopes, np.zeros(2 * d), tol=1e-12).x[:d]
            total += 0.5 * np.mean((rows[n:] @ p - target[n:]) ** 2)
        return total / m

    known, new = (per_block(m, a=a[:, part], b=b[:, part]) for part in (slice(n), slice(n, None)))
    problem = bx.Problem(lambda x, y, block, batch: fit(y[0], 0.0, batch), bx.saddle(lower), m, new, known)
    return problem, np.zeros(d), (jnp.zeros((m, d)), jnp.zeros((m, d))), exact


def far_worse(m=200, n=4, d=3, share=0.05):
    """The mean of the worst ten of 200 blocks, six of which are far worse than all others."""
    random = np.random.default_rng(0)
    aim = 0.3 * random.normal(size=(m, d))
    aim[random.permutation(m)[:6]] += 4 * random.normal(size=(6, d))
    rows = aim[:, None] + 0.5 * random.normal(size=(m, n, d))

    def upper(x, y, block, batch):
        return 0.5 * jnp.mean(jnp.sum((y - batch["a"]) ** 2, -1))

    def lower(x, y, block, batch):
        return upper(x, y, block, batch) + 2 * jnp.sum((y - x) ** 2)

    def exact(x):
        y = (rows.mean(1) + 4 * x) / 5
        values = 0.5 * np.mean(np.sum((y[:, None] - rows) ** 2, -1), 1)
        return np.sort(values)[-round(share * m) :].mean()

    data = per_block(m, a=rows)
    return bx.Problem(upper, lower, m, data, data, risk=bx.cvar(share)), np.ones(d), jnp.zeros((m, d)), exact


@pytest.mark.parametrize("make", [portfolios, temperatures, deviations, adversaries, far_worse])
def test_a_run_with_nothing_given_ends_at_the_optimum(make):
    problem, x0, y0, exact = make()
    result = bx.minimize(problem, jnp.asarray(x0, jnp.float32), y0, steps=3000, progress=None)
    end = np.asarray(result.x, float)
    near = {"method": "Nelder-Mead", "options": {"maxfev": 80}}  # kinks, and minima of one of many pieces
    best = scipy.optimize.minimize(exact, end, **near).fun
    assert exact(end) - best < 0.01 * (exact(x0) - best)
    found = result.verification
    assert (found.blocks, found.message) == (problem.count, "")
    assert found.objective == pytest.approx(exact(end), rel=1e-4)


@pytest.mark.usefixtures("x64")
def test_variables_within_bounds_are_solved_from_far_away():
    """Exponents of 30 and more: a step for their curvature would be one of nothing elsewhere."""
    problem, x0, y0, exact = temperatures()
    far = {"s": np.full(16, -1.0), "t": np.full(16, 0.6)}
    found = bx.value_and_hypergradient(problem, jnp.asarray(x0), far)
    np.testing.assert_allclose(found.value, exact(x0), rtol=1e-8)
    differences = [(exact(x0 + e) - exact(x0 - e)) / 2e-5 for e in 1e-5 * np.eye(3)]
    np.testing.assert_allclose(found.gradient, differences, rtol=1e-4)
    assert jax.tree.structure(found.y) == jax.tree.structure(y0)
