"""Data sets: strict readers, known data sets by name, label noise, splits and generated interactions."""

from bilevax.data import generate
from bilevax.data.classification import Dataset, load
from bilevax.data.errors import DataError
from bilevax.data.interactions import Interactions, make_interactions
from bilevax.data.labels import flip_labels, remove_positives, split_rows
from bilevax.data.libsvm import read_libsvm
from bilevax.data.rating_files import load_interactions
from bilevax.data.splits import Splits, split_last, split_ratio, split_time
from bilevax.data.user_rows import UserRows

__all__ = [
    "DataError",
    "Dataset",
    "Interactions",
    "Splits",
    "UserRows",
    "flip_labels",
    "generate",
    "load",
    "load_interactions",
    "make_interactions",
    "read_libsvm",
    "remove_positives",
    "split_last",
    "split_ratio",
    "split_rows",
    "split_time",
]
