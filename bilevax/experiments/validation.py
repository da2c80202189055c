"""The paper's first problem: weights of training rows that make 100 classifiers good on validation rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax import data
from bilevax.applications.reweighting import Reweighting, cross_entropy, products, reweighting

METHODS = {"BSVRBv1": bx.BSVRBv1, "BSVRBv2": bx.BSVRBv2, "RSVRB": bx.RSVRB}
BLOCKS, BLOCKS_PER_STEP, BATCH = 100, 10, 32
VALIDATION = 0.2  # the share of rows kept for validation, as in the paper


@dataclasses.dataclass(frozen=True)
class Split:
    """A division of a data set's training rows, proper: no validation row is trained on."""

    X: Any
    y: np.ndarray
    X_validation: Any
    y_validation: np.ndarray


def load_split(name: str, seed: int, rows: int | None = None) -> Split:
    """80% of a data set's training rows to train on, 20% for validation; of its first `rows` if given."""
    whole = data.load(name)
    X, y = whole.X[:rows], whole.y[:rows]
    train, held = data.split_rows(len(y), VALIDATION, seed=seed)
    return Split(X[train], y[train], X[held], y[held])


def make_task(split: Split, ridge: float, seed: int, blocks: int = BLOCKS) -> Reweighting:
    """The paper's problem on a split: temperatures uniform on [1, 11)."""
    heat = np.random.default_rng(seed).uniform(1, 11, blocks)
    return reweighting(
        split.X, split.y, split.X_validation, split.y_validation, temperatures=heat, ridge=ridge
    )


def validation_loss(problem: bx.Problem, state: bx.State) -> Array:
    """The mean loss of all blocks on all validation rows, at the tracked y."""
    assert isinstance(problem.upper_data, bx.Shared)
    rows = problem.upper_data.rows

    def one(block: dict[str, Array], y: Array) -> Array:
        return jnp.mean(cross_entropy(products(rows["row"], y) / block["temperature"], rows["label"]))

    return jnp.mean(jax.lax.map(lambda pair: one(*pair), (problem.blocks, state.y)))


def steps_per_epoch(split: Split, blocks_per_step: int = BLOCKS_PER_STEP, batch: int = BATCH) -> float:
    """How many steps draw as many training rows as there are."""
    return len(split.y) / (blocks_per_step * batch)


def tuned(name: str) -> dict[str, dict[str, float]]:
    """The stored settings of a data set: "ridge" and the numbers of every method; "about" says whence."""
    text = resources.files("bilevax.experiments").joinpath("configs", "validation.json").read_text("utf-8")
    return json.loads(text)[name]


def make_solver(method: str, numbers: Mapping[str, float]) -> Any:
    """A method with its tuned numbers."""
    return METHODS[method](**numbers)
