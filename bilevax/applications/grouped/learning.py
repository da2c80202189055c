r"""Learns the prior: its x minimises the loss of rows that their group was not fitted to.

.. math::
    F(x) &= \tfrac1N \sum_{(i, k)} \sum_{j \in V_{ik}} a_j\, \ell(r_j^\top \beta_{ik}, t_j), \qquad
    \beta_{ik} = \mu(z_i) + S w_{ik} \\
    w_{ik} &= \arg\min_w \sum_{j \in R_i \setminus V_{ik}} a_j\, \ell(r_j^\top (\mu(z_i) + S w), t_j)
        + \tfrac12 \|w\|^2

V_ik is fold k of the rows R_i of group i. That is a multi-block bilevel problem (`make_problem`) with few
upper variables and small lower problems. So all of them are solved in every evaluation of F, in closed form
(`sums`) or by Newton steps (`newton`), and x is moved by L-BFGS along ∇F.
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
from bilevax.applications.grouped.blocks import Blocks, folds_of
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.newton import CrossValidation, fit_tiles, held_out_tiles, on_device
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.start import enough, starts
from bilevax.applications.grouped.sums import SquaredCrossValidation, fit_sums, held_out_sums

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


def cross_validation(blocks: Blocks, prior: Prior, loss: Loss) -> CrossValidation | SquaredCrossValidation:
    """F and ∇F, in closed form where the loss has one."""
    return SquaredCrossValidation(blocks, prior) if loss.quadratic else CrossValidation(blocks, prior, loss)


@dataclasses.dataclass(frozen=True)
class Judging:
    """How a prior is judged.

    Attributes:
      folds: of a group, at most.
      judge: "groups", each counts alike, or "rows".
      newcomers: the share of F of groups as if they were new.
    """

    folds: int = 5
    judge: str = "groups"
    newcomers: float = 0.0

    def blocks(self, panel: Panel, seed: int) -> Blocks:
        """The blocks of a panel."""
        return folds_of(panel, self.folds, seed, judge=self.judge, newcomers=self.newcomers)


def learn(
    panel: Panel,
    prior: Prior,
    loss: Loss,
    judging: Judging,
    *,
    max_iter: int,
    tol: float,
    seed: int,
    progress: Any,
) -> Learnt:
    """The best prior of its form.

    It is learnt from a part of the groups first, where there are many, and then from all: most steps are
    taken where they cost little.

    Args:
      panel: the rows.
      prior: its form.
      loss: of a row.
      judging: how it is judged.
      max_iter: the most steps of L-BFGS.
      tol: the relative decrease of F in a step at which to stop.
      seed: of the folds and of the parts.
      progress: as in `bx.minimize`.
    """
    mean, curvature = pooled(panel, loss, seed)
    few = panel.some(enough(prior), seed)
    judge = cross_validation(judging.blocks(few, seed), prior, loss)
    candidates = starts(few, prior, loss, mean, curvature)
    values = [judge.value_and_gradient(one)[0] for one in candidates]
    if not np.isfinite(values).any():
        raise ValueError("the loss is not finite at the start: check the target and the loss function")
    x, unit = candidates[int(np.nanargmin(values))], abs(float(np.nanmin(values)))
    found = Learnt(x, [float(np.nanmin(values))], bx.Outcome.FINISHED)
    display = bx.make_progress(progress, max_iter)
    taken = 0
    with display:
        for part in [few, panel] if panel.groups > 2 * few.groups else [panel]:
            if part is not few:
                judge = cross_validation(judging.blocks(part, seed), prior, loss)
            found = _descend(
                Penalised(judge, prior, unit / part.weight.sum()),
                found.x,
                prior.bounds(x),
                max_iter - taken,
                tol if part is panel else 10 * tol,
                display,
                taken,
            )
            taken += len(found.history) - 1
            if found.outcome is bx.Outcome.INTERRUPTED:
                break
    return found


@dataclasses.dataclass(frozen=True)
class Penalised:
    """F with a penalty on the prior itself, which keeps that of few groups in place.

    Attributes:
      judge: F and ∇F.
      prior: the form of the prior.
      weight: of the penalty: that of one row.
    """

    judge: CrossValidation | SquaredCrossValidation
    prior: Prior
    weight: float

    def value_and_gradient(self, x: X) -> tuple[float, X]:
        """The sum and its gradient."""
        value, gradient = self.judge.value_and_gradient(x)
        extra, slope = _penalty(self.prior, on_device(x))
        value += self.weight * float(extra)
        return value, jax.tree.map(lambda a, b: a + self.weight * np.asarray(b, float), gradient, slope)


@functools.partial(jax.jit, static_argnums=0)
def _penalty(prior: Prior, x: X) -> tuple[Array, X]:
    return jax.value_and_grad(prior.penalty)(x)


def _descend(
    objective: Penalised, x: X, ends: Any, max_iter: int, tol: float, display: Any, taken: int
) -> Learnt:
    """L-BFGS from x on; the best x that was looked at."""
    flat, unravel = _ravelled(x)
    bounds = np.stack([_ravelled({n: pair[side] for n, pair in ends.items()})[0] for side in (0, 1)], 1)
    first = objective.value_and_gradient(x)[0]
    size = abs(first) or 1.0  # L-BFGS measures decreases against one
    history, best, began = [first], [(first, flat)], time.monotonic()

    def scaled(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective.value_and_gradient(unravel(at))
        slope = _ravelled(gradient)[0]
        if not (np.isfinite(value) and np.isfinite(slope).all()):
            return 1e30, np.zeros_like(at)  # the line search comes back from here
        if value < best[0][0]:
            best[0] = (value, at.copy())
        return value / size, slope / size

    def after_step(intermediate_result: Any) -> None:
        history.append(size * float(intermediate_result.fun))
        steps = len(history) - 1
        display.update(taken + steps, steps / max(time.monotonic() - began, 1e-9), {"F": history[-1]})

    outcome = bx.Outcome.FINISHED
    options = {"maxiter": max_iter, "ftol": tol, "gtol": 1e-7, "maxcor": 20}
    try:
        if max_iter > 0:
            minimize(
                scaled, flat, jac=True, method="L-BFGS-B", bounds=bounds, options=options, callback=after_step
            )
    except KeyboardInterrupt:
        outcome = bx.Outcome.INTERRUPTED
    return Learnt(unravel(best[0][1]), history, outcome)


def fit_groups(panel: Panel, prior: Prior, loss: Loss, x: X, *, variance: bool = False) -> Fits:
    """The coefficients of all groups of a panel at a given prior, on all their rows."""
    if loss.quadratic:
        fits = Fits(*fit_sums(panel, prior, x, variance=variance))
    else:
        fits = Fits(*fit_tiles(panel, prior, loss, x, variance=variance))
    if not np.isfinite(fits.coef).all():
        raise ValueError(
            "the coefficients of some groups are not finite: the loss must be convex and finite at all rows"
        )
    return fits


def held_out_errors(blocks: Blocks, prior: Prior, loss: Loss, x: X) -> tuple[np.ndarray, np.ndarray]:
    """Errors of held-out rows in units of how uncertain their predictors are, and the rows' weights."""
    return held_out_sums(blocks, prior, x) if loss.quadratic else held_out_tiles(blocks, prior, loss, x)


def pooled(panel: Panel, loss: Loss, seed: int) -> tuple[np.ndarray, float]:
    """One model for rows of all groups (at most 20,000): its coefficients, and the curvature of a row."""
    chosen = np.sort(
        np.random.default_rng(seed).choice(len(panel.target), min(len(panel.target), _START_ROWS), False)
    )
    rows, target, weight = panel.at(chosen), panel.target[chosen], panel.weight[chosen]
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
    spread, slopes = prior.matrix(x), np.asarray(x["mean"], float)[..., 0]
    rows = panel.all()
    eta = rows @ slopes
    if prior.known:
        mean = np.tensordot(panel.known, np.asarray(x["known"])[..., 0], 1)
        eta += np.einsum("nd,nd->n", rows, np.repeat(mean, np.diff(panel.offsets), 0))
    return (panel.target - eta) / np.sqrt(1 + ((rows @ spread) ** 2).sum(1))


@functools.partial(jax.jit, static_argnums=0)
def _curvatures(loss: Loss, eta: Array, target: Array) -> Array:
    """The curvature of every row's loss, the mean over its predictors."""
    return jnp.trace(jax.vmap(jax.hessian(loss.row))(eta, target), axis1=-2, axis2=-1) / loss.columns


def _ravelled(x: X) -> tuple[np.ndarray, Any]:
    names = sorted(x)
    shapes = {name: np.shape(x[name]) for name in names}
    ends = np.cumsum([int(np.prod(shapes[name])) for name in names])[:-1]

    def unravel(flat: np.ndarray) -> X:
        return {n: p.reshape(shapes[n]) for n, p in zip(names, np.split(flat, ends), strict=True)}

    return np.concatenate([np.ravel(x[name]) for name in names]).astype(float), unravel
