"""Checkpoints of a run: written in the background, checked when read, one writer at a time."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._run.checkpoint import CheckpointError
from bilevax._run.digest import SMALL, checksum
from bilevax._run.identity import differences
from bilevax._step.state import State
from bilevax._util import processes

FORMAT = 5


class Saved(NamedTuple):
    """What a checkpoint gives back."""

    state: State
    extra: Any
    notes: dict[str, Any]


class CheckpointStore:
    """The checkpoints in a directory, locked for as long as this object is open.

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
        self._lock = _locked_by_one(self.directory, together)
        self._orbax = orbax
        options = orbax.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        self._manager = orbax.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, in order."""
        return sorted(self._manager.all_steps())

    def require_none(self) -> None:
        """Raises if there are checkpoints: those of a new run must not be mixed with those of an old one."""
        if self.steps():
            raise CheckpointError(
                f"{self.directory} holds checkpoints of steps {self.steps()}: go on with resume=True, or "
                "give a new run a directory of its own"
            )

    def save(self, state: State, extra: Any, notes: dict[str, Any]) -> None:
        """Starts to write the state, other arrays and JSON notes; returns before they are on disk.

        Raises:
          CheckpointError: if this or the write before it failed; what was there before is unharmed.
        """
        leaves = jax.tree.leaves((state, extra))
        sums = [checksum(leaf) for leaf in leaves]
        # Written in the background: what goes on changing must be copied now. (The writer itself copies what
        # other processes have parts of.)
        arrays = [leaf if _in_parts(leaf) else processes.on_host(leaf) for leaf in leaves]
        notes = json.loads(json.dumps(notes))
        meta = {"format": FORMAT, "identity": self.identity, "sums": sums, "notes": notes}
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = self._orbax.args
        composite = args.Composite(arrays=args.StandardSave(_packed(arrays)), meta=args.JsonSave(meta))
        self._guard(lambda: self._manager.save(step, args=composite, force=True))

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          CheckpointError: if a write failed.
        """
        self._guard(self._manager.wait_until_finished)

    def restore(self, state: State, extra: Any) -> Saved | None:
        """The latest checkpoint that can be read; None if there is none.

        A damaged one is reported as a warning, and the one before it is used.

        Args:
          state: a state of the run that is to be continued, for its structure.
          extra: the other arrays, likewise.

        Raises:
          CheckpointError: if the checkpoint is of another run, or all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                saved = self._read(step, state, extra)
            except CheckpointError:
                raise
            except Exception as error:
                warnings.warn(
                    f"checkpoint {self.directory / str(step)} is damaged ({_first_line(error)}); "
                    "trying the one before it",
                    stacklevel=3,
                )
                continue
            for later in steps[steps.index(step) + 1 :]:
                self._manager.delete(later)
            return saved
        if steps:
            raise CheckpointError(f"all checkpoints in {self.directory} are damaged: steps {steps}")
        return None

    def close(self) -> None:
        """Waits for the writes and releases the lock; `wait` reports whether they succeeded."""
        try:
            with contextlib.suppress(Exception):  # it repeats what `wait` or `save` has raised
                self._manager.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def _read(self, step: int, state: State, extra: Any) -> Saved:
        args = self._orbax.args
        meta = self._manager.restore(step, args=args.Composite(meta=args.JsonRestore()))["meta"]
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} has format {meta['format']}, expected {FORMAT}"
            )
        found = differences(meta["identity"], self.identity)
        if found:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} belongs to another run: {'; '.join(found)}"
            )
        leaves, structure = jax.tree.flatten((state, extra))
        if len(meta["sums"]) != len(leaves):
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} was written "
                f"with{'out' if extra is not None else ''} patience: resume it in the same way"
            )
        like = _packed([leaf if _in_parts(leaf) else np.empty(leaf.shape, leaf.dtype) for leaf in leaves])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = self._manager.restore(step, args=args.Composite(arrays=args.StandardRestore(like)))[
                "arrays"
            ]
        arrays = [_placed(a, leaf) for a, leaf in zip(_unpacked(read, leaves), leaves, strict=True)]
        for number, (array, expected) in enumerate(zip(arrays, meta["sums"], strict=True)):
            if checksum(array) != expected:
                raise ValueError(f"the checksum of array {number} does not match")
        state, extra = jax.tree.unflatten(structure, arrays)
        return Saved(state, extra, meta["notes"])

    def _guard(self, act: Any) -> None:
        try:
            act()
        except Exception as error:
            # The manager's own list counts the checkpoint that failed, and not those it would replace.
            kept = sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())
            full = "No space left" in str(error)
            raise CheckpointError(
                f"a checkpoint could not be written to {self.directory}: "
                f"{'the disk is full (No space left on device)' if full else _first_line(error)}; "
                f"those of steps {kept} are unharmed"
            ) from error


def saved_strata(directory: str | Path) -> int | None:
    """The strata of the run whose checkpoints these are, so that other devices can go on with it."""
    steps = [path for path in Path(directory).glob("*/meta/metadata") if path.parts[-3].isdigit()]
    with contextlib.suppress(OSError, ValueError, KeyError):
        latest = max(steps, key=lambda path: int(path.parts[-3]))
        return int(json.loads(latest.read_text(encoding="utf-8"))["identity"]["strata"])
    return None


def _locked_by_one(directory: Path, together: bool) -> int | None:
    """The lock of a directory, which the first of several processes holds; all raise if it cannot."""
    lock, failure = None, None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not together or jax.process_index() == 0:
            lock = _locked(directory / ".lock")
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"cannot write checkpoints to {directory}: {error}")
        failure.__cause__ = error
    if together and processes.agreed([failure is not None])[0] and failure is None:
        failure = CheckpointError(f"another process cannot write checkpoints to {directory}")
    if failure is not None:
        raise failure
    return lock


def _locked(path: Path) -> int:
    """An open file with an exclusive lock that ends with the process."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise CheckpointError(f"{path.parent} is in use by another run (it holds {path.name})") from error
    return handle


def _packed(arrays: list[Any]) -> dict[str, Any]:
    """Large arrays by their number, and the bytes of all small ones, one after the other.

    (Each array costs the writer some memory for good.)
    """
    out = {_name(number): array for number, array in enumerate(arrays) if array.nbytes >= SMALL}
    small = [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes < SMALL]
    return out | {"small": np.concatenate([*small, np.zeros(1, np.uint8)])}


def _unpacked(read: dict[str, Any], like: list[Any]) -> list[Any]:
    """The inverse of `_packed`, for arrays of those shapes and dtypes."""
    small, place, out = np.asarray(read["small"]), 0, []
    for number, leaf in enumerate(like):
        if leaf.nbytes >= SMALL:
            out.append(read[_name(number)])
            continue
        out.append(small[place : place + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
        place += leaf.nbytes
    return out


def _in_parts(leaf: Any) -> bool:
    """Whether several processes have parts of an array that is worth writing in parts."""
    return leaf.nbytes >= SMALL and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _placed(array: Any, like: jax.Array) -> jax.Array:
    """An array that was read, where another one is."""
    single = len(like.sharding.device_set) == 1
    return jnp.asarray(array) if single else processes.put(array, like.sharding)


def _name(number: int) -> str:
    return f"array_{number:04d}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
