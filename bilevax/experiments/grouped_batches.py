"""Penalised regressions of all groups together, for the baselines; in NumPy and float64.

Rows are cut into tiles of 16, so that the sums of all groups are a few products of arrays; a loop over groups
takes ten times longer.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from bilevax.experiments.grouped_panels import Rows

_TILE = 16
_LENGTHS = (1.0, 0.5, 0.25, 0.1, 0.01)


class Batch:
    """The rows of all groups in tiles.

    Args:
      rows: the rows.
    """

    def __init__(self, rows: Rows):
        lengths = np.diff(rows.offsets)
        tiles = -(-lengths // _TILE)
        self.groups, self.size = rows.groups, rows.X.shape[1]
        self.owner = np.repeat(np.arange(rows.groups), tiles)
        number = np.arange(len(self.owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        inside = number[:, None] * _TILE + np.arange(_TILE)
        self.real = inside < lengths[self.owner, None]
        self.place = np.where(self.real, rows.offsets[:-1][self.owner, None] + inside, 0)
        self.X, self.y = rows.X[self.place], rows.y[self.place]
        self.starts = np.cumsum(tiles) - tiles

    def tiled(self, per_row: np.ndarray) -> np.ndarray:
        """Values of rows as tiles, zero where there is no row."""
        return np.where(self.real, per_row[self.place], 0.0)

    def totals(self, tiles: np.ndarray) -> np.ndarray:
        """Sums over the tiles of every group."""
        return np.add.reduceat(tiles, self.starts, 0)

    def eta(self, beta: np.ndarray) -> np.ndarray:
        """Predictors of all rows, from coefficients (m, d)."""
        return (self.X @ beta[self.owner][..., None])[..., 0]

    def gram(self, weight: np.ndarray) -> np.ndarray:
        """Σ weight x xᵀ of every group."""
        return self.totals(np.swapaxes(self.X * weight[..., None], 1, 2) @ self.X)

    def cross(self, values: np.ndarray) -> np.ndarray:
        """Σ value x of every group."""
        return self.totals((values[:, None, :] @ self.X)[:, 0])


def logistic(
    batch: Batch,
    weight: np.ndarray,
    centre: np.ndarray,
    precision: np.ndarray,
    start: np.ndarray,
    steps: int = 30,
    enough: float = 1e-5,
) -> tuple[np.ndarray, np.ndarray]:
    """Logistic regressions of all groups, and their Hessians, by Newton steps.

    Each minimises Σ weight ℓ + ½ (β − centre)ᵀ precision (β − centre).

    Args:
      batch: the rows.
      weight: of rows, in tiles.
      centre: (d,).
      precision: (d, d), or one for every group.
      start: (m, d).
      steps: the most.
      enough: no coefficient moves by more in the last step.
    """

    def value(beta: np.ndarray) -> np.ndarray:
        eta, off = batch.eta(beta), beta - centre
        loss = batch.totals((weight * (np.logaddexp(0, eta) - batch.y * eta)).sum(1))
        return loss + 0.5 * (off * (off[:, None, :] @ precision)[:, 0]).sum(1)

    beta, now = start.copy(), value(start)
    hessian = np.broadcast_to(precision, (batch.groups, batch.size, batch.size))
    for _ in range(steps):
        chance = expit(batch.eta(beta))
        off = ((beta - centre)[:, None, :] @ precision)[:, 0]
        gradient = batch.cross(weight * (chance - batch.y)) + off
        hessian = batch.gram(weight * chance * (1 - chance)) + precision
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        left = np.ones(batch.groups, bool)
        for length in _LENGTHS:
            tried = beta - length * step * left[:, None]
            then = value(tried)
            better = left & (then <= now + 1e-10)
            beta[better], now[better], left = tried[better], then[better], left & ~better
            if not left.any():
                break
        if np.abs(step).max() < enough:
            break
    return beta, hessian


def quantile_regression(
    batch: Batch,
    weight: np.ndarray,
    quantile: float,
    centre: np.ndarray,
    precision: np.ndarray,
    start: np.ndarray,
    steps: int = 100,
    enough: float = 1e-4,
) -> np.ndarray:
    """Quantile regressions of all groups, by parabolas above the pinball loss (Hunter and Lange, 2000).

    Each minimises Σ weight ρ(y − x β) + ½ (β − centre)ᵀ precision (β − centre), with the corner of ρ rounded
    off over a thousandth of the spread of y; arguments as in `logistic`.
    """
    small = 1e-3 * float(batch.y[batch.real].std())
    beta, tilt = start, (quantile - 0.5) * batch.cross(weight)
    right = tilt + centre @ precision
    for _ in range(steps):
        pull = 0.5 * weight / (small + np.abs(batch.y - batch.eta(beta)))
        system = batch.gram(pull) + precision
        before = beta
        beta = np.linalg.solve(system, (batch.cross(pull * batch.y) + right)[..., None])[..., 0]
        if np.abs(beta - before).max() <= enough * (1 + np.abs(beta).max()):
            break
    return beta
