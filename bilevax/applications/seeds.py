"""The `random_state` of estimators, as scikit-learn has it."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import check_random_state


def drawn_from(random_state: Any) -> np.random.RandomState:
    """The generator that an estimator draws from.

    Raises:
      ValueError: it is neither a seed nor a `RandomState` nor None.
    """
    try:
        return check_random_state(random_state)
    except ValueError as error:
        seed = "; random_state=int(generator.integers(2**31)) takes a seed from a Generator"
        raise ValueError(
            "random_state must be a whole number from 0 to 2**32 - 1, a numpy.random.RandomState or None, as "
            f"everywhere in scikit-learn, got {random_state!r}"
            f"{seed if isinstance(random_state, np.random.Generator) else ''}"
        ) from error
