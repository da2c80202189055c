"""Many rare classes under one network: min over the network, and per task a min-max problem (MMBO).

python examples/multi_task_auc.py [--quick]
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import bilevax as bx
from bilevax.applications.auc import centres, multi_task_auc

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS, WIDTH = 10, 32


def network(key: jax.Array) -> dict[str, jax.Array]:
    """One layer that all tasks share, and a head per task."""
    first, heads = jax.random.split(key)
    return {
        "layer": jax.random.normal(first, (64, WIDTH)) / 8,
        "bias": jnp.zeros(WIDTH),
        "heads": jax.random.normal(heads, (TASKS, WIDTH)) / WIDTH**0.5,
    }


def score(x: dict[str, jax.Array], task: int | jax.Array, rows: jax.Array) -> jax.Array:
    """The score of images for a task."""
    return jax.nn.sigmoid(jax.nn.relu(rows @ x["layer"] + x["bias"]) @ x["heads"][task])


def main() -> None:
    """Learns ten tasks, digit k against the rest, from ten positive images each."""
    steps = 50 if "--quick" in sys.argv else 1_500
    found: Any = load_digits()
    images, digit = jnp.asarray(found.data, jnp.float32) / 8 - 1, found.target
    random = np.random.default_rng(0)
    train, test = np.array_split(random.permutation(len(digit)), 2)
    labels = np.where(digit[train] == np.arange(TASKS)[:, None], 0, -1)
    for task, own in enumerate(labels):
        own[np.flatnonzero(digit[train] == task)[:10]] = 1  # the task knows ten of its digit, and no more

    problem = multi_task_auc(images[train], labels, score)
    result = bx.minimize(problem, network(jax.random.key(0)), centres(TASKS), steps=steps, batch_size=16)
    areas = [
        roc_auc_score(digit[test] == task, np.asarray(score(result.x, task, images[test])))
        for task in range(TASKS)
    ]
    print(f"mean AUC of ten tasks on other images: {np.mean(areas):.4f}")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5))
    left.plot(result.history["step"], result.history["objective"])
    left.set(xlabel="step", ylabel="min-max objective")
    right.bar(range(TASKS), areas)
    right.set(xlabel="digit", ylabel="test AUC", ylim=(min(areas) - 0.02, 1))
    figure.savefig("multi_task_auc.png", dpi=130)
    print("drawn to multi_task_auc.png")


if __name__ == "__main__":
    main()
