"""The paper's first problem: training-row weights with which 100 classifiers do well on validation rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax import data
from bilevax.applications.reweighting import Reweighting, cross_entropy, products, reweighting

METHODS = {"BSVRBv1": bx.BSVRBv1, "BSVRBv2": bx.BSVRBv2, "RSVRB": bx.RSVRB}
DATA = ("a8a", "w8a")
BLOCKS, BLOCKS_PER_STEP, BATCH = 100, 10, 32
VALIDATION = 0.2  # share of validation rows, as in the paper
# What steps that were tuned on all rows are multiplied by on about a thousand: η is to be smaller in
# proportion, as it acts on weights of 1/rows each, and batches are noisier.
ON_FEW_ROWS = (0.05, 0.2)


@dataclasses.dataclass(frozen=True)
class ValidationSplit:
    """Training and validation rows of a data set; they are disjoint."""

    X: Any
    y: np.ndarray
    X_validation: Any
    y_validation: np.ndarray


def load_split(name: str, seed: int, rows: int | None = None) -> ValidationSplit:
    """A data set's training rows, or its first `rows`: 80% for training, 20% for validation."""
    whole = data.load(name)
    X, y = whole.X[:rows], whole.y[:rows]
    train, held = data.split_rows(len(y), VALIDATION, seed=seed)
    return ValidationSplit(X[train], y[train], X[held], y[held])


def make_task(split: ValidationSplit, ridge: float, seed: int, blocks: int = BLOCKS) -> Reweighting:
    """The paper's problem on a split, with temperatures uniform on [1, 11)."""
    heat = np.random.default_rng(seed).uniform(1, 11, blocks)
    return reweighting(
        split.X, split.y, split.X_validation, split.y_validation, temperatures=heat, ridge=ridge
    )


@eqx.filter_jit
def validation_loss(problem: bx.Problem, state: bx.State) -> Array:
    """The mean loss of all blocks on all validation rows, at the state's y.

    It is compiled: `jax.lax.map` alone would compile its function anew at every call.
    """
    assert isinstance(problem.upper_data, bx.Shared)
    rows = problem.upper_data.rows

    def one(block: dict[str, Array], y: Array) -> Array:
        return jnp.mean(cross_entropy(products(rows["row"], y) / block["temperature"], rows["label"]))

    return jnp.mean(jax.lax.map(lambda pair: one(*pair), (problem.blocks, state.y)))


def steps_per_epoch(
    split: ValidationSplit, blocks_per_step: int = BLOCKS_PER_STEP, batch: int = BATCH
) -> float:
    """The number of steps that draw as many training rows as the split has."""
    return len(split.y) / (blocks_per_step * batch)


def tuned(name: str) -> dict[str, dict[str, float]]:
    """The tuned hyper-parameters of a data set: "ridge", and those of every method."""
    return _configuration()[name]


def origin() -> str:
    """How the tuned hyper-parameters were found, and with which budgets."""
    return _configuration()["about"]


def _configuration() -> dict[str, Any]:
    text = resources.files("bilevax.experiments").joinpath("configs", "validation.json").read_text("utf-8")
    return json.loads(text)


def make_solver(method: str, hyperparameters: Mapping[str, float]) -> Any:
    """A method with its tuned hyper-parameters."""
    return METHODS[method](**hyperparameters)


def shortened(hyperparameters: Mapping[str, float], factors: tuple[float, float]) -> dict[str, float]:
    """Hyper-parameters with the steps of x, and of y and v, multiplied by two factors."""
    upper, lower = factors
    steps = {
        "upper_step": upper * hyperparameters["upper_step"],
        "lower_step": lower * hyperparameters["lower_step"],
    }
    return {**hyperparameters, **steps}
