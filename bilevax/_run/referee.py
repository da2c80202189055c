"""The exact F of a few blocks, now and then during a run: where it has risen, the run goes back.

While y and v follow x too slowly, the f that a run tracks may fall where F rises. Nothing that a step sees
shows this; a few blocks that are solved do. They are solved seldom enough to be a small part of the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax._problem.problem import Problem
from bilevax._run.verification import can_verify
from bilevax._run.work import whole_work_of_a_step
from bilevax._step.state import State
from bilevax._truth.few_blocks import blocks_to_solve, solve_at, work_of_solving
from bilevax._truth.lower_solve import USUAL_STEPS
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver

_SHARE = 0.05  # of the work of a run, at most
_FIRST, _FARTHER = 250, 1.25  # steps from look to look: at least so many, and so many times as far as before
_RISE = 0.01  # of the decrease of F so far
_SURE = 1.5  # standard errors of the change of F, from block to block
_LATE, _FAST = (0.5, 0.8), 0.2  # shares of the steps: a look there; of the decrease of F, since then
_LEFT = 0.005  # of F, by which a further Newton step may change it


def make_referee(solver: AbstractSolver, problem: Problem, x0: PyTree, state: State) -> Referee | None:
    """A referee of a run, where a few blocks are worth looking at; under a risk they are not.

    `state` is a copy of the state before the first step.
    """
    if problem.risk is not None or not can_verify(problem, state.y, np.inf):
        return None
    return Referee(problem, x0, state, whole_work_of_a_step(solver, problem, state))


class Referee:
    """Looks at F on a few blocks, and keeps the state where it was least.

    Args:
      problem: the problem.
      x0: where x starts.
      state: a copy of the state before the first step.
      work: how many numbers a step reads.

    Attributes:
      best: a copy of the state with the least F so far.
      values: F of each of the blocks there; none before the first look.
      start: the mean of F at x0 over the blocks; NaN before the first look, or if they cannot be solved.
      last: the step of the latest look.
      pause: how many steps there are from look to look, at least, so that these are a small part of the work.
      seen: the steps of all looks that count, each with the mean of F there.
    """

    def __init__(self, problem: Problem, x0: PyTree, state: State, work: float):
        self.problem, self.x0, self.best = problem.without_centres(), x0, state
        self.blocks = blocks_to_solve(self.problem)
        self.values, self.start, self.last = np.zeros(0), np.nan, 0
        self.seen: list[tuple[int, float]] = []
        solving = work_of_solving(self.problem, self.blocks.size, state.y)
        # In steps, as long as it takes to solve the blocks, if they are as hard as is usual.
        self._usual = solving / (_SHARE * work)
        self.pause = max(_FIRST, self._usual)

    def is_due(self, step: int) -> bool:
        """Whether it is time for another look."""
        return step >= max(_FARTHER * self.last, self.last + self.pause)

    def has_risen(self, state: State, final: bool = False) -> bool:
        """Whether F is larger than at the best state, by more than the choice of the blocks accounts for.

        A final look changes nothing: a run that is continued later must not depend on where it was divided.
        Other looks may keep the state, which must be a copy.
        """
        values = self._values(state.settled.x, state)
        best, start = self.values, self.start
        if self.last == 0:
            best = self._values(self.x0, state)
            start = float(np.mean(best)) if best.size else np.nan
        risen = bool(values.size) and bool(best.size) and self._is_larger(values, best, start)
        if risen or final:
            return risen
        self.last = int(state.step)
        if values.size:
            if not best.size or np.mean(values) < np.mean(best):
                best, self.best = values, state
            self.seen.append((self.last, float(np.mean(values))))
        self.values, self.start = best, start
        return False

    def forget_after(self, step: int) -> None:
        """The run went back to a step."""
        self.seen = [look for look in self.seen if look[0] <= step]

    def still_falls(self, steps: int, reached: float) -> str:
        """What to say if F still falls fast at the end of a run, where it is as verified; else nothing."""
        late = [look for look in self.seen if _LATE[0] * steps <= look[0] <= _LATE[1] * steps]
        if not late or not np.isfinite(self.start) or reached >= self.start:
            return ""
        step, before = late[-1]
        share = (before - reached) / (self.start - reached)
        if share < _FAST:
            return ""
        return (
            f"x is still on its way: {share:.0%} of the decrease of F came after step {step} of {steps}, on "
            f"{self.blocks.size} blocks that were solved: try steps={4 * steps} instead of {steps}"
        )

    def notes(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside the state."""
        start = None if np.isnan(self.start) else self.start
        looks = {"last": self.last, "pause": self.pause, "seen": self.seen}
        return {"values": self.values.tolist(), "start": start} | looks

    def take(self, notes: dict[str, Any]) -> None:
        """Goes on with what a checkpoint holds."""
        self.values, self.last = np.asarray(notes["values"], np.float64), int(notes["last"])
        self.pause = float(notes["pause"])
        self.start = np.nan if notes["start"] is None else float(notes["start"])
        self.seen = [(int(step), float(value)) for step, value in notes["seen"]]

    def _is_larger(self, values: np.ndarray, best: np.ndarray, start: float) -> bool:
        change = values - best
        noise = 0.0 if len(change) == self.problem.count else float(np.std(change)) / len(change) ** 0.5
        fallen = 0.0 if np.isnan(start) else start - float(np.mean(best))
        return float(np.mean(change)) > _SURE * noise + _RISE * max(fallen, 0.0)

    def _values(self, x: PyTree, state: State) -> np.ndarray:
        """F of every block at x, solved from the y of a state; none if they cannot be solved."""
        found = solve_at(self.problem, x, state, self.blocks)
        self.pause = max(self.pause, self._usual * int(found.steps) / USUAL_STEPS)
        values, left = np.asarray(found.value, np.float64), float(np.mean(np.asarray(found.left, np.float64)))
        size = np.fmax(abs(np.mean(values)), abs(np.mean(values) - self.start))
        solved = np.isfinite(values).all() and left <= _LEFT * size
        return values if solved else np.zeros(0)
