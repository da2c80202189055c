"""Data sets: readers that trust nothing, known sets by name, corruptions, splits and generators."""

from bilevax.data.classification import Dataset, load
from bilevax.data.corrupt import flip_labels, remove_positives, split_rows
from bilevax.data.errors import DataError
from bilevax.data.libsvm import read_libsvm

__all__ = [
    "DataError",
    "Dataset",
    "flip_labels",
    "load",
    "read_libsvm",
    "remove_positives",
    "split_rows",
]
