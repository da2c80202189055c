"""An equinox network as x: where are labels to be trusted?

Points of a plane belong to one of two classes. Inside a disc somebody labelled them by chance. x is
an equinox network that maps a point to the weight of its label; it needs no list of wrong labels,
only 100 clean points. Each of 20 blocks is a classifier on the weighted points with a ridge of its
own (lower level), judged on the clean points (upper level). The picture shows the labels, and the
weight that the network has learnt for every place.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="network_equinox.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()

random = np.random.default_rng(0)
points = random.uniform(-2, 2, (2_100, 2)).astype(np.float32)
truth = np.where(points[:, 1] > np.sin(2 * points[:, 0]), 1, -1).astype(np.float32)
noisy, clean = np.arange(2_000), np.arange(2_000, 2_100)
disc = np.linalg.norm(points - [0.8, -0.4], axis=1) < 0.9
labels = np.where(disc & (random.random(2_100) < 0.5), -truth, truth)
CENTRES = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(-2, 2, 6)]), -1).reshape(-1, 2)


def bumps(points):
    """36 features of a point: one bump each."""
    return jnp.exp(-jnp.sum((points[:, None] - CENTRES) ** 2, -1) / 0.8)


def loss(y, batch):
    return jax.nn.softplus(-batch["label"] * (bumps(batch["point"]) @ y))


def trust(x, points):  # between 0 and 1
    return jax.nn.sigmoid(jax.vmap(eqx.combine(x, rest))(points))


def upper(x, y, ridge, batch):  # the loss on clean points
    return jnp.mean(loss(y, batch))


def lower(x, y, ridge, batch):  # the weighted loss on all others
    return jnp.mean(trust(x, batch["point"]) * loss(y, batch)) + ridge / 2 * y @ y


network = eqx.nn.MLP(2, "scalar", width_size=16, depth=2, key=jax.random.key(0))
x0, rest = eqx.partition(network, eqx.is_inexact_array)  # x holds arrays only, not activation functions
problem = bx.Problem(
    upper,
    lower,
    blocks=jnp.logspace(-4, -2, 20),
    upper_data=bx.Shared({"point": points[clean], "label": truth[clean]}),
    lower_data=bx.Shared({"point": points[noisy], "label": labels[noisy]}),
)
result = bx.minimize(problem, x0, jnp.zeros((20, 36)), steps=150 if options.quick else 3_000)
weights, inside = trust(result.x, points[noisy]), disc[noisy]
print(f"mean weight inside the disc {weights[inside].mean():.2f}, outside {weights[~inside].mean():.2f}")

axes = np.linspace(-2, 2, 101)
learnt = trust(result.x, np.stack(np.meshgrid(axes, axes), -1).reshape(-1, 2)).reshape(101, 101)
figure, ((left, right),) = figures.panels(1, 2, height=2.9)
left.scatter(*points[:800].T, c=np.where(labels[:800] > 0, "#D55E00", "#0072B2"), s=2)
left.set(title="given labels (800 of 2,000)")
shown = right.contourf(axes, axes, learnt, levels=np.linspace(0, 1, 11), cmap="viridis")
right.set(title="learnt weight of a label")
figure.colorbar(shown, ax=right)
for axis in (left, right):
    axis.contour(axes, axes, np.hypot(*np.meshgrid(axes - 0.8, axes + 0.4)), levels=[0.9], colors="black")
    axis.set(aspect="equal", xlim=(-2, 2), ylim=(-2, 2))
figure.savefig(options.picture, dpi=110)
