r"""Noisy labels as a multi-block bilevel problem: one weight per row, one classifier per temperature.

.. math::
    \min_x \frac1m \sum_i \frac{1}{|V|} \sum_{k \in V} \ell(y_i(x)^\top r_k / T_i, c_k), \qquad
    y_i(x) = \arg\min_y \frac1n \sum_j \sigma(x_j) \, \ell(y^\top r_j / T_i, c_j) + \frac{\lambda}{2} \|y\|^2

All blocks share the weights σ(x) of the training rows and are evaluated on clean rows V. Each temperature
corresponds to a ridge λT², so that no single ridge has to be chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import sparse

import bilevax as bx
from bilevax.applications.clean_scale import check_scales

PyTree = Any

_DENSE = 2**26  # sparse rows with at most this many entries, zeros included, are stored as dense rows
_PADDED = 2**27  # the most padded (column, value) pairs for other sparse rows


@dataclasses.dataclass(frozen=True)
class Reweighting:
    """The bilevel problem of noisy labels, and a start.

    Attributes:
      problem: for `bilevax.minimize`.
      x0: zeros, one per training row: every weight is a half.
      y0: zeros, (m, width) for two classes and (m, width, C) for more; width counts the intercept.
      classes: the labels, in the order of their codes.
      intercept: whether rows have a constant 1 as their last entry.
    """

    problem: bx.Problem
    x0: Array
    y0: Array
    classes: np.ndarray
    intercept: bool

    def weights(self, x: Array) -> np.ndarray:
        """The weight of every training row, between 0 and 1."""
        return np.asarray(jax.nn.sigmoid(x))

    def logits(self, X: Any, y: Array) -> np.ndarray:
        """The logits of rows by every block: (m, n) for two classes, (m, n, C) for more."""
        rows = as_rows(X, intercept=self.intercept)
        cold = self.problem.blocks["temperature"].reshape(-1, *[1] * (y.ndim - 1))
        return np.asarray(_all_products(rows, y) / cold)


def reweighting(
    X: Any,
    y: Any,
    X_clean: Any,
    y_clean: Any,
    *,
    temperatures: Any = 100,
    ridge: float = 1e-3,
    intercept: bool = True,
) -> Reweighting:
    """The reweighting problem of a data set.

    Args:
      X: training rows (n, d), dense or scipy-sparse.
      y: their labels, some of which are wrong; any two or more classes.
      X_clean: rows (k, d) whose labels are right.
      y_clean: their labels.
      temperatures: T_1 … T_m; or m, for m evenly spaced temperatures on [1, 11). (The paper draws them at
        random from there.)
      ridge: λ.
      intercept: whether to append a constant to every row; its coefficient is regularised like the others.

    Returns:
      The problem and a start.

    Raises:
      ValueError: shapes do not fit, there is a single class or one that only clean rows have, an entry is not
        finite, X and X_clean are on different scales, or there are too many sparse rows to store.

    Example:
      >>> import bilevax as bx, jax, numpy as np
      >>> from bilevax.applications.reweighting import reweighting
      >>> random = np.random.default_rng(0)
      >>> X = random.normal(size=(200, 3)); y = X[:, 0] > 0
      >>> wrong = random.random(150) < 0.3
      >>> task = reweighting(X[:150], y[:150] ^ wrong, X[150:], y[150:], temperatures=4)
      >>> result = bx.minimize(
      ...     task.problem, task.x0, task.y0, solver=bx.BSVRBv2(upper_step=10.0), steps=500, batch_size=16,
      ...     key=jax.random.key(0), progress=None,
      ... )
      >>> weights = task.weights(result.x)
      >>> bool(weights[~wrong].mean() > weights[wrong].mean())
      True
    """
    codes, clean_codes, classes = _codes(y, y_clean)
    rows, clean_rows = as_rows(X, intercept=intercept), as_rows(X_clean, intercept=intercept, like=X)
    for name, count, labels in (("y", X.shape[0], codes), ("y_clean", X_clean.shape[0], clean_codes)):
        if len(labels) != count:
            raise ValueError(f"{name} must have one label per row, got {len(labels)} for {count} rows")
    check_scales(X, X_clean)
    if not (isinstance(ridge, (int, float)) and 0 < ridge < np.inf):
        raise ValueError(f"ridge must be a positive number, got {ridge!r}")
    heat = _temperatures(temperatures)
    m, n = len(heat), len(codes)
    problem = bx.Problem(
        upper=_upper,
        lower=_lower,
        blocks={"temperature": heat, "ridge": np.full(m, ridge, np.float32)},
        upper_data=bx.Shared({"row": clean_rows, "label": clean_codes}),
        lower_data=bx.Shared({"row": rows, "label": codes, "index": np.arange(n, dtype=np.int32)}),
    )
    width = X.shape[1] + intercept
    shape = (m, width) if len(classes) == 2 else (m, width, len(classes))
    return Reweighting(problem, jnp.zeros(n), jnp.zeros(shape), classes, intercept)


def as_rows(X: Any, *, intercept: bool, like: Any = None) -> dict[str, np.ndarray]:
    """Rows as arrays: {"dense": (n, width)}, or padded {"column", "value"}, each (n, most entries of a row).

    Args:
      X: a matrix, dense or scipy-sparse.
      intercept: whether to append a constant 1 to every row.
      like: another matrix; X must have its width, and the rows get its form.

    Example:
      >>> as_rows(np.eye(2), intercept=True)["dense"].tolist()
      [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    """
    if np.ndim(X) != 2 and not sparse.issparse(X):
        raise ValueError(f"rows must be a matrix, got {np.ndim(X)} dimensions")
    if like is not None and X.shape[1] != like.shape[1]:
        raise ValueError(f"X_clean must have the {like.shape[1]} features of X, got {X.shape[1]}")
    model = X if like is None else like
    if not sparse.issparse(model) or model.shape[0] * model.shape[1] <= _DENSE:
        dense = np.asarray(X.toarray() if sparse.issparse(X) else X, np.float32)
        _check_finite(dense)
        return {"dense": np.c_[dense, np.ones((len(dense), 1), np.float32)] if intercept else dense}
    rows: Any = sparse.csr_matrix(X, dtype=np.float32)
    _check_finite(rows.data)
    lengths = np.diff(rows.indptr)
    width = max(int(lengths.max(initial=0)), 1) + intercept
    if rows.shape[0] * width > _PADDED:
        raise ValueError(
            f"X of shape {rows.shape} has rows with up to {width - intercept} entries: too many to store "
            f"({rows.shape[0] * width} pairs, at most {_PADDED})"
        )
    column, value = (np.zeros((rows.shape[0], width), kind) for kind in (np.int32, np.float32))
    inside = np.arange(width) < lengths[:, None]
    column[inside], value[inside] = rows.indices, rows.data
    if intercept:
        column[:, -1], value[:, -1] = rows.shape[1], 1.0
    return {"column": column, "value": value}


def products(rows: dict[str, Array], y: Array, product: Callable[..., Array] = jnp.matmul) -> Array:
    """rows @ y, for either form of rows; `product` multiplies dense ones (in a step, use `bx.dot`)."""
    if "dense" in rows:
        return product(rows["dense"], y)
    value = rows["value"] if y.ndim == 1 else rows["value"][..., None]
    return jnp.sum(value * y[rows["column"]], axis=rows["value"].ndim - 1)


def cross_entropy(logits: Array, codes: Array) -> Array:
    """The loss of every row: logits (n,) of the second of two classes, or (n, C)."""
    if logits.ndim == 1:
        return jax.nn.softplus(jnp.where(codes == 1, -logits, logits))
    chosen = jnp.take_along_axis(logits, codes[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - chosen


def _loss(y: Array, block: dict[str, Array], batch: dict[str, Any]) -> Array:
    return cross_entropy(products(batch["row"], y, bx.dot) / block["temperature"], batch["label"])


def _upper(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Any]) -> Array:
    return jnp.mean(_loss(y, block, batch))


def _lower(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Any]) -> Array:
    weight = jax.nn.sigmoid(x[batch["index"]])
    return jnp.mean(weight * _loss(y, block, batch)) + 0.5 * block["ridge"] * jnp.sum(y * y)


@jax.jit
def _all_products(rows: dict[str, Array], y: Array) -> Array:
    return jax.vmap(lambda one: products(rows, one))(y)


def _codes(y: Any, y_clean: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y, y_clean = np.asarray(y), np.asarray(y_clean)
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y must have at least two classes, got only {classes.tolist()}")
    if y_clean.size == 0:
        raise ValueError("y_clean must have at least one label, got none")
    unseen = np.setdiff1d(y_clean, classes)
    if unseen.size:
        raise ValueError(f"y_clean has classes that y does not have: {unseen.tolist()}")
    return codes.astype(np.int32), np.searchsorted(classes, y_clean).astype(np.int32), classes


def _temperatures(given: Any) -> np.ndarray:
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool) and given > 0:
        return np.linspace(1, 11, int(given), endpoint=False).astype(np.float32)
    heat = np.asarray(given, np.float32)
    if heat.ndim != 1 or heat.size == 0 or not (np.isfinite(heat) & (heat > 0)).all():
        raise ValueError(f"temperatures must be a count or positive numbers, got {given!r}")
    return heat


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ValueError("X must be finite, got NaN or infinity")
