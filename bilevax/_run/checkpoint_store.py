"""Checkpoints of a run: written in the background, checked when read, one writer at a time."""

from __future__ import annotations

import contextlib
import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bilevax._run import checkpoint_arrays, checkpoint_files
from bilevax._run.checkpoint import CheckpointError
from bilevax._run.digest import checksum
from bilevax._run.directory_lock import DirectoryLock
from bilevax._run.identity import differences
from bilevax._step.state import State
from bilevax._util import processes

FORMAT = 6


class Saved(NamedTuple):
    """What a checkpoint holds."""

    state: State
    extra: Any
    notes: dict[str, Any]


class Pending(NamedTuple):
    """A checkpoint that is being written.

    Attributes:
      step: its step.
      like: what its arrays are read into; None where processes write parts of arrays, because devices may
        have no room for the arrays twice.
      sums: checksums of its arrays.
    """

    step: int
    like: dict[str, Any] | None
    sums: dict[str, int]


class CheckpointStore:
    """The checkpoints in a directory, locked for as long as this object is open.

    A checkpoint is good once it was read, or written and read back. Only good ones are deleted, the oldest
    first, when more than `keep` of them are on disk. docs/running.md lists the order of all this, and what is
    left after a crash at any point.

    Args:
      directory: where they live; made if missing.
      identity: what a checkpoint must have in common with the run that continues it (`identity`).
      keep: how many of the latest to keep.
      together: several processes write their parts; each of them must make every call.

    Raises:
      CheckpointError: if the directory cannot be written, or another run holds it.
    """

    def __init__(
        self, directory: str | Path, identity: dict[str, Any], keep: int = 3, together: bool = False
    ):
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            raise ImportError('checkpoints need orbax: pip install "bilevax[checkpoints]"') from error
        self.directory, self.identity = Path(directory).absolute(), identity
        self._keep, self._together, self._args = keep, together, orbax.args
        self.failed = False  # a write: no other is tried
        self._good: set[int] = set()  # the steps of the good checkpoints
        self._pending: Pending | None = None
        self._lock: DirectoryLock | None = None  # the first process holds it
        try:
            self._everywhere(self._enter)
            # Threads that wait for folders which cannot be made would keep the program from ending.
            options = orbax.options.AsyncOptions(create_directories_asynchronously=False)
            self._writer = orbax.AsyncCheckpointer(orbax.CompositeCheckpointHandler(), async_options=options)
        except BaseException as error:
            self._release()
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            raise self._unusable(error) from error

    def _enter(self) -> None:
        """Locks the directory, and removes what a run left unfinished when it was killed."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._is_first:
                self._lock = DirectoryLock(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoints to {self.directory}: {error}") from error
        for step in self.steps():
            checkpoint_files.require_files(self._path(step))
        if self._is_first:
            checkpoint_files.delete_unfinished(self.directory)

    def _unusable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"cannot use {self.directory} for checkpoints: {_line(error)}")

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, in order.

        Raises:
          CheckpointError: if the directory cannot be listed.
        """
        try:
            return checkpoint_files.steps_in(self.directory)
        except OSError as error:
            raise self._unusable(error) from error

    def require_none(self) -> None:
        """Raises if there are checkpoints: those of a new run must not be mixed with those of an old one."""
        if steps := self._agreed_steps():
            raise CheckpointError(
                f"{self.directory} holds checkpoints of steps {steps}: go on with resume=True, or give a new "
                "run a directory of its own"
            )

    # --- writing ---------------------------------------------------------------

    def save(self, state: State, extra: Any, notes: dict[str, Any]) -> None:
        """Starts to write the state, other arrays and JSON notes; returns before they are on disk.

        Raises:
          CheckpointError: if this or the write before it failed; what was there before is unharmed.
        """
        self.wait()
        step = int(state.step)
        if step in self._good:
            return
        leaves = jax.tree.leaves((state, extra))
        meta = {"format": FORMAT, "identity": self.identity, "notes": json.loads(json.dumps(notes))}
        meta = checkpoint_files.sealed(meta | {"sums": [checksum(leaf) for leaf in leaves]})
        # Written in the background, so what will change is copied now. (The writer itself copies arrays that
        # other processes hold parts of.)
        parts = [checkpoint_arrays.in_parts(leaf) for leaf in leaves]
        arrays = checkpoint_arrays.packed(
            [leaf if part else processes.on_host(leaf) for leaf, part in zip(leaves, parts, strict=True)]
        )
        items = {"arrays": self._args.StandardSave(arrays), "meta": self._args.JsonSave(meta)}
        self._guard(lambda: self._writer.save(self._path(step), args=self._args.Composite(**items)))
        if any(parts):
            self._pending = Pending(step, None, {})
        else:
            like = {name: checkpoint_arrays.blank(array) for name, array in arrays.items()}
            self._pending = Pending(step, like, checkpoint_arrays.checksums(arrays))

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          CheckpointError: if a write failed.
        """
        self._guard(self._finish)

    def _finish(self) -> None:
        """Waits for the write, makes sure that it succeeded, and deletes what is no longer kept."""
        pending, self._pending = self._pending, None
        self._everywhere(self._wait_for_writer)
        if pending is None:
            return
        try:
            # Metadata first: reading arrays waits for all processes.
            self._everywhere(lambda: checkpoint_files.read_meta(self._path(pending.step)))
            self._everywhere(lambda: self._verify(pending))
        except Exception as error:
            # If the read failed, the checkpoint may be good: a resumed run tries again.
            if self._is_first and _severity(error) == _DAMAGED:
                checkpoint_files.set_aside(self._path(pending.step))
            raise
        self._everywhere(lambda: self._keep_latest(pending.step))

    def _wait_for_writer(self) -> None:
        self._writer.wait_until_finished()
        if self._lock is not None:
            self._lock.check()

    def _verify(self, pending: Pending) -> None:
        """Raises unless what was written can be read: the writer may miss an error of the file system."""
        if pending.like is not None:
            read = self._read_arrays(pending.step, pending.like)
            if checkpoint_arrays.checksums(read) != pending.sums:
                raise ValueError("it holds other arrays than were written")

    def _keep_latest(self, step: int) -> None:
        """Counts a checkpoint among the good ones once it is durable, and deletes the oldest of them."""
        if self._is_first:
            # The writer syncs the arrays only: metadata and names would not survive a power failure.
            checkpoint_files.sync(self._path(step))
        self._good.add(step)
        for old in sorted(self._good)[: -self._keep]:
            self._good.remove(old)
            if self._is_first and old in self.steps():
                checkpoint_files.delete(self._path(old))

    def forget_after(self, step: int) -> None:
        """Deletes this run's checkpoints of later steps: it went back, and will take them in another way."""
        self.wait()
        for later in sorted(one for one in self._good if one > step):
            self._good.remove(later)
            if self._is_first and later in self.steps():
                checkpoint_files.delete(self._path(later))

    # --- reading ---------------------------------------------------------------

    def restore(self, state: State, extra: Any) -> Saved | None:
        """The latest checkpoint that can be read; None if there is none.

        A damaged one is reported as a warning, and the one before it is used.

        Args:
          state: a state of the run that is to be continued, for its structure.
          extra: the other arrays, likewise.

        Raises:
          CheckpointError: if the checkpoint is of another run, or all are damaged.
        """
        steps = self._agreed_steps()
        for place, step in reversed(list(enumerate(steps))):
            try:
                meta = self._everywhere(lambda step=step: self._read_meta(step, state, extra))
                saved = self._everywhere(lambda step=step, meta=meta: self._read(step, meta, state, extra))
            except CheckpointError:
                raise
            except Exception as error:
                if checkpoint_files.may_pass(error):
                    raise CheckpointError(
                        f"checkpoint {self._path(step)} could not be read ({_line(error)}); nothing was "
                        "changed: try again, or move it away to use the one before it"
                    ) from error
                warnings.warn(
                    f"checkpoint {self._path(step)} is damaged ({_line(error)}); trying the one before it",
                    stacklevel=3,
                )
                continue
            self._everywhere(lambda later=steps[place + 1 :]: self._set_aside(later))
            self._good = {step, *filter(self._is_ours, steps[:place])}
            return saved
        if steps:
            raise CheckpointError(f"all checkpoints in {self.directory} are damaged: steps {steps}")
        return None

    def _read_meta(self, step: int, state: State, extra: Any) -> dict[str, Any]:
        """The metadata of a checkpoint; raises if it is not one of this run."""
        path = self._path(step)
        meta = checkpoint_files.read_meta(path)
        if meta["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {meta['format']}, expected {FORMAT}")
        found = differences(meta["identity"], self.identity)
        if found:
            raise CheckpointError(f"checkpoint {path} belongs to another run: {'; '.join(found)}")
        if len(meta["sums"]) != len(jax.tree.leaves((state, extra))):
            raise CheckpointError(
                f"checkpoint {path} was written with other options of Stop, patience or recover: resume it "
                "with the same"
            )
        return meta

    def _read(self, step: int, meta: dict[str, Any], state: State, extra: Any) -> Saved:
        """The arrays of a checkpoint, compared with the checksums in its metadata."""
        leaves, structure = jax.tree.flatten((state, extra))
        read = self._read_arrays(step, checkpoint_arrays.template(leaves))
        arrays = [
            checkpoint_arrays.placed(array, leaf)
            for array, leaf in zip(checkpoint_arrays.unpacked(read, leaves), leaves, strict=True)
        ]
        for number, (array, expected) in enumerate(zip(arrays, meta["sums"], strict=True)):
            if checksum(array) != expected:
                raise ValueError(f"the checksum of array {number} does not match")
        state, extra = jax.tree.unflatten(structure, arrays)
        if int(state.step) != step:
            raise ValueError(f"it holds step {int(state.step)}")
        return Saved(state, extra, meta["notes"])

    def _read_arrays(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        items = self._args.Composite(arrays=self._args.StandardRestore(like))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._writer.restore(self._path(step), args=items)["arrays"]

    def _is_ours(self, step: int) -> bool:
        """Whether a checkpoint is one of this run: others are not deleted."""
        with contextlib.suppress(Exception):
            return not differences(checkpoint_files.read_meta(self._path(step))["identity"], self.identity)
        return False

    def _set_aside(self, steps: list[int]) -> None:
        try:
            for step in steps if self._is_first else []:
                checkpoint_files.set_aside(self._path(step))
        except OSError as error:
            raise CheckpointError(f"damaged checkpoints could not be renamed: {error}") from error

    # --- both ------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the writes and releases the lock; `wait` reports whether they succeeded."""
        try:
            with contextlib.suppress(Exception):  # it repeats what `wait` or `save` has raised
                self._writer.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def _is_first(self) -> bool:
        """Whether this process locks, renames and deletes."""
        return not self._together or jax.process_index() == 0

    def _path(self, step: int) -> Path:
        return checkpoint_files.path_of(self.directory, step)

    def _everywhere(self, act: Callable[[], Any]) -> Any:
        """Does something in every process; if it fails in one, all raise an error of the same severity."""
        found, failure = None, None
        try:
            found = act()
        except Exception as error:
            failure = error
        if self._together:
            own = 0 if failure is None else _severity(failure)
            (worst,) = processes.agreed([own])
            if worst > own:
                kind = CheckpointError if worst == _REFUSED else ValueError
                failure = kind(f"another process could not use {self.directory}; its error says why")
        if failure is not None:
            raise failure
        return found

    def _agreed_steps(self) -> list[int]:
        """The steps; raises if processes see different ones, as they would not resume from the same."""
        steps = self._everywhere(self.steps)
        if not self._together:
            return steps
        word = zlib.crc32(repr(steps).encode())
        halves = [word >> 16, word & 0xFFFF]  # `agreed` takes floats of 24 bits
        *highest, first, second = processes.agreed([*halves, *(-half for half in halves)])
        if highest != [-first, -second]:
            raise CheckpointError(
                f"the processes see different checkpoints in {self.directory} (this one those of steps "
                f"{steps}): it must be one directory that all of them share"
            )
        return steps

    def _guard(self, act: Callable[[], Any]) -> None:
        try:
            self._everywhere(act)
        except Exception as error:
            self.failed, kept = True, []
            with contextlib.suppress(CheckpointError):
                kept = [step for step in self.steps() if step in self._good]
            full = "No space left" in str(error)
            raise CheckpointError(
                f"a checkpoint could not be written to {self.directory}: "
                f"{'the disk is full (No space left on device)' if full else _line(error)}; "
                f"those of steps {kept} are unharmed"
            ) from error


def saved_strata(directory: str | Path) -> int | None:
    """The strata of the run whose checkpoints these are, so that other devices can continue it."""
    steps: list[int] = []
    with contextlib.suppress(OSError):  # `restore` will say what is wrong
        steps = checkpoint_files.steps_in(Path(directory))
    for step in reversed(steps):
        with contextlib.suppress(Exception):
            meta = checkpoint_files.read_meta(checkpoint_files.path_of(Path(directory), step))
            return int(meta["identity"]["strata"])
    return None


_DAMAGED, _REFUSED = 1, 2


def _severity(error: Exception) -> int:
    """Whether a checkpoint is damaged, or nothing is known about it."""
    refused = isinstance(error, CheckpointError) or checkpoint_files.may_pass(error)
    return _REFUSED if refused else _DAMAGED


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
