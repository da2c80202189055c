"""Flax networks as x and as y.

Sine waves share an encoder, a flax nnx network that turns t into features. The head of a wave is a
small flax linen network, fitted to ten points (lower level) and judged on ten others (upper level).
The library sees pytrees only: `nnx.split` takes the parameters out of a module, `nnx.merge` puts
them back, and linen keeps them apart anyway. The picture shows a new wave, fitted with the learnt
encoder and with a random one. It needs `pip install "bilevax[experiments,flax]"`.
"""

import argparse

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few tasks and steps, to try it out")
parser.add_argument("--picture", default="network_flax.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()
TASKS, STEPS = (20, 100) if options.quick else (100, 1_500)


class Encoder(nnx.Module):  # t into 16 features
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(1, 40, rngs=rngs), nnx.Linear(40, 16, rngs=rngs)

    def __call__(self, t):
        return nnx.tanh(self.second(nnx.tanh(self.first(t[:, None]))))


def waves(count, points, seed):  # points of some waves, (count, points)
    random = np.random.default_rng(seed)
    size, phase = random.uniform(0.1, 5, (count, 1)), random.uniform(0, np.pi, (count, 1))
    t = random.uniform(-5, 5, (count, points)).astype(np.float32)
    return t, (size * np.sin(t + phase)).astype(np.float32)


encoder, x0 = nnx.split(Encoder(nnx.Rngs(0)))  # the structure, and the parameters as a pytree
head = flax.linen.Dense(1)


def predict(x, y, t):
    return head.apply(y, nnx.merge(encoder, x)(t))[:, 0]


def upper(x, y, block, batch):  # the loss on the other points
    return jnp.mean((predict(x, y, batch["t"]) - batch["s"]) ** 2)


def lower(x, y, block, batch):  # the loss on the known points, and a small ridge
    return upper(x, y, block, batch) + 0.05 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))


def per_block(t, s):
    return bx.PerBlock({"t": t.reshape(-1), "s": s.reshape(-1)}, np.arange(len(t) + 1) * t.shape[1])


t, s = waves(TASKS, 20, seed=0)
known, others = per_block(t[:, :10], s[:, :10]), per_block(t[:, 10:], s[:, 10:])
problem = bx.Problem(upper, lower, TASKS, upper_data=others, lower_data=known)
y0 = jax.vmap(lambda key: head.init(key, jnp.zeros((1, 16))))(jax.random.split(jax.random.key(0), TASKS))
result = bx.minimize(problem, x0, y0, steps=STEPS)

t, s = waves(1, 8, seed=2)
grid = jnp.linspace(-5, 5, 201)
figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=3.0)
axis.plot(t[0], s[0], "o", color="black", label="known points of a new wave")
for name, x, colour in (("random encoder", x0, "#888888"), ("learnt encoder", result.x, "#0072B2")):
    adapted = bx.adapt(problem, x, per_block(t, s), y0=jax.tree.map(lambda leaf: leaf[:1], y0))
    curve = predict(x, jax.tree.map(lambda leaf: leaf[0], adapted), grid)
    axis.plot(grid, curve, color=colour, label=name)
axis.set(xlabel="t", ylabel="prediction")
figures.legend_below(axis)
figure.savefig(options.picture, dpi=150)
