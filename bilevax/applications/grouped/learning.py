r"""Learns the prior: its x minimises the loss of rows that their group was not fitted to.

.. math::
    F(x) &= \tfrac1N \sum_{(i, k)} \sum_{j \in V_{ik}} a_j\, \ell(r_j^\top \beta_{ik}, t_j), \qquad
    \beta_{ik} = \mu(z_i) + S w_{ik} \\
    w_{ik} &= \arg\min_w \sum_{j \in R_i \setminus V_{ik}} a_j\, \ell(r_j^\top (\mu(z_i) + S w), t_j)
        + \tfrac12 \|w\|^2

V_ik is fold k of the rows R_i of group i. That is a multi-block bilevel problem (`make_problem`) with few
upper variables and small lower problems. So all of them are solved in every evaluation of F, in closed form
(`sums`), by Newton steps (`newton`), or in the space of rows where these are few (`row_space`), and x is
moved by L-BFGS along ∇F.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.grouped.blocks import Blocks, folds_of
from bilevax.applications.grouped.closed_form import (
    Evidence,
    SquaredCrossValidation,
    fit_sums,
    pooled_sums,
)
from bilevax.applications.grouped.coordinates import Coordinates
from bilevax.applications.grouped.descent import Descent, Point
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.newton import CrossValidation, fit_tiles
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X
from bilevax.applications.grouped.row_parabolas import RowParabolas
from bilevax.applications.grouped.row_space import RowCrossValidation, RowEvidence, fewer_rows, fit_rows
from bilevax.applications.grouped.start import Parabolas, enough, row_slopes, starts
from bilevax.applications.grouped.sums import group_sums

_START_ROWS = 20_000
_NONE = -9.0  # added to the logarithm of a strength: none
# For each entry of the prior, how many groups and how many rows are divided into folds beside the evidence of
# all: more would take longer and tell little more.
_FOLDED, _FOLDED_ROWS = 10, 1_000
_COMPARED = 100  # groups that starts are compared on, where that takes Newton steps
_OF_PART = 1e-4  # the least tolerance on a part of the groups


Judge = CrossValidation | SquaredCrossValidation | RowCrossValidation


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What was learnt.

    Attributes:
      x: the prior.
      history: F after every step on all groups, the start included.
      steps: how many were taken, on a part of the groups and on all.
      outcome: why it ended.
      judge: F of all groups.
      sums: of all rows of every group, for the squared loss.
    """

    x: X
    history: list[float]
    steps: int
    outcome: bx.Outcome
    judge: Judge
    sums: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Fits:
    """Groups that were fitted at a given prior.

    Attributes:
      coef: (m, d, columns).
      share: (m,), the share of the prior variance of a coefficient that the group's rows account for, the
        mean over its coefficients.
      variance: (m, d, d), the inverse curvature of a group's coefficients; None unless asked for.
      unsolved: how many groups could not be fitted well.
    """

    coef: np.ndarray
    share: np.ndarray
    variance: np.ndarray | None
    unsolved: int = 0


def cross_validation(blocks: Blocks, prior: Prior, loss: Loss) -> Judge:
    """F and ∇F: in the space of rows where groups have few of them, or else in closed form where the loss has
    one."""
    if fewer_rows(blocks.panel, loss):
        return RowCrossValidation(blocks, prior, loss)
    return SquaredCrossValidation(blocks, prior) if loss.quadratic else CrossValidation(blocks, prior, loss)


@dataclasses.dataclass(frozen=True)
class Judging:
    """How a prior is judged.

    Attributes:
      folds: of a group, at most.
      judge: "groups", each counts alike, or "rows".
      newcomers: the share of F of groups as if they were new.
      evidence: the share of F of the random-effects model's likelihood, for the squared loss.
    """

    folds: int = 5
    judge: str = "groups"
    newcomers: float = 0.0
    evidence: float = 0.0

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
    few_rows = fewer_rows(panel, loss)
    sums = group_sums(panel) if loss.quadratic and not few_rows else None
    # Fewer groups than coefficients do not tell how these vary together.
    if not loss.quadratic or not judging.evidence or panel.groups <= prior.size:
        whole: Any = cross_validation(judging.blocks(panel, seed), prior, loss)
    else:
        whole = _with_evidence(panel, sums, prior, loss, judging, seed)
    chosen = whole.blocks.of_groups(enough(prior, whole.blocks.panel.groups), seed)
    few = whole.part(chosen) if 2 * len(chosen) <= whole.blocks.count else whole
    seen, members = whole.blocks.panel, np.unique(few.blocks.group)
    if sums is None:
        mean, curvature = pooled(panel, loss, seed)
        kind = RowParabolas if few_rows else Parabolas
        parabolas = kind.of(seen.part(members), loss, mean, curvature)
    else:
        mean = pooled_sums(sums)
        parabolas = Parabolas.of_sums(whole.sums.total[members], seen.known[members])
    candidates = starts(parabolas, prior, mean)
    # To choose a start, closed forms cost little; Newton steps from nowhere are the most expensive ones.
    first = few if loss.quadratic else few.part(few.blocks.of_groups(_COMPARED, seed))
    values = [first.value_and_gradient(one)[0] for one in candidates]
    if not np.isfinite(values).any():
        raise ValueError(
            "groups cannot be fitted at the start: the loss must be finite at all targets, smooth and convex"
        )
    ranked, unit = [candidates[place] for place in np.argsort(values)], abs(float(np.nanmin(values)))
    # Groups that were not looked at may be out of reach from a start: the next best is taken then.
    fine = (one for one in ranked if first is few or np.isfinite(few.value_and_gradient(one)[0]))
    x = next(fine, ranked[0])
    weight = unit / panel.weight.sum()
    way = _Way(prior, x, panel.known, weight, max_iter, bx.make_progress(progress, max_iter))
    # By chance F of a part is off as many times as much as the part is smaller: to go on there is no help.
    of_part = max(tol * whole.blocks.count / few.blocks.count, _OF_PART)
    with way.display:
        for judge in [few, whole] if few is not whole else [whole]:
            if not way.interrupted:
                way.descend(judge, tol if judge is whole else of_part)
    if not (np.diff(panel.offsets) > 1).any():
        way.x = way.x | {"scale": way.x["scale"] + _NONE}  # nothing tells how much groups differ
    outcome = bx.Outcome.INTERRUPTED if way.interrupted else bx.Outcome.FINISHED
    return Learnt(way.x, way.history, way.steps, outcome, whole, sums)


def _with_evidence(
    panel: Panel, sums: np.ndarray | None, prior: Prior, loss: Loss, judging: Judging, seed: int
) -> Judge:
    """F of the squared loss. Where all groups are in the evidence, fewer have to be divided into folds."""
    rows = len(panel.target) / panel.groups
    folded = panel.some(int(prior.entries * max(_FOLDED, _FOLDED_ROWS / rows)), seed)
    if sums is None:
        of_rows = RowEvidence(panel, prior, loss, judging.evidence)
        return RowCrossValidation(judging.blocks(folded, seed), prior, loss, of_rows)
    evidence = Evidence(prior, sums, panel.known, judging.evidence)
    return SquaredCrossValidation(judging.blocks(folded, seed), prior, evidence=evidence)


class _Way:
    """The way of the prior's x down F, with a penalty on the prior itself, which keeps that of few groups in
    place.

    Args:
      prior: the form of the prior.
      x: the start.
      known: (m, p), what is known of groups.
      weight: of the penalty: that of one row.
      max_iter: the most steps.
      display: is told of every step.
    """

    def __init__(self, prior: Prior, x: X, known: np.ndarray, weight: float, max_iter: int, display: Any):
        self.prior, self.x, self.weight, self.max_iter, self.display = prior, x, weight, max_iter, display
        self.history: list[float] = []
        self.steps, self.interrupted, self.began = 0, False, time.monotonic()
        self.coordinates = Coordinates(prior, x, known)
        self.descent = Descent(*self.coordinates.bounds)

    def descend(self, judge: Judge, tol: float) -> None:
        """Goes down F of some blocks, to the best x that is looked at."""
        coordinates = self.coordinates
        best: list[Any] = [np.inf, self.x]

        def evaluate(at: np.ndarray) -> tuple[float, np.ndarray]:
            x = coordinates.x(at)
            value, gradient = judge.value_and_gradient(x)
            extra, slope = self.prior.penalty(x)
            value += self.weight * extra
            if value < best[0]:
                best[:] = value, x
            both = {name: one + self.weight * slope[name] for name, one in gradient.items()}
            return value, coordinates.gradient(at, x, both)

        def after_step(here: Point) -> None:
            self.history.append(here.value)
            self.steps += 1
            speed = self.steps / max(time.monotonic() - self.began, 1e-9)
            self.display.update(self.steps, speed, {"F": here.value})

        try:
            at = coordinates.of(self.x)
            start = Point(at, *evaluate(at))
            self.history = [start.value]
            self.descent.run(
                evaluate,
                start,
                most=self.max_iter - self.steps,
                tol=tol * abs(start.value),
                after_step=after_step,
            )
        except KeyboardInterrupt:
            self.interrupted = True
        self.x = best[1]


def fit_groups(
    panel: Panel, prior: Prior, loss: Loss, x: X, *, variance: bool = False, sums: np.ndarray | None = None
) -> Fits:
    """The coefficients of all groups of a panel at a given prior, on all their rows.

    Args:
      panel: the rows.
      prior: the form of the prior.
      loss: of a row.
      x: the prior.
      variance: whether the groups' variances are wanted.
      sums: of all rows of every group, for the squared loss; left out, they are made.
    """
    if fewer_rows(panel, loss):
        fits = Fits(*fit_rows(panel, prior, loss, x, variance=variance))
    elif loss.quadratic:
        fits = Fits(*fit_sums(panel, prior, x, variance=variance, sums=sums))
    else:
        fits = Fits(*fit_tiles(panel, prior, loss, x, variance=variance))
    if not np.isfinite(fits.coef).all():
        raise ValueError(
            "the coefficients of some groups are not finite: the loss must be convex and finite at all rows"
        )
    return fits


def held_out_errors(judge: Judge, x: X, groups: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors of held-out rows in units of how uncertain their predictors are, and the rows' weights, from the
    folds of at most so many groups."""
    places = judge.blocks.of_groups(groups, seed)
    return judge.errors(places[places < judge.blocks.folds], x)


def held_out_predictions(
    judge: CrossValidation | RowCrossValidation, x: X, groups: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictors (n, columns), targets and weights of held-out rows, from the folds of at most so many
    groups."""
    places = judge.blocks.of_groups(groups, seed)
    return judge.predictions(places[places < judge.blocks.folds], x)


def noise_of(judge: CrossValidation | RowCrossValidation, x: X, groups: int, seed: int) -> float:
    """How many times as much as its curvature says the loss of held-out rows varies, as a deviation.

    A likelihood has one: the mean square of its gradients is its curvature.
    """
    eta, target, weight = held_out_predictions(judge, x, groups, seed)
    there = judge.loss, jnp.asarray(eta), jnp.asarray(target)
    pull = np.mean(np.asarray(row_slopes(*there)) ** 2, -1)
    return float(np.sqrt((weight @ pull) / max(weight @ np.asarray(_curvatures(*there)), 1e-12)))


def pooled(panel: Panel, loss: Loss, seed: int) -> tuple[np.ndarray, float]:
    """One model for rows of all groups (at most 20,000): its coefficients, and the curvature of a row; for
    losses that are no parabola."""
    chosen = np.sort(
        np.random.default_rng(seed).choice(len(panel.target), min(len(panel.target), _START_ROWS), False)
    )
    rows, target, weight = panel.at(chosen), panel.target[chosen], panel.weight[chosen]
    part = Panel(rows, target, weight, np.array([0, len(chosen)]), np.zeros((1, 0)))
    prior = Prior("ridge", rows.shape[1], loss.columns)
    coef = fit_groups(part, prior, loss, prior.start(np.zeros((prior.size, loss.columns)), 10.0)).coef[0]
    curvature = float(
        np.average(_curvatures(loss, jnp.asarray(rows @ coef), jnp.asarray(target)), weights=weight)
    )
    return coef, curvature if np.isfinite(curvature) and curvature > 1e-8 else 1.0


def prior_errors(panel: Panel, prior: Prior, x: X) -> np.ndarray:
    """Errors of rows that the prior alone predicts, in units of how uncertain their predictors are."""
    rows, spread = panel.all(), prior.matrix(x)
    return (panel.target - prior_predictions(panel, prior, x)) / np.sqrt(1 + ((rows @ spread) ** 2).sum(1))


def prior_predictions(panel: Panel, prior: Prior, x: X) -> np.ndarray:
    """Predictors of rows by the prior alone, for losses of one predictor."""
    rows = panel.all()
    eta = rows @ np.asarray(x["mean"], float)[..., 0]
    if prior.known:
        mean = np.tensordot(panel.known, np.asarray(x["known"])[..., 0], 1)
        eta += np.einsum("nd,nd->n", rows, np.repeat(mean, np.diff(panel.offsets), 0))
    return eta


@jax.jit
def _curvatures(loss: Loss, eta: Array, target: Array) -> Array:
    """The curvature of every row's loss, the mean over its predictors."""
    return jnp.trace(jax.vmap(jax.hessian(loss))(eta, target), axis1=-2, axis2=-1) / loss.columns
