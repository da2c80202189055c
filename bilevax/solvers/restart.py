"""RE-: a solver run in stages, each with smaller steps and twice as long."""

from __future__ import annotations

import itertools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampler
from bilevax._step.oracles import Oracles
from bilevax._step.state import Info, State
from bilevax._util import checks
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver


class Restart(AbstractSolver):
    r"""Runs a solver in stages: the RE- form of a method.

    Stage k = 0, 1, … lasts :math:`2^k` times `first` steps; in it α, ᾱ and β are :math:`2^{-k}` times, and
    τ, τ̄ and η :math:`2^{-k/2}` times what the solver has. The state carries over. After the last stage its
    parameters stay. If F satisfies the PL condition, F − min F halves with every stage.

    As printed, a stage returns its iterate of a random step :math:`\tilde t`, and the next one begins there
    with :math:`x_0 = x_1`, :math:`y_0 = y_1` and :math:`v_0 = v_1`. That is `seed=0, reset=True`, run for
    `steps` steps. What a stage does after :math:`\tilde t` has no effect, so that it ends there. With one
    stage, it is the random output of Algorithms 1 and 2.

    Args:
      solver: any solver of this library.
      first: T₁, the steps of the first stage.
      stages: K, the number of stages.
      seed: of the steps at which stages end, drawn from 1 to T_k; left out, each lasts all of its T_k steps.
      reset: whether every stage forgets where x and the lower variables were one step earlier.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.Restart(bx.BSVRBv2(upper_step=0.1), first=1000, stages=5)
      >>> solver.steps
      31000

    Reference:
      Hu et al., *Blockwise Stochastic Variance-Reduced Methods with Parallel Speedup for Multi-Block
      Bilevel Optimization*, ICML 2023, Algorithm 3 and Theorem 2.
    """

    solver: AbstractSolver
    first: int = eqx.field(static=True, kw_only=True)
    stages: int = eqx.field(static=True, kw_only=True)
    seed: int | None = eqx.field(static=True, kw_only=True, default=None)
    reset: bool = eqx.field(static=True, kw_only=True, default=False)

    def __check_init__(self) -> None:
        checks.solver(self.solver, AbstractSolver)
        if isinstance(self.solver, Restart):
            raise TypeError("solver must not itself be restarted, got a Restart")
        checks.whole_number("first", self.first, 1)
        checks.whole_number("stages", self.stages, 1, 30)
        if self.seed is not None:
            checks.whole_number("seed", self.seed, 0)
        checks.flag("reset", self.reset)

    @property
    def distributed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the solver inside can be used with a mesh."""
        return self.solver.distributed

    @property
    def takes_risks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the solver inside weighs blocks by a risk."""
        return self.solver.takes_risks

    @property
    def lengths(self) -> tuple[int, ...]:
        """The steps of every stage."""
        whole = [self.first * 2**k for k in range(self.stages)]
        if self.seed is None:
            return tuple(whole)
        random = np.random.default_rng(self.seed)
        return tuple(int(random.integers(1, length, endpoint=True)) for length in whole)

    @property
    def steps(self) -> int:
        """The steps of all stages together."""
        return sum(self.lengths)

    @property
    def _ends(self) -> Array:
        """The steps at which later stages begin."""
        last = jnp.iinfo(jnp.int32).max  # no step's number is greater
        return jnp.asarray([min(end, last) for end in itertools.accumulate(self.lengths[:-1])], jnp.int32)

    def stage(self, step: Array | int) -> Array:
        """The stage k that a step belongs to."""
        return jnp.sum(jnp.asarray(step) >= self._ends, dtype=jnp.int32)

    def check(self, problem: Problem, sampler: Sampler) -> None:
        """The checks of the solver inside."""
        self.solver.check(problem, sampler)

    def start(self, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
        """The start of the solver inside."""
        return self.solver.start(problem, x0, y0, sampler)

    def step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """One step with the parameters of its stage."""
        return self.solver.step(problem, self._begun(state), self.stage(state.step) + stage)

    def due(self, state: State) -> Array | None:
        """As for the solver inside."""
        return self.solver.due(state)

    def renew_estimates(self, problem: Problem, state: State) -> State:
        """Those of the solver inside."""
        return self.solver.renew_estimates(problem, state)

    def bare_step(self, problem: Problem, state: State, stage: Array | int = 0) -> tuple[State, Info]:
        """One bare step with the parameters of its stage."""
        return self.solver.bare_step(problem, self._begun(state), self.stage(state.step) + stage)

    def _begun(self, state: State) -> State:
        """The state in which a step finds its stage."""
        return state.at_rest(jnp.any(state.step == self._ends)) if self.reset else state

    def count_oracles(self, problem: Problem, sampler: Sampler, steps: int) -> Oracles | None:
        """The count of the solver inside."""
        return self.solver.count_oracles(problem, sampler, steps)
