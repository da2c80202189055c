"""The loop around compiled chunks: measuring, stopping, saving, and what a person sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import make_sampler
from bilevax._run.checkpoint import CheckpointError, Checkpoints, identity, saved_strata
from bilevax._run.chunks import compiled_chunk, compiled_init, numbers_as_arrays
from bilevax._run.interrupts import Interrupts
from bilevax._run.logs import Log, Logs
from bilevax._run.outcome import DivergedError, Outcome
from bilevax._run.progress import Choice, Progress, make_progress
from bilevax._run.run import FIXED, Result, Run
from bilevax._run.sharding import make_shards
from bilevax._step.oracles import count_oracles
from bilevax._step.state import State
from bilevax._util import checks
from bilevax._util.trees import PyTree
from bilevax.solvers.inputs import check_coefficients, first_rows
from bilevax.solvers.restart import Restart


def minimize(
    problem: Problem,
    solver: Any,
    x0: PyTree,
    y0: PyTree = None,
    *,
    steps: int,
    key: Array,
    blocks_per_step: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    initial_batch_size: int | Literal["all"] | None = None,
    mesh: Mesh | None = None,
    strata: int | None = None,
    metrics: Mapping[str, Callable[[Problem, State], Any]] | None = None,
    every: int | None = None,
    progress: Choice | Progress | None = "auto",
    seconds: float | None = None,
    tolerance: float | None = None,
    patience: int | None = None,
    watch: str = "objective",
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    save_seconds: float | None = 300.0,
    keep: int = 3,
    resume: bool = False,
    log: str | Path | Log | Sequence[Any] | None = None,
    throw: bool = True,
) -> Result:
    """Minimises F by a solver.

    Args:
      problem: what to solve.
      solver: `BSVRBv2(…)` or another method, or a `Restart` of one.
      x0: where x starts.
      y0: where the lower variables start, with the slots as leading axis; a dict if the levels have
        names. A mean level may be left None.
      steps: how many steps to take.
      key: the random key: the same key gives the same run.
      blocks_per_step: I, the blocks a step visits; None visits all of them.
      batch_size: B, the rows per visited block; None takes all of them.
      shuffle: blocks in shuffled epochs if True, else drawn anew in each step.
      initial_batch_size: rows per block of the first estimators; see `BSVRBv2.init`.
      mesh: devices that share the blocks along the axis "blocks" of this mesh, on one host or several; both m
        and `blocks_per_step` must be divisible by their number. Every process makes the same call.
      strata: the blocks are divided into so many runs of equal length, and a step draws as many of each;
        left out, one per device, or as many as the checkpoint has. The same number draws the same samples on
        any number of devices.
      metrics: functions of (problem, state), called between compiled chunks; each gives one number. The
        state's arrays are overwritten by the next step: copy what you keep.
      every: steps between two entries of the history; left out, a hundredth of the run.
      progress: "auto" (a bar on a terminal, lines elsewhere), "bar", "lines", or None for silence.
      seconds: stop after about so much time, compilation included.
      tolerance: stop when ‖z‖ is at most this.
      patience: stop when `watch` has not improved for so many entries; the best iterate is kept.
      watch: the metric that `patience` looks at; smaller is better.
      checkpoint: a directory for checkpoints, written in the background.
      save_every: steps between checkpoints.
      save_seconds: seconds between checkpoints; one is written at the end in any case.
      keep: how many of the latest checkpoints are kept.
      resume: go on from the latest checkpoint, if there is one; the run ends with the same bits as one that
        was never stopped.
      log: where every entry of the history goes while the run goes on: the path of a file of JSON lines, a
        `TensorBoard(folder)`, another `Log`, or a list of them.
      throw: raise if the run diverges; False returns the result with its outcome.

    The first SIGINT or SIGTERM ends the chunk, saves and returns; the second stops the program at once.

    Returns:
      A `Result`.

    Raises:
      DivergedError: if f is not finite any more, and `throw` is set. The last finite checkpoint stays.
      CheckpointError: if checkpoints cannot be written, or belong to another run. If a write fails, the
        error's `result` is what the run had reached.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> solver = bx.BSVRBv2(upper_step=0.1)
      >>> result = bx.minimize(
      ...     problem, solver, jnp.zeros(2), jnp.zeros((4, 2)),
      ...     steps=500, key=jax.random.key(0), progress=None,
      ... )
      >>> [round(float(value), 3) for value in result.x]  # the mean of the blocks
      [3.0, 4.0]
      >>> print(result.outcome)
      finished
    """
    began = time.monotonic()
    steps = checks.whole_number("steps", steps, 0)
    every = max(1, steps // 100) if every is None else checks.whole_number("every", every, 1)
    measures = _checked_metrics(metrics)
    _check_stopping(
        seconds, tolerance, patience, watch, measures, save_every, save_seconds, keep, checkpoint, resume
    )
    checks.solver(solver)
    shards = make_shards(mesh)
    display = make_progress(progress if shards is None or shards.speaks else None, steps)
    logs = Logs(log if shards is None or shards.speaks else None)
    # Inside the compiled init the solver's numbers are traced: what depends on their values is checked here.
    if strata is None:
        strata = saved_strata(checkpoint) if resume and checkpoint is not None else None
        strata = shards.devices if strata is None and shards is not None else strata
    sampler = make_sampler(problem, key, blocks_per_step, batch_size, shuffle, strata)
    method = solver.solver if isinstance(solver, Restart) else solver
    check_coefficients(method, problem, sampler)

    plan = {"blocks_per_step": blocks_per_step, "batch_size": batch_size, "shuffle": shuffle}
    plan |= {"initial_batch_size": initial_batch_size, "strata": sampler.strata}
    whole = problem
    if shards is not None:
        shards.check(solver, problem, x0, y0, key, plan)
        problem, (x0, y0, key) = shards.place(shards.spread(problem)), shards.place_start(x0, y0, key)
    state = compiled_init(solver, problem, x0, y0, key, shards, **plan)
    inputs = (numbers_as_arrays(solver), problem)
    run = Run(state, jax.tree.map(jnp.copy, (state.x, state.y)) if patience else None, shards)
    store = None
    if checkpoint is not None:
        together = shards is not None and shards.several_processes
        store = Checkpoints(checkpoint, identity(whole, solver, state), keep, together)
    begun = False

    def result(outcome: Outcome) -> Result:
        rows = getattr(method, "first_rows", first_rows)(initial_batch_size, sampler.batch_size)
        return run.result(outcome, count_oracles(whole, solver, sampler, run.done, rows))

    try:
        if store is not None:
            run.continue_from(store) if resume else store.require_none()
        run.state, _ = compiled_chunk(inputs, run.state, 0, shards=shards)
        jax.block_until_ready(run.state)
        logs.start(run.history.entries)
        run.compile_seconds = time.monotonic() - began
        saved, begun = time.monotonic(), True
        with Interrupts() as interrupts, display:
            while (outcome := run.outcome(steps, seconds, tolerance, patience, began, interrupts)) is None:
                boundary = min(steps, (run.done // every + 1) * every)
                if save_every is not None:
                    boundary = min(boundary, (run.done // save_every + 1) * save_every)
                run.advance(inputs, boundary)
                if run.done % every == 0 or run.done == steps or run.failed:
                    entry = run.measure(problem, measures, watch)
                    logs.write(entry)
                    shown = {n: v for n, v in entry.items() if n not in ("step", "seconds")}
                    display.update(run.done, run.speed, shown)
                due = save_every is not None and run.done % save_every == 0
                due |= save_seconds is not None and time.monotonic() - saved >= save_seconds
                if store is not None and run.agreed(due)[0] and not run.failed:
                    run.save(store)
                    saved = time.monotonic()
        if store is not None:
            if not run.failed:
                run.save(store)
            store.wait()
        # The end of a run that was cut short. It is not in the checkpoint: had the run gone on, there would
        # be no such entry.
        if run.done > (run.history.entries[-1]["step"] if run.history.entries else 0):
            logs.write(run.measure(problem, measures, watch))
    except CheckpointError as error:
        error.result = result(Outcome.INTERRUPTED) if begun else None
        raise
    finally:
        logs.close()
        if store is not None:
            store.close()
    reached = result(outcome)
    if outcome is Outcome.DIVERGED and throw:
        raise DivergedError(reached.message, reached)
    return reached


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


def _check_stopping(
    seconds: Any,
    tolerance: Any,
    patience: Any,
    watch: Any,
    measures: Mapping[str, Any],
    save_every: Any,
    save_seconds: Any,
    keep: Any,
    checkpoint: Any,
    resume: Any,
) -> None:
    checks.coefficient("seconds", seconds)
    checks.coefficient("tolerance", tolerance, zero=True)
    checks.coefficient("save_seconds", save_seconds)
    checks.whole_number("keep", keep, 1)
    if patience is not None:
        checks.whole_number("patience", patience, 1)
    if save_every is not None:
        checks.whole_number("save_every", save_every, 1)
    known = [*FIXED, *measures]
    if watch not in known:
        raise ValueError(f"watch must name a metric, one of {known}, got {watch!r}")
    if resume and checkpoint is None:
        raise ValueError("resume needs the directory of the checkpoints, got checkpoint=None")
