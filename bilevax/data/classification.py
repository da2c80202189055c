"""Data sets for classification, by name."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import numpy as np
from scipy.sparse import csr_matrix

from bilevax.data.errors import DataError
from bilevax.data.libsvm import read_libsvm
from bilevax.data.locate import obtain
from bilevax.data.registry import ENTRIES, entry_of

NAMES = tuple(name for name, entry in ENTRIES.items() if "features" in entry.counts)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training rows and test rows of a data set.

    Attributes:
      name: the data set's name.
      X: training rows, float32, sparse, as wide as the data set declares.
      y: their labels, -1 or +1, int64.
      X_test: test rows.
      y_test: their labels.
    """

    name: str
    X: csr_matrix
    y: np.ndarray
    X_test: csr_matrix
    y_test: np.ndarray


def load(name: str, *, download: bool = True) -> Dataset:
    """A data set for classification: `a8a` or `w8a`.

    It is searched for in the folder that BILEVAX_DATA names (as `libsvm/a8a`), then in the cache, and
    otherwise downloaded into the cache. Its checksum, rows, features and labels are always checked.

    Args:
      name: the name of the data set.
      download: whether it may be downloaded.

    Returns:
      Its training and test rows.

    Raises:
      DataError: there is no such data set, it cannot be found or downloaded, or a check fails.

    Example:
      >>> from bilevax.data import load
      >>> load("a9a")
      Traceback (most recent call last):
      bilevax.data.errors.DataError: no data set for classification is called 'a9a'; known are a8a, w8a
    """
    if name not in NAMES:
        raise DataError(f"no data set for classification is called {name!r}; known are {', '.join(NAMES)}")
    entry = entry_of(name)
    counts = entry.counts
    parts = []
    for source, prefix in zip(entry.sources, ("", "test_"), strict=True):
        path = obtain(source, download=download)
        rows, labels = read_libsvm(path, width=counts["features"])
        _check(path, labels, rows=counts[prefix + "rows"], positives=counts[prefix + "positives"])
        parts += [rows, labels]
    return Dataset(name, *parts)


def _check(path: str | PathLike[str], labels: np.ndarray, rows: int, positives: int) -> None:
    if len(labels) != rows:
        raise DataError(f"has {len(labels):,} rows, expected {rows:,}", path=path)
    odd = ~np.isin(labels, (-1, 1))
    if odd.any():
        line = int(np.argmax(odd)) + 1
        raise DataError(f"has the label {labels[line - 1]}, expected -1 or +1", path=path, line=line)
    if np.count_nonzero(labels == 1) != positives:
        got = np.count_nonzero(labels == 1)
        raise DataError(f"has {got:,} labels +1, expected {positives:,}", path=path)
