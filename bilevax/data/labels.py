"""Labelled rows: flip labels, remove positives, split. All draws are seeded, with exact counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bilevax.data.arguments import generator, number


def flip_labels(y: Any, fraction: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Give a fraction of the rows a wrong label.

    Exactly fraction · n rows, rounded, are drawn without replacement. Each gets one of the other classes, at
    random if there are several.

    Args:
      y: labels of at least two classes.
      fraction: the fraction of labels to flip, from 0 to 1.
      seed: the same seed gives the same flips.

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
    count = _count(fraction, len(labels))
    classes, code = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y must hold at least two classes, got only {classes[0]!r}")
    random = generator(seed)
    rows = random.choice(len(labels), count, replace=False)
    shift = random.integers(1, len(classes), count)
    flipped, wrong = labels.copy(), np.zeros(len(labels), bool)
    flipped[rows] = classes[(code[rows] + shift) % len(classes)]
    wrong[rows] = True
    return flipped, wrong


def remove_positives(y: Any, fraction: float = 0.7, *, seed: int) -> np.ndarray:
    """Make positives rare: the rows that remain when a fraction of the positives is removed.

    Args:
      y: labels of two classes; the larger label (+1 of -1 and +1) is the positive one.
      fraction: the fraction of positives to remove, from 0 to 1; their number is rounded.
      seed: the same seed removes the same rows.

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
    count = _count(fraction, len(positives))
    keep = np.ones(len(labels), bool)
    keep[generator(seed).choice(positives, count, replace=False)] = False
    return np.flatnonzero(keep)


def split_rows(
    rows: Any, fraction: float = 0.2, *, seed: int, stratify: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into two disjoint parts.

    Args:
      rows: the number of rows, or their labels.
      fraction: the fraction of rows in the second part; their number is rounded.
      seed: the same seed gives the same parts.
      stratify: whether to split every class in this proportion; `rows` must then be labels. The shares of
        the classes are rounded such that the second part is as large as without `stratify`.

    Returns:
      The indices of the first part (training) and of the second (validation), both ascending.

    Raises:
      ValueError: a part would be empty, or an argument is invalid.

    Example:
      >>> from bilevax.data import split_rows
      >>> train, validation = split_rows(10, 0.2, seed=0)
      >>> len(train), len(validation), sorted([*train, *validation]) == list(range(10))
      (8, 2, True)
    """
    counted = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
    if counted and stratify:
        raise ValueError("stratify needs the labels of the rows, got their number")
    n = int(rows) if counted else len(_vector("rows", rows))
    count = _count(fraction, n)
    if not 0 < count < n:
        raise ValueError(f"fraction {fraction} of {n} rows leaves a part without rows")
    order = generator(seed).permutation(n)
    if stratify:
        code = np.unique(_vector("rows", rows), return_inverse=True)[1]
        order = _shares(code[order], count, order)
    second = np.zeros(n, bool)
    second[order[:count]] = True
    return np.flatnonzero(~second), np.flatnonzero(second)


def _shares(code: np.ndarray, count: int, order: np.ndarray) -> np.ndarray:
    """The rows, ordered such that the first `count` hold every class in its proportion."""
    sizes = np.bincount(code)
    exact = sizes * (count / len(code))
    shares = np.floor(exact).astype(int)
    # Rounding down leaves some rows over: they go to the largest remainders, ties to the first class.
    shares[np.argsort(shares - exact, kind="stable")[: count - shares.sum()]] += 1
    by_class = np.argsort(code, kind="stable")
    rank = np.arange(len(code)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = rank < np.repeat(shares, sizes)
    return order[np.concatenate([by_class[chosen], by_class[~chosen]])]


def _vector(name: str, values: Any) -> np.ndarray:
    try:
        vector = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{name} must be a vector with at least one entry: {error}") from error
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(f"{name} must be a vector with at least one entry, got shape {vector.shape}")
    if vector.dtype == object or (vector.dtype.kind in "fc" and not np.isfinite(vector).all()):
        raise ValueError(f"{name} must hold finite numbers or strings, got {vector.dtype} with other entries")
    return vector


def _count(fraction: float, total: int) -> int:
    return math.floor(number("fraction", fraction, 0, 1) * total + 0.5)
