"""What follows the last step: the answer is checked, made exact where that is cheap, and doubted aloud."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from bilevax._problem.problem import Problem
from bilevax._run.chunks import work_of_a_step
from bilevax._run.finish import Finished, Kept, affordable_effort, finish
from bilevax._run.interrupts import Interrupts
from bilevax._run.knobs import Knobs
from bilevax._run.outcome import Outcome
from bilevax._run.remedies import joined, less_noise, newton_steps
from bilevax._run.run import Result, Run
from bilevax._run.sharding import Shards
from bilevax._run.stop import Stop
from bilevax._run.trend import rise, still_falls
from bilevax._run.verification import can_verify, verify
from bilevax._run.work import whole_work_of_a_step
from bilevax._step.pace import paces, shortest_window
from bilevax._step.state import State
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver

_WINDOWS, _FIRST_WINDOWS = 40, 16  # of `automatic_step`: enough to get somewhere; x gathers speed
_FAR_SHORTER = 1e-3  # than at first: so short are steps after five returns
_STILL_STEEP = 0.5  # ‖z‖, as a share of its largest value: x has hardly begun
_MEANT = 20  # steps, from which on a run is meant to get somewhere
_VERIFIED = 500  # steps of a run that is verified unasked
_LONGER = 0.1  # of the seconds that a run may take, for exact steps after them
_IN_TIME = 0.2  # of the work that exact steps may otherwise be: so much is done in that time


def verifies(stop: Stop, problem: Problem, state: State, steps: int, shards: Shards | None) -> bool:
    """Whether to solve a few blocks of a run of so many steps."""
    if shards is not None or stop.verify is not None:
        return shards is None and bool(stop.verify)
    work = steps * work_of_a_step(problem, state)
    return steps >= _VERIFIED and can_verify(problem, state.y, work)


def end(
    reached: Result,
    problem: Problem,
    x0: PyTree,
    run: Run,
    interrupts: Interrupts,
    *,
    solver: AbstractSolver,
    stop: Stop,
    shards: Shards | None,
) -> tuple[Result, str]:
    """The result of a run with all that is known about it, and what is to be doubted, if anything."""
    is_answer = reached.outcome not in (Outcome.DIVERGED, Outcome.INTERRUPTED)
    will_verify = is_answer and verifies(stop, problem, reached.state, run.done, shards)
    doubt = ""
    if shards is None and reached.outcome is Outcome.FINISHED:
        doubt = _too_short(run) or _went_back_often(reached)
        doubt = doubt or ("" if will_verify else _has_risen(problem, run, solver) or _is_falling(run))
    if not will_verify:
        return reached, doubt
    with interrupts:
        found = verify(problem, reached.state, x0, solver=solver)
        doubt = found.message or doubt
        if run.referee is not None and reached.outcome is Outcome.FINISHED:
            doubt = doubt or run.referee.still_falls(run.done, found.objective)
        until = time.monotonic() + (math.inf if stop.seconds is None else _LONGER * stop.seconds)
        if _finishes(stop, problem, reached.state, solver):

            def is_over() -> bool:
                return interrupts.caught is not None or time.monotonic() > until

            share = 1.0 if stop.seconds is None else _IN_TIME
            work = share * run.done * whole_work_of_a_step(solver, problem, reached.state)
            made = _exact_steps(problem, reached.state, x0, work, found.ill_posed, is_over)
            reached, doubt = _with(made, reached, run.done, doubt)
    # What is doubted is the answer that is returned.
    reached = dataclasses.replace(reached, verification=dataclasses.replace(found, message=doubt))
    if interrupts.caught is not None:
        reached = dataclasses.replace(reached, outcome=Outcome.INTERRUPTED)
        if reached.finish is not None:
            reached = dataclasses.replace(reached, message=f"{reached.message}; exact steps were interrupted")
    return reached, doubt


def _finishes(stop: Stop, problem: Problem, state: State, solver: AbstractSolver) -> bool:
    """Whether a run may end with exact steps: not if others choose its x, or keep it in a set."""
    knobs = Knobs(solver)
    is_ours = "upper_step" in knobs and knobs.values["upper_step"] is None
    return is_ours and stop.finish and stop.patience is None and not problem.random and int(state.step) > 0


def _exact_steps(
    problem: Problem,
    state: State,
    x0: PyTree,
    work: float,
    ill_posed: bool,
    is_over: Callable[[], bool],
) -> Finished | Kept:
    """What exact steps have made of the answer, where they are cheap."""
    if ill_posed:
        return Kept("y(x) is not unique")
    effort = affordable_effort(problem, state, work)
    if effort is None:
        return Kept("they would be too long beside the run, or need too much memory")
    try:
        return finish(problem, state, x0, effort, is_over)
    except Exception as error:  # too little memory, or a function that fails far from where the run was
        return Kept(f"they failed ({type(error).__name__}: {error})", failed=True)


def _with(made: Finished | Kept, reached: Result, steps: int, doubt: str) -> tuple[Result, str]:
    """The result after exact steps, and what is to be doubted then."""
    if isinstance(made, Kept):
        y = reached.y if made.y is None else made.y
        message = f"{reached.message}; no exact steps: {made.why}"
        if made.failed and not doubt:
            doubt = f"exact steps at the end were not taken: {made.why}; x and y are those of the last step"
        return dataclasses.replace(reached, y=y, message=message), doubt
    report, message = made.report, f"{reached.message}; {made.report}"
    after = dataclasses.replace(reached, x=made.x, y=made.y, finish=report, message=message)
    if report.is_steep and doubt and not report.doubt(steps):
        found = f"where ‖∇F‖ is still {report.slope:.2g} times its largest value"
        return after, f"exact steps found no less than F = {report.after:.4g}, {found}; before them: {doubt}"
    return after, report.doubt(steps)


def _went_back_often(reached: Result) -> str:
    """What to say if steps were shortened so much that x may hardly have moved since."""
    last = reached.recoveries[-1] if reached.recoveries else None
    if last is None or last.factor > _FAR_SHORTER:
        return ""
    return (
        f"the run went back {len(reached.recoveries)} times, and has taken {last.factor:.2g} times the "
        f"{last.what} since step {last.back_to}: x may be far from a minimum. Try another x0, standardised "
        "data, or compare with exact gradients (bx.value_and_hypergradient)"
    )


def _has_risen(problem: Problem, run: Run, solver: AbstractSolver) -> str:
    """What to say if f has been lower, where no blocks were solved to tell what F is."""
    found = rise(run.history["objective"].tolist()) if paces(run.state.optimizer) else None
    if found is None:
        return ""
    entry, least, latest = found
    step = int(run.history["step"][entry])
    newton = newton_steps(problem, problem.split("state.y", run.state.y), solver)
    choices = [*less_noise(problem, run.state.sampler), *newton, "another key", "bounds of x (bx.bounded)"]
    return (
        f"f has risen from {least:.4g} near step {step} to {latest:.4g} at the end: x may have run away from "
        "where it was better, or y stays behind. stop=bx.Stop(patience=20) keeps the best as result.best. "
        f"Try {joined(choices)}"
    )


def _is_falling(run: Run) -> str:
    """What to say if f still falls fast, where no blocks were solved to tell how far F is from its least."""
    share = still_falls(run.history["objective"].tolist()) if paces(run.state.optimizer) else 0.0
    if share == 0:
        return ""
    return (
        f"x is still on its way: {share:.0%} of the decrease of f came in the last quarter of the run: "
        f"try steps={4 * run.done} instead of {run.done}"
    )


def _too_short(run: Run) -> str:
    """What to try if the automatic upper step has not begun to move x, or not got far; empty if it has."""
    sampler, moving = run.state.sampler, paces(run.state.optimizer)
    window = shortest_window(sampler.per_step / sampler.blocks)
    enough = _WINDOWS * window
    if run.done < _MEANT or run.done >= enough or not moving:
        return ""
    advice = f"{run.done} steps were too few for that: try steps={enough} or more"
    if any(float(one.scale) == 0 for one in moving):
        return f"x has not moved yet: the automatic upper step waits while y and v settle, and {advice}"
    slopes = run.history["gradient_norm"]
    if run.done < _FIRST_WINDOWS * window and slopes[-1] > _STILL_STEEP * max(slopes):
        return f"x has not got far: the automatic upper step begins with short steps, and {advice}"
    return ""
