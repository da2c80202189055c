"""Rows by group, standardised when they are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

_PIECE = 2**12  # rows that are looked at together: they stay in a cache


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Rows and targets as the model sees them: (X − shift) / scale with a column of ones, and likewise y.

    A loss that a user gave sees y as it is: the shift and the scale of targets are those of predictions then.
    """

    shift: np.ndarray
    scale: np.ndarray
    target_shift: float
    target_scale: float

    @classmethod
    def of(cls, X: np.ndarray, target: np.ndarray, weight: np.ndarray, *, targets: bool) -> Scaling:
        """The scaling by which features have mean 0 and deviation 1, and targets too, if they are scaled."""
        with np.errstate(over="ignore", invalid="ignore"):
            shift, scale = _moments(X, weight)
            (middle,), (deviation,) = _moments(target[:, None], weight)
        for name, one in (("X", scale), ("y", deviation)):
            if not np.isfinite(one).all():
                raise ValueError(f"{name} must be of a size whose square is finite, got a larger one")
        tiny = 1e-10 * (np.abs(shift) + np.finfo(float).tiny ** 0.5)
        # Nothing tells what a constant feature does, so that it does nothing where it differs later.
        scale = np.where(scale > tiny, scale, np.inf)
        if not targets:
            return cls(shift, scale, 0.0, 1.0)
        return cls(shift, scale, float(middle), float(deviation) if deviation > 1e-12 * abs(middle) else 1.0)

    def rows(self, X: np.ndarray) -> np.ndarray:
        """Standardised rows."""
        out = np.empty((len(X), X.shape[1] + 1))
        out[:, 0] = 1.0
        np.subtract(X, self.shift, out=out[:, 1:])
        out[:, 1:] /= self.scale
        return out

    def coefficients(self, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients (…, features, columns) and intercepts (…, columns) of X and y themselves."""
        coef = self.target_scale * beta[..., 1:, :] / self.scale[:, None]
        return coef, self.target_scale * beta[..., 0, :] + self.target_shift - np.tensordot(
            np.moveaxis(coef, -2, -1), self.shift, 1
        )

    def linear_map(self) -> np.ndarray:
        """The matrix that turns (intercept, coefficients) of the model's units into those of X and y."""
        out = np.diag(np.concatenate([[1.0], 1 / self.scale]))
        out[0, 1:] = -self.shift / self.scale
        return self.target_scale * out


@dataclasses.dataclass(frozen=True)
class Panel:
    """Rows by group.

    Rows stay where the user has them, in their order and units: with millions of groups, a sorted and
    standardised copy of all would take several times their memory. `at` makes those that are asked for.

    Attributes:
      X: (n, d), rows that begin with a one; or, with a scaling, (n, d − 1), rows as the user gave them.
      target: (n,), by group.
      weight: (n,), by group.
      offsets: group i owns rows offsets[i] to offsets[i + 1].
      known: (m, p), the metadata of every group; p may be zero.
      order: the place in X of every row; None if they are by group already.
      scaling: how rows are standardised.
    """

    X: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    order: np.ndarray | None = None
    scaling: Scaling | None = None

    @classmethod
    def by_group(
        cls,
        X: np.ndarray,
        target: np.ndarray,
        weight: np.ndarray,
        codes: np.ndarray,
        known: Any,
        scaling: Scaling,
    ) -> Panel:
        """The panel of rows in any order, with the codes of their groups; targets as the model sees them."""
        offsets = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(known)))])
        if (codes[1:] >= codes[:-1]).all():
            return cls(X, target, weight, offsets, known, None, scaling)
        order = np.argsort(codes, kind="stable")
        return cls(X, target[order], weight[order], offsets, known, order, scaling)

    @property
    def groups(self) -> int:
        """m, the number of groups."""
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """d, the number of features and the one."""
        return self.X.shape[1] + (self.scaling is not None)

    @property
    def centring(self) -> tuple[np.ndarray, np.ndarray]:
        """What is taken from the d entries of a row, and what they are divided by then."""
        if self.scaling is None:
            return np.zeros(self.size), np.ones(self.size)
        return np.append(0.0, self.scaling.shift), np.append(1.0, self.scaling.scale)

    def at(self, place: np.ndarray) -> np.ndarray:
        """The rows of some places, with the shape of these and d."""
        inside = place.ravel() if self.order is None else self.order[place.ravel()]
        rows = self.X[inside]
        if self.scaling is not None:
            rows = self.scaling.rows(rows)
        return rows.reshape(*place.shape, self.size)

    def between(self, low: int, high: int) -> np.ndarray:
        """The rows from one place to another."""
        rows = self.X[low:high] if self.order is None else self.X[self.order[low:high]]
        return rows if self.scaling is None else self.scaling.rows(rows)

    def all(self) -> np.ndarray:
        """All rows by group, for panels that are small."""
        return self.between(0, len(self.target))

    def reordered(self, order: np.ndarray) -> Panel:
        """The panel with the rows of every group in another order."""
        inside = order if self.order is None else self.order[order]
        target, weight = self.target[order], self.weight[order]
        return dataclasses.replace(self, target=target, weight=weight, order=inside)

    def part(self, chosen: np.ndarray) -> Panel:
        """The panel of some groups."""
        lengths = np.diff(self.offsets)[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        return dataclasses.replace(self.reordered(place), offsets=offsets, known=self.known[chosen])

    def some(self, most: int, seed: int) -> Panel:
        """The panel of at most so many groups, drawn at random."""
        if self.groups <= most:
            return self
        return self.part(np.sort(np.random.default_rng(seed).permutation(self.groups)[:most]))


def _moments(X: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted means and deviations of columns, from pieces: a centred copy of X would be as large as X.

    All is measured from the mean of the first rows, so that one pass is enough.
    """
    near = X[:_PIECE].mean(0, dtype=float)
    first, second, total = np.zeros(X.shape[1]), np.zeros(X.shape[1]), float(weight.sum())
    for low in range(0, len(X), _PIECE):
        part, left = weight[low : low + _PIECE], X[low : low + _PIECE] - near
        first += part @ left
        left *= left
        second += part @ left
    first /= total
    return near + first, np.sqrt(np.maximum(second / total - first**2, 0.0))
