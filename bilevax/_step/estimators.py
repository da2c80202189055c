r"""How a quantity is tracked from one noisy sample per visit.

====================  ===============================================================
MSVR                  h ← (1−α) h + α h(e_t; B) + γ (h(e_t; B) − h(e_{t−1}; B))
STORM                 z ← (1−β)(z − G̃) + G
moving average        h ← (1−α) h + α h(e_t; B)
====================  ===============================================================

`now` is the sample at time t and `before` the one at time t−1, on the same rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array

from bilevax._util.trees import combine

PyTree = Any


def msvr(tracked: PyTree, now: PyTree, before: PyTree, alpha: Array, gamma: Array) -> PyTree:
    """The multi-block variance-reduced estimator of a sampled slot (before any projection)."""
    return combine((1 - alpha, tracked), (alpha + gamma, now), (-gamma, before))


def storm(tracked: PyTree, now: PyTree, minus_before: PyTree, beta: Array) -> PyTree:
    """STORM: momentum whose stale part is corrected by the change of the sample, which is given as −G̃."""
    return combine((1 - beta, combine((1, tracked), (1, minus_before))), (1, now))


def moving_average(tracked: PyTree, now: PyTree, alpha: Array) -> PyTree:
    """An exponential moving average."""
    return combine((1 - alpha, tracked), (alpha, now))


def msvr_gamma(alpha: Any, chance: float) -> Any:
    r"""The error correction of MSVR, :math:`\gamma = \frac{m-I}{I(1-\alpha)} + (1-\alpha)`.

    Args:
      alpha: the averaging weight.
      chance: the probability I/m that a step samples the slot.
    """
    if chance >= 1.0:
        return 1 - alpha
    with np.errstate(divide="ignore"):  # infinite at α = 1, where callers have a bound
        return (1 / chance - 1) / (1 - alpha) + (1 - alpha)
