"""Min-max: the AUC of many rare classes under one network.

Ten tasks, digit k against the rest, each with ten positive images. The AUC of a task is a min-max
problem: two centres minimise f and a dual maximises it, and all three are lower variables of the
task's block (`bx.minimum`, `bx.maximum`). x is a network that all tasks share. The picture shows
the objective of the run and the AUC on other images.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import bilevax as bx
from bilevax.applications.auc import centres, multi_task_auc
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="multi_task_auc.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()

TASKS, WIDTH = 10, 32
pixels, digit = load_digits(return_X_y=True)
images = jnp.asarray(pixels, jnp.float32) / 8 - 1
train, test = np.array_split(np.random.default_rng(0).permutation(len(digit)), 2)
labels = np.where(digit[train] == np.arange(TASKS)[:, None], 0, -1)
for task, own in enumerate(labels):
    own[np.flatnonzero(digit[train] == task)[:10]] = 1  # the task knows ten of its digit, and no more


def score(x, task, rows):
    """The score of images for a task: one layer that all tasks share, and a head per task."""
    return jax.nn.sigmoid(jax.nn.relu(rows @ x["layer"] + x["bias"]) @ x["heads"][task])


keys = jax.random.split(jax.random.key(0))
network = {
    "layer": jax.random.normal(keys[0], (64, WIDTH)) / 8,
    "bias": jnp.zeros(WIDTH),
    "heads": jax.random.normal(keys[1], (TASKS, WIDTH)) / WIDTH**0.5,
}
problem = multi_task_auc(images[train], labels, score)
steps = 50 if options.quick else 1_500
result = bx.minimize(problem, network, centres(TASKS), steps=steps, batch_size=16)


def areas(x):
    scores = [np.asarray(score(x, task, images[test])) for task in range(TASKS)]
    return [roc_auc_score(digit[test] == task, scores[task]) for task in range(TASKS)]


before, after = areas(network), areas(result.x)
print(f"mean AUC on other images: {np.mean(before):.3f} before, {np.mean(after):.3f} after")

figure, ((left, right),) = figures.panels(1, 2)
left.plot(result.history["step"], result.history["objective"], color="#0072B2")
left.set(xlabel="step", ylabel="min-max objective")
for values, colour, label in ((before, "#BBBBBB", "before"), (after, "#0072B2", "after the run")):
    right.plot(range(TASKS), values, "o", color=colour, label=label)
right.set(xlabel="digit against the rest", ylabel="test AUC", ylim=(0, 1.03), xticks=range(TASKS))
figures.legend_below(right)
figure.savefig(options.picture, dpi=150)
