r"""F, ∇F and the fits of groups for the squared loss, in closed form from sums of squares.

A block's rows enter through K = Σ a r rᵀ and k = Σ a r t of the rows it is fitted to and H, h and c = Σ a t²
of those it is judged on. With the precision P = (S Sᵀ)⁻¹ of the prior,

.. math::
    \beta &= (K + P)^{-1} (k + P \mu), \qquad f = \tfrac12 \beta^\top H \beta - h^\top \beta + \tfrac12 c \\
    q &= (K + P)^{-1} (H \beta - h), \qquad
    \partial f / \partial \mu = P q, \qquad \partial f / \partial P = q (\mu - \beta)^\top

So an evaluation of F takes an inverse per block, whatever its rows. All is in double precision: f is
a difference of sums.

A share of F is the evidence of the random-effects model, whose groups have the prior as distribution and
normal noise. With the sums A, b and c of all N rows of a group, its likelihood at the best noise is, as an
error of a row,

.. math::
    E = \tfrac12 \, \Big( \tfrac1N \sum_i c_i - b_i^\top \beta_i + \mu^\top P (\mu - \beta_i) \Big)
        \exp \Big( \tfrac1N \sum_i \log |A_i + P| - \log |P| \Big),
    \qquad \beta_i = (A_i + P)^{-1} (b_i + P \mu)

By the chain rule of probabilities it is the geometric mean of what one is off when the rows of a group are
predicted one after the other. It sees every row and needs no folds, so that it tells more of the prior than
F does if the model is near the truth; F tells more if it is not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped import block_systems
from bilevax.applications.grouped.block_systems import tiled, untiled
from bilevax.applications.grouped.blocks import Blocks
from bilevax.applications.grouped.device_sums import device_sums, on_accelerator
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.sums import BlockSums, group_sums
from bilevax.applications.grouped.tiles import power_of_two

_MOST, _ENTRIES = 2**9, 2**19  # blocks of a chunk, and entries of their matrices
_WIDER = 64  # times as many on an accelerator, which does not wait for the host then


class Normal(NamedTuple):
    """The prior as programs take it, whatever its form: one program is compiled for all.

    Attributes:
      precision: P, (d, d).
      mean: (d,), that of a group of which nothing is known.
      slopes: (p, d), by what is known of a group.
    """

    precision: np.ndarray
    mean: np.ndarray
    slopes: np.ndarray

    @classmethod
    def of(cls, prior: Prior, x: X) -> Normal:
        """That of x."""
        spread, slopes = prior.matrix(x), np.zeros((0, prior.size))
        if prior.known:
            slopes = np.asarray(x["known"], float)[..., 0]
        return cls(np.linalg.inv(spread @ spread.T), np.asarray(x["mean"], float)[:, 0], slopes)

    def gradient(
        self, prior: Prior, x: X, by_precision: np.ndarray, by_mean: np.ndarray, by_known: np.ndarray
    ) -> X:
        """The gradient in x, from those in P, the mean and the slopes: dP = −P (dS Sᵀ + S dSᵀ) P."""
        turned = self.precision @ by_precision @ self.precision
        out = prior.by_spread(x, -(turned + turned.T) @ prior.matrix(x))
        out["mean"] = by_mean[:, None]
        return out | ({"known": by_known[..., None]} if prior.known else {})


class SquaredCrossValidation:
    """F and ∇F over blocks, as `CrossValidation` has them for any loss.

    Args:
      blocks: the blocks.
      prior: the form of the prior.
      sums: those of the blocks; left out, they are made.
      evidence: what else is seen of groups, and its share; None if nothing is.
    """

    def __init__(
        self, blocks: Blocks, prior: Prior, sums: BlockSums | None = None, evidence: Evidence | None = None
    ):
        self.blocks, self.prior, self.evidence, self.chunks = blocks, prior, evidence, []
        self.sums = BlockSums.of(blocks) if sums is None else sums
        size = _at_once(blocks.count, prior.size)
        with jax.enable_x64(True):
            for first in range(0, blocks.count, size):
                part = slice(first, first + size)
                held = self.sums.held[part] * blocks.judged[part, None, None]
                arrays = (self.sums.kept[part], held, blocks.panel.known[blocks.group[part]])
                tiles = (tiled(_padded(one, size), prior.size + 1) for one in arrays)
                self.chunks.append(tuple(jnp.asarray(one) for one in tiles))

    def part(self, places: np.ndarray) -> SquaredCrossValidation:
        """F of some blocks."""
        sums = BlockSums(self.sums.kept[places], self.sums.held[places], self.sums.total)
        evidence, members = self.evidence, np.unique(self.blocks.group[places])
        if evidence is not None:
            known = self.blocks.panel.known[members]
            evidence = Evidence(self.prior, self.sums.total[members], known, evidence.share)
        return SquaredCrossValidation(self.blocks.part(places), self.prior, sums, evidence)

    def errors(self, places: np.ndarray, x: X) -> tuple[np.ndarray, np.ndarray]:
        """Errors of the held-out rows of some folds in units of how uncertain their predictors are, and the
        rows' weights."""
        return held_out_sums(self.blocks.rows_alike(places), self.prior, x, self.sums.kept[places])

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """F(x) and ∇F(x)."""
        normal = Normal.of(self.prior, x)
        with jax.enable_x64(True):
            found = [block_systems.judge(*chunk, *normal) for chunk in self.chunks]
        value, by_precision, by_mean, by_known = _added(found)
        gradient = normal.gradient(self.prior, x, by_precision, by_mean, by_known)
        if self.evidence is not None:
            own, slope = self.evidence.value_and_gradient(x)
            share = self.evidence.share
            value = (1 - share) * value + share * own
            gradient = {n: (1 - share) * one + share * slope[n] for n, one in gradient.items()}
        return float(value), gradient


class Evidence:
    """E and ∇E over groups.

    Args:
      prior: the form of the prior.
      total: (m, d + 1, d + 1), the sums of all rows of every group.
      known: (m, p), what is known of them.
      share: of F.
    """

    def __init__(self, prior: Prior, total: np.ndarray, known: np.ndarray, share: float):
        self.prior, self.share, self.groups, self.chunks = prior, share, len(total), []
        self.weight = float(total[:, 0, 0].sum())  # the first feature is one
        size = _at_once(len(total), prior.size)
        with jax.enable_x64(True):
            for first in range(0, len(total), size):
                arrays = (_padded(one[first : first + size], size) for one in (total, known))
                real = (np.arange(first, first + size) < len(total)) * 1.0
                tiles = (tiled(one, prior.size + 1) for one in (*arrays, real))
                self.chunks.append(tuple(jnp.asarray(one) for one in tiles))

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """E(x) and ∇E(x)."""
        normal, spread = Normal.of(self.prior, x), self.prior.matrix(x)
        with jax.enable_x64(True):
            found = [block_systems.explained(*chunk, *normal) for chunk in self.chunks]
        left, size, off, inverse, by_mean, by_known = _added(found)
        covariance = spread @ spread.T
        grown = np.exp((size + self.groups * np.linalg.slogdet(covariance)[1]) / self.weight)
        error, scale = left / self.weight, grown / self.weight
        by_precision = 0.5 * scale * (off + error * (inverse - self.groups * covariance))
        gradient = normal.gradient(self.prior, x, by_precision, scale * by_mean, scale * by_known)
        return float(0.5 * error * grown), gradient


def fit_sums(
    panel: Panel, prior: Prior, x: X, *, variance: bool, sums: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Coefficients (m, d, 1), shares and (m, d, d) variances of all groups, on all their rows, whose `sums`
    may be known."""
    d = prior.size
    coef, share = np.zeros((panel.groups, d, 1)), np.zeros(panel.groups)
    spreads = np.zeros((panel.groups, d, d)) if variance else None
    size = _at_once(panel.groups, d)
    normal, between = Normal.of(prior, x), (prior.matrix(x) ** 2).sum(1)
    with jax.enable_x64(True):
        for first in range(0, panel.groups, size):
            part = slice(first, min(first + size, panel.groups))
            if sums is not None:
                own = _padded(sums[part], size)
            elif on_accelerator():
                own = device_sums(panel, part.start, part.stop, size)
            else:
                own = _padded(group_sums(panel.part(np.arange(part.start, part.stop))), size)
            known = _padded(panel.known[part], size)
            tiles = (jnp.asarray(tiled(one, d + 1)) for one in (own, known))
            found = block_systems.fit(*tiles, *normal, between, variance)
            count = part.stop - part.start
            coef[part, :, 0], share[part] = (untiled(one)[:count] for one in found[:2])
            if spreads is not None:
                spreads[part] = untiled(found[2])[:count]
    return coef, share, spreads


def pooled_sums(total: np.ndarray) -> np.ndarray:
    """One model for all rows, (d, 1), from the sums of all groups; a constant feature has none of it."""
    both = total.sum(0)
    return np.linalg.lstsq(both[:-1, :-1], both[:-1, -1:], rcond=None)[0]


def held_out_sums(blocks: Blocks, prior: Prior, x: X, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors of held-out rows in units of how uncertain their predictors are, and the rows' weights,
    from the sums of the rows that blocks are fitted to."""
    panel, d, spread = blocks.panel, prior.size, prior.matrix(x)
    precision = np.linalg.inv(spread @ spread.T)
    mean = np.broadcast_to(np.asarray(x["mean"])[:, 0], (blocks.count, d))
    if prior.known:
        mean = mean + np.tensordot(panel.known[blocks.group], np.asarray(x["known"])[..., 0], 1)
    variance = np.linalg.inv(kept[:, :d, :d] + precision)
    beta = np.einsum("bde,be->bd", variance, kept[:, :d, d] + mean @ precision)
    owner, place, real = blocks.held.tiled(np.arange(blocks.count))
    rows = panel.at(place)
    error = panel.target[place] - np.einsum("tld,td->tl", rows, beta[owner])
    size = np.sqrt(1 + np.einsum("tld,tld->tl", rows @ variance[owner], rows))
    return (error / size)[real], (panel.weight[place] * blocks.judged[owner, None])[real]


def _at_once(count: int, size: int) -> int:
    """Blocks of a chunk: a power of two, so that few programs are compiled."""
    wider = _WIDER if on_accelerator() else 1
    fitting = max(power_of_two(wider * _ENTRIES // (size + 1) ** 2) // 2, 1)
    return min(wider * _MOST, power_of_two(count), fitting)


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    return np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1))


def _added(found: list[tuple[Array, ...]]) -> tuple[Any, ...]:
    """The sums of what programs returned for every chunk."""
    return tuple(sum(map(np.asarray, part)) for part in zip(*found, strict=True))
