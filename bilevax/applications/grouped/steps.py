r"""Predictions that are values of the target, where it has few of them.

Ratings, grades and small counts have few values, and so have their quantiles: a linear function can only be
near them. Its predictions η of held-out rows tell where one value is better than the next. For the values
:math:`a_1 < a_2 < \dots` the prediction is :math:`a_k` from threshold :math:`c_{k-1}` to :math:`c_k`, with

.. math::
    c_k = \arg\min_c \sum_j h_j
        \big( [\eta_j < c]\, \ell(a_k, t_j) + [\eta_j \ge c]\, \ell(a_{k+1}, t_j) \big)

As ℓ is convex, its difference between two values grows with the values, and thresholds ascend by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

_MOST = 64  # values of a target that is predicted by steps
_ROWS = 10  # for every value, at least
_HALVES = 2  # thresholds are judged on rows that they were not found from

RowLoss = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of predictions and targets


@dataclasses.dataclass(frozen=True)
class Steps:
    """A step function of linear predictions.

    Attributes:
      values: (K,), ascending.
      thresholds: (K − 1,), ascending.
    """

    values: np.ndarray
    thresholds: np.ndarray

    def __call__(self, eta: np.ndarray) -> np.ndarray:
        """The values that are predicted."""
        return self.values[np.searchsorted(self.thresholds, eta, "right")]


def few_values(target: np.ndarray) -> np.ndarray | None:
    """The values of a target, ascending; None if there are many."""
    if len(np.unique(target[: _MOST * _ROWS])) > _MOST:
        return None
    values, counts = np.unique(target, return_counts=True)
    return values if 2 <= len(values) <= _MOST and counts.sum() >= _ROWS * len(values) else None


def find_steps(
    values: np.ndarray, eta: np.ndarray, target: np.ndarray, weight: np.ndarray, loss: RowLoss, seed: int
) -> Steps | None:
    """The steps that are best for predictions of held-out rows; None if the predictions themselves are.

    Args:
      values: of the target.
      eta: (n,), predictions.
      target: (n,).
      weight: (n,).
      loss: of predictions and targets, convex in the former.
      seed: of the halves in which steps are judged.
    """
    half = np.random.default_rng([seed, 2]).integers(_HALVES, size=len(eta))
    gain = 0.0
    for one in range(_HALVES):
        others, own = half != one, half == one
        steps = Steps(values, _thresholds(values, eta[others], target[others], weight[others], loss))
        plain, stepped = (loss(found, target[own]) for found in (eta[own], steps(eta[own])))
        gain += float(weight[own] @ (plain - stepped))
    return Steps(values, _thresholds(values, eta, target, weight, loss)) if gain > 0 else None


def _thresholds(
    values: np.ndarray, eta: np.ndarray, target: np.ndarray, weight: np.ndarray, loss: RowLoss
) -> np.ndarray:
    order = np.argsort(eta)
    eta, target, weight = eta[order], target[order], weight[order]
    between = np.concatenate([[-np.inf], 0.5 * (eta[1:] + eta[:-1]), [np.inf]])
    possible = np.concatenate([[True], eta[1:] > eta[:-1], [True]])  # rows with one η have one prediction
    out, losses = np.empty(len(values) - 1), loss(np.full(len(eta), values[0]), target)
    for k, value in enumerate(values[1:]):
        higher = loss(np.full(len(eta), value), target)
        # What is lost if the rows up to a place have the lower value, and those after it the higher one.
        lost = np.concatenate([[0.0], np.cumsum(weight * (losses - higher))])
        out[k], losses = between[int(np.argmin(np.where(possible, lost, np.inf)))], higher
    return np.maximum.accumulate(out)
