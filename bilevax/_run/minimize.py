"""The loop around compiled chunks: measuring, stopping, saving, and what a person sees."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import Mesh

from bilevax._problem.finite import check_finite
from bilevax._problem.problem import Problem
from bilevax._problem.row_means import check_row_means
from bilevax._problem.sampling import Sampler, Sampling, as_sampling, is_streamed
from bilevax._run.checkpoint import Checkpoint, as_checkpoint
from bilevax._run.checkpoint_store import CheckpointStore, saved_strata
from bilevax._run.chunks import compiled_start, numbers_as_arrays, prepare
from bilevax._run.ending import end, verifies
from bilevax._run.feeding import Feed
from bilevax._run.identity import identity
from bilevax._run.interrupts import Interrupts, report
from bilevax._run.logs import Log, Logs
from bilevax._run.outcome import DivergedError, Outcome
from bilevax._run.progress import Progress, make_progress
from bilevax._run.recovery import RecoveryWarning, can_guard
from bilevax._run.referee import make_referee
from bilevax._run.run import FIXED, MOST_STEPS, Result, Run, checked_steps
from bilevax._run.settings import Asked
from bilevax._run.sharding import Shards, make_shards
from bilevax._run.stop import Stop
from bilevax._run.verification import AccuracyWarning
from bilevax._step.state import State
from bilevax._util import checks
from bilevax._util.collector import collector_paused
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.default import chosen_solver
from bilevax.solvers.offsets import with_offsets
from bilevax.solvers.start_checks import check_feasible


def minimize(
    problem: Problem,
    x0: PyTree,
    y0: PyTree = None,
    *,
    solver: AbstractSolver | None = None,
    steps: int | None = None,
    key: Array | None = None,
    sampling: Sampling | None = None,
    blocks_per_step: int | Literal["all"] | None = None,
    batch_size: int | Literal["all"] | None = None,
    mesh: Mesh | None = None,
    metrics: Mapping[str, Callable[[Problem, State], Any]] | None = None,
    every: int | None = None,
    progress: str | Progress | None = "auto",
    stop: Stop | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    log: str | Path | Log | Sequence[Any] | None = None,
) -> Result:
    """Minimises F.

    Args:
      problem: what to solve.
      x0: where x starts.
      y0: where the lower variables start, with the slots as leading axis; a dict if the levels have
        names. A mean level may be left None.
      solver: `BSVRBv2(…)` or another method, or a `Restart` of one; left out, `BlockNewton()` for lower
        problems whose Hessians a step can afford, and `MMBO()` for others; `BSVRBv2()` where blocks share
        slots, and `F2SA()` where a lower solution stays in a set that is not a box.
      steps: how many steps to take; may be left out if `stop` says when to stop.
      key: the random key: the same key gives the same run; left out, `jax.random.key(0)`.
      sampling: how blocks and rows are drawn.
      blocks_per_step: I, the blocks a step visits, or "all", as in `Sampling`, for short.
      batch_size: B, the rows per visited block, or "all", as in `Sampling`, for short. If I or B is left out,
        a step over all blocks or rows is taken where it is cheap, else some are chosen: see `Sampling`.
      mesh: devices that share the blocks along the axis "blocks" of this mesh, on one host or several; both m
        and `blocks_per_step` must be divisible by their number. Every process makes the same call.
      metrics: functions of (problem, state), called between compiled chunks; each returns one number. The
        next step overwrites the state's arrays: copy what you keep.
      every: steps between two entries of the history; left out, a hundredth of the run.
      progress: "auto" (a bar on a terminal, lines elsewhere), "bar", "lines", or None for silence. It shows
        the speed, F as `history.estimate()` has it, and the latest entry of the history.
      stop: when to stop before the last step, as a `Stop`.
      checkpoint: a directory for checkpoints, or a `Checkpoint` that also says how often, how many, and
        whether to resume.
      log: where every entry of the history goes as soon as it is known: the path of a file of JSON lines, a
        `TensorBoard(folder)`, another `Log`, or a list of them.

    The first SIGINT or SIGTERM ends the chunk, saves, prints a line to stderr and returns; with
    `Stop(raise_on_interrupt=True)` it raises instead. The second signal stops the program at once.

    Returns:
      A `Result`. Its `settings` say what was chosen for all that was left out.

    Raises:
      DivergedError: if f, x or anything tracked is no longer finite, unless `stop` says otherwise. Only
        finite states are saved.
      KeyboardInterrupt: after a signal, if `stop` says so; its `result` is what the run has reached.
      CheckpointError: if checkpoints cannot be written, or belong to another run.

    An error in a metric, a log or a checkpoint does not lose the run: its state is saved if that is possible,
    and the error's `result` is what the run had reached.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> result = bx.minimize(
      ...     problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=bx.BSVRBv2(upper_step=0.1),
      ...     steps=500, key=jax.random.key(0), progress=None,
      ... )
      >>> [round(float(value), 3) for value in result.x]  # the mean of the blocks
      [3.0, 4.0]
      >>> print(result.outcome)
      finished
    """
    began = time.monotonic()
    stop = _as_stop(stop)
    every = _entries_every(every, steps)
    sampling = as_sampling(sampling, blocks_per_step, batch_size)
    asked = Asked(solver, steps, key, sampling)
    steps = _steps_to_take(steps, stop)
    key = jax.random.key(0) if key is None else key
    measures = _checked_metrics(metrics)
    stop.check_watch([*FIXED, *measures])
    saving = None if checkpoint is None else as_checkpoint(checkpoint)
    shards = None if mesh is None else make_shards(mesh)
    sampler = _with_strata(sampling, saving, shards).sampler(problem, key)
    solver = chosen_solver(problem, solver, y0, sampler)
    speaks = shards is None or shards.speaks
    display = make_progress(progress if speaks else None, steps)
    logs = Logs(log if speaks else None)
    solver.check(problem, sampler)

    with contextlib.ExitStack() as stack:
        feed = Feed(problem, sampler, steps) if is_streamed(problem) else None
        if feed is not None:
            stack.callback(feed.close)
        with collector_paused():
            started = _start(solver, problem, x0, y0, sampler, shards, feed, steps, stop.recover)
            looks = verifies(stop, problem, started[2], steps, shards)
            referee = functools.partial(make_referee, solver, problem, x0)
            run = Run(*started, feed, stop, steps, referee if looks else None)
        saves = None
        if saving is not None:
            together = shards is not None and shards.several_processes
            known = problem if feed is None else feed.blank(problem)
            same = identity(known.with_centres(run.state.centres), solver, run.state)
            saves = _Saves(saving, CheckpointStore(saving.directory, same, saving.keep, together))
            stack.callback(saves.store.close)
            run.continue_from(saves.store) if saving.resume else saves.store.require_none()
        with collector_paused():
            run.compile()
        stack.callback(logs.close)
        logs.start(run.history.entries)
        run.compile_seconds = time.monotonic() - began
        entries = _Entries(every, measures, logs, display)

        def result(outcome: Outcome) -> Result:
            settings = asked.settings(solver, problem, run.state, key)
            return run.result(outcome, solver.count_oracles(problem, sampler, run.done), settings)

        with Interrupts() as interrupts:
            try:
                outcome = _loop(run, steps, began, interrupts, entries, saves)
                if saves is not None:
                    run.finish(saves.store)
                # The last entry of a run that was cut short is not in the checkpoint: a run that was never
                # cut short has no such entry.
                if run.done > run.last_entry:
                    entries.add(run)
                logs.close()
            except BaseException as error:
                _rescue(error, run, saves, logs, result)
                raise
    reached = result(Outcome.DIVERGED if run.failed else outcome)
    blown_up = [one for one in reached.recoveries if one.why == "blow-up"]
    if blown_up and not run.failed:
        went = "; ".join(map(str, blown_up))
        warnings.warn(f"the run began to blow up and went back, {went}", RecoveryWarning, stacklevel=2)
    try:
        reached, doubt = end(reached, problem, x0, run, interrupts, solver=solver, stop=stop, shards=shards)
    except Exception as error:
        error.result = reached  # pyright: ignore[reportAttributeAccessIssue]
        error.add_note(f"All {run.done} steps were taken: this error's `result` holds the run.")
        raise
    if doubt:
        warnings.warn(doubt, AccuracyWarning, stacklevel=2)
    if reached.outcome is Outcome.DIVERGED and stop.throw:
        raise DivergedError(reached.message, reached)
    if reached.outcome is Outcome.INTERRUPTED:
        directory = None if saving is None else saving.directory
        line = interrupts.describe(run.done, steps, directory, raised=stop.raise_on_interrupt)
        if stop.raise_on_interrupt:
            interrupt = KeyboardInterrupt(line)
            interrupt.result = reached  # pyright: ignore[reportAttributeAccessIssue]
            raise interrupt
        if speaks:
            report(line)
    return reached


def _steps_to_take(steps: int | None, stop: Stop) -> int:
    """The steps that were given; as many as can be counted if something else ends the run."""
    if steps is not None:
        return checked_steps(steps, 0)
    if stop.seconds is None and stop.tolerance is None and stop.patience is None:
        raise ValueError("steps must be given unless stop ends the run, such as Stop(seconds=60), got None")
    return MOST_STEPS


def _entries_every(every: int | None, steps: int | None) -> int:
    """The steps between two entries of the history."""
    if every is not None:
        return checks.whole_number("every", every, 1)
    return 100 if steps is None else max(1, checked_steps(steps, 0) // 100)


@dataclasses.dataclass(frozen=True)
class _Entries:
    """How the history grows, and who is told."""

    every: int
    measures: dict[str, Callable[..., Any]]
    logs: Logs
    display: Progress

    def add(self, run: Run) -> None:
        """Measures, and tells the logs and the display."""
        entry = run.measure(self.measures)
        if entry is None:
            return
        self.logs.write(entry)
        shown = {name: value for name, value in entry.items() if name not in ("step", "seconds")}
        shown = {"F": run.history.estimate()} | shown
        self.display.update(run.done, run.speed, shown)


@dataclasses.dataclass
class _Saves:
    """When a run is saved, and where."""

    options: Checkpoint
    store: CheckpointStore
    last: float = dataclasses.field(default_factory=time.monotonic)

    def save_if_due(self, run: Run) -> None:
        due = self.options.steps is not None and run.done % self.options.steps == 0
        due |= self.options.seconds is not None and time.monotonic() - self.last >= self.options.seconds
        if run.agreed(due)[0]:
            run.save(self.store)
            self.last = time.monotonic()


def _loop(
    run: Run, steps: int, began: float, interrupts: Interrupts, entries: _Entries, saves: _Saves | None
) -> Outcome:
    """Takes chunks of steps, with all that happens between them, until there is a reason to stop."""
    failures: list[BaseException] = []
    with entries.display:
        try:
            return _steps(run, steps, began, interrupts, entries, saves)
        except BaseException as error:
            failures.append(error)
            raise
    raise failures[0]  # a display must not hide an error


def _steps(
    run: Run, steps: int, began: float, interrupts: Interrupts, entries: _Entries, saves: _Saves | None
) -> Outcome:
    periods = [entries.every]
    if saves is not None and saves.options.steps is not None:
        periods.append(saves.options.steps)
    if run.done % entries.every == 0 and run.done > run.last_entry:
        entries.add(run)  # the run was saved after an error in a metric, without this entry
    recovered, logged = len(run.recoveries), 0
    while (outcome := run.outcome(steps, began, interrupts)) is None:
        run.advance(min(steps, *((run.done // period + 1) * period for period in periods)))
        due = run.done % entries.every == 0 or run.done == steps or run.failed
        if due and run.done > run.last_entry:  # not if the run went back to an entry
            entries.add(run)
        if saves is not None:
            saves.save_if_due(run)
        logged = max(logged, run.last_entry)
        if len(run.recoveries) > recovered:
            recovered = len(run.recoveries)
            if run.last_entry < logged:
                entries.logs.restart(run.history.entries)
            if saves is not None:
                saves.store.forget_after(run.done)
    return outcome


def _rescue(
    error: BaseException,
    run: Run,
    saves: _Saves | None,
    logs: Logs,
    result: Callable[[Outcome], Result],
) -> None:
    """After an error: saves what the run has reached, attaches it to the error, and closes the logs."""
    saved = ""
    if saves is not None and not saves.store.failed and not run.several_processes:
        with contextlib.suppress(Exception):
            run.finish(saves.store)
            saved = "" if run.failed else ", and a checkpoint of it was written"
    with contextlib.suppress(Exception):
        if run.intact:
            error.result = result(Outcome.INTERRUPTED)  # pyright: ignore[reportAttributeAccessIssue]
            error.add_note(f"The run had reached step {run.done}: this error's `result` holds it{saved}.")
    try:
        logs.close()
    except BaseException as other:
        error.add_note(f"A log could not be closed either: {type(other).__name__}: {other}")


def _start(
    solver: AbstractSolver,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    sampler: Sampler,
    shards: Shards | None,
    feed: Feed | None,
    steps: int,
    recover: bool | None,
) -> tuple[AbstractSolver, Problem, State, Shards | None, Callable[[AbstractSolver], State]]:
    """The solver and the problem as a compiled chunk takes them, the state before the first step, the devices
    that share the blocks, and how any solver begins."""
    check_finite(problem, x0, y0)
    check_feasible(problem, y0)
    ready = None
    if shards is None and feed is None:
        with contextlib.suppress(Exception):  # what is wrong is said below, check by check
            ready = with_offsets(problem, solver, x0, y0, sampler)
            prepare(solver, ready, x0, y0, sampler, steps, lambda state: can_guard(state, recover))
    check_row_means(problem, x0, y0)
    if feed is not None:
        problem, _ = feed.fill(problem, 0, ahead=False)
    if shards is None:
        problem = ready or with_offsets(problem, solver, x0, y0, sampler)
    else:
        shards.check(solver, problem, x0, y0, sampler)
        problem = shards.place(shards.spread(problem))
        x0, y0, sampler = shards.place_start(x0, y0, sampler)

    def begin(solver: AbstractSolver) -> State:
        return compiled_start(solver, problem, x0, y0, sampler, shards)

    return numbers_as_arrays(solver), problem, begin(solver), shards, begin


def _with_strata(sampling: Sampling, saving: Checkpoint | None, shards: Shards | None) -> Sampling:
    """The strata of the run to resume, else one per device, unless the user chose a number."""
    strata = sampling.strata
    if strata is None and saving is not None and saving.resume:
        strata = saved_strata(saving.directory)
    if strata is None and shards is not None:
        strata = shards.devices
    return dataclasses.replace(sampling, strata=strata)


def _as_stop(stop: Stop | None) -> Stop:
    if stop is not None and not isinstance(stop, Stop):
        raise TypeError(f"stop must be a bilevax.Stop, got {type(stop).__name__}")
    return stop or Stop()


def _checked_metrics(metrics: Any) -> dict[str, Callable[..., Any]]:
    if not (metrics is None or isinstance(metrics, Mapping)):
        raise TypeError(
            f"metrics must be a dict of functions of (problem, state), got {type(metrics).__name__}"
        )
    measures = dict(metrics or {})
    for name, measure in measures.items():
        if name in ("step", "seconds", *FIXED):
            raise ValueError(f"metrics must not be called {name!r}: the history has that already")
        if not callable(measure):
            raise TypeError(
                f"metrics[{name!r}] must be a function of (problem, state), got {type(measure).__name__}"
            )
    return measures
