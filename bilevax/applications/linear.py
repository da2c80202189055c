"""Linear classifiers on weighted rows, fitted exactly by L-BFGS.

Logits have C' columns: one if there are two classes (the logit of the second), C if there are C > 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

_FREE = 1e-6  # the ridge on intercepts, per total weight: it only keeps them finite


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear classifier, with a shift for the logits of noisy rows.

    Attributes:
      coef: (features, C').
      intercept: (C',).
      shift: (C',), added to the logits of noisy rows, whose class frequencies may differ.
    """

    coef: np.ndarray
    intercept: np.ndarray
    shift: np.ndarray

    def logits(self, rows: Any) -> np.ndarray:
        """Logits of clean rows, (rows, C')."""
        return np.asarray(rows @ self.coef.astype(rows.dtype)) + self.intercept

    def vector(self) -> np.ndarray:
        """All parameters in one vector."""
        return np.concatenate([self.coef.ravel(), self.intercept, self.shift])


def columns_of(classes: int) -> int:
    """C', the number of logits for C classes."""
    return 1 if classes == 2 else classes


def all_logits(logits: np.ndarray) -> np.ndarray:
    """One logit per class: with two classes, that of the first is zero.

    Example:
      >>> all_logits(np.array([[3.0]])).tolist()
      [[0.0, 3.0]]
    """
    if logits.shape[-1] > 1:
        return logits
    return np.concatenate([np.zeros_like(logits), logits], -1)


def losses(logits: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The cross-entropy of every row, from logits with C' columns and class codes."""
    return -log_softmax(all_logits(logits), -1)[np.arange(len(codes)), codes]


def mean_model(models: list[Linear], shares: np.ndarray) -> Linear:
    """The model whose logits are the weighted mean of the models' logits."""
    return Linear(
        *(
            np.tensordot(shares, np.stack([getattr(model, name) for model in models]), 1)
            for name in ("coef", "intercept", "shift")
        )
    )


def fit(
    rows: Any,
    codes: np.ndarray,
    weight: np.ndarray,
    ridge: float,
    *,
    classes: int,
    noisy: np.ndarray | None = None,
    shift_deviation: float = 1.0,
    start: Linear | None = None,
    iterations: int = 200,
) -> Linear:
    r"""Multinomial logistic regression on weighted rows.

    .. math::
        \min_{B, a, s} \sum_j w_j \, \ell(B^\top r_j + a + [j \text{ noisy}]\, s, c_j)
            + \tfrac{\rho}{2} \|B\|^2 + \tfrac{1}{2\sigma^2} \|s\|^2

    Args:
      rows: (n, features), dense or scipy-sparse.
      codes: the class of every row, 0 to C − 1.
      weight: the weight w of every row.
      ridge: ρ.
      classes: C.
      noisy: which rows are noisy, so that s shifts their logits; None for none.
      shift_deviation: σ, the prior standard deviation of s.
      start: the model to start from.
      iterations: the most iterations of L-BFGS.

    Returns:
      The fitted model.

    Example:
      >>> rows, codes = np.array([[-1.0], [1.0]]), np.array([0, 1])
      >>> model = fit(rows, codes, np.ones(2), 0.1, classes=2)
      >>> bool(model.coef[0, 0] > 0)
      True
    """
    count, features = rows.shape
    width = columns_of(classes)
    one_hot = _one_hot(codes, classes)
    moved = np.zeros(count) if noisy is None else noisy.astype(float)
    free = _FREE * max(weight.sum(), 1.0)
    scales = np.concatenate(
        [np.full(features * width, ridge), np.full(width, free), np.full(width, shift_deviation**-2.0)]
    )
    transposed = rows.T

    def objective(vector: np.ndarray) -> tuple[float, np.ndarray]:
        model = _from_vector(vector, features, width)
        loss, slope = _losses_and_slopes(model.logits(rows) + moved[:, None] * model.shift, one_hot)
        slope *= weight[:, None]
        parts = [np.asarray(transposed @ slope.astype(rows.dtype)).ravel(), slope.sum(0), moved @ slope]
        value = float(weight @ loss + 0.5 * (scales @ vector**2))
        return value, np.concatenate(parts) + scales * vector

    first = np.zeros(features * width + 2 * width) if start is None else start.vector()
    options = {"maxiter": iterations, "maxcor": 20, "gtol": 1e-6 * max(weight.sum(), 1.0), "ftol": 1e-8}
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
    return _from_vector(found.x, features, width)


def calibrate(logits: np.ndarray, codes: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias that fit logits of unit spread to a few labels (Platt's method).

    The maximum a posteriori under scale ~ N(1.5, 1) and bias ~ N(0, 2²): a few labels move them little.

    Returns:
      The scale, of shape (1,), and the bias, of shape (C',).
    """
    width = columns_of(classes)
    one_hot = _one_hot(codes, classes)
    centre = np.concatenate([[1.5], np.zeros(width)])
    precision = np.concatenate([[1.0], np.full(width, 0.25)])

    def objective(vector: np.ndarray) -> tuple[float, np.ndarray]:
        loss, slope = _losses_and_slopes(vector[0] * logits + vector[1:], one_hot)
        off = vector - centre
        gradient = np.concatenate([[(slope * logits).sum()], slope.sum(0)]) + precision * off
        return loss.sum() + 0.5 * (precision @ off**2), gradient

    bounds = [(0.05, None)] + [(None, None)] * width
    found = minimize(objective, centre, jac=True, method="L-BFGS-B", bounds=bounds)
    return found.x[:1], found.x[1:]


def _one_hot(codes: np.ndarray, classes: int) -> np.ndarray:
    """The class of every row as C' columns of booleans."""
    return codes[:, None] == np.arange(classes)[classes - columns_of(classes) :]


def _losses_and_slopes(logits: np.ndarray, one_hot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropies and their derivatives in the logits."""
    if logits.shape[1] == 1:
        return np.logaddexp(0.0, np.where(one_hot, -logits, logits))[:, 0], expit(logits) - one_hot
    log_chance = log_softmax(logits, -1)
    return -log_chance[one_hot], np.exp(log_chance) - one_hot


def _from_vector(vector: np.ndarray, features: int, width: int) -> Linear:
    coef, intercept, shift = np.split(vector, [features * width, features * width + width])
    return Linear(coef.reshape(features, width), intercept, shift)
