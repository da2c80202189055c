r"""F, ∇F and the fits of groups that have fewer rows than features.

A group's coefficients are its prior mean and a combination of its rows, so that a block is a problem in a
number per row, α, and not in one per feature. With the predictors :math:`\eta_0 = R \mu` of the prior and
:math:`G = R S S^\top R^\top`,

.. math::
    \eta = \eta_0 + G \alpha, \qquad
    \rho(\alpha) = a\, \ell'(\eta, t) + \alpha = 0, \qquad
    \beta = \mu + S S^\top R^\top \alpha

A fold is its group with other weights a, zero for rows that are held out, so that all folds of a group share
G. ∇F is that of the scalar f − ⟨q, ρ⟩ with :math:`q = (I + G W)^{-1} \nabla_\alpha f` and the curvatures
W = a ℓ''. All is in double precision.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from bilevax.applications.grouped import row_systems
from bilevax.applications.grouped.blocks import Blocks, whole_groups
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.row_chunks import chunks

_WIDE = 32  # features, up to which a block's matrix of their products costs little
_UNSOLVED = 1e-2  # of g, by which one more step would lower it


def fewer_rows(panel: Panel, loss: Loss) -> bool:
    """Whether systems of a group's rows are smaller than those of its features, by far."""
    work = float(np.mean(np.diff(panel.offsets).astype(float) ** 3))
    return loss.columns == 1 and panel.size > _WIDE and work <= (panel.size / 2) ** 3


class RowCrossValidation:
    """F and ∇F over blocks, as `CrossValidation` has them.

    Args:
      blocks: the blocks.
      prior: the form of the prior.
      loss: of a row, of one predictor.
      evidence: what else is seen of groups, and its share; None if nothing is.
    """

    def __init__(self, blocks: Blocks, prior: Prior, loss: Loss, evidence: RowEvidence | None = None):
        self.blocks, self.prior, self.loss, self.evidence = blocks, prior, loss, evidence
        self.chunks = list(chunks(blocks))
        self.alpha: list[Any] = [np.zeros_like(chunk.data["a"]) for chunk in self.chunks]

    def part(self, places: np.ndarray) -> RowCrossValidation:
        """F of some blocks."""
        evidence = self.evidence
        if evidence is not None:
            evidence = evidence.part(np.unique(self.blocks.group[places]))
        return RowCrossValidation(self.blocks.part(places), self.prior, self.loss, evidence)

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """F(x) and ∇F(x)."""
        found = []
        with jax.enable_x64(True):
            for place, chunk in enumerate(self.chunks):
                one, slope, self.alpha[place] = row_systems.judge(
                    self.prior, self.loss, x, chunk.data, self.alpha[place]
                )
                found.append((one, slope))
        value, gradient = _added(found)
        if self.evidence is not None:
            own, slope = self.evidence.value_and_gradient(x)
            share = self.evidence.share
            value = (1 - share) * value + share * own
            gradient = {n: (1 - share) * one + share * slope[n] for n, one in gradient.items()}
        return float(value), gradient

    def held_out(self, x: X) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of all held-out rows: predictors, targets, weights in F, and variances of the predictors."""
        found = []
        with jax.enable_x64(True):
            for chunk in self.chunks:
                data = chunk.data
                eta, variance = map(np.asarray, row_systems.held_out(self.prior, self.loss, x, data))
                real = data["h"] > 0
                target = np.broadcast_to(data["t"][:, None], real.shape)
                found.append([one[real] for one in (eta, target, data["h"], variance)])
        eta, target, weight, variance = (np.concatenate(part) for part in zip(*found, strict=True))
        return eta, target, weight, variance

    def errors(self, places: np.ndarray, x: X) -> tuple[np.ndarray, np.ndarray]:
        """Errors of the held-out rows of some folds in units of how uncertain their predictors are, and the
        rows' weights."""
        blocks = self.blocks.rows_alike(places)
        eta, target, weight, variance = RowCrossValidation(blocks, self.prior, self.loss).held_out(x)
        return (target - eta) / np.sqrt(1 + variance), weight

    def predictions(self, places: np.ndarray, x: X) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predictors (n, 1), targets and weights in F of the held-out rows of some folds."""
        eta, target, weight, _ = self.part(places).held_out(x)
        return eta[:, None], target, weight


class RowEvidence:
    """The evidence of the squared loss and its gradient, as `Evidence` has them.

    Args:
      panel: the rows.
      prior: the form of the prior.
      loss: the squared one.
      share: of F.
    """

    def __init__(self, panel: Panel, prior: Prior, loss: Loss, share: float):
        self.panel, self.prior, self.loss, self.share = panel, prior, loss, share
        self.chunks = list(chunks(whole_groups(panel)))
        self.weight = float(panel.weight.sum())

    def part(self, groups: np.ndarray) -> RowEvidence:
        """That of some groups."""
        return RowEvidence(self.panel.part(groups), self.prior, self.loss, self.share)

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """E(x) and ∇E(x)."""
        with jax.enable_x64(True):
            found = [row_systems.explained(self.prior, self.loss, x, chunk.data) for chunk in self.chunks]
        left, size, by_left, by_size = _added(found)
        error, grown = left / self.weight, np.exp(size / self.weight)
        scale = 0.5 * grown / self.weight
        gradient = {name: scale * (one + error * by_size[name]) for name, one in by_left.items()}
        return float(0.5 * error * grown), gradient


def fit_rows(
    panel: Panel, prior: Prior, loss: Loss, x: X, *, variance: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Coefficients (m, d, 1), shares and (m, d, d) variances of all groups, on all their rows, and how many
    of them could not be fitted well."""
    d = prior.size
    coef, share = np.zeros((panel.groups, d, 1)), np.zeros(panel.groups)
    spreads, unsolved = np.zeros((panel.groups, d, d)) if variance else None, 0
    spread = prior.matrix(x)
    covariance = spread @ spread.T
    for chunk in chunks(whole_groups(panel)):
        with jax.enable_x64(True):
            found = row_systems.fit(prior, loss, x, chunk.data)
        count = len(chunk.groups)
        beta, across, solved, left_over = (np.asarray(one)[:count] for one in found)
        coef[chunk.groups, :, 0] = beta
        share[chunk.groups] = np.mean((across * solved).sum(1) / np.diag(covariance), -1)
        unsolved += int((~(left_over <= _UNSOLVED)).sum())
        if spreads is not None:
            spreads[chunk.groups] = covariance - np.swapaxes(across, 1, 2) @ solved
    return coef, share, spreads, unsolved


def _added(found: list[Any]) -> Any:
    """The sums of what programs returned for every chunk."""
    return jax.tree.map(lambda *parts: sum(np.asarray(part, float) for part in parts), *found)
