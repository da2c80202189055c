r"""The prior that all groups share: x of the bilevel problem.

A group's coefficients are :math:`\beta_i = \mu(z_i) + S w_i` with :math:`\tfrac12 \|w_i\|^2` as penalty,
which is a Gaussian prior with mean μ and covariance :math:`S S^\top`. The group's variable is w, so that its
problem is well-conditioned whatever S is, and S may go to zero where groups do not differ.

| form | S |
| --- | --- |
| ridge | one strength for all features, one for the intercept |
| diagonal | a strength per feature |
| low_rank | a strength per feature, and a few directions in which coefficients vary together |
| full | a triangular matrix |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

FORMS = ("ridge", "diagonal", "low_rank", "full")
_LOW, _HIGH = -9.0, 7.0  # bounds of the logarithms of strengths, relative to the start
_FIRST = 0.1  # of a strength: how far low-rank directions start from zero, where their gradient is zero

X = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prior:
    """The form of a prior.

    Attributes:
      form: one of `FORMS`.
      size: d, the number of features and the intercept, which comes first.
      columns: linear predictors of a row; all have the same S.
      rank: the number of directions of "low_rank".
      known: how many entries a group's metadata has.
    """

    form: str
    size: int
    columns: int = 1
    rank: int = 0
    known: int = 0

    def start(self, mean: np.ndarray, strength: float, seed: int = 0) -> X:
        """x at a given mean, (d, columns), and one strength."""
        d, level = self.size, float(np.log(strength))
        x: X = {"mean": np.asarray(mean, float), "scale": np.full(2 if self.form == "ridge" else d, level)}
        if self.form == "full":
            x["mix"] = np.zeros(d * (d - 1) // 2)
        if self.form == "low_rank":
            x["mix"] = _FIRST * np.random.default_rng(seed).normal(size=(d, self.rank))
        if self.known:
            x["known"] = np.zeros((self.known, d, self.columns))
        return x

    def start_at(self, mean: np.ndarray, known: np.ndarray, covariance: np.ndarray) -> X:
        """x with this mean, coefficients of metadata, and S Sᵀ as near to the covariance as may be."""
        x = self.start(mean, 1.0)
        deviation = np.sqrt(np.diag(covariance))
        x["scale"] = np.log(deviation)
        if self.form == "ridge":
            x["scale"] = np.array([x["scale"][0], x["scale"][1:].mean() if self.size > 1 else x["scale"][0]])
        if self.form == "full":
            factor = np.linalg.cholesky(covariance)
            x["scale"] = np.log(np.diag(factor))
            x["mix"] = (factor / np.diag(factor)[:, None])[np.tril_indices(self.size, -1)]
        if self.form == "low_rank":
            # Half of every variance is a coefficient's own; of the rest, the largest common directions.
            values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
            x["scale"] -= 0.5 * np.log(2.0)
            common = vectors[:, ::-1] * np.sqrt(np.maximum(2 * values[::-1] - 1, 0.01))
            x["mix"] = common[:, : self.rank]
        if self.known:
            x["known"] = np.asarray(known, float)
        return x

    def bounds(self, x: X) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The least and the greatest value of every entry."""
        ends = {name: (np.full(one.shape, -np.inf), np.full(one.shape, np.inf)) for name, one in x.items()}
        return ends | {"scale": (x["scale"] + _LOW, x["scale"] + _HIGH)}

    @property
    def width(self) -> int:
        """e, the length of w per column."""
        return self.size + (self.rank if self.form == "low_rank" else 0)

    @property
    def entries(self) -> int:
        """How many numbers x has."""
        mix = {"full": self.size * (self.size - 1) // 2, "low_rank": self.size * self.rank}
        strengths = 2 if self.form == "ridge" else self.size
        return (1 + self.known) * self.size * self.columns + strengths + mix.get(self.form, 0)

    def spread(self, x: X) -> Array:
        """S, (d, e)."""
        return self.along(x, jnp.eye(self.size, dtype=jnp.asarray(x["scale"]).dtype))

    def along(self, x: X, rows: Array) -> Array:
        """Rows (…, d) times S, (…, e)."""
        d, scale = self.size, jnp.asarray(x["scale"])
        if self.form == "ridge":
            scale = jnp.concatenate([scale[:1], jnp.broadcast_to(scale[1:], (d - 1,))])
        scaled = rows * jnp.exp(scale)
        if self.form == "full":
            mix = jnp.eye(d, dtype=scale.dtype).at[np.tril_indices(d, -1)].set(x["mix"])
            return scaled @ mix
        if self.form == "low_rank":
            return jnp.concatenate([scaled, scaled @ jnp.asarray(x["mix"])], -1)
        return scaled

    def matrix(self, x: X) -> np.ndarray:
        """S as numbers, without a program to compile."""
        d, scale = self.size, np.asarray(x["scale"], float)
        if self.form == "ridge":
            scale = np.repeat(scale, [1, d - 1])
        matrix = np.eye(d)
        if self.form == "full":
            matrix[np.tril_indices(d, -1)] = x["mix"]
        if self.form == "low_rank":
            matrix = np.concatenate([matrix, np.asarray(x["mix"], float)], 1)
        return np.exp(scale)[:, None] * matrix

    def by_spread(self, x: X, slope: np.ndarray) -> X:
        """The gradient in x of what has the gradient `slope` in S, (d, e)."""
        d, out = self.size, {name: np.zeros(np.shape(one)) for name, one in x.items()}
        matrix = self.matrix(x)
        own = (slope * matrix).sum(1)
        out["scale"] = np.array([own[0], own[1:].sum()]) if self.form == "ridge" else own
        if self.form == "full":
            strengths = np.diag(matrix)
            out["mix"] = (slope * strengths[:, None])[np.tril_indices(d, -1)]
        if self.form == "low_rank":
            out["mix"] = (slope * np.diag(matrix)[:, None])[:, d:]
        return out

    def mean(self, x: X, known: Array) -> Array:
        """μ of a group with this metadata, (d, columns)."""
        return x["mean"] + jnp.tensordot(known, x["known"], 1) if self.known else x["mean"]

    def penalty(self, x: X) -> tuple[float, X]:
        """Half the sum of squares of what is zero if features are alike and metadata says nothing, and its
        gradient."""
        slope = {name: np.array(one, float) for name, one in x.items()}
        slope["mean"][0] = slope["scale"][0] = 0.0
        own = slope["scale"][1:]
        own -= own.mean() if own.size else 0.0
        return 0.5 * sum(float(np.sum(one**2)) for one in slope.values()), slope
