"""What changes while a run goes on, and what is made of it in the end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._run.advice import advise
from bilevax._run.checkpoint import CheckpointError
from bilevax._run.checkpoint_store import CheckpointStore
from bilevax._run.chunks import Sizes, compiled_chunk, looked_at, work_of
from bilevax._run.divergence import describe, fault
from bilevax._run.feeding import Feed
from bilevax._run.finish_report import Finish
from bilevax._run.history import History
from bilevax._run.interrupts import Interrupts
from bilevax._run.outcome import Outcome
from bilevax._run.recovery import MOST, Guard, Recovery, can_guard
from bilevax._run.referee import Referee
from bilevax._run.replay import Replays
from bilevax._run.settings import Settings
from bilevax._run.sharding import Shards
from bilevax._run.stop import Stop
from bilevax._run.verification import Verification
from bilevax._step.oracles import Oracles
from bilevax._step.pace import paces
from bilevax._step.state import State
from bilevax._util import checks, processes
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver

_CHUNK_SECONDS = 0.5  # about how long a compiled chunk lasts, and how soon signals and clocks are noticed
_FIRST_CHUNK = 8
_ADVICE_SECONDS, _ADVICE_SHARE = (
    60.0,
    5.0,
)  # what advice after a divergence may cost, and its share of the run
MOST_STEPS = 2**31 - 1
FIXED = ("objective", "gradient_norm", "lower_residual", "inverse_residual")  # measured in any run


@dataclasses.dataclass(frozen=True)
class Best:
    """The best iterate by a metric.

    With an `averaged` upper step x is the average: watch a metric of `state.average` then.
    """

    x: PyTree
    y: PyTree
    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What `minimize` returns.

    Attributes:
      x: the upper variable at the end, after exact steps if there were any (`finish`); its average, if the
        solver's upper step is `averaged`.
      y: the lower variables at the end, caught up; a dict if the levels have names. After exact steps, or
        where these kept x and have solved all blocks, they are y(x). Else they follow `state.x`; for those of
        an average, `solve_lower(problem, result.x)`.
      state: the whole state, from which `advance` can go on.
      history: what was measured; `history["objective"]` is an array, `history.frame()` a pandas frame.
      outcome: why the run ended.
      message: the same in a sentence, and what exact steps did, or why there were none.
      best: the best iterate by the metric that `patience` watches.
      oracles: the gradients, products, matrices and rows that the run has asked for since its start; None
        for a solver that does not say what it asks for.
      steps_per_second: speed of the compiled steps, compilation left out.
      compile_seconds: time until the first step: tracing, compiling, the first pass, reading a checkpoint.
      settings: what was given and what was chosen: solver, coefficients, sampling, key and steps.
      recoveries: where the run began to blow up and went back (see `Stop`).
      verification: a few blocks solved exactly where the run ended, before exact steps, as `verify` does;
        None if that was not done. Its message is what is to be doubted of x and y here.
      finish: what exact steps at the end did (see `Stop`); None if there were none.
    """

    x: PyTree
    y: PyTree
    state: State
    history: History
    outcome: Outcome
    message: str
    best: Best | None
    oracles: Oracles | None
    steps_per_second: float
    compile_seconds: float
    settings: Settings
    recoveries: tuple[Recovery, ...] = ()
    verification: Verification | None = None
    finish: Finish | None = None

    def plot(self, names: list[str] | None = None, against: str = "step") -> Any:
        """The history as a matplotlib figure; `figure.savefig("run.png")` writes it."""
        return self.history.plot(names, against)


def checked_steps(steps: Any, least: int) -> int:
    """How many steps to take; raises if they cannot be counted."""
    count = checks.whole_number("steps", steps, least)
    if count > MOST_STEPS:
        raise ValueError(
            f"steps must be at most {MOST_STEPS}, as a state counts them in 32 bits, got {steps}"
        )
    return count


class Run:
    """What changes while a run goes on."""

    def __init__(
        self,
        solver: AbstractSolver,
        problem: Problem,
        state: State,
        shards: Shards | None,
        begin: Callable[[AbstractSolver], State],
        feed: Feed | None,
        stop: Stop,
        steps: int,
        referee: Callable[[State], Referee | None] | None = None,
    ):
        self.inputs, self.begin, self.feed = (solver, problem), begin, feed
        # Of all steps, not of those that are left: a run that is resumed must have the same bits.
        self.work = math.inf if shards is not None else work_of(problem, state, steps)
        self.state, self.history, self.shards, self.stop = state, History(), shards, stop
        self.done, self.running, self.compile_seconds = 0, 0.0, 0.0
        self.total, self.counted = (0.0, 0.0), 0  # of f, since the last entry
        self.chunk = _FIRST_CHUNK
        self.failed, self.last_finite = "", 0
        self.best_iterate = jax.tree.map(jnp.copy, (state.settled.x, state.y)) if stop.patience else None
        self.best_value, self.best_step, self.stale = np.inf, 0, 0
        copy = looked_at(state, True)[1] if can_guard(state, stop.recover) else None
        self.guard = None if copy is None else Guard(copy)
        self.referee = None if copy is None or referee is None else referee(copy)
        self.steps = steps

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """How often the run went back."""
        return () if self.guard is None else tuple(self.guard.recoveries)

    @property
    def speed(self) -> float:
        """Steps per second."""
        return self.done / self.running if self.running else 0.0

    @property
    def last_entry(self) -> int:
        """The step of the last entry of the history; 0 if there is none."""
        return int(self.history.entries[-1]["step"]) if self.history.entries else 0

    @property
    def intact(self) -> bool:
        """Whether the state can be read: an error within a compiled chunk takes it along."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def compile(self) -> None:
        """Compiles the chunk, by taking no step."""
        self.state, _ = compiled_chunk(self.inputs, self.state, 0, shards=self.shards, work=self.work)
        jax.block_until_ready(self.state)

    def advance(self, boundary: int) -> None:
        """Takes a chunk of steps, at most up to a boundary."""
        tick, before = time.perf_counter(), self.done
        count = min(self.chunk, boundary - self.done)
        state, total = self._take(self.state, count, self.total)
        self.total = (float(total.high), float(total.low))
        self.state, self.done = state, int(state.step)
        self.counted += self.done - before
        elapsed = time.perf_counter() - tick
        self.running += elapsed
        (next_chunk,) = self.agreed(int(_CHUNK_SECONDS * (self.done - before) / elapsed))
        self.chunk = max(1, min(2**30, 4 * self.chunk, int(next_chunk)))
        if not np.isfinite(self.total[0]) and not self._recovered(before):
            self.failed = self._divergence(before)

    def _take(self, state: State, steps: int, total: tuple[float, float] = (0.0, 0.0)) -> Any:
        """Some steps, and the sum of f over them."""
        if self.feed is None:
            return compiled_chunk(self.inputs, state, steps, total, self.shards, self.work)
        return self.feed.advance(self.inputs, state, steps, total, self.shards)

    def _recovered(self, first: int) -> bool:
        """Goes back to the latest healthy state with a shorter step, if that may help."""
        guard = self.guard
        if guard is None or len(guard.recoveries) >= MOST:
            return False
        if fault(self._with_batches(), self.state, first, self.done):
            return False
        start, lost = int(guard.good.step), self.done
        if lost <= 1:  # f is not finite at the start
            return False
        held, total = self._take(guard.held(), lost - start)
        objective = float(total.high) / (lost - start)
        good, tried = (looked_at(one, True)[0] for one in (guard.good, held))
        what = guard.cause(self._entry(good, 0.0), self._entry(tried, objective))
        self._go_on_from(guard.back(lost, what, lambda: self.begin(self.inputs[0])))
        return True

    def _go_on_from(self, state: State) -> None:
        """Goes on from an earlier state."""
        self.state = state
        self.done = self.last_finite = int(state.step)
        self.total, self.counted = (0.0, 0.0), 0
        self.history = History([entry for entry in self.history.entries if entry["step"] <= self.done])
        if self.guard is not None:
            self.guard.count(self.history.entries)
        if self.referee is not None:
            self.referee.forget_after(self.done)

    def _went_astray(self, copy: State) -> bool:
        """Goes back to where F was least, with a shorter upper step, if it has risen since then.

        `copy` is one of the state.
        """
        final = self.done >= self.steps
        if self.referee is None or self.guard is None or len(self.recoveries) >= MOST:
            return False
        if not (final or self.referee.is_due(self.done)) or not self.referee.has_risen(copy, final):
            return False
        self._go_on_from(self.guard.give_up(self.done, self.referee.best))
        return True

    def _divergence(self, first: int) -> str:
        """What is not finite since a step, and which hyper-parameter to look at."""
        solver, problem = self.inputs

        def advice() -> str:
            # Several processes might not agree on how many replays to take; rows of the host are read once.
            if self.several_processes or self.feed is not None:
                return ""
            most = _ADVICE_SECONDS * self.speed + self.done
            replays = Replays(problem, self.begin, self.done, most, self.shards, self.work)
            return advise(solver, problem, replays)

        return describe(self._with_batches(), solver, self.state, first, self.done, advice)

    def _with_batches(self) -> Problem:
        """The problem, with the streamed batches of the latest step."""
        problem = self.inputs[1]
        return problem if self.feed is None else self.feed.fill(problem, self.done - 1, ahead=False)[0]

    def check(self) -> tuple[Sizes, State | None]:
        """How large the tracked gradients are, and a copy of the state if the run may go back to it.

        Notes if x or anything tracked is no longer finite.
        """
        seen = looked_at(self.state, self.guard is not None)
        if not self.failed and not bool(seen[0].finite):
            if self._recovered(self.last_finite):
                return looked_at(self.state, True)
            self.failed = self._divergence(self.last_finite)
        elif not self.failed:
            self.last_finite = self.done
        return seen

    def _entry(self, size: Sizes, objective: float) -> dict[str, float]:
        return {
            "step": self.done,
            "seconds": self.running,
            "objective": objective,
            "gradient_norm": float(size.gradient_norm),
            "lower_residual": float(size.lower_residual),
            "inverse_residual": float(size.inverse_residual),
        }

    def measure(self, measures: dict[str, Any]) -> dict[str, float] | None:
        """A new entry of the history; None if the run went back instead."""
        done = self.done
        size, copy = self.check()
        if self.done < done:
            return None
        entry = self._entry(size, sum(self.total) / max(self.counted, 1))
        if self.guard is not None and copy is not None and not self.failed:
            if self._waits(entry):
                self.guard.settled = abs(entry["objective"])
            elif self.guard.has_blown_up(entry) and self._recovered(self.last_entry):
                return None
            if self._went_astray(copy):
                return None
            self.guard.note(entry, copy)
        if measures:
            settled = self.state.settled
            for name, measure in measures.items():
                entry[name] = as_number(name, measure(self.inputs[1], settled))
        self.total, self.counted = (0.0, 0.0), 0
        self.history.append(entry)
        if self.best_iterate is not None:
            self.stale += 1
            if entry[self.stop.watch] < self.best_value and not self.failed:
                self.best_iterate = jax.tree.map(jnp.copy, (self.state.average, self.state.y))
                self.best_value, self.best_step, self.stale = entry[self.stop.watch], self.done, 0
        return entry

    def _waits(self, entry: dict[str, float]) -> bool:
        """Whether x waits for y to settle, so that f says nothing about x: it may rise by any factor."""
        assert self.guard is not None
        moving = paces(self.state.optimizer)
        returned = any(int(pace.resume) > self.last_entry for pace in moving)
        begins = any(float(pace.scale) == 0 for pace in moving)
        begins &= entry["lower_residual"] <= self.guard.largest["lower_residual"]
        return (returned or begins) and math.isfinite(entry["objective"])

    def outcome(self, steps: int, began: float, interrupts: Interrupts) -> Outcome | None:
        """Why to stop now; None to continue."""
        entries, stop = self.history.entries, self.stop
        if self.failed:
            return Outcome.DIVERGED
        if stop.tolerance is not None and entries and entries[-1]["gradient_norm"] <= stop.tolerance:
            return Outcome.CONVERGED
        if stop.patience is not None and self.stale >= stop.patience:
            return Outcome.PATIENCE
        if self.done >= steps:
            return Outcome.FINISHED
        late = stop.seconds is not None and time.monotonic() - began >= stop.seconds
        interrupted, late = self.agreed(interrupts.caught is not None, late)
        if interrupted:
            return Outcome.INTERRUPTED
        return Outcome.TIME if late else None

    def agreed(self, *numbers: float) -> list[float]:
        """Numbers that clocks and signals give, the same in all processes that share the blocks."""
        return processes.agreed(list(numbers)) if self.several_processes else list(numbers)

    @property
    def several_processes(self) -> bool:
        """Whether other processes take the same steps."""
        return self.shards is not None and self.shards.several_processes

    def save(self, store: CheckpointStore) -> None:
        """Starts to write a checkpoint of everything, unless something is no longer finite."""
        self.check()
        if self.failed:
            return
        notes = {
            "watch": self.stop.watch if self.best_iterate is not None else None,
            "history": self.history.entries,
            "running": self.running,
            "total": self.total,
            "counted": self.counted,
            "recoveries": [dataclasses.asdict(one) for one in self.recoveries],
            "settled": 0.0 if self.guard is None else self.guard.settled,
            "referee": None if self.referee is None else self.referee.notes(),
            "streams": None if self.feed is None else self.feed.positions(self.done),
            "best": [self.best_value if np.isfinite(self.best_value) else None, self.best_step, self.stale],
        }
        store.save(self.state, self._extra, notes)

    @property
    def _extra(self) -> Any:
        """What a checkpoint holds besides the state: the best iterate, and the states to go back to.

        Also where F is not looked at: the run may be resumed with more steps, and then it is.
        """
        good = None if self.guard is None else self.guard.good
        return self.best_iterate, good, good if self.referee is None else self.referee.best

    def finish(self, store: CheckpointStore | None) -> None:
        """Saves the last state, and returns when it is on disk."""
        if store is not None:
            self.save(store)
            store.wait()

    def continue_from(self, store: CheckpointStore) -> None:
        """Takes up the latest checkpoint, if there is one."""
        saved = store.restore(self.state, self._extra)
        if saved is None:
            return
        watch = self.stop.watch if self.best_iterate is not None else None
        try:
            watched = saved.notes["watch"]
            self._take_notes(saved.notes, int(saved.state.step))
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the notes of the checkpoint make no sense: {error!r}") from error
        if watched != watch:
            raise CheckpointError(
                f"the run to resume watched {watched!r}, this one watches {watch!r}: the best iterate "
                "so far is by another metric"
            )
        self.state, (self.best_iterate, good, best) = saved.state, saved.extra
        if self.referee is not None:
            self.referee.best = best
        if self.guard is not None:
            self.guard.good = good
            self.guard.count(self.history.entries)
        self.done = self.last_finite = int(self.state.step)

    def _take_notes(self, notes: dict[str, Any], done: int) -> None:
        history = [{name: float(value) for name, value in entry.items()} for entry in notes["history"]]
        steps = [int(entry["step"]) for entry in history]
        if steps != sorted(set(steps)) or not all(0 < step <= done for step in steps):
            raise ValueError(f"the history holds the steps {steps[:10]}")
        self.history = History([entry | {"step": step} for entry, step in zip(history, steps, strict=True)])
        self.running, self.counted = float(notes["running"]), int(notes["counted"])
        high, low = notes["total"]
        self.total = (float(high), float(low))
        if not np.isfinite([*self.total, self.running]).all():
            raise ValueError("the sum of f is not finite")
        if self.feed is not None:
            self.feed.restore(notes["streams"])
        if self.guard is not None:
            self.guard.recoveries = [Recovery(**one) for one in notes["recoveries"]]
            self.guard.settled = float(notes["settled"])
        if self.referee is not None and notes["referee"] is not None:
            self.referee.take(notes["referee"])
        value, step, stale = notes["best"]
        self.best_value = np.inf if value is None else float(value)
        self.best_step, self.stale = int(step), int(stale)

    def result(self, outcome: Outcome, oracles: Oracles | None, settings: Settings) -> Result:
        """What to return."""
        message = self.failed or f"{outcome} after {self.done} steps"
        best = None
        if self.best_iterate is not None and np.isfinite(self.best_value):
            x, y = self.best_iterate
            best = Best(x, y, self.best_step, self.best_value)
        state = self.state
        rest = (best, oracles, self.speed, self.compile_seconds, settings, self.recoveries)
        return Result(state.average, state.y, state, self.history, outcome, message, *rest)


def as_number(name: str, value: Any) -> float:
    """What a metric returned, as a number."""
    try:
        if value is not None and not isinstance(value, (str, bytes)) and np.shape(value) == ():
            return float(value)
    except (TypeError, ValueError):
        pass
    shape = getattr(value, "shape", None)
    got = type(value).__name__ if shape is None else f"shape {shape}"
    raise TypeError(f"metrics[{name!r}] must return one number, got {got}")
