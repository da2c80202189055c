"""What the loop knows of a solver."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import Any, ClassVar, Literal, Self

import equinox as eqx
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampler, Sampling, as_sampling
from bilevax._step.linear_algebra import run_if
from bilevax._step.oracles import Oracles
from bilevax._step.state import Info, State
from bilevax._util import checks
from bilevax._util.trees import PyTree


class AbstractSolver(eqx.Module):
    """The base class of all solvers: how a run starts, and how it takes a step.

    A solver of your own implements `start` and `step`. Its fields are its hyper-parameters: numbers,
    schedules, optax transformations, or dicts of numbers by level. Fields marked `eqx.field(static=True)` may
    be anything. Most methods are easier to write as a `Recipe`.

    Class attributes:
      distributed: whether a step averages z and its `Info` over the devices that share the blocks
        (`state.sampler.mean`), so that the solver can be used with a mesh.
      takes_risks: whether a step weighs its blocks by the problem's `risk`.
      takes_tables: whether a step moves only what it looks up of the problem's `tables`; else all of x moves.
        A recipe whose `renew` computes all of z anew sets it to False.
    """

    distributed: ClassVar[bool] = False
    takes_risks: ClassVar[bool] = False
    takes_tables: ClassVar[bool] = False

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Refuses by name an option that the method does not have, and says which methods have it."""
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for name in () if takes_any else options:
            if name not in known:
                having = _methods_with(name, AbstractSolver)
                others = f"; {name} is an option of {', '.join(sorted(having))}" if having else ""
                own = ", ".join([*known][1:])
                raise TypeError(f"{cls.__name__} has no option {name!r}: it takes {own}{others}")
        return super().__new__(cls)

    def init(
        self,
        problem: Problem,
        x0: PyTree,
        y0: PyTree = None,
        *,
        key: Array,
        sampling: Sampling | None = None,
        blocks_per_step: int | Literal["all"] | None = None,
        batch_size: int | Literal["all"] | None = None,
    ) -> State:
        """The state before the first step.

        Args:
          problem: the problem.
          x0: where x starts.
          y0: where the lower variables start, with the slots as leading axis; a dict if the levels
            have names. A mean level may be left None: it then starts from its first batch.
          key: the random key of the whole run.
          sampling: how blocks and rows are drawn.
          blocks_per_step: I or "all", as in `Sampling`, for short.
          batch_size: B or "all", as in `Sampling`, for short.

        Returns:
          The state, to be given to `step`.
        """
        sampler = as_sampling(sampling, blocks_per_step, batch_size).sampler(problem, key)
        self.check(problem, sampler)
        return self.start(problem, x0, y0, sampler)

    @abc.abstractmethod
    def start(self, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
        """The state before the first step, for a plan of sampling that `check` has accepted."""

    @abc.abstractmethod
    def step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """Takes one step.

        Args:
          problem: the problem.
          state: what `init` or the step before returned.
          stage: the number of restarts so far (see `Restart`).

        Returns:
          The new state, and what the step saw.
        """

    def due(self, state: State) -> Array | None:
        """Whether `renew_estimates` is due before the next step; None if it never is."""
        return None

    def renew_estimates(self, problem: Problem, state: State) -> State:
        """What has to be done now and then between two steps: `step` does it when it is due.

        It may change `state.smoothness`, and under a risk `state.blocks`, only.
        """
        return state

    def bare_step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """`step` without what is due before it, for loops that see to that themselves."""
        return self.step(problem, state, stage)

    def check(self, problem: Problem, sampler: Sampler) -> None:
        """Raises if the solver cannot serve the problem; called once, with concrete hyper-parameters."""
        levels = sorted(problem.levels) if problem.named else None
        checks.all_fit(self.coefficients(), levels)
        if problem.risk is not None and not self.takes_risks:
            raise ValueError(
                f"{type(self).__name__} minimises the mean over the blocks only, got a problem with risk = "
                f"{type(problem.risk).__name__}: use BlockNewton, MMBO or BSVRBv2"
            )

    def coefficients(self) -> dict[str, object]:
        """The hyper-parameters by name: all fields that are not static."""
        fields = [field for field in dataclasses.fields(self) if not field.metadata.get("static", False)]
        return {field.name: getattr(self, field.name) for field in fields}

    def coefficients_at(self, problem: Problem, state: State) -> dict[str, object]:
        """What the hyper-parameters that may be left out are at a state, for `result.settings`.

        Returns:
          Numbers or schedules by name, or dicts of them by lower level.
        """
        return {}

    def count_oracles(self, problem: Problem, sampler: Sampler, steps: int) -> Oracles | None:
        """How often a run has called f and g after some steps; None if the solver does not count."""
        return None


def _methods_with(option: str, base: type[AbstractSolver]) -> set[str]:
    """The names of the library's methods that have an option."""
    found = [name for one in base.__subclasses__() for name in _methods_with(option, one)]
    is_ours = base.__module__.startswith("bilevax.solvers.") and not base.__name__.startswith("_")
    has_it = not inspect.isabstract(base) and option in inspect.signature(base.__init__).parameters
    return {*found, base.__name__} if is_ours and has_it else {*found}


def renewed_if_due(
    solver: AbstractSolver, problem: Problem, state: State, allowed: Array | bool = True
) -> State:
    """The state before the next step, with its estimates renewed if that is due, and allowed there."""
    due = solver.due(state)
    if due is None:
        return state
    due = due & allowed

    def renewed() -> Any:
        after = solver.renew_estimates(problem, state)
        return after.smoothness, after.blocks

    smoothness, blocks = run_if(due, renewed, (state.smoothness, state.blocks))
    return dataclasses.replace(state, smoothness=smoothness, blocks=blocks)
