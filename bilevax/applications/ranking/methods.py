"""Every training method by its name: its settings, its problem and its solver.

The plain losses and the bilevel methods go through the same loop, with the same lists and the same upper step
(Adam with decoupled weight decay, or its lazy form).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optax

import bilevax as bx
from bilevax.applications.ranking.discounts import Logarithmic, Power
from bilevax.applications.ranking.fresh import FreshBSVRBv1, FreshKSONG, FreshSONG
from bilevax.applications.ranking.lists import Lists
from bilevax.applications.ranking.losses import LOSSES, Listing, make_list_problem
from bilevax.applications.ranking.objective import SmoothedNDCG, check_constant, make_problem
from bilevax.applications.ranking.ratings import Ratings, for_all_users
from bilevax.applications.ranking.surrogates import Logistic, Sigmoid, SquaredHinge, Surrogate

BILEVEL = ("song", "k-song", "bsvrb v1", "re-bsvrb v1")
METHODS = (*BILEVEL, *LOSSES)
SURROGATES: dict[str, Callable[[Any], Surrogate]] = {
    "squared hinge": SquaredHinge,
    "logistic": Logistic,
    "sigmoid": Sigmoid,
}

DISCOUNTS = ("logarithmic", "power")

_EPSILON = 1e-12  # of Adam


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """Training hyper-parameters; a method ignores those that it does not use.

    Values may be traced, so that runs with different settings go side by side under `jax.vmap`. Those marked
    * are sizes or names, which are compiled in.

    Attributes:
      learning_rate: of Adam.
      weight_decay: decoupled: parameters shrink by learning_rate · weight_decay in every step.
      l2: this multiple of the parameters is added to the gradient before Adam, as PyTorch's Adam does; None
        adds nothing.
      averaging: the model that is measured and kept is an average over about this many epochs, or over a
        tenth of the run while that is less; None keeps the model as it is. See `bx.averaged`.
      users_per_step: I. *
      positives: P, the pairs of a user in a list. *
      negatives: B, the unrated items in a list. *
      temperature: the surrogate's parameter (a squared hinge's margin), or the temperature of a plain loss.
      surrogate: "squared hinge", "logistic" or "sigmoid". *
      cutoff: K. *
      softness, ridge, gate, rivals, focus: as in `SmoothedNDCG`.
      evenness: how evenly users weigh: with 1 all users weigh the same, with −1 all pairs, and down to −3
        users with many pairs weigh more; for the bilevel methods 0 is NDCG. See `SmoothedNDCG` and
        `make_list_problem`.
      discount: "logarithmic", as in NDCG, or "power". *
      depth: the power.
      alpha: α of the ranks.
      beta: β of the tracked gradient.
      gamma: γ of the ranks, for methods with error correction.
      threshold_alpha: α (and ᾱ) of the thresholds.
      threshold_gamma: γ (and γ̄) of the thresholds.
      threshold_step: τ: how far a threshold moves per visit, as a share of the safe step 2/(3 L).
      stages: of the restarted method. *
      lazy: whether users' vectors move by `bx.lazy_adam`, another method than Adam, which touches those of a
        step's users alone: for tables of very many users. It does not go with `l2`. *
      fresh: whether the bilevel methods look at ranks after their refresh (`FreshSONG`, …), or before it, as
        published (`bx.SONG`, …). *

    Raises:
      TypeError, ValueError: a value is of another kind, or out of range.
    """

    learning_rate: Any = 1e-3
    weight_decay: Any = 0.3
    l2: Any = None
    averaging: Any = None
    users_per_step: int = 256
    positives: int = 10
    negatives: int = 300
    temperature: Any = 1.0
    surrogate: str = "squared hinge"
    cutoff: int = 300
    softness: Any = 0.1
    ridge: Any = 1e-3
    gate: Any = 1.0
    evenness: Any = 0.0
    rivals: Any = 1.0
    focus: Any = None
    discount: str = "logarithmic"
    depth: Any = 0.4
    alpha: Any = 0.4
    beta: Any = 0.9
    gamma: Any = 0.1
    threshold_alpha: Any = 0.9
    threshold_gamma: Any = 0.1
    threshold_step: Any = 1.0
    stages: int = 3
    fresh: bool = True
    lazy: bool = False

    def __post_init__(self) -> None:
        for name in ("users_per_step", "positives", "negatives", "cutoff", "stages"):
            object.__setattr__(self, name, bx.checks.whole_number(name, getattr(self, name), 1))
        if self.surrogate not in list(SURROGATES):
            raise ValueError(f"surrogate must be one of {list(SURROGATES)}, got {self.surrogate!r}")
        if self.discount not in DISCOUNTS:
            raise ValueError(f"discount must be one of {list(DISCOUNTS)}, got {self.discount!r}")
        for name in ("temperature", "depth", "threshold_step"):
            check_constant(name, getattr(self, name))
        check_constant("averaging", self.averaging, zero=True, optional=True)
        check_constant("l2", self.l2, zero=True, optional=True)
        bx.checks.flag("fresh", self.fresh)
        bx.checks.flag("lazy", self.lazy)
        if self.lazy and self.l2 is not None:
            raise ValueError(
                "lazy=True does not go with l2, which adds all of x to the gradient: use weight_decay"
            )
        self.objective(item_count=2)  # checks its own fields
        # The rest is for a solver or its upper step, and may be a schedule.
        bx.checks.coefficient("learning_rate", self.learning_rate, optional=False)
        for name in ("weight_decay", "gamma", "threshold_gamma"):
            bx.checks.coefficient(name, getattr(self, name), zero=True, optional=False)
        for name in ("alpha", "beta", "threshold_alpha"):
            bx.checks.coefficient(name, getattr(self, name), high=1.0, optional=False)

    def objective(self, item_count: int, *, thresholds: bool = True) -> SmoothedNDCG:
        """The smoothed NDCG of a bilevel method, with thresholds or without."""
        power = self.discount == "power"
        return SmoothedNDCG(
            cutoff=self.cutoff if thresholds else None,
            surrogate=SURROGATES[self.surrogate](self.temperature),
            softness=self.softness,
            ridge=self.ridge,
            gate=self.gate,
            evenness=self.evenness,
            rivals=self.rivals,
            focus=self.focus,
            discount=Power(self.depth, float(item_count)) if power else Logarithmic(),
        )

    def sampling(self, users: int) -> bx.Sampling:
        """How a run samples: I users per step, B negatives per list, and no first pass over the data."""
        return bx.Sampling(
            blocks_per_step=min(self.users_per_step, users), batch_size=self.negatives, initial_batch_size=0
        )

    def replace(self, **changes: Any) -> TrainingSettings:
        """The settings with some changed.

        Raises:
          TypeError: a name is not one of the settings.
        """
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise TypeError(f"settings must be among {known}, got {unknown}")
        return dataclasses.replace(self, **changes)


def make_method(
    method: str, ratings: Ratings, model: Any, settings: TrainingSettings, steps: int
) -> tuple[bx.Problem, Any]:
    """The problem and the solver of a method.

    Args:
      method: one of `METHODS`.
      ratings: the training pairs.
      model: scores items.
      settings: its hyper-parameters.
      steps: the length of the run, which the stages of a restarted method divide among themselves.

    Returns:
      The problem and the solver for `bx.minimize`; `batch_size` must be `settings.negatives`.

    Raises:
      ValueError: the method is unknown.
    """
    checked_method(method)
    positives = settings.positives
    if method in LOSSES:
        problem = make_list_problem(
            ratings,
            model,
            method,
            positives=positives,
            lazy=settings.lazy,
            **_listing_constants(settings),
        )
    else:
        objective = settings.objective(ratings.item_count, thresholds=method != "song")
        problem = make_problem(ratings, model, objective, positives=positives, lazy=settings.lazy)
    return problem, make_solver(method, ratings.users, settings, steps)


def checked_method(method: str) -> str:
    """The method's name, after a check that there is such a method."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}")
    return method


def with_settings(problem: bx.Problem, settings: TrainingSettings) -> bx.Problem:
    """A problem of `make_method` with other constants, which may be traced. Sizes and names stay the same."""
    if isinstance(problem.blocks, Listing):
        constants = for_all_users(_listing_constants(settings), problem.count)
    else:
        (lists,) = problem.lower_data
        assert isinstance(lists, Lists)
        constants = settings.objective(lists.ratings.item_count).constants(problem.count)
    changed = dataclasses.replace(problem.blocks, **constants)
    return eqx.tree_at(lambda problem: problem.blocks, problem, changed)


def _listing_constants(settings: TrainingSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("temperature", "cutoff", "evenness")}


def steps_per_epoch(users: int, settings: TrainingSettings) -> int:
    """The number of steps that visit every user about once."""
    return max(1, users // settings.users_per_step)


def make_solver(method: str, users: int, settings: TrainingSettings, steps: int) -> Any:
    """The solver of a method, for a number of users and of steps."""
    # F is a mean over users, and an item's vector is in the lists of few users. So the gradients of the NDCGs
    # may be as small as Adam's usual ε, 1e-8, which would shorten their steps.
    adam = bx.lazy_adam if settings.lazy else optax.adamw
    upper_step = adam(settings.learning_rate, eps=_EPSILON, weight_decay=settings.weight_decay)
    if settings.l2 is not None:
        upper_step = optax.chain(optax.add_decayed_weights(settings.l2), upper_step)
    if settings.averaging is not None:
        epoch = steps_per_epoch(users, settings)
        upper_step = bx.averaged(upper_step, jnp.maximum(settings.averaging * epoch, 1.0))
    if method in LOSSES:
        return bx.SONG(upper_step=upper_step, alpha=1.0, beta=1.0)
    if method == "song":
        song = FreshSONG if settings.fresh else bx.SONG
        return song(upper_step=upper_step, alpha=settings.alpha, beta=settings.beta)
    # g″ = τ₂ + mean of σ'/τ₁ ≤ τ₂ + 1/(4 τ₁): a bound that needs no estimate.
    safe = 2 / (3 * (settings.ridge + 0.25 / settings.softness)) * settings.threshold_step
    alpha = {"rank": settings.alpha, "threshold": settings.threshold_alpha}
    if method == "k-song":
        k_song = FreshKSONG if settings.fresh else bx.KSONG
        return k_song(
            upper_step=upper_step, lower_step=safe, alpha=alpha, beta=settings.beta, floor=settings.ridge
        )
    # A threshold moves in every step along the slope of its last visit.
    chance = min(1.0, settings.users_per_step / users)
    bsvrb = FreshBSVRBv1 if settings.fresh else bx.BSVRBv1
    solver = bsvrb(
        upper_step=upper_step,
        lower_step=safe * chance,
        alpha=alpha,
        beta=settings.beta,
        gamma={"rank": settings.gamma, "threshold": settings.threshold_gamma},
        floor=settings.ridge,
    )
    if method == "bsvrb v1":
        return solver
    return bx.Restart(solver, first=max(1, -(-steps // (2**settings.stages - 1))), stages=settings.stages)
