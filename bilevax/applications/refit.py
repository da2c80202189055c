"""From noisy and clean rows to a model: guess weights, learn them, refit, combine the candidates.

All rows are scaled to a common size (`SIZE`), so that a ridge means the same for every data set: with
coefficients ~ N(0, 1/ridge), logits have the variance SIZE / ridge.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse
from scipy.special import softmax

import bilevax as bx
from bilevax.applications import linear, noise_model
from bilevax.applications.cross_validated import SHIFT_DEVIATION, BilevelSettings, learn_weights
from bilevax.applications.linear import Linear, all_logits
from bilevax.applications.noisy_task import NoisyTask

SIZE = 10.0  # the rows' mean squared distance from their mean
RIDGES = tuple(SIZE / spread for spread in (1.0, 4.0, 16.0, 64.0))
_GUESS_RIDGES = tuple(SIZE / spread for spread in (0.01, 0.04, 0.16, 0.64, 2.5))  # for noisy rows alone

PLAIN = "all 1"  # the name of the weights that leave the labels as they are
_DRAWS = 200  # other clean rows that might have been drawn
_LEAST_PRIOR = 1e-9  # of a ridge: clean rows may still overrule the noisy ones
_MOST_NOISY = 1.0  # the most that noisy rows say for or against weights, as a logarithm

Folds = dict[int, Linear]  # the model without each fold of the clean rows


@dataclasses.dataclass(frozen=True)
class Found:
    """The final model and how it was found.

    Attributes:
      model: the final model.
      weights: of the noisy rows, in (0, 1).
      candidates: the models that the final model averages: weights, ridge, cross-validated loss, share.
      history: of the bilevel runs: columns by name, and the round.
      steps: of all bilevel runs.
      outcome: why the bilevel runs ended: interrupted or diverged if one of them was, else of the last run;
        finished if there was none.
    """

    model: Linear
    weights: np.ndarray
    candidates: list[dict[str, Any]]
    history: dict[str, np.ndarray]
    steps: int
    outcome: bx.Outcome


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model fitted to all rows, the models without each fold, and what is known about them.

    Attributes:
      name: of the weights.
      weights: of the noisy rows; None for a model of the clean rows alone.
      ridge: of the model.
      model: fitted to all rows.
      folds: the models without each fold of the clean rows.
      losses: of `folds`, on every clean row, which its fold was fitted without.
      noisy: the log-likelihood of noisy labels that were left out; None for a model of the clean rows alone.
    """

    name: str
    weights: np.ndarray | None
    ridge: float
    model: Linear
    folds: Folds
    losses: np.ndarray
    noisy: float | None

    @property
    def loss(self) -> float:
        """The cross-validated loss."""
        return float(self.losses.mean())


def learn(task: NoisyTask, rounds: int, settings: BilevelSettings) -> Found:
    """Learns weights and model. An interrupted run is the last: what it found is refitted.

    Args:
      task: the data.
      rounds: how many times weights are guessed and learnt.
      settings: of the bilevel runs.
    """
    bench = Bench(task)
    alone, plain = bench.candidates("clean rows alone", None), bench.plain_candidates()
    guess = np.repeat(first_guess(task)[None], task.folds + 1, 0)
    candidates, histories, steps, best = [], [], 0, alone
    outcomes = [bx.Outcome.FINISHED]
    for number in range(1, rounds + 1):
        if number > 1:
            guess = bench.guess(best)
        best = bench.candidates(f"guess {number}", guess)
        candidates += best
        if task.folds < 2 or settings.steps == 0:
            continue
        starts = {(one, each.ridge): each.folds[one] for one in range(task.folds) for each in best}
        own = dataclasses.replace(settings, seed=settings.seed + number)
        found = learn_weights(task, guess, starts, own)
        steps += found.steps
        histories.append(found.history)
        outcomes.append(found.outcome)
        learnt = bench.candidates(f"learnt {number}", found.weights, like=best)
        candidates += learnt
        if bench.evidence(learnt) > bench.evidence(best):
            best = learnt
        if found.outcome is bx.Outcome.INTERRUPTED:
            break
    candidates += alone + plain
    shares = bench.shares(candidates)
    rows = [
        {
            "weights": one.name,
            "ridge": one.ridge,
            "prior": float(prior),
            "loss": one.loss,
            "share": float(share),
        }
        for one, prior, share in zip(candidates, priors(candidates), shares, strict=True)
    ]
    weights = guess[-1] if best[0].weights is None else best[0].weights
    return Found(bench.mean(candidates), weights, rows, _joined(histories), steps, overall_outcome(outcomes))


class Bench:
    """Fits candidates to noisy and clean rows, and evaluates them by cross-validation."""

    def __init__(self, task: NoisyTask):
        self.task = task
        parts = [task.rows, task.clean_rows]
        self.rows: Any = (
            sparse.csr_matrix(sparse.vstack(parts)) if sparse.issparse(task.rows) else np.concatenate(parts)
        )
        self.codes = np.concatenate([task.codes, task.clean_codes])
        self.noisy = np.arange(len(self.codes)) < len(task.codes)

    def candidates(
        self, name: str, weights: np.ndarray | None, like: list[Candidate] | None = None
    ) -> list[Candidate]:
        """One candidate per ridge.

        Args:
          name: of the weights.
          weights: (folds + 1, n), without each fold and with all clean rows; None leaves the noisy rows out.
          like: candidates that the fits start from.
        """
        out: list[Candidate] = []
        noisy = [None] * len(RIDGES) if weights is None else self._noisy_likelihoods(weights[-1], like)
        for place, ridge in enumerate(RIDGES):
            near = like[place] if like else (out[-1] if out else None)
            model = self._fit(weights, ridge, -1, near.model if near else None)
            folds = {
                one: self._fit(weights, ridge, one, near.folds[one] if near else model)
                for one in range(self.task.folds)
            }
            whole = None if weights is None else weights[-1]
            out.append(Candidate(name, whole, ridge, model, folds, self._losses(folds), noisy[place]))
        return out

    def plain_candidates(self) -> list[Candidate]:
        """Models of the noisy labels as they are, calibrated on the clean rows; one candidate per ridge."""
        task, ones, out = self.task, np.ones(len(self.task.codes)), []
        noisy, model = self._noisy_likelihoods(ones, None), None
        for place, ridge in enumerate(RIDGES):
            model = linear.fit(task.rows, task.codes, ones, ridge, classes=task.classes, start=model)
            folds = {one: calibrated(task, model, task.fold != one) for one in range(task.folds)}
            whole = calibrated(task, model)
            out.append(Candidate(PLAIN, ones, ridge, whole, folds, self._losses(folds), noisy[place]))
        return out

    def guess(self, candidates: list[Candidate]) -> np.ndarray:
        """Weights by a noise model around the candidates' mean: without each fold, and with all of them."""
        shares, rows, codes = self.shares(candidates), self.task.rows, self.task.codes
        models = [[one.folds[k] for one in candidates] for k in range(self.task.folds)]
        out = []
        for some in [*models, [one.model for one in candidates]]:
            logits = all_logits(linear.mean_model(some, shares).logits(rows))
            out.append(noise_model.estimate(logits, codes).weight(logits, codes))
        return _inside(np.stack(out))

    def shares(self, candidates: list[Candidate]) -> np.ndarray:
        """The share of each candidate in the mean: its prior · exp(−loss summed over the clean rows).

        It is averaged over a Bayesian bootstrap: clean rows with random weights, as if others had been drawn.
        Candidates that a few clean rows cannot tell apart share alike, and no lucky one takes all.
        """
        prior = np.log(priors(candidates))
        losses = np.stack([one.losses for one in candidates])
        random, total = np.random.default_rng(0), np.zeros(len(candidates))
        for _ in range(_DRAWS):
            weights = random.exponential(size=losses.shape[1])
            total += softmax(prior - losses @ (weights / weights.mean()))
        return total / _DRAWS

    def evidence(self, candidates: list[Candidate]) -> float:
        """How well candidates with the same weights do together; larger is better."""
        losses = np.array([one.losses.sum() for one in candidates])
        return float(np.logaddexp.reduce(np.log(priors(candidates)) - losses))

    def mean(self, candidates: list[Candidate]) -> Linear:
        """The candidates' mean, weighted by their shares."""
        return linear.mean_model([one.model for one in candidates], self.shares(candidates))

    def _fit(self, weights: np.ndarray | None, ridge: float, left_out: int, start: Linear | None) -> Linear:
        task = self.task
        used = (task.fold != left_out).astype(float)
        if weights is None:
            return linear.fit(
                task.clean_rows, task.clean_codes, used, ridge, classes=task.classes, start=start
            )
        return linear.fit(
            self.rows,
            self.codes,
            np.concatenate([weights[left_out], used]),
            ridge,
            classes=task.classes,
            noisy=self.noisy,
            shift_deviation=SHIFT_DEVIATION,
            start=start,
        )

    def _noisy_likelihoods(self, weights: np.ndarray, like: list[Candidate] | None) -> list[float]:
        """How well each ridge predicts noisy labels: each half of the noisy rows from the other half.

        The log-likelihood is that of a noise model around each fit.
        """
        task = self.task
        half = np.arange(len(task.codes)) % 2 == 0
        totals = [0.0] * len(RIDGES)
        for side in (half, ~half):
            model = None
            for place, ridge in enumerate(RIDGES):
                start = like[place].model if like else model
                used = np.concatenate([weights * side, np.ones(len(task.fold))])
                model = linear.fit(
                    self.rows,
                    self.codes,
                    used,
                    ridge / 2,
                    classes=task.classes,
                    noisy=self.noisy,
                    shift_deviation=SHIFT_DEVIATION,
                    start=start,
                )
                logits = all_logits(model.logits(task.rows[~side]))
                codes = task.codes[~side]
                totals[place] += noise_model.estimate(logits, codes, 100).log_likelihood(logits, codes)
        return totals

    def _losses(self, folds: Folds) -> np.ndarray:
        task, out = self.task, np.zeros(len(self.task.fold))
        for one, model in folds.items():
            inside = task.fold == one
            out[inside] = linear.losses(model.logits(task.clean_rows[inside]), task.clean_codes[inside])
        return out


def priors(candidates: list[Candidate]) -> np.ndarray:
    """The share of each candidate before the clean rows are asked.

    - Among ridges with the same weights, the noisy rows decide: clean rows are too few where a class is rare.
    - Labels as they are have half of the prior, and all other weights the other half: where clean rows say
      little, weights must not make a model worse than none.
    - Weights that predict noisy labels worse than others lose, but at most by a factor: the noise model may
      be wrong, and clean rows must be able to overrule it.
    """
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(candidates):
        groups.setdefault(one.name, []).append(place)
    inside, among = np.zeros(len(candidates)), {}
    for name, places in groups.items():
        known = [value for value in (candidates[place].noisy for place in places) if value is not None]
        inside[places] = np.maximum(softmax(known), _LEAST_PRIOR) if known else 1 / len(places)
        among[name] = max(known, default=np.inf)
    best = max([value for value in among.values() if np.isfinite(value)], default=0.0)
    factor = {name: np.exp(np.clip(value - best, -_MOST_NOISY, 0.0)) for name, value in among.items()}
    if PLAIN in factor:
        factor[PLAIN] *= max(len(factor) - 1, 1)
    weight = inside * [factor[one.name] for one in candidates]
    return weight / weight.sum()


def first_guess(task: NoisyTask) -> np.ndarray:
    """Weights of noisy rows, by a noise model around a calibrated model of the noisy labels.

    The calibrated model is fitted twice: first with equal weights, then with the weights of the first turn.
    """
    rows, codes, classes = task.rows, task.codes, task.classes
    model = _regularised(rows, codes, classes)
    weights = np.ones(len(codes))
    for turn in range(2):
        if turn:
            model = linear.fit(rows, codes, weights, RIDGES[1], classes=classes, start=model)
        logits = all_logits(calibrated(task, model).logits(rows))
        weights = noise_model.estimate(logits, codes).weight(logits, codes)
    return _inside(weights)


def calibrated(task: NoisyTask, model: Linear, used: np.ndarray | None = None) -> Linear:
    """A model of noisy labels as one of clean labels, by the scale and bias that fit the clean rows.

    Args:
      task: the data.
      model: fitted to noisy labels.
      used: a mask of the clean rows to use; by default all.
    """
    used = np.ones(len(task.fold), bool) if used is None else used
    said = model.logits(task.rows)
    centre, spread = said.mean(0), max(float(said.std()), 1e-12)
    clean = (model.logits(task.clean_rows[used]) - centre) / spread
    scale, bias = linear.calibrate(clean, task.clean_codes[used], task.classes)
    factor = float(scale[0]) / spread
    return Linear(factor * model.coef, factor * (model.intercept - centre) + bias, 0.0 * model.shift)


def _regularised(rows: Any, codes: np.ndarray, classes: int) -> Linear:
    """Logistic regression on noisy rows alone; one half of the rows selects the ridge for the other."""
    half = np.arange(len(codes)) % 2 == 0
    model, best, chosen = None, np.inf, _GUESS_RIDGES[0]
    for ridge in _GUESS_RIDGES:
        model = linear.fit(rows, codes, half.astype(float), ridge / 2, classes=classes, start=model)
        loss = linear.losses(model.logits(rows), codes)[~half].sum()
        if loss >= best:
            break
        best, chosen = loss, ridge
    return linear.fit(rows, codes, np.ones(len(codes)), chosen, classes=classes, start=model)


def _inside(weights: np.ndarray) -> np.ndarray:
    """The weights, clipped so that their logits are finite."""
    return np.clip(weights, 1e-3, 1 - 1e-3)


def overall_outcome(outcomes: list[bx.Outcome]) -> bx.Outcome:
    """The outcome of the last run, unless one was interrupted or diverged."""
    for bad in (bx.Outcome.INTERRUPTED, bx.Outcome.DIVERGED):
        if bad in outcomes:
            return bad
    return outcomes[-1]


def _joined(histories: list[Any]) -> dict[str, np.ndarray]:
    if not histories:
        return {}
    columns = {name: np.concatenate([one[name] for one in histories]) for name in histories[0]}
    lengths = [len(one["step"]) for one in histories]
    return {"round": np.repeat(np.arange(1, len(histories) + 1), lengths)} | columns
