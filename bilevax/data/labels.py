"""Labels made worse on purpose, and rows set aside: seeded, and exact in their counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def flip_labels(y: Any, fraction: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Give a fraction of the rows a wrong label.

    Exactly fraction · n rows, rounded, are drawn without replacement. With two classes each gets the other
    one; with more, one of the others at random.

    Args:
      y: labels, of at least two classes.
      fraction: how many of them to flip, from 0 to 1.
      seed: of the draw; the same seed gives the same flips.

    Returns:
      The labels with errors, of the same dtype, and a mask that is True where a label was flipped.

    Raises:
      ValueError: y is not a vector of at least two classes, or the fraction is not in [0, 1].

    Example:
      >>> from bilevax.data import flip_labels
      >>> flipped, wrong = flip_labels([1, 1, -1, -1], 0.5, seed=0)
      >>> int(wrong.sum()), int((flipped != [1, 1, -1, -1]).sum())
      (2, 2)
    """
    labels = _vector("y", y)
    count = _count("fraction", fraction, len(labels))
    classes, code = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y must hold at least two classes, got only {classes[0]!r}")
    random = _random(seed)
    rows = random.choice(len(labels), count, replace=False)
    shift = random.integers(1, len(classes), count)
    flipped, wrong = labels.copy(), np.zeros(len(labels), bool)
    flipped[rows] = classes[(code[rows] + shift) % len(classes)]
    wrong[rows] = True
    return flipped, wrong


def remove_positives(y: Any, fraction: float = 0.7, *, seed: int) -> np.ndarray:
    """Make the positives rare: the rows that are left when a fraction of them is removed.

    Args:
      y: labels of two classes; the larger one (+1 of -1 and +1) is the positive one.
      fraction: how many of the positives go, from 0 to 1; their number is rounded.
      seed: of the draw.

    Returns:
      The indices of the rows to keep, ascending: all negatives and the rest of the positives.

    Raises:
      ValueError: y is not a vector of two classes, or the fraction is not in [0, 1].

    Example:
      >>> from bilevax.data import remove_positives
      >>> y = [1] * 10 + [-1] * 5
      >>> len(remove_positives(y, 0.7, seed=0))
      8
    """
    labels = _vector("y", y)
    classes = np.unique(labels)
    if len(classes) != 2:
        raise ValueError(f"y must hold two classes, got {len(classes)}")
    positives = np.flatnonzero(labels == classes[1])
    count = _count("fraction", fraction, len(positives))
    keep = np.ones(len(labels), bool)
    keep[_random(seed).choice(positives, count, replace=False)] = False
    return np.flatnonzero(keep)


def split_rows(
    rows: Any, fraction: float = 0.2, *, seed: int, stratify: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows into two parts that have none in common.

    Args:
      rows: the number of rows, or their labels.
      fraction: how many go into the second part; their number is rounded.
      seed: of the draw.
      stratify: whether each class is divided in this proportion; `rows` must then be labels. The sizes of
        the classes' shares are rounded so that their sum is what it is without.

    Returns:
      The indices of the first part (training) and of the second (validation), both ascending.

    Raises:
      ValueError: a part would be empty, or the arguments are not as above.

    Example:
      >>> from bilevax.data import split_rows
      >>> train, validation = split_rows(10, 0.2, seed=0)
      >>> len(train), len(validation), sorted([*train, *validation]) == list(range(10))
      (8, 2, True)
    """
    counted = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
    if counted and stratify:
        raise ValueError("stratify needs the labels as rows, got their number")
    n = int(rows) if counted else len(_vector("rows", rows))
    count = _count("fraction", fraction, n)
    if not 0 < count < n:
        raise ValueError(f"fraction {fraction} of {n} rows leaves a part without rows")
    random = _random(seed)
    order = random.permutation(n)
    if stratify:
        code = np.unique(_vector("rows", rows), return_inverse=True)[1]
        order = _shares(code[order], count, order)
    second = np.zeros(n, bool)
    second[order[:count]] = True
    return np.flatnonzero(~second), np.flatnonzero(second)


def _shares(code: np.ndarray, count: int, order: np.ndarray) -> np.ndarray:
    """The rows in an order whose first `count` hold every class in its proportion."""
    sizes = np.bincount(code)
    exact = sizes * (count / len(code))
    shares = np.floor(exact).astype(int)
    # The largest remainders take what rounding down has left; ties go to the first class.
    shares[np.argsort(shares - exact, kind="stable")[: count - shares.sum()]] += 1
    by_class = np.argsort(code, kind="stable")
    rank = np.arange(len(code)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = rank < np.repeat(shares, sizes)
    return order[np.concatenate([by_class[chosen], by_class[~chosen]])]


def _vector(name: str, values: Any) -> np.ndarray:
    vector = np.asarray(values)
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(f"{name} must be a vector with at least one entry, got shape {vector.shape}")
    if vector.dtype == object or (vector.dtype.kind == "f" and not np.isfinite(vector).all()):
        raise ValueError(f"{name} must hold finite numbers or strings, got {vector.dtype} with other entries")
    return vector


def _count(name: str, fraction: float, total: int) -> int:
    if not isinstance(fraction, int | float | np.number) or not 0 <= fraction <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {fraction!r}")
    return math.floor(float(fraction) * total + 0.5)


def _random(seed: int) -> np.random.Generator:
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be a whole number from 0, got {seed!r}")
    return np.random.default_rng(int(seed))
