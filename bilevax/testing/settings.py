"""The settings of a family: its sizes and its difficulty, which its function takes as keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from bilevax import PerBlock, checks

P = ParamSpec("P")
S = TypeVar("S")
F = TypeVar("F")


@dataclass(frozen=True, kw_only=True)
class FamilySettings:
    """What all families have in common; the defaults differ between families.

    Attributes:
      m: blocks.
      d_x, d_y: lengths of x and of each y_i.
      rows: rows per block, in the upper and in the lower data.
      noise: standard deviation of a row about the mean of its block; 0 makes all rows of a block equal.
      conditioning: largest over smallest eigenvalue of the noise-free curvature, at least 1.
      coupling: how strongly y_i depends on x, at least 0.
      seed: seed of all random draws.
      dtype: of the problem's arrays, float32 or float64 (which needs JAX's x64 mode). The truth is always
        float64.

    Raises:
      ValueError, TypeError: if a setting is invalid; the message names it.
    """

    m: int = 50
    d_x: int = 10
    d_y: int = 10
    rows: int = 100
    noise: float = 1.0
    conditioning: float = 3.0
    coupling: float = 1.0
    seed: int = 0
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        for name in ("m", "d_x", "d_y", "rows"):
            checks.whole_number(name, getattr(self, name), 1)
        checks.whole_number("seed", self.seed, 0)
        for name, least in (("noise", 0), ("conditioning", 1), ("coupling", 0)):
            checks.number(name, getattr(self, name), least)
        dtype = np.dtype(self.dtype)
        if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, got {dtype}")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                "dtype must be float32 unless JAX's x64 mode is on (jax_enable_x64), got float64"
            )

    def cast(self, array: Any) -> np.ndarray:
        """The array in the problem's dtype."""
        return np.asarray(array, self.dtype)

    def per_block(self, **arrays: np.ndarray) -> PerBlock:
        """Arrays with axes (block, row, …) as data of the problem."""
        flat = {name: self.cast(a).reshape(self.m * self.rows, *a.shape[2:]) for name, a in arrays.items()}
        return PerBlock(flat, np.arange(self.m + 1) * self.rows)


def check_narrow(settings: FamilySettings) -> None:
    """Rejects d_x > d_y, for families in which each x_k needs its own y_j."""
    if settings.d_x > settings.d_y:
        raise ValueError(f"d_x must be at most d_y = {settings.d_y} in this family, got {settings.d_x}")


def takes_fields_of(kind: Callable[P, S]) -> Callable[[Callable[[S], F]], Callable[P, F]]:
    """A decorator: a function of one settings object is called with the object's fields as keywords.

    Example:
      >>> @takes_fields_of(FamilySettings)
      ... def count_rows(settings: FamilySettings) -> int:
      ...     return settings.m * settings.rows
      >>> count_rows(m=3, rows=4)
      12
    """

    def decorate(build: Callable[[S], F]) -> Callable[P, F]:
        @functools.wraps(build)
        def call(*args: P.args, **kwargs: P.kwargs) -> F:
            return build(kind(*args, **kwargs))

        returned = inspect.signature(build).return_annotation
        signature = inspect.signature(kind).replace(return_annotation=returned)
        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate
