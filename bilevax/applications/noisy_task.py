"""The data of a noisy-label task: noisy rows, clean rows and their folds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class NoisyTask:
    """Rows whose labels may be wrong, and clean rows, whose labels are right.

    Attributes:
      rows: noisy rows, dense or scipy-sparse.
      codes: their class codes, 0 to C − 1.
      clean_rows: clean rows, in the same form.
      clean_codes: their class codes.
      fold: the fold of every clean row, from 0 without gaps.
      classes: C.
    """

    rows: Any
    codes: np.ndarray
    clean_rows: Any
    clean_codes: np.ndarray
    fold: np.ndarray
    classes: int

    @property
    def folds(self) -> int:
        """The number of folds."""
        return int(self.fold.max()) + 1
