r"""Learns the prior: its x minimises the loss of rows that their group was not fitted to.

.. math::
    F(x) &= \tfrac1N \sum_{(i, k)} \sum_{j \in V_{ik}} a_j\, \ell(r_j^\top \beta_{ik}, t_j), \qquad
    \beta_{ik} = \mu(z_i) + S w_{ik} \\
    w_{ik} &= \arg\min_w \sum_{j \in R_i \setminus V_{ik}} a_j\, \ell(r_j^\top (\mu(z_i) + S w), t_j)
        + \tfrac12 \|w\|^2

V_ik is fold k of the rows R_i of group i. That is a multi-block bilevel problem (`make_problem`) with few
upper variables and small lower problems. So all of them are solved in every evaluation of F, by Newton
steps from their last solutions, and ∇F is that of the scalar f − ⟨v, ∇_w g⟩ with v = [∇²_ww g]⁻¹ ∇_w f; x
is moved by L-BFGS.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import minimize

import bilevax as bx
from bilevax.applications.grouped.blocks import Panel, chunks, folds_of, whole_groups
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.small_systems import solve

_NEWTON_STEPS = 50
_SHORTENED = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)
_STRENGTHS = (0.03, 0.1, 0.3, 1.0)  # of the start, times the root of a row's curvature
_START_ROWS = 20_000


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What was learnt.

    Attributes:
      x: the prior.
      history: F after every step, the start included.
      outcome: why it ended.
    """

    x: X
    history: list[float]
    outcome: bx.Outcome


@dataclasses.dataclass(frozen=True)
class Fits:
    """Groups that were fitted at a given prior.

    Attributes:
      coef: (m, d, columns).
      share: (m,), the share of the prior variance of a coefficient that the group's rows account for, the
        mean over its coefficients.
      variance: (m, d, d), the inverse curvature of a group's coefficients; None unless asked for.
    """

    coef: np.ndarray
    share: np.ndarray
    variance: np.ndarray | None


class CrossValidation:
    """F and ∇F over all folds of a panel.

    Args:
      panel: the rows.
      prior: the form of the prior.
      loss: of a row.
      folds: of a group, at most.
      seed: of the folds.
    """

    def __init__(self, panel: Panel, prior: Prior, loss: Loss, folds: int, seed: int):
        self.prior, self.loss = prior, loss
        mixed, group, kept, held = folds_of(panel, folds, seed)
        self.chunks = list(chunks(mixed, group, kept, held, squared=loss.quadratic))
        self.total = float(panel.weight.sum())
        self.unit = 0.0  # the loss of a row, by which the prior's own penalty is measured
        shape = (prior.width, prior.columns)
        self.w = [jnp.zeros((len(chunk.data["known"]), *shape)) for chunk in self.chunks]

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """F(x) and ∇F(x)."""
        value, gradient = 0.0, jax.tree.map(np.zeros_like, x)
        for place, chunk in enumerate(self.chunks):
            one, slope, w = _judge(self.prior, self.loss, _on_device(x), chunk.data, self.w[place])
            if bool(jnp.all(jnp.isfinite(w))):
                self.w[place] = w
            value += float(one)
            gradient = jax.tree.map(lambda a, b: a + np.asarray(b, float), gradient, slope)
        extra, slope = jax.value_and_grad(self.prior.penalty)(_on_device(x))
        value = (value + self.unit * float(extra)) / self.total
        gradient = jax.tree.map(
            lambda a, b: (a + self.unit * np.asarray(b, float)) / self.total, gradient, slope
        )
        return value, gradient


def learn(
    panel: Panel,
    prior: Prior,
    loss: Loss,
    *,
    folds: int,
    max_iter: int,
    tol: float,
    seed: int,
    progress: Any,
) -> Learnt:
    """The best prior of its form.

    Args:
      panel: the rows.
      prior: its form.
      loss: of a row.
      folds: of a group, at most.
      max_iter: the most steps of L-BFGS.
      tol: the relative decrease of F in a step at which to stop.
      seed: of the folds and of the start.
      progress: as in `bx.minimize`.
    """
    judge = CrossValidation(panel, prior, loss, folds, seed)
    mean, curvature = pooled(panel, loss, seed)
    starts = [prior.start(mean, one / curvature**0.5, seed) for one in _STRENGTHS]
    values = [judge.value_and_gradient(one)[0] for one in starts]
    if not np.isfinite(values).any():
        raise ValueError("the loss is not finite at the start: check the target and the loss function")
    x0 = starts[int(np.nanargmin(values))]
    judge.unit = abs(float(np.nanmin(values)))
    size = judge.unit or 1.0  # L-BFGS measures decreases against one
    flat, unravel = _ravelled(x0)
    bounds = np.stack(
        [_ravelled({n: ends[side] for n, ends in prior.bounds(x0).items()})[0] for side in (0, 1)], 1
    )
    history, best = [float(np.nanmin(values))], [(float(np.nanmin(values)), flat)]
    display, began = bx.make_progress(progress, max_iter), time.monotonic()

    def objective(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = judge.value_and_gradient(unravel(at))
        slope = _ravelled(gradient)[0]
        if not (np.isfinite(value) and np.isfinite(slope).all()):
            return 1e30, np.zeros_like(at)  # the line search comes back from here
        if value < best[0][0]:
            best[0] = (value, at.copy())
        return value / size, slope / size

    def after_step(intermediate_result: Any) -> None:
        history.append(size * float(intermediate_result.fun))
        steps = len(history) - 1
        display.update(steps, steps / max(time.monotonic() - began, 1e-9), {"F": history[-1]})

    outcome = bx.Outcome.FINISHED
    options = {"maxiter": max_iter, "ftol": tol, "gtol": 1e-7, "maxcor": 20}
    with display:
        try:
            if max_iter:
                minimize(
                    objective,
                    flat,
                    jac=True,
                    method="L-BFGS-B",
                    bounds=bounds,
                    options=options,
                    callback=after_step,
                )
        except KeyboardInterrupt:
            outcome = bx.Outcome.INTERRUPTED
    return Learnt(unravel(best[0][1]), history, outcome)


def fit_groups(panel: Panel, prior: Prior, loss: Loss, x: X, *, variance: bool = False) -> Fits:
    """The coefficients of all groups of a panel at a given prior, on all their rows."""
    d, columns = prior.size, prior.columns
    coef, share = np.zeros((panel.groups, d, columns)), np.zeros(panel.groups)
    spreads = np.zeros((panel.groups, d, d)) if variance else None
    for chunk in chunks(panel, *whole_groups(panel), squared=loss.quadratic):
        found = _fit(prior, loss, _on_device(x), chunk.data, variance)
        count = len(chunk.blocks)
        coef[chunk.blocks], share[chunk.blocks] = np.asarray(found[0])[:count], np.asarray(found[1])[:count]
        if spreads is not None:
            spreads[chunk.blocks] = np.asarray(found[2])[:count]
    if not np.isfinite(coef).all():
        raise ValueError(
            "the coefficients of some groups are not finite: the loss must be convex and finite at all rows"
        )
    return Fits(coef, share, spreads)


def held_out_errors(
    panel: Panel, prior: Prior, loss: Loss, x: X, folds: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of held-out rows in units of how uncertain their predictors are, and the rows' weights."""
    errors, weights = [], []
    for chunk in chunks(*folds_of(panel, folds, seed)):
        error, weight = _held_out(prior, loss, _on_device(x), chunk.data)
        real = np.asarray(weight) > 0
        errors.append(np.asarray(error, float)[real])
        weights.append(np.asarray(weight, float)[real])
    return np.concatenate(errors), np.concatenate(weights)


def pooled(panel: Panel, loss: Loss, seed: int) -> tuple[np.ndarray, float]:
    """One model for rows of all groups (at most 20,000): its coefficients, and the curvature of a row."""
    chosen = np.random.default_rng(seed).permutation(len(panel.rows))[:_START_ROWS]
    rows, target, weight = panel.rows[chosen], panel.target[chosen], panel.weight[chosen]
    if loss.quadratic:
        root = np.sqrt(weight)
        return np.linalg.lstsq(rows * root[:, None], target * root, rcond=None)[0][:, None], 1.0
    part = Panel(rows, target, weight, np.array([0, len(chosen)]), np.zeros((1, 0)))
    prior = Prior("ridge", rows.shape[1], loss.columns)
    coef = fit_groups(part, prior, loss, prior.start(np.zeros((prior.size, loss.columns)), 10.0)).coef[0]
    curvature = float(
        np.average(_curvatures(loss, jnp.asarray(rows @ coef), jnp.asarray(target)), weights=weight)
    )
    return coef, curvature if np.isfinite(curvature) and curvature > 1e-8 else 1.0


def prior_errors(panel: Panel, prior: Prior, x: X) -> np.ndarray:
    """Errors of rows that the prior alone predicts, in units of how uncertain their predictors are."""
    spread, slopes = np.asarray(prior.spread(x), float), np.asarray(x["mean"], float)[..., 0]
    eta = panel.rows @ slopes
    if prior.known:
        mean = np.tensordot(panel.known, np.asarray(x["known"])[..., 0], 1)
        eta += np.einsum("nd,nd->n", panel.rows, np.repeat(mean, np.diff(panel.offsets), 0))
    return (panel.target - eta) / np.sqrt(1 + ((panel.rows @ spread) ** 2).sum(1))


@functools.partial(jax.jit, static_argnums=0)
def _curvatures(loss: Loss, eta: Array, target: Array) -> Array:
    """The curvature of every row's loss, the mean over its predictors."""
    return jnp.trace(jax.vmap(jax.hessian(loss.row))(eta, target), axis1=-2, axis2=-1) / loss.columns


@functools.partial(jax.jit, static_argnums=(0, 1))
def _judge(prior: Prior, loss: Loss, x: X, data: dict[str, Array], w0: Array) -> tuple[Array, X, Array]:
    """The sum of f over some blocks, its gradient in x, and the lower solutions."""
    w, hessian = _solve(prior, loss, x, data, w0)
    total, slope = jax.value_and_grad(lambda w: _upper(prior, loss, x, w, data))(w)
    v = solve(hessian, slope.reshape(*hessian.shape[:2], 1)).reshape(w.shape)

    def scalar(x: X) -> Array:
        by_w = jax.grad(lambda w: _lower(prior, loss, x, w, data))(w)
        return _upper(prior, loss, x, w, data) - jnp.vdot(v, by_w)

    return total, jax.grad(scalar)(x), w


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _fit(prior: Prior, loss: Loss, x: X, data: dict[str, Array], variance: bool) -> tuple[Array, ...]:
    """The coefficients of some groups, the share of the prior variance that their rows account for, and the
    variances."""
    w, hessian = _solve(prior, loss, x, data, jnp.zeros((len(data["known"]), prior.width, prior.columns)))
    spread, mean = prior.spread(x), jax.vmap(lambda known: prior.mean(x, known))(data["known"])
    coef = mean + jnp.einsum("de,bec->bdc", spread, w)
    # The rows of S for every column: coefficient (d, c) is row (d, c) of it times w.
    every = jnp.kron(spread, jnp.eye(prior.columns, dtype=spread.dtype))
    right = jnp.broadcast_to(every.T, (len(w), *every.T.shape))
    left = every @ solve(hessian, right)
    share = jnp.mean(1 - jnp.diagonal(left, axis1=1, axis2=2) / jnp.sum(every**2, 1), 1)
    return coef, share, left if variance else jnp.zeros(())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _held_out(prior: Prior, loss: Loss, x: X, data: dict[str, Array]) -> tuple[Array, Array]:
    w, hessian = _solve(prior, loss, x, data, jnp.zeros((len(data["known"]), prior.width, 1)))
    spread = prior.spread(x)
    inverse = solve(hessian, jnp.broadcast_to(jnp.eye(prior.width), hessian.shape))
    rows = data["Xh"] @ spread
    variance = jnp.sum((rows @ inverse[data["ofh"]]) * rows, -1)
    error = data["th"] - _predictors(prior, x, w, data["Xh"], data["ofh"], data["known"])[..., 0]
    return error / jnp.sqrt(1 + variance), data["h"]


def _predictors(prior: Prior, x: X, w: Array, rows: Array, owner: Array, known: Array) -> Array:
    mean = jax.vmap(lambda one: prior.mean(x, one))(known)
    return rows @ (mean + jnp.einsum("de,bec->bdc", prior.spread(x), w))[owner]


def _upper(prior: Prior, loss: Loss, x: X, w: Array, data: dict[str, Array]) -> Array:
    """The weighted sum of the losses of held-out rows."""
    eta = _predictors(prior, x, w, data["Xh"], data["ofh"], data["known"])
    return jnp.sum(_weighted(loss, eta, data["th"], data["h"]))


def _lower(prior: Prior, loss: Loss, x: X, w: Array, data: dict[str, Array]) -> Array:
    """The sum of g over all blocks."""
    eta = _predictors(prior, x, w, data["X"], data["of"], data["known"])
    return jnp.sum(_weighted(loss, eta, data["t"], data["a"])) + 0.5 * jnp.sum(w**2)


def _weighted(loss: Loss, eta: Array, target: Array, weight: Array) -> Array:
    values = jax.vmap(jax.vmap(loss.row))(eta, target)
    return jnp.where(weight > 0, weight * jnp.where(weight > 0, values, 0.0), 0.0)


def _solve(prior: Prior, loss: Loss, x: X, data: dict[str, Array], w0: Array) -> tuple[Array, Array]:
    """The minimisers of g, and its Hessians.

    By Newton steps, of which the best of some lengths is taken; or, where that is better, by a step with the
    curvature of a parabola above the loss, which always goes down.
    """
    rows, owner, weight = data["X"] @ prior.spread(x), data["of"], data["a"]
    mean = jax.vmap(lambda known: prior.mean(x, known))(data["known"])
    base, size = data["X"] @ mean[owner], prior.width * prior.columns
    slope = jax.vmap(jax.vmap(jax.grad(loss.row)))
    bend = jax.vmap(jax.vmap(jax.hessian(loss.row)))
    above: Any = None if loss.bound is None else jax.vmap(jax.vmap(loss.bound))

    def by_block(tiles: Array) -> Array:
        return jax.ops.segment_sum(tiles, owner, len(w0), indices_are_sorted=True)

    def value(w: Array) -> Array:
        losses = _weighted(loss, base + rows @ w[owner], data["t"], weight)
        return by_block(jnp.sum(losses, 1)) + 0.5 * jnp.sum(w**2, (1, 2))

    def direction(w: Array, bend: Any = bend) -> tuple[Array, Array]:
        eta = base + rows @ w[owner]
        real = weight[..., None] > 0
        first = jnp.where(real, weight[..., None] * slope(eta, data["t"]), 0.0)
        second = jnp.where(real[..., None], weight[..., None, None] * bend(eta, data["t"]), 0.0)
        gradient = by_block(jnp.swapaxes(rows, 1, 2) @ first) + w
        if prior.columns == 1:
            tiles = jnp.swapaxes(rows, 1, 2) @ (second[..., 0] * rows)
        else:
            tiles = jnp.einsum("ble,blcd,blf->becfd", rows, second, rows).reshape(-1, size, size)
        hessian = by_block(tiles) + jnp.eye(size, dtype=tiles.dtype)
        return solve(hessian, gradient.reshape(-1, size, 1)).reshape(w.shape), hessian

    if loss.quadratic:
        step, hessian = direction(w0)
        return w0 - step, hessian
    enough = 1e-3 if w0.dtype == jnp.float32 else 1e-6
    lengths = jnp.asarray([*_SHORTENED, 0.0], w0.dtype)

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return carry[2] & (carry[1] < _NEWTON_STEPS)

    def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        w, count, _ = carry
        step, _ = direction(w)
        tried = jax.lax.map(lambda length: value(w - length * step), lengths)
        tried = jnp.where(jnp.isfinite(tried), tried, jnp.inf)
        moved = lengths[jnp.argmin(tried, 0)][:, None, None] * step
        if above is not None:
            sure, _ = direction(w, lambda eta, target: above(eta, target)[..., None, None])
            moved = jnp.where((value(w - sure) < jnp.min(tried, 0))[:, None, None], sure, moved)
        left = jnp.max(jnp.abs(moved), (1, 2)) > enough * (1 + jnp.max(jnp.abs(w), (1, 2)))
        return w - moved, count + 1, jnp.any(left)

    w = jax.lax.while_loop(unfinished, newton, (w0, jnp.zeros((), jnp.int32), jnp.ones((), bool)))[0]
    return w, direction(w)[1]


def _on_device(x: X) -> X:
    return jax.tree.map(lambda one: jnp.asarray(one, jnp.result_type(float)), x)


def _ravelled(x: X) -> tuple[np.ndarray, Any]:
    names = sorted(x)
    shapes = {name: np.shape(x[name]) for name in names}
    ends = np.cumsum([int(np.prod(shapes[name])) for name in names])[:-1]

    def unravel(flat: np.ndarray) -> X:
        return {n: p.reshape(shapes[n]) for n, p in zip(names, np.split(flat, ends), strict=True)}

    return np.concatenate([np.ravel(x[name]) for name in names]).astype(float), unravel
