"""Linear algebra with one matrix or vector per block, and the norms that the constants are made of."""

from __future__ import annotations

import numpy as np


def times(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """One matrix-vector product per block."""
    return (matrices @ vectors[..., None])[..., 0]


def solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """One linear system per block."""
    return np.linalg.solve(matrices, vectors[..., None])[..., 0]


def scatter(array: np.ndarray) -> float:
    """The largest standard deviation of a block's rows, in the Euclidean norm; the array is (m, rows, …)."""
    deviation = (array - array.mean(1, keepdims=True)).reshape(*array.shape[:2], -1)
    return float(np.sqrt(np.mean(np.sum(deviation**2, -1), 1).max()))


def largest(matrices: np.ndarray) -> float:
    """The largest spectral norm."""
    return float(np.linalg.norm(matrices, 2, axis=(-2, -1)).max())


def longest(vectors: np.ndarray) -> float:
    """The largest Euclidean norm."""
    return float(np.linalg.norm(vectors, axis=-1).max())
