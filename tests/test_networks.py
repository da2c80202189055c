"""Networks of equinox as x and as y: what f and g, results and new blocks see are networks again."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx

TASKS, ROWS = 6, 8
NETWORK = eqx.nn.MLP(1, 1, width_size=12, depth=2, activation=jnp.tanh, key=jax.random.key(0))
WEIGHTS, REST = eqx.partition(NETWORK, eqx.is_inexact_array)


def loss(weights, batch):
    out = jax.vmap(eqx.combine(weights, REST))(batch["t"])
    return jnp.mean((out - batch["target"]) ** 2)


def pulled(x, y, block, batch):
    squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), x, y)
    return loss(y, batch) + 0.5 * sum(jax.tree.leaves(squares))


def tasks():
    """Waves of one frequency and many phases: a network per task, near a network that they share."""
    t = np.linspace(-2, 2, TASKS * ROWS, dtype=np.float32).reshape(ROWS, TASKS).T
    rows = {"t": t.reshape(-1, 1), "target": np.sin(2 * t + np.arange(TASKS)[:, None]).reshape(-1, 1)}
    data = bx.PerBlock({name: a.astype(np.float32) for name, a in rows.items()}, np.arange(TASKS + 1) * ROWS)
    upper = lambda x, y, block, batch: loss(y, batch)  # noqa: E731
    problem = bx.Problem(upper, bx.argmin(pulled, around=lambda x: x), TASKS, data, data)
    return problem, jax.tree.map(lambda a: jnp.broadcast_to(a, (TASKS, *a.shape)), WEIGHTS)


def test_a_network_is_learnt_above_and_below():
    problem, y0 = tasks()
    solver = bx.SOBA(0.05, lower_step=0.05)
    plan = {"steps": 150, "blocks_per_step": 3, "progress": None, "stop": bx.Stop(verify=False)}
    result = bx.minimize(problem, WEIGHTS, y0, solver=solver, key=jax.random.key(0), **plan)
    assert jax.tree.structure(result.x) == jax.tree.structure(WEIGHTS)
    assert jax.tree.structure(result.y) == jax.tree.structure(y0)
    assert eqx.combine(result.x, REST)(jnp.ones(1)).shape == (1,)
    rows = problem.upper_data.rows
    everything = {name: a.reshape(TASKS, ROWS, 1) for name, a in rows.items()}
    before, after = (jnp.mean(jax.vmap(loss)(y, everything)) for y in (y0, result.y))
    assert float(after) < 0.8 * float(before)


def test_a_network_with_its_functions_is_refused_with_advice():
    problem, y0 = tasks()
    with pytest.raises(TypeError, match=r"x0\.activation must be a floating array.* eqx\.partition\("):
        bx.minimize(problem, NETWORK, y0, solver=bx.SOBA(0.1), steps=1, progress=None)
