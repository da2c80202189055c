"""Arithmetic on the host, where arrays are there already.

An operation on a few numbers outside of a compiled program is compiled for itself: each takes some hundredths
of a second, in every process.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def numpy_of(*values: Any) -> Any:
    """NumPy, if all values are on the host, else JAX's."""
    return np if all(isinstance(value, (np.ndarray, np.generic, float, int)) for value in values) else jnp
