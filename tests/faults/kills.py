"""A process that is killed, at any file operation or moment, and taken up by another."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

from faults.operations import Operations, how_many
from faults.runs import Attempt, ViolationError, copy_of_stopped_run, saved_steps, settle

LOG = "log.jsonl"  # beside the folder of the run

TESTS = os.path.dirname(os.path.dirname(__file__))


@functools.cache
def _context():
    """Forks processes that have all imports behind them; JAX has not begun to compute in them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bilevax", "orbax.checkpoint"])
    return context


@functools.cache
def _cache():
    """Compiled programs, for the processes that come after the first."""
    return tempfile.mkdtemp(prefix="fault-cache-")


def _live(pipe, folder, cache, operation, which, times):
    """Runs until it is killed: by itself at an operation, or by the parent, who learns of every entry."""
    import jax

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    metrics = {"alive": lambda problem, state: pipe.send(int(state.step)) or 0.0}
    log = Path(folder).with_name(LOG)
    with Operations(folder, operation, lambda: [os.kill(os.getpid(), which) for _ in range(times)]):
        Attempt(folder, keep=2, save_every=7, metrics=metrics, logs=[log])
    pipe.send("done")


def _kill(rng, number, operation, which):
    context = _context()
    with copy_of_stopped_run() as folder:
        reports, pipe = context.Pipe(duplex=False)
        times = int(rng.integers(1, 3))  # a second signal ends the process at once
        arguments = (pipe, str(folder), _cache(), operation, which, times)
        process = context.Process(target=_live, args=arguments)
        process.start()
        pipe.close()
        reached, wanted = [], rng.integers(0, 6)
        try:
            while operation or len(reached) < wanted:
                reached.append(reports.recv())
        except EOFError:
            pass
        before = saved_steps(folder)
        if not operation and process.is_alive():
            for _ in range(times):
                os.kill(process.pid, which)
        process.join()
        after = saved_steps(folder)
        if max(after) < max(before):
            raise ViolationError(f"checkpoints {before} before the kill, {after} after it")
        if which != signal.SIGKILL and process.exitcode not in (0, 1, -which):
            raise ViolationError(f"exit status {process.exitcode} after signal {which}")
        return settle(folder, may_refuse=False, may_warn=False, log=folder.with_name(LOG))


def kill_at_operation(rng, number):
    """SIGKILL, SIGTERM or SIGINT at a file operation: in every phase of reading, writing and deleting."""
    which = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[rng.integers(4)]
    return _kill(rng, number, 1 + (number * 37) % (3 * how_many()), which)


def kill_at_moment(rng, number):
    """The same at a moment of its own, in compiled code too."""
    which = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[rng.integers(3)]
    return _kill(rng, number, 0, which)


if TESTS not in sys.path:  # for the processes that are forked
    sys.path.insert(0, TESTS)
