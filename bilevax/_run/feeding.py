"""Batches from the host for compiled chunks: windows of steps, read one ahead by a thread."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._problem.rows import Rows
from bilevax._problem.sampling import Sampler
from bilevax._problem.streamed import Streamed, Window
from bilevax._run.chunks import compiled_chunk
from bilevax._run.sharding import Shards
from bilevax._step.clocks import CompensatedSum
from bilevax._step.state import State
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver

_BYTES = 2**26  # of a window, of which two are held
_MOST = 1024  # steps of a window
_REMEMBERED = 8  # places that an iterator can be taken back to


class Feed:
    """The streamed sources of a run.

    A run that needs a step of another window waits for it; then the next window is read while the steps of
    this one are computed. An error of a source is raised when the run has taken all steps before it.

    Args:
      problem: the problem.
      sampler: the plan of sampling.
      steps: how many steps the run takes at most: no batch after them is read.
    """

    def __init__(self, problem: Problem, sampler: Sampler, steps: int):
        sources = {"upper_data": problem.upper_data}
        several = len(problem.lower_data) > 1
        sources |= {
            f"lower_data[{place}]" if several else "lower_data": one
            for place, one in enumerate(problem.lower_data)
        }
        found = {name: one for name, one in sources.items() if isinstance(one, Streamed)}
        self.sampler, self.steps = sampler, steps
        self.readers = {id(one.source): _Reader(name, one) for name, one in found.items()}
        self.length = window_length(problem, sampler, steps)
        self._plan = jax.jit(jax.vmap(sampler.blocks_at))
        self._thread = ThreadPoolExecutor(1, "bilevax-rows")
        self._wide = jnp.result_type(float).itemsize == 8
        self._windows: dict[int, Future[_Read]] = {}

    def close(self) -> None:
        """Reads nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def fill(self, problem: Problem, step: int, ahead: bool = True) -> tuple[Problem, int]:
        """The problem with the batches of the window that a step is in, and the step after the last of them.

        Raises:
          Exception: what a source has raised, if it has no batch of this step.
        """
        first = step // self.length * self.length
        read = self._window(first).result()
        if read.end <= step:
            self._windows.pop(first, None)
            assert read.error is not None
            raise read.error
        if ahead and read.error is None and read.end < self.steps:
            self._window(read.end)
        self._windows = {k: one for k, one in self._windows.items() if k >= first}

        def change(rows: Rows) -> Rows:
            return rows.filled(read.windows[id(rows.source)]) if isinstance(rows, Streamed) else rows

        return problem.with_rows(change), read.end

    def blank(self, problem: Problem) -> Problem:
        """The problem with one step's batches of zeros."""
        return blank_problem(problem, self.sampler, 1)

    def advance(
        self,
        inputs: tuple[AbstractSolver, Problem],
        state: State,
        steps: int,
        total: tuple[float, float],
        shards: Shards | None,
    ) -> tuple[State, CompensatedSum]:
        """As `compiled_chunk`, window by window.

        If a source fails, the steps before are taken, and the next call raises.
        """
        solver, problem = inputs
        at = int(state.step)
        last, summed = at + steps, CompensatedSum(*(np.asarray(part) for part in total))  # pyright: ignore
        taken = False
        while at < last:
            try:
                filled, end = self.fill(problem, at)
            except Exception:
                if taken:
                    break
                raise
            before = (float(summed.high), float(summed.low))
            state, summed = compiled_chunk((solver, filled), state, min(end, last) - at, before, shards)
            taken, reached = True, int(state.step)
            if reached < min(end, last):  # f is not finite
                break
            at = reached
        return state, summed

    def _window(self, first: int) -> Future[_Read]:
        if first not in self._windows:
            self._windows[first] = self._thread.submit(self._read, first)
        return self._windows[first]

    def _read(self, first: int) -> _Read:
        """A window, in the precision of the thread that asked for it: `jax.enable_x64` is set by thread."""
        with jax.enable_x64(self._wide):
            return self._read_here(first)

    def _read_here(self, first: int) -> _Read:
        """The batches of a window, as far as its sources have them."""
        count = min(self.length, self.steps - first)
        blocks = np.asarray(self._plan(jnp.arange(first, first + self.length, dtype=jnp.int32)))
        held: dict[int, list[list[np.ndarray]]] = {key: [] for key in self.readers}
        error: BaseException | None = None
        done = 0
        for place in range(count):
            try:
                batches = {
                    key: reader.batch(first + place, blocks[place], self.sampler)
                    for key, reader in self.readers.items()
                }
            except Exception as raised:
                error = raised
                break
            for key, leaves in batches.items():
                held[key].append(leaves)
            done += 1
        for reader in self.readers.values():
            reader.note()
        read = self.readers if done else {}
        windows = {key: self._stacked(one.rows, first, held[key]) for key, one in read.items()}
        return _Read(windows, first + done, error)

    def _stacked(self, rows: Streamed, first: int, batches: list[list[np.ndarray]]) -> Window:
        """A window that always has the same shape: what is missing at its end repeats the last batch."""
        missing = self.length - len(batches)
        leaves = [np.stack([*column, *[column[-1]] * missing]) for column in zip(*batches, strict=True)]
        placed = jax.tree.unflatten(rows.structure, [jnp.asarray(leaf) for leaf in leaves])
        return Window(jnp.asarray(first, jnp.int32), placed)

    def positions(self, step: int) -> list[Any]:
        """What a checkpoint at a step holds of the sources, as JSON."""
        first = step // self.length * self.length
        return [reader.position(first) for reader in self.readers.values()]

    def restore(self, positions: Any) -> None:
        """Takes up the positions of a checkpoint."""
        self._windows = {}
        for reader, position in zip(self.readers.values(), positions, strict=True):
            reader.restore(position)


class _Read:
    """A window that was read: its batches, the first step that it lacks, and why it lacks it."""

    def __init__(self, windows: dict[int, Window], end: int, error: BaseException | None):
        self.windows, self.end, self.error = windows, end, error


class _Reader:
    """One source, read in order."""

    def __init__(self, name: str, rows: Streamed):
        self.name, self.rows = name, rows
        self._iterator: Iterator[PyTree] | None = None
        self._next = 0  # the step of the next batch of the iterator
        self._known: dict[int, Any] = {}  # states of the iterator, by the step of the next batch

    def batch(self, step: int, blocks: np.ndarray, sampler: Sampler) -> list[np.ndarray]:
        """The leaves of a step's batch."""
        size = sampler.batch_size
        assert size is not None
        try:
            fetch = self.rows.source.fetch
            batch = self._taken(step) if fetch is None else fetch(step, blocks, size)
        except StopIteration:
            raise RuntimeError(
                f"the batches of {self.name} (Streamed) ended after {self._next}: there is none for step "
                f"{step}"
            ) from None
        except Exception as error:
            raise RuntimeError(
                f"{self.name} (Streamed) could not read the batch of step {step}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return self.rows.checked(self.name, step, batch, len(blocks), size)

    def _taken(self, step: int) -> PyTree:
        """The batch of a step from an iterator, which is moved there if it is elsewhere."""
        if self._iterator is None or self._next != step:
            self._seek(step)
        assert self._iterator is not None
        batch = next(self._iterator)
        self._next += 1
        return batch

    def note(self) -> None:
        """Remembers where the iterator is, if it can say so; and a few places before."""
        if self._iterator is not None and hasattr(self._iterator, "get_state"):
            latest = sorted(self._known)[-_REMEMBERED:]
            state = self._iterator.get_state()  # pyright: ignore[reportAttributeAccessIssue]
            self._known = {step: self._known[step] for step in latest} | {self._next: state}

    def _seek(self, step: int) -> None:
        batches = self.rows.source.batches
        assert batches is not None
        self._iterator, self._next = iter(batches), 0
        near = max((known for known in self._known if known <= step), default=None)
        if near is not None and hasattr(self._iterator, "set_state"):
            self._iterator.set_state(self._known[near])  # pyright: ignore[reportAttributeAccessIssue]
            self._next = near
        while self._next < step:
            next(self._iterator)
            self._next += 1

    def position(self, step: int) -> Any:
        """The state of the iterator before the batch of a step, as JSON; None if it has none."""
        state = self._known.get(step)
        if state is None:
            return None
        if isinstance(state, bytes):
            return {"step": step, "bytes": base64.b64encode(state).decode()}
        try:
            return {"step": step, "state": json.loads(json.dumps(state))}
        except (TypeError, ValueError):
            return None  # the batches before are read again

    def restore(self, position: Any) -> None:
        """Continues from a position."""
        self._iterator, self._next, self._known = None, 0, {}
        if position is not None:
            stored = position.get("state")
            state = base64.b64decode(position["bytes"]) if "bytes" in position else stored
            self._known = {int(position["step"]): state}


def window_length(problem: Problem, sampler: Sampler, steps: int = _MOST) -> int:
    """The steps of a window, for runs of so many steps."""
    sources = {id(one): one for one in (problem.upper_data, *problem.lower_data) if isinstance(one, Streamed)}
    row = sum(math.prod(s.shape) * s.dtype.itemsize for one in sources.values() for s in one.shapes)
    each = row * sampler.per_step * (sampler.batch_size or 1)
    return max(1, min(_MOST, steps, _BYTES // max(each, 1)))


def blank_problem(problem: Problem, sampler: Sampler, length: int | None = None) -> Problem:
    """The problem with batches of zeros for some steps, for programs that are traced and never run."""
    size = sampler.batch_size
    steps = window_length(problem, sampler) if length is None else length

    def change(rows: Rows) -> Rows:
        if not isinstance(rows, Streamed) or size is None:
            return rows
        leaves = [np.zeros((steps, sampler.per_step, size, *one.shape), one.dtype) for one in rows.shapes]
        zeros = jax.tree.unflatten(rows.structure, [jnp.asarray(leaf) for leaf in leaves])
        return rows.filled(Window(jnp.zeros((), jnp.int32), zeros))

    return problem.with_rows(change)
