"""Data sources of cross-validated blocks: the clean rows of a block's fold, and all other rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx

PyTree = Any


class NoisyAndClean(bx.Rows):
    """Batches of noisy rows and of clean rows outside the block's fold, as {"noisy": …, "clean": …}.

    Arrays are padded to a few sizes, so that data of similar shape share one compilation. `count` is the
    number of noisy rows without padding. Clean rows are sorted by fold, and `offsets` bounds the folds.
    """

    noisy: PyTree
    clean: PyTree
    count: Array
    offsets: Array
    fold: Array

    def draw(self, random: bx.Stream, blocks: Array, size: int | None) -> bx.Batch:
        fold, shape = self.fold[blocks], (blocks.shape[0], _checked(size))
        first, after = self.offsets[fold][:, None], self.offsets[fold + 1][:, None]
        total = self.offsets[-1]
        outside = (after + random.at(1).integers(shape, total - (after - first))) % total
        inside = random.at(0).integers(shape, self.count)
        return bx.Batch({"noisy": _take(self.noisy, inside), "clean": _take(self.clean, outside)})


class HeldOut(bx.Rows):
    """Batches of clean rows in the block's fold."""

    clean: PyTree
    offsets: Array
    fold: Array

    def draw(self, random: bx.Stream, blocks: Array, size: int | None) -> bx.Batch:
        fold, shape = self.fold[blocks], (blocks.shape[0], _checked(size))
        first, after = self.offsets[fold][:, None], self.offsets[fold + 1][:, None]
        return bx.Batch(_take(self.clean, first + random.integers(shape, after - first)))


def bucket(size: int, least: int) -> int:
    """The size to which an axis is padded: a power of two up to 4096, then a multiple of a sixteenth of one.

    Example:
      >>> bucket(10, 64), bucket(100, 64), bucket(15_000, 64)
      (64, 128, 15360)
    """
    power = max(least, 1 << max(size - 1, 0).bit_length())
    step = power if power <= 4096 else power // 16
    return -(-size // step) * step if size > least else least


def padded(rows: PyTree, size: int) -> PyTree:
    """Rows with zeros appended, on the device."""

    def pad(leaf: np.ndarray) -> Array:
        return jnp.asarray(np.pad(leaf, [(0, size - len(leaf))] + [(0, 0)] * (leaf.ndim - 1)))

    return jax.tree.map(pad, rows)


def _take(rows: PyTree, index: Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.at[index].get(mode="promise_in_bounds"), rows)


def _checked(size: int | None) -> int:
    if size is None:
        raise ValueError(
            "batch_size must be an integer: these rows are padded and cannot all be used at once"
        )
    return size
