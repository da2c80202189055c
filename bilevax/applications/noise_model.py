r"""A model of label noise: how often each class is labelled as each other class.

A noisy row with clean logits t has the true class k with probability p_k = softmax(t + δ)_k, where δ accounts
for different class frequencies among noisy rows, and the label c with probability Σ_k p_k T_kc. It follows:

- the chance that a label is right, q = p_c T_cc / Σ_k p_k T_kc;
- the efficient weight, w = κ p_c / Σ_k p_k T_kc with κ = (tr T − 1)/(C − 1). With two classes the gradient of
  the weighted logistic loss is then that of the labels' likelihood: weighting loses no information.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.special import softmax

_PSEUDO_RIGHT, _PSEUDO_WRONG = 4.0, 1.0  # pseudo-counts of labels: the prior of T
_LEAST_RIGHT = 0.02  # a label is right with at least this probability more than a random one


@dataclasses.dataclass(frozen=True)
class NoiseModel:
    """T and δ.

    Attributes:
      flip: (C, C), T_kc: the chance that a row of class k is labelled c.
      shift: (C,), δ, with mean zero.
    """

    flip: np.ndarray
    shift: np.ndarray

    def true_class(self, logits: np.ndarray) -> np.ndarray:
        """p, the probabilities of the true classes of noisy rows, from clean logits (one per class)."""
        return softmax(logits + self.shift, -1)

    def quality(self, logits: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """The chance that each label is right."""
        chance = self.true_class(logits)
        at = np.arange(len(codes))
        return np.clip(chance[at, codes] * self.flip[codes, codes] / self._label(chance, codes), 0.0, 1.0)

    def weight(self, logits: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """The efficient weight of each row, between 0 and 1."""
        classes = len(self.flip)
        kappa = max((np.trace(self.flip) - 1) / (classes - 1), _LEAST_RIGHT)
        chance = self.true_class(logits)
        at = np.arange(len(codes))
        return np.clip(kappa * chance[at, codes] / self._label(chance, codes), 0.0, 1.0)

    def log_likelihood(self, logits: np.ndarray, codes: np.ndarray) -> float:
        """The log-likelihood of labels, summed over rows."""
        return float(np.log(self._label(self.true_class(logits), codes)).sum())

    def _label(self, chance: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return np.maximum((chance * self.flip.T[codes]).sum(-1), 1e-12)


def estimate(
    logits: np.ndarray, codes: np.ndarray, iterations: int = 500, tolerance: float = 1e-5
) -> NoiseModel:
    """The T and δ that maximise the likelihood of noisy labels, by expectation-maximisation.

    Args:
      logits: clean logits of the noisy rows, (n, C).
      codes: their labels, 0 to C − 1.
      iterations: the most iterations.
      tolerance: stop when no entry of T changes by more than this.

    Returns:
      The noise model.

    Example:
      >>> random = np.random.default_rng(0)
      >>> true, wrong = random.integers(0, 2, 4000), random.random(4000) < 0.2
      >>> logits = np.where(true == 1, 4.0, -4.0)[:, None] * [0.0, 1.0]
      >>> estimate(logits, np.where(wrong, 1 - true, true)).flip.round(1).tolist()
      [[0.8, 0.2], [0.2, 0.8]]
    """
    classes = logits.shape[1]
    labels = np.eye(classes)[codes]
    prior = np.where(np.eye(classes, dtype=bool), _PSEUDO_RIGHT * (classes - 1), _PSEUDO_WRONG)
    model = NoiseModel(prior / prior.sum(1, keepdims=True), np.zeros(classes))
    least = 1 / classes + _LEAST_RIGHT
    unshifted = np.exp(logits - logits.max(-1, keepdims=True))
    for _ in range(iterations):
        chance = unshifted * np.exp(model.shift)
        chance /= chance.sum(-1, keepdims=True)
        posterior = chance * model.flip.T[codes]
        posterior /= np.maximum(posterior.sum(-1, keepdims=True), 1e-12)
        counts = posterior.T @ labels + prior
        flip = counts / counts.sum(1, keepdims=True)
        right = np.maximum(np.diag(flip), least)
        flip *= ((1 - right) / np.maximum(1 - np.diag(flip), 1e-12))[:, None]
        np.fill_diagonal(flip, right)
        # One pseudo-row per class keeps δ finite where a class is unlikely everywhere.
        shift = model.shift + np.log((posterior.sum(0) + 1) / (chance.sum(0) + 1))
        change = np.abs(flip - model.flip).max()
        model = NoiseModel(flip, shift - shift.mean())
        if change < tolerance:
            break
    return model
