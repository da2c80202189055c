"""The paper's hyper-parameter problem on a8a and w8a, which several benchmarks use."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from sklearn.datasets import load_svmlight_file

import bilevax as bx
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays

WIDTHS = {"a8a": 123, "w8a": 300}
REGULARIZATION = 1e-3


class SparseSplit(NamedTuple):
    """Sparse rows and labels: 80% for training, 20% (`held`) for validation."""

    train: sp.csr_matrix
    labels: np.ndarray
    held: sp.csr_matrix
    held_labels: np.ndarray


def load(name: str, seed: int = 0) -> SparseSplit:
    """A data set from the folder BILEVAX_DATA; generated rows of its shape if that is not set."""
    folder = os.environ.get("BILEVAX_DATA")
    if folder:
        rows, labels = load_svmlight_file(str(Path(folder) / "libsvm" / name), n_features=WIDTHS[name])
    else:
        rng = np.random.default_rng(seed)
        count, density = {"a8a": (22_696, 0.113), "w8a": (49_749, 0.039)}[name]
        rows = sp.random(count, WIDTHS[name], density, "csr", rng=rng, data_rvs=np.ones)
        labels = np.where(rows @ rng.normal(size=WIDTHS[name]) > 0, 1.0, -1.0)
    order = np.random.default_rng(seed).permutation(len(labels))
    cut = int(0.8 * len(labels))
    train, held = order[:cut], order[cut:]
    rows = sp.csr_matrix(rows, dtype=np.float32)
    labels = labels.astype(np.float32)
    return SparseSplit(rows[train], labels[train], rows[held], labels[held])


def temperatures(blocks: int, seed: int = 0) -> np.ndarray:
    """The paper's temperatures, uniform on [1, 11)."""
    return np.random.default_rng(seed).uniform(1, 11, blocks).astype(np.float32)


def upper(x, y, block, batch):
    return jnp.mean(jax.nn.softplus(-batch["label"] * bx.dot(batch["row"], y) / block["temperature"]))


def lower(x, y, block, batch):
    return weighted(x[batch["index"]], y, block, batch)


def weighted(weights, y, block, batch):
    loss = jax.nn.softplus(-batch["label"] * bx.dot(batch["row"], y) / block["temperature"])
    return jnp.mean(jax.nn.sigmoid(weights) * loss) + 0.5 * REGULARIZATION * y @ y


def problem(
    split: SparseSplit, blocks: int = 100, table: bool = False
) -> tuple[bx.Problem, jax.Array, jax.Array]:
    """The problem with dense rows, and the start of x and y; x may be declared as a table."""
    n, features = split.train.shape
    built = bx.Problem(
        upper=upper,
        lower=weighted if table else lower,
        tables=(lambda block, batch: batch.get("index")) if table else None,
        blocks={"temperature": temperatures(blocks)},
        upper_data=bx.Shared({"row": split.held.toarray(), "label": split.held_labels}),
        lower_data=bx.Shared(
            {"row": split.train.toarray(), "label": split.labels, "index": np.arange(n, dtype=np.int32)}
        ),
    )
    return built, jnp.zeros(n), jnp.zeros((blocks, features))


class CompiledSteps:
    """A method on this problem, compiled, with its state."""

    def __init__(
        self,
        solver: Any,
        split: SparseSplit,
        blocks: int,
        blocks_per_step: int,
        batch_size: int,
        table: bool = False,
    ):
        built, x0, y0 = problem(split, blocks, table)
        self.inputs = (numbers_as_arrays(solver), built)
        sampling = bx.Sampling(blocks_per_step, batch_size)
        began = time.perf_counter()
        self.state = compiled_start(*self.inputs, x0, y0, sampling.sampler(self.inputs[1], jax.random.key(0)))
        self.advance(0)
        self.compile_seconds = time.perf_counter() - began

    def advance(self, steps: int) -> None:
        """Takes steps, and waits for them."""
        self.state, _ = compiled_chunk(self.inputs, self.state, steps)
        jax.block_until_ready(self.state)
