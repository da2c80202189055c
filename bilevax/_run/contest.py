"""Runs that compete: they advance side by side, are judged by F, and the worse ones are dropped."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampling
from bilevax._run.judge import Judge
from bilevax._run.many_runs import Make, ManyRuns
from bilevax._run.progress import Progress
from bilevax._step.state import State
from bilevax._util.trees import PyTree, all_finite
from bilevax.solvers.base import AbstractSolver


class Heat:
    """Trials that are one compiled program, as they differ in numbers only."""

    def __init__(
        self,
        make: Make,
        sampling: Sampling,
        fixed: dict[str, Any],
        settings: list[dict[str, Any]],
        members: list[int],
    ):
        # A row of its own for every trial, also where no number differs.
        def made(_row: Array, **numbers: Array) -> AbstractSolver:
            return make(**fixed, **numbers)

        self.runs, self.members = ManyRuns(made, sampling), members
        numbers = {name: [settings[t][name] for t in members] for name in settings[0] if name not in fixed}
        self.numbers = {name: jnp.asarray(column, float) for name, column in numbers.items()}
        self.numbers["_row"] = jnp.zeros(len(members))
        self.states: Any = None

    def start(self, problem: Problem, x0: PyTree, y0: PyTree, key: Array) -> None:
        self.states = self.runs.start(problem, self.numbers, x0, y0, key[None])

    def advance(self, problem: Problem, steps: int) -> None:
        self.states = jax.block_until_ready(self.runs.advance(problem, self.numbers, self.states, steps)[0])

    def state(self, trial: int) -> State:
        row = self.members.index(trial)
        return jax.tree.map(lambda leaf: leaf[row, 0], self.states)

    def keep(self, trials: list[int]) -> None:
        rows = np.asarray([row for row, trial in enumerate(self.members) if trial in trials], int)
        if len(rows) < len(self.members):
            self.members = [self.members[row] for row in rows]
            self.numbers, self.states = jax.tree.map(lambda leaf: leaf[rows], (self.numbers, self.states))


@dataclasses.dataclass
class Record:
    """How a trial has done so far."""

    objective: list[float] = dataclasses.field(default_factory=list)
    steps: int = 0
    outcome: str = "finished"

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Less is better."""
        return self.outcome in ("diverged", "unsolved"), -self.steps, self.objective[-1]


@dataclasses.dataclass
class Contest:
    """The trials that still run, and the records of all."""

    problem: Problem
    heats: list[Heat]
    judge: Judge
    records: list[Record]
    done: int = 0

    @property
    def running(self) -> list[int]:
        """The trials that still run, the best first."""
        trials = [trial for heat in self.heats for trial in heat.members]
        return sorted(trials, key=lambda trial: (*self.records[trial].objective[-1:], trial))

    def state(self, trial: int) -> State:
        (heat,) = [heat for heat in self.heats if trial in heat.members]
        return heat.state(trial)

    def advance(self, end: int, length: int, display: Progress) -> None:
        """Takes all trials to a step, with a report after each piece of some length."""
        while self.done < end:
            count = min(length, end - self.done)
            began = time.perf_counter()
            for heat in self.heats:
                heat.advance(self.problem, count)
            self.done += count
            speed = count * len(self.running) / (time.perf_counter() - began)
            best = [self.judge.start, *self.records[self.running[0]].objective][-1]
            display.update(self.done, speed, {"trials": float(len(self.running)), "F": best})

    def judge_all(self) -> None:
        """Notes F of every trial, and drops those without one."""
        for trial in self.running:
            state, record = self.state(trial), self.records[trial]
            record.steps = self.done
            record.objective.append(self.judge(state.average, state.y))
            if not np.isfinite(record.objective[-1]):
                record.outcome = "unsolved" if bool(all_finite((state.average, state.y))) else "diverged"
        self._keep([trial for trial in self.running if self.records[trial].outcome == "finished"])
        if not self.heats:
            raise ValueError(
                _nothing_left([record.outcome for record in self.records], self.problem.assumptions)
            )

    def keep(self, most: int) -> None:
        """Drops all but the best trials."""
        for trial in self.running[most:]:
            self.records[trial].outcome = "dropped"
        self._keep(self.running[:most])

    def _keep(self, trials: list[int]) -> None:
        for heat in self.heats:
            heat.keep(trials)
        self.heats = [heat for heat in self.heats if heat.members]


def _nothing_left(outcomes: list[str], assumptions: str) -> str:
    if "unsolved" in outcomes:
        return (
            "no trial could be judged: some lower problems could not be solved at the x that was reached; "
            f"{assumptions}, and steps must not be too large"
        )
    return f"all {len(outcomes)} trials diverged: put smaller steps into the grid"
