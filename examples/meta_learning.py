"""Meta-learning: a network that is soon adapted to a new task.

A task is a sine wave A sin(t + φ), with ten points to learn from. x is a network that all tasks
start from. Block i is the network of task i, which fits its points and stays near x (lower level);
it is judged on ten other points (upper level). The picture shows a new wave, x, and x adapted to
ten points of the wave by gradient steps; and the error on 100 new waves by the number of steps,
beside a network with random weights.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few tasks and steps, to try it out")
parser.add_argument("--picture", default="meta_learning.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()
TASKS, STEPS = (50, 100) if options.quick else (200, 2_500)


def waves(count, points, seed):  # points of some waves, (count, points)
    random = np.random.default_rng(seed)
    size, phase = random.uniform(0.1, 5, (count, 1)), random.uniform(0, np.pi, (count, 1))
    t = random.uniform(-5, 5, (count, points))
    return {"t": jnp.asarray(t, jnp.float32), "s": jnp.asarray(size * np.sin(t + phase), jnp.float32)}


def network(weights, t):
    hidden = t[:, None]
    for layer in weights[:-1]:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
    return (hidden @ weights[-1]["w"] + weights[-1]["b"])[:, 0]


def upper(x, y, wave, batch):  # the loss on other points
    return jnp.mean((network(y, wave["t"][10:]) - wave["s"][10:]) ** 2)


def lower(x, y, wave, batch):  # the loss on ten points, and the distance from x
    far = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), x, y)
    return jnp.mean((network(y, wave["t"][:10]) - wave["s"][:10]) ** 2) + 0.5 * sum(jax.tree.leaves(far))


x0 = [
    {"w": jax.random.normal(jax.random.key(k), shape) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
    for k, shape in enumerate([(1, 20), (20, 20), (20, 1)])
]
y0 = jax.tree.map(lambda a: jnp.stack(TASKS * [a]), x0)
problem = bx.Problem(upper, lower, blocks=waves(TASKS, 20, seed=0))
result = bx.minimize(problem, x0, y0, steps=STEPS, blocks_per_step=50)


def adapted(x, wave):  # gradient steps of the lower problem from x, and the error on other points before each
    def step(y, _):
        slope = jax.grad(lower, argnums=1)(x, y, wave, None)
        return jax.tree.map(lambda a, b: a - 0.01 * b, y, slope), upper(x, y, wave, None)

    return jax.lax.scan(step, x, length=200)


new, grid = waves(100, 60, seed=1), jnp.linspace(-5, 5, 201)
figure, ((left, right),) = figures.panels(1, 2, height=2.6)
left.plot(new["t"][0, :10], new["s"][0, :10], "o", color="black", label="known points")
left.plot(grid, network(result.x, grid), color="#BBBBBB", label="x")
for name, x, colour in (("random x", x0, "#888888"), ("learnt x", result.x, "#0072B2")):
    y, errors = jax.vmap(adapted, in_axes=(None, 0))(x, new)
    print(f"{name}: error {errors[:, 0].mean():.2f}, {errors[:, 10].mean():.2f} after ten steps")
    right.plot(errors.mean(0), color=colour, label=name)
left.plot(grid, network(jax.tree.map(lambda a: a[0], y), grid), color="#0072B2", label="x, adapted to them")
left.set(xlabel="t", ylabel="a new wave")
right.set(xlabel="gradient steps on ten points", ylabel="error on 100 new waves", yscale="log")
figures.legend_below(left)
figures.legend_below(right)
figure.savefig(options.picture, dpi=150)
