r"""The variables in which the prior is learnt: those of x, relative to the start.

In terms of x itself F is badly conditioned: a mean that is off by a given amount matters much along a
direction in which groups hardly vary, and little along one in which they vary a lot. So the mean moves in
units of :math:`S_0`, that of the start, and metadata in units of what it has in common,

.. math::
    (\mu, \Gamma) = R\, u\, S_0^\top, \qquad R^{-\top} R^{-1} = \tfrac1m Z^\top Z, \qquad
    S = S_0 T

with a row (1, z_i) of Z for every group, and T triangular with the exponentials of variables as diagonal,
where S is triangular. The curvature of the random-effects model's likelihood is then about the same in all
directions, whatever the features, their correlations and those of their coefficients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax.applications.grouped.priors import Prior, X

_ALIKE = 1e-6  # of the mean square of metadata: columns that hardly differ are not told apart further


class Coordinates:
    """The variables, as one vector.

    Args:
      prior: the form of the prior.
      x: the start.
      known: (m, p), what is known of groups.
    """

    def __init__(self, prior: Prior, x: X, known: np.ndarray):
        self.prior, self.start = prior, {name: np.asarray(one, float) for name, one in x.items()}
        spread = prior.matrix(self.start)
        self.spread = spread if prior.form == "full" else np.linalg.cholesky(spread @ spread.T)
        table = np.concatenate([np.ones((len(known), 1)), known], 1)
        square = table.T @ table / len(table)
        square += _ALIKE * np.trace(square) / len(square) * np.eye(len(square))
        self.across = np.linalg.inv(np.linalg.cholesky(square)).T
        self.lower = np.tril_indices(prior.size, -1)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the greatest value of every variable, relative to the start."""
        ends = self.prior.bounds(self.start)
        if self.prior.form == "full":  # the diagonal of T is one at the start
            ends |= {"scale": tuple(end - self.start["scale"] for end in ends["scale"])}
        low, high = ({name: pair[side] for name, pair in ends.items()} for side in (0, 1))
        return self._flat(low), self._flat(high)

    def of(self, x: X) -> np.ndarray:
        """The variables of x."""
        out = {name: np.asarray(one, float) for name, one in x.items()}
        means = np.linalg.solve(self.spread, np.moveaxis(self._means(out), 1, 0).reshape(self.prior.size, -1))
        means = np.moveaxis(means.reshape(self.prior.size, -1, self.prior.columns), 0, 1)
        out |= self._by_name(np.tensordot(np.linalg.inv(self.across), means, 1))
        if self.prior.form == "full":
            relative = np.linalg.solve(self.spread, self.prior.matrix(x))
            out["scale"], out["mix"] = np.log(np.diag(relative)), relative[self.lower]
        return self._flat(out)

    def x(self, flat: np.ndarray) -> X:
        """x, from its variables."""
        out = self._named(flat)
        out |= self._by_name(np.einsum("de,qec->qdc", self.spread, self._across(self._means(out))))
        if self.prior.form == "full":
            out |= self._factor(self.spread @ self._relative(flat))
        return out

    def gradient(self, flat: np.ndarray, x: X, slope: X) -> np.ndarray:
        """The gradient in the variables of what has the gradient `slope` in x."""
        out = {name: np.asarray(one, float) for name, one in slope.items()}
        turned = np.einsum("de,qdc->qec", self.spread, self._means(out))
        out |= self._by_name(np.tensordot(self.across.T, turned, 1))
        if self.prior.form == "full":
            relative = self._relative(flat)
            by_relative = self.spread.T @ self._by_spread(x, out)
            out["scale"] = np.diag(by_relative) * np.diag(relative)
            out["mix"] = by_relative[self.lower]
        return self._flat(out)

    def _by_spread(self, x: X, slope: X) -> np.ndarray:
        """The gradient in S of what has this gradient in x: the inverse of `Prior.by_spread`."""
        spread, out = self.prior.matrix(x), np.zeros_like(self.spread)
        out[self.lower] = slope["mix"] / np.diag(spread)[self.lower[0]]
        own = slope["scale"] - (out * spread).sum(1)
        out[np.diag_indices(len(out))] = own / np.diag(spread)
        return out

    def _relative(self, flat: np.ndarray) -> np.ndarray:
        """T."""
        named = self._named(flat)
        out = np.diag(np.exp(named["scale"]))
        out[self.lower] = named["mix"]
        return out

    def _factor(self, spread: np.ndarray) -> X:
        """The entries of x of a triangular S."""
        diagonal = np.diag(spread)
        return {"scale": np.log(diagonal), "mix": (spread / diagonal[:, None])[self.lower]}

    def _means(self, x: X) -> np.ndarray:
        """The mean and its slopes by metadata, (1 + p, d, columns)."""
        return np.concatenate([x["mean"][None], *([x["known"]] if self.prior.known else [])])

    def _by_name(self, means: np.ndarray) -> X:
        return {"mean": means[0]} | ({"known": means[1:]} if self.prior.known else {})

    def _across(self, means: np.ndarray) -> np.ndarray:
        return np.tensordot(self.across, means, 1)

    def _flat(self, x: X) -> np.ndarray:
        return np.concatenate([np.ravel(x[name]) for name in sorted(self.start)]).astype(float)

    def _named(self, flat: np.ndarray) -> dict[str, Any]:
        names = sorted(self.start)
        ends = np.cumsum([self.start[name].size for name in names])[:-1]
        parts = zip(names, np.split(flat, ends), strict=True)
        return {name: part.reshape(self.start[name].shape) for name, part in parts}
