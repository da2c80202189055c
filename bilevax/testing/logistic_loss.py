"""The logistic loss in NumPy, on arrays of −label · features, (m, rows, observations, d_y)."""

from __future__ import annotations

import math

import numpy as np

THIRD = 1 / (6 * math.sqrt(3))  #: the largest third derivative of the logistic loss


def margins(signed: np.ndarray, y: np.ndarray) -> np.ndarray:
    """−label · score, of every observation."""
    return (signed @ y[:, None, :, None])[..., 0]


def sigmoid(signed: np.ndarray, y: np.ndarray) -> np.ndarray:
    """1/(1 + exp(label · score)) of every observation."""
    return 0.5 * (1 + np.tanh(0.5 * margins(signed, y)))


def losses(signed: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The mean logistic loss of each block."""
    return np.logaddexp(0, margins(signed, y)).mean((1, 2))


def slopes(signed: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of each block's mean loss."""
    p, flat = sigmoid(signed, y).reshape(len(y), 1, -1), signed.reshape(len(y), -1, y.shape[1])
    return (p @ flat)[:, 0] / flat.shape[1]


def mean_gram(signed: np.ndarray) -> np.ndarray:
    """The mean of a aᵀ over all observations of each block."""
    flat = signed.reshape(len(signed), -1, signed.shape[-1])
    return flat.transpose(0, 2, 1) @ flat / flat.shape[1]


def row_curvature(signed: np.ndarray) -> np.ndarray:
    """A bound on the curvature of each row's loss."""
    return np.linalg.norm(signed, 2, axis=(-2, -1)) ** 2 / (4 * signed.shape[2])


def row_noise(signed: np.ndarray, size: float) -> tuple[float, float]:
    """Bounds on the standard deviations of a row's gradient and Hessian, for ‖y‖ ≤ size.

    A variance is at most the mean square distance from a row with the mean features a. Per observation the
    gradient differs by ‖δ‖ (1 + ‖a‖ size/4), the Hessian by ‖δ‖ ((‖a + δ‖ + ‖a‖)/4 + ‖a‖² size/(6√3)).
    """
    middle = signed.mean(1, keepdims=True)
    delta, old, new = (np.linalg.norm(a, axis=-1) for a in (signed - middle, middle, signed))
    first = delta * (1 + old * size / 4)
    second = delta * ((new + old) / 4 + THIRD * old**2 * size)
    deviations = [float(np.sqrt(np.mean(d.mean(-1) ** 2, 1).max())) for d in (first, second)]
    return deviations[0], deviations[1]
