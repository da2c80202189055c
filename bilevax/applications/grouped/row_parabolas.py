r"""Where learning starts, for groups that have fewer rows than features.

A group with rows R and the covariance :math:`\Sigma` of coefficients has, with noise variance s²,

.. math::
    C = s^2 I + R \Sigma R^\top, \qquad
    \mathrm{E} \beta = \mu + \Sigma R^\top C^{-1} (t - R \mu), \qquad
    \mathrm{Cov} \beta = \Sigma - \Sigma R^\top C^{-1} R \Sigma

so that a step of EM takes an inverse as large as the group has rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.start import Expected, Model, parabola_targets


@dataclasses.dataclass(frozen=True)
class RowParabolas:
    """The rows of groups with the targets that they would have if the loss were a parabola.

    Attributes:
      rows: (m, n, d), times the roots of their weights; those that fill up are zero.
      target: (m, n), likewise.
      weight: Σ a of all rows.
      known: (m, p), the metadata of the groups.
      curvature: that of the parabola.
    """

    rows: np.ndarray
    target: np.ndarray
    weight: float
    known: np.ndarray
    curvature: float

    @classmethod
    def of(cls, panel: Panel, loss: Loss, pooled: np.ndarray, curvature: float) -> RowParabolas:
        """Those of a panel at a pooled model of one predictor."""
        lengths, plain, root = np.diff(panel.offsets), panel.all(), np.sqrt(panel.weight)
        targets = parabola_targets(plain, panel.target, loss, pooled, curvature)[:, 0]
        place = (
            np.repeat(np.arange(panel.groups), lengths),
            np.arange(len(root)) - np.repeat(panel.offsets[:-1], lengths),
        )
        rows, target = (np.zeros((panel.groups, lengths.max(), *one)) for one in ((panel.size,), ()))
        rows[place], target[place] = root[:, None] * plain, root * targets
        return cls(rows, target, float(panel.weight.sum()), panel.known, curvature)

    @property
    def cross(self) -> np.ndarray:
        """Σ a r t of all groups, (d, 1)."""
        return np.tensordot(self.rows, self.target, ((0, 1), (0, 1)))[:, None]

    @property
    def square(self) -> float:
        """Σ a t² of all rows."""
        return float((self.target**2).sum())

    def expected(self, model: Model) -> Expected:
        """A step of expectation."""
        n, mean = self.rows.shape[1], model.mean[..., 0]
        across = self.rows @ model.covariance
        inverse = np.linalg.inv(model.noise * np.eye(n) + across @ np.swapaxes(self.rows, 1, 2))
        off = self.target - np.einsum("mnd,md->mn", self.rows, mean)
        solved = np.einsum("mij,mj->mi", inverse, off)
        beta = mean + np.einsum("mnd,mn->md", across, solved)
        flat, turned = (one.reshape(-1, one.shape[-1]) for one in (across, inverse @ across))
        covariance = model.covariance - flat.T @ turned / len(across)
        # What is left of a row is s² C⁻¹ (t − R μ), and the covariance of its predictor s² (I − s² C⁻¹).
        own = inverse.shape[0] * n - model.noise * np.trace(inverse, axis1=1, axis2=2).sum()
        left = model.noise**2 * (solved**2).sum() + model.noise * own
        return Expected(beta[..., None], covariance, float(left))
