"""From noisy and clean rows to a model: guess weights, learn them, refit, choose.

All rows are of a common size (`SIZE`), so that a ridge means the same for every data set: with coefficients
~ N(0, 1/ridge), logits have the variance SIZE / ridge.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse

from bilevax.applications import linear, noise_model
from bilevax.applications.cross_validated import SHIFT_DEVIATION, Plan, learn_weights
from bilevax.applications.linear import Linear, all_logits

SIZE = 10.0  # the rows' mean squared distance from their mean
RIDGES = tuple(SIZE / spread for spread in (1.0, 4.0, 16.0))
_GUESS_RIDGES = tuple(SIZE / spread for spread in (0.01, 0.04, 0.16, 0.64, 2.5))  # for noisy rows alone

Labelled = tuple[Any, np.ndarray]  # rows, dense or sparse, and class codes
Folds = dict[int, Linear]  # the model without each fold of the clean rows


@dataclasses.dataclass(frozen=True)
class Found:
    """What was learnt.

    Attributes:
      model: the final model.
      weights: of the noisy rows, in (0, 1).
      candidates: what the model is the mean of: weights, ridge, cross-validated loss, share.
      history: of the bilevel runs: columns by name, and the round.
      steps: of all bilevel runs.
    """

    model: Linear
    weights: np.ndarray
    candidates: list[dict[str, Any]]
    history: dict[str, np.ndarray]
    steps: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model on all rows, those without each fold, and the loss of the latter on the folds left out."""

    name: str
    weights: np.ndarray | None
    ridge: float
    model: Linear
    folds: Folds
    loss: float


def learn(noisy: Labelled, clean: Labelled, fold: np.ndarray, classes: int, rounds: int, plan: Plan) -> Found:
    """Learns weights and model.

    Args:
      noisy: rows whose labels may be wrong.
      clean: rows whose labels are right.
      fold: the fold of every clean row, from 0 without gaps.
      classes: how many there are.
      rounds: how often weights are guessed and learnt.
      plan: of the bilevel runs.

    Returns:
      What was found.
    """
    bench = Bench(noisy, clean, fold, classes)
    alone = bench.candidates("clean rows alone", None)
    guess = np.repeat(first_guess(noisy, clean, classes)[None], bench.count + 1, 0)
    candidates, histories, steps, best = [], [], 0, alone
    for number in range(1, rounds + 1):
        if number > 1:
            guess = bench.guess(best)
        best = bench.candidates(f"guess {number}", guess)
        candidates += best
        if bench.count < 2 or plan.steps == 0:
            continue
        starts = {(one, each.ridge): each.folds[one] for one in range(bench.count) for each in best}
        found = learn_weights(
            noisy, clean, guess, fold, starts, dataclasses.replace(plan, seed=plan.seed + number)
        )
        steps += found.steps
        histories.append(found.history)
        learnt = bench.candidates(f"learnt {number}", found.weights, like=best)
        candidates += learnt
        if min(one.loss for one in learnt) < min(one.loss for one in best):
            best = learnt
    candidates += alone
    shares = bench.shares(candidates)
    rows = [
        {"weights": one.name, "ridge": one.ridge, "loss": one.loss, "share": float(share)}
        for one, share in zip(candidates, shares, strict=True)
    ]
    weights = guess[-1] if best[0].weights is None else best[0].weights
    return Found(bench.mean(candidates), weights, rows, _joined(histories), steps)


class Bench:
    """Fits and judges candidates on noisy and clean rows."""

    def __init__(self, noisy: Labelled, clean: Labelled, fold: np.ndarray, classes: int):
        self.clean, self.fold, self.classes = clean, fold, classes
        self.count = int(fold.max()) + 1
        parts = [noisy[0], clean[0]]
        self.rows: Any = (
            sparse.csr_matrix(sparse.vstack(parts)) if sparse.issparse(noisy[0]) else np.concatenate(parts)
        )
        self.codes = np.concatenate([noisy[1], clean[1]])
        self.noisy = np.arange(len(self.codes)) < len(noisy[1])

    def candidates(
        self, name: str, weights: np.ndarray | None, like: list[Candidate] | None = None
    ) -> list[Candidate]:
        """One candidate per ridge.

        Args:
          name: of the weights.
          weights: (folds + 1, n), without each fold and with all; None leaves the noisy rows out.
          like: candidates from which the fits start.
        """
        out: list[Candidate] = []
        for place, ridge in enumerate(RIDGES):
            near = like[place] if like else (out[-1] if out else None)
            model = self._fit(weights, ridge, -1, near.model if near else None)
            folds = {
                one: self._fit(weights, ridge, one, near.folds[one] if near else model)
                for one in range(self.count)
            }
            whole = None if weights is None else weights[-1]
            out.append(Candidate(name, whole, ridge, model, folds, self._loss(folds)))
        return out

    def guess(self, candidates: list[Candidate]) -> np.ndarray:
        """Weights by a model of the noise around the candidates' mean, without each fold and with all."""
        shares = self.shares(candidates)
        out = []
        for models in [[one.folds[k] for one in candidates] for k in range(self.count)] + [
            [one.model for one in candidates]
        ]:
            logits = all_logits(linear.mean_model(models, shares).logits(self.rows[self.noisy]))
            out.append(
                noise_model.estimate(logits, self.codes[self.noisy]).weight(logits, self.codes[self.noisy])
            )
        return _inside(np.stack(out))

    def shares(self, candidates: list[Candidate]) -> np.ndarray:
        """How much of each candidate the mean takes: exp(−loss summed over the clean rows), normalised."""
        total = len(self.fold) * np.array([one.loss for one in candidates])
        shares = np.exp(total.min() - total)
        return shares / shares.sum()

    def mean(self, candidates: list[Candidate]) -> Linear:
        """The candidates' mean, by their shares."""
        return linear.mean_model([one.model for one in candidates], self.shares(candidates))

    def _fit(self, weights: np.ndarray | None, ridge: float, left_out: int, start: Linear | None) -> Linear:
        used = (self.fold != left_out).astype(float)
        if weights is None:
            return linear.fit(*self.clean, used, ridge, classes=self.classes, start=start)
        return linear.fit(
            self.rows,
            self.codes,
            np.concatenate([weights[left_out], used]),
            ridge,
            classes=self.classes,
            noisy=self.noisy,
            shift_deviation=SHIFT_DEVIATION,
            start=start,
        )

    def _loss(self, folds: Folds) -> float:
        total = 0.0
        for one, model in folds.items():
            inside = self.fold == one
            total += linear.losses(model.logits(self.clean[0][inside]), self.clean[1][inside]).sum()
        return float(total / len(self.fold))


def first_guess(noisy: Labelled, clean: Labelled, classes: int) -> np.ndarray:
    """Weights of noisy rows, by a model of the noise around a calibrated model of the noisy labels.

    The model is first fitted to all noisy labels alike, then to those weights.
    """
    rows, codes = noisy
    model = _regularised(rows, codes, classes)
    weights = np.ones(len(codes))
    for turn in range(2):
        if turn:
            model = linear.fit(rows, codes, weights, RIDGES[1], classes=classes, start=model)
        said = model.logits(rows)
        centre, spread = said.mean(0), max(float(said.std()), 1e-12)
        scale, bias = linear.calibrate((model.logits(clean[0]) - centre) / spread, clean[1], classes)
        logits = all_logits(scale * (said - centre) / spread + bias)
        weights = noise_model.estimate(logits, codes).weight(logits, codes)
    return _inside(weights)


def _regularised(rows: Any, codes: np.ndarray, classes: int) -> Linear:
    """Logistic regression on noisy rows alone; its ridge is chosen by how one half predicts the other."""
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
    """Weights whose logits are finite."""
    return np.clip(weights, 1e-3, 1 - 1e-3)


def _joined(histories: list[Any]) -> dict[str, np.ndarray]:
    if not histories:
        return {}
    columns = {name: np.concatenate([one[name] for one in histories]) for name in histories[0]}
    lengths = [len(one["step"]) for one in histories]
    return {"round": np.repeat(np.arange(1, len(histories) + 1), lengths)} | columns
