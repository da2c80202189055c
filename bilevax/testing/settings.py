"""What all families are made from: their sizes, and random pieces drawn from one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bilevax import PerBlock, checks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes and the difficulty of a problem, checked.

    Raises:
      ValueError, TypeError: naming the argument that cannot be.
    """

    m: int  #: blocks
    d_x: int  #: length of x
    d_y: int  #: length of each y_i
    rows: int  #: rows per block, of the upper and of the lower data each
    noise: float  #: standard deviation of a row about the block's mean; 0 makes all rows equal
    conditioning: float  #: largest over smallest eigenvalue of the noise-free curvature, at least 1
    coupling: float  #: how strongly y_i depends on x
    seed: int  #: of every random draw
    dtype: Any  #: of the problem's arrays; the truth is always float64

    def __post_init__(self) -> None:
        for name in ("m", "d_x", "d_y", "rows"):
            checks.whole_number(name, getattr(self, name), 1)
        checks.whole_number("seed", self.seed, 0)
        number("noise", self.noise, 0)
        number("conditioning", self.conditioning, 1)
        number("coupling", self.coupling, 0)
        dtype = np.dtype(self.dtype)
        if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, got {dtype}")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                "dtype must be float32 unless JAX's x64 mode is on (jax_enable_x64), got float64"
            )

    def narrow(self) -> None:
        """Refuses more upper than lower variables, for families where each x_k needs a y_j of its own."""
        if self.d_x > self.d_y:
            raise ValueError(f"d_x must be at most d_y = {self.d_y} in this family, got {self.d_x}")

    def cast(self, array: Any) -> np.ndarray:
        """An array in the problem's dtype."""
        return np.asarray(array, self.dtype)

    def per_block(self, **arrays: np.ndarray) -> PerBlock:
        """Arrays with the axes (block, row, …) as the problem's data."""
        flat = {name: self.cast(a).reshape(self.m * self.rows, *a.shape[2:]) for name, a in arrays.items()}
        return PerBlock(flat, np.arange(self.m + 1) * self.rows)


def number(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """A finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (least <= value <= most and math.isfinite(value)):
        bounds = f"of at least {least}" if most == math.inf else f"between {least} and {most}"
        raise ValueError(f"{name} must be a finite number {bounds}, got {value}")
    return float(value)


class Draws:
    """Random pieces. Rows have a stream of their own: block means do not depend on `noise` or `rows`."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.means = np.random.default_rng([settings.seed, 0])
        self.deviation = np.random.default_rng([settings.seed, 1])

    def normal(self, *shape: int) -> np.ndarray:
        """A standard normal per block: (m, …)."""
        return self.means.normal(size=(self.settings.m, *shape))

    def orthonormal(self, rows: int, columns: int) -> np.ndarray:
        """Matrices (m, rows, columns) with orthonormal columns; rows ≥ columns."""
        return np.linalg.qr(self.normal(rows, columns))[0]

    def eigenvalues(self, size: int) -> np.ndarray:
        """Evenly spread over [1, conditioning]."""
        return np.linspace(1.0, self.settings.conditioning, size)

    def positive_definite(self, size: int) -> np.ndarray:
        """Symmetric matrices (m, size, size) with those eigenvalues, in random bases."""
        bases = self.orthonormal(size, size)
        return np.einsum("mij,j,mkj->mik", bases, self.eigenvalues(size), bases)

    def design(self, observations: int, size: int) -> np.ndarray:
        """Matrices (m, observations, size) with those eigenvalues of AᵀA; observations ≥ size."""
        left, right = self.orthonormal(observations, size), self.orthonormal(size, size)
        return np.einsum("mij,j,mkj->mik", left, np.sqrt(self.eigenvalues(size)), right)

    def deviations(self, *shape: int) -> np.ndarray:
        """noise · normal per row, (m, rows, …), whose mean over the rows of a block is zero."""
        drawn = self.deviation.normal(size=(self.settings.m, self.settings.rows, *shape))
        return self.settings.noise * (drawn - drawn.mean(1, keepdims=True))

    def factors(self) -> np.ndarray:
        """A factor per row, (m, rows), in (0, 2) and of mean one: each row's curvature stays positive."""
        drawn = self.deviation.uniform(-1, 1, size=(self.settings.m, self.settings.rows))
        drawn = drawn - drawn.mean(1, keepdims=True)
        drawn /= np.maximum(1, np.abs(drawn).max(1, keepdims=True))
        return 1 + self.settings.noise / (1 + self.settings.noise) * drawn


def scatter(array: np.ndarray) -> float:
    """The largest standard deviation over blocks of rows (m, rows, …), in the Euclidean norm."""
    deviation = (array - array.mean(1, keepdims=True)).reshape(*array.shape[:2], -1)
    return float(np.sqrt(np.mean(np.sum(deviation**2, -1), 1).max()))


def largest(matrices: np.ndarray) -> float:
    """The largest spectral norm."""
    return float(np.linalg.norm(matrices, 2, axis=(-2, -1)).max())


def longest(vectors: np.ndarray) -> float:
    """The largest Euclidean norm."""
    return float(np.linalg.norm(vectors, axis=-1).max())
