"""Every method by its name, with the settings that it takes, as a problem and a solver.

The plain losses over lists and the bilevel methods go through the same loop, with the same lists and the same
upper step (Adam with decoupled weight decay).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._step.averaging import averaged
from bilevax._util import checks
from bilevax.applications.ranking.discounts import Discount, Logarithmic, Power
from bilevax.applications.ranking.fresh import FreshBSVRBv1, FreshKSONG, FreshSONG
from bilevax.applications.ranking.lists import Lists
from bilevax.applications.ranking.losses import LOSSES, Listing, make_list_problem
from bilevax.applications.ranking.objective import check_evenness, make_problem
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.surrogates import Logistic, Sigmoid, SquaredHinge, Surrogate
from bilevax.solvers import SONG
from bilevax.solvers.restart import Restart

BILEVEL = ("song", "k-song", "bsvrb v1", "re-bsvrb v1")
METHODS = (*BILEVEL, *LOSSES)
SURROGATES: dict[str, Callable[[Any], Surrogate]] = {
    "squared hinge": SquaredHinge,
    "logistic": Logistic,
    "sigmoid": Sigmoid,
}

DISCOUNTS = ("logarithmic", "power")

_EPSILON = 1e-12


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a training run is told; a number that a method has no use for is ignored.

    Numbers may be traced, so that runs with other numbers go side by side under `jax.vmap`; those marked *
    are sizes or names, which are compiled in.

    Attributes:
      learning_rate: of Adam.
      weight_decay: decoupled: parameters shrink by learning_rate · weight_decay in every step.
      averaging: the model that is measured and kept is an average over about so many epochs, and over a tenth
        of the run while that is less; None takes it as it is. See `bx.averaged`.
      users_per_step: I. *
      positives: P, the pairs of a user in a list. *
      negatives: B, the unrated items in a list. *
      temperature: the surrogate's number (a squared hinge's margin), or what a plain loss divides scores by.
      surrogate: "squared hinge", "logistic" or "sigmoid". *
      cutoff: K. *
      softness: τ₁ of the threshold's problem.
      ridge: τ₂ of it.
      gate: the width of ψ.
      evenness: how evenly users weigh: 1 all users, −1 all pairs, and down to −3 busy users more; for the
        bilevel methods 0 is NDCG; see `make_problem` and `make_list_problem`.
      rivals: what the user's other pairs count in a rank; see `make_problem`.
      focus: how much more the top of a list counts in a rank; None for all alike; see `make_problem`.
      discount: "logarithmic", NDCG's, or "power". *
      depth: the power.
      alpha: α of the ranks.
      beta: β of the tracked gradient.
      gamma: γ of the ranks, for methods with error correction.
      threshold_alpha: α (and ᾱ) of the thresholds.
      threshold_gamma: γ (and γ̄) of the thresholds.
      threshold_step: τ: how far a threshold moves per visit, as a share of the safe step 2/(3 L).
      stages: of the restarted method. *

    Raises:
      TypeError, ValueError: if one is of another kind, or out of range.
    """

    learning_rate: Any = 1e-3
    weight_decay: Any = 0.3
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

    def __post_init__(self) -> None:
        for name in ("users_per_step", "positives", "negatives", "cutoff", "stages"):
            object.__setattr__(self, name, checks.whole_number(name, getattr(self, name), 1))
        if self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate must be one of {list(SURROGATES)}, got {self.surrogate!r}")
        if self.discount not in DISCOUNTS:
            raise ValueError(f"discount must be one of {list(DISCOUNTS)}, got {self.discount!r}")
        for name in ("temperature", "softness", "ridge", "gate", "depth", "threshold_step"):
            checks.coefficient(name, self._number(name), optional=False)
        for name in ("averaging", "focus"):
            checks.coefficient(name, self._number(name), zero=True)
        checks.coefficient("rivals", self._number("rivals"), high=1.0, zero=True, optional=False)
        check_evenness(self._number("evenness"))
        # What is left is for a solver or its upper step, and may be a schedule.
        checks.coefficient("learning_rate", self.learning_rate, optional=False)
        for name in ("weight_decay", "gamma", "threshold_gamma"):
            checks.coefficient(name, getattr(self, name), zero=True, optional=False)
        for name in ("alpha", "beta", "threshold_alpha"):
            checks.coefficient(name, getattr(self, name), high=1.0, optional=False)

    def _number(self, name: str) -> Any:
        value = getattr(self, name)
        if callable(value):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        return value

    def replace(self, **changes: Any) -> Settings:
        """The settings with some changed.

        Raises:
          TypeError: if a name is not one of the settings.
        """
        unknown = set(changes) - {field.name for field in dataclasses.fields(self)}
        if unknown:
            known = [field.name for field in dataclasses.fields(self)]
            raise TypeError(f"settings must be among {known}, got {sorted(unknown)}")
        return dataclasses.replace(self, **changes)


def make_method(
    method: str, ratings: Ratings, model: Any, settings: Settings, steps: int
) -> tuple[Problem, Any]:
    """The problem and the solver of a method.

    Args:
      method: one of `METHODS`.
      ratings: the training pairs.
      model: scores items.
      settings: its numbers.
      steps: how many steps are to come: what the stages of a restarted method divide among themselves.

    Returns:
      What `bx.minimize` takes; `batch_size` is `settings.negatives`.

    Raises:
      ValueError: if the method is not known.
    """
    checked_method(method)
    if method in LOSSES:
        problem = make_list_problem(ratings, model, method, positives=settings.positives)
    else:
        cutoff = None if method == "song" else settings.cutoff
        problem = make_problem(ratings, model, cutoff=cutoff, positives=settings.positives)
    return with_numbers(problem, settings), make_solver(method, ratings.users, settings, steps)


def checked_method(method: str) -> str:
    """The method's name, if there is such a method."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}")
    return method


def with_numbers(problem: Problem, settings: Settings) -> Problem:
    """The problem with its numbers taken from the settings: traced ones too, nothing is compiled anew."""
    blocks = problem.blocks
    if isinstance(blocks, Listing):
        numbers: Any = {
            "temperature": settings.temperature,
            "cutoff": settings.cutoff,
            "evenness": settings.evenness,
        }
    else:
        surrogate = SURROGATES[settings.surrogate](settings.temperature)
        numbers = {
            "softness": settings.softness,
            "ridge": settings.ridge,
            "gate": settings.gate,
            "evenness": settings.evenness,
            "rivals": settings.rivals,
            "focus": settings.focus,
            "surrogate": surrogate,
            "discount": _discount(problem, settings),
        }

    def of_all(value: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, jnp.float32), (problem.count,))

    changed = dataclasses.replace(blocks, **jax.tree.map(of_all, numbers))
    return eqx.tree_at(lambda problem: problem.blocks, problem, changed)


def _discount(problem: Problem, settings: Settings) -> Discount:
    if settings.discount == "logarithmic":
        return Logarithmic()
    (lists,) = problem.lower_data
    assert isinstance(lists, Lists)
    return Power(settings.depth, float(lists.ratings.item_count))


def steps_per_epoch(users: int, settings: Settings) -> int:
    """Steps in which every user is visited about once."""
    return max(1, users // settings.users_per_step)


def make_solver(method: str, users: int, settings: Settings, steps: int) -> Any:
    """The solver of a method, for `users` blocks and so many steps."""
    # F is a mean over users, and a vector is in few of their lists: gradients of the NDCGs are of the size of
    # Adam's usual ε, 1e-8, or less, and that would be a smaller step for them than for sums over pairs.
    upper_step = optax.adamw(settings.learning_rate, eps=_EPSILON, weight_decay=settings.weight_decay)
    if settings.averaging is not None:
        epoch = steps_per_epoch(users, settings)
        upper_step = averaged(upper_step, jnp.maximum(settings.averaging * epoch, 1.0))
    if method in LOSSES:
        return SONG(upper_step=upper_step, alpha=1.0, beta=1.0)
    if method == "song":
        return FreshSONG(upper_step=upper_step, alpha=settings.alpha, beta=settings.beta)
    # g″ = τ₂ + mean of σ'/τ₁ ≤ τ₂ + 1/(4 τ₁), exactly: nothing has to be estimated.
    safe = 2 / (3 * (settings.ridge + 0.25 / settings.softness)) * settings.threshold_step
    alpha = {"rank": settings.alpha, "threshold": settings.threshold_alpha}
    if method == "k-song":
        return FreshKSONG(
            upper_step=upper_step, lower_step=safe, alpha=alpha, beta=settings.beta, floor=settings.ridge
        )
    # A threshold moves in every step along the slope of its last visit.
    chance = min(1.0, settings.users_per_step / users)
    solver = FreshBSVRBv1(
        upper_step=upper_step,
        lower_step=safe * chance,
        alpha=alpha,
        beta=settings.beta,
        gamma={"rank": settings.gamma, "threshold": settings.threshold_gamma},
        floor=settings.ridge,
    )
    if method == "bsvrb v1":
        return solver
    return Restart(solver, first=max(1, -(-steps // (2**settings.stages - 1))), stages=settings.stages)
