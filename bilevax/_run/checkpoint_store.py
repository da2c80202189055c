"""Checkpoints of a run: written in the background, checked when read, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._run.checkpoint import CheckpointError
from bilevax._run.digest import SMALL, checksum
from bilevax._run.directory_lock import DirectoryLock
from bilevax._run.identity import differences
from bilevax._step.state import State
from bilevax._util import processes

FORMAT = 6
_PREFIX = "step"  # of the names of checkpoints: other folders are not touched


_UNFINISHED = ".orbax-checkpoint-tmp"  # what the writer appends to the name while it writes


class Saved(NamedTuple):
    """What a checkpoint holds."""

    state: State
    extra: Any
    notes: dict[str, Any]


class Pending(NamedTuple):
    """A checkpoint that is being written: its step, the checksums of its arrays, and arrays like them.

    Where processes write parts of arrays there are none: devices may have no room for the arrays twice.
    """

    step: int
    sums: list[int]
    like: list[np.ndarray] | None


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
        self._keep, self._together, self._args = keep, together, orbax.args
        self.failed = False  # a write: no other is tried
        self._good: set[int] = set()  # steps whose checkpoints were read or written by this object
        self._pending: Pending | None = None
        self._lock = _locked_by_one(self.directory, together)
        try:
            self._clean()
            # Threads that wait for folders which cannot be made would keep the program from ending.
            options = orbax.options.AsyncOptions(create_directories_asynchronously=False)
            self._writer = orbax.AsyncCheckpointer(orbax.CompositeCheckpointHandler(), async_options=options)
        except BaseException as error:
            self._release()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(f"{self.directory} cannot be used: {_first_line(error)}") from error

    def steps(self) -> list[int]:
        """The steps of the saved checkpoints, in order."""
        return sorted(_steps_in(self.directory))

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
        self.wait()
        step = int(state.step)
        if step in self._good:
            return
        leaves = jax.tree.leaves((state, extra))
        sums = [checksum(leaf) for leaf in leaves]
        # Written in the background, so what will change is copied now. (The writer itself copies arrays that
        # other processes hold parts of.)
        arrays = [leaf if _in_parts(leaf) else processes.on_host(leaf) for leaf in leaves]
        notes = json.loads(json.dumps(notes))
        meta = _sealed({"format": FORMAT, "identity": self.identity, "sums": sums, "notes": notes})
        items = {"arrays": self._args.StandardSave(_packed(arrays)), "meta": self._args.JsonSave(meta)}
        path = self._path(step)
        self._guard(lambda: self._writer.save(path, args=self._args.Composite(**items)))
        whole = not any(map(_in_parts, leaves))
        # Arrays that take no memory.
        like = [np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for leaf in leaves] if whole else None
        self._pending = Pending(step, sums, like)

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          CheckpointError: if a write failed.
        """
        self._guard(self._finish)

    def _finish(self) -> None:
        """Waits for the write, makes sure that it succeeded, and deletes what is no longer kept."""
        self._writer.wait_until_finished()
        if self._lock is not None:
            self._lock.check()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._verify(pending)
        except Exception:
            self._set_aside([pending.step])
            raise
        self._good.add(pending.step)
        if self._lock is not None:
            # The writer syncs the arrays only: notes and names would not survive a power failure.
            _sync(self._path(pending.step))
            for step in [step for step in self.steps() if step in self._good][: -self._keep]:
                _delete(self._path(step))

    def _verify(self, pending: Pending) -> None:
        """Raises unless what was written can be read: the writer may miss an error of the file system."""
        if self._read_meta(pending.step)["sums"] != pending.sums:
            raise ValueError("it holds something else than was written")
        if pending.like is None:
            return
        with jax.default_device(jax.devices("cpu")[0]):
            for array, expected in zip(
                self._read_arrays(pending.step, pending.like), pending.sums, strict=True
            ):
                if checksum(array) != expected:
                    raise ValueError("it holds other arrays than were written")

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
        for place, step in reversed(list(enumerate(steps))):
            try:
                saved = self._read(step, state, extra)
            except CheckpointError:
                raise
            except Exception as error:
                if _may_pass(error):
                    raise CheckpointError(
                        f"checkpoint {self._path(step)} could not be read ({_first_line(error)}); nothing "
                        "was changed: try again, or move it away to use the one before it"
                    ) from error
                warnings.warn(
                    f"checkpoint {self._path(step)} is damaged ({_first_line(error)}); trying the one "
                    "before it",
                    stacklevel=3,
                )
                continue
            try:
                self._set_aside(steps[place + 1 :])
            except OSError as error:
                raise CheckpointError(f"damaged checkpoints could not be renamed: {error}") from error
            self._good = {step, *filter(self._is_ours, steps[:place])}
            return saved
        if steps:
            raise CheckpointError(f"all checkpoints in {self.directory} are damaged: steps {steps}")
        return None

    def _set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints: they are in the way of new ones, but nothing is deleted."""
        if steps and (not self._together or jax.process_index() == 0):
            for step in steps:
                self._path(step).rename(_unused(self.directory / f"damaged_{_PREFIX}_{step}"))
        if self._together:
            processes.agreed([0])  # all of them see the new names

    def _path(self, step: int) -> Path:
        return self.directory / f"{_PREFIX}_{step}"

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

    def _clean(self) -> None:
        """Removes what a run left unfinished when it was killed; raises if a pipe would be waited for."""
        for step in self.steps():
            _require_files(self._path(step))
        if self._lock is not None:
            for path in self.directory.glob(f"{_PREFIX}_*{_UNFINISHED}*"):
                if _step_of(path.name.split(_UNFINISHED)[0]) is not None and not path.is_symlink():
                    shutil.rmtree(path)

    def _read(self, step: int, state: State, extra: Any) -> Saved:
        meta = self._read_meta(step)
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {self._path(step)} has format {meta['format']}, expected {FORMAT}"
            )
        found = differences(meta["identity"], self.identity)
        if found:
            raise CheckpointError(f"checkpoint {self._path(step)} belongs to another run: {'; '.join(found)}")
        leaves, structure = jax.tree.flatten((state, extra))
        if len(meta["sums"]) != len(leaves):
            raise CheckpointError(
                f"checkpoint {self._path(step)} was written "
                f"with{'out' if extra is not None else ''} patience: resume it in the same way"
            )
        read = self._read_arrays(step, leaves)
        arrays = [_placed(array, leaf) for array, leaf in zip(read, leaves, strict=True)]
        for number, (array, expected) in enumerate(zip(arrays, meta["sums"], strict=True)):
            if checksum(array) != expected:
                raise ValueError(f"the checksum of array {number} does not match")
        state, extra = jax.tree.unflatten(structure, arrays)
        if int(state.step) != step:
            raise ValueError(f"it holds step {int(state.step)}")
        return Saved(state, extra, meta["notes"])

    def _read_meta(self, step: int) -> dict[str, Any]:
        items = self._args.Composite(meta=self._args.JsonRestore())
        meta = self._writer.restore(self._path(step), args=items)["meta"]
        if not _intact(meta):
            raise ValueError("the checksum of its notes does not match")
        return meta

    def _read_arrays(self, step: int, leaves: list[Any]) -> list[Any]:
        like = _packed([leaf if _in_parts(leaf) else np.empty(leaf.shape, leaf.dtype) for leaf in leaves])
        items = self._args.Composite(arrays=self._args.StandardRestore(like))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = self._writer.restore(self._path(step), args=items)["arrays"]
        return _unpacked(read, leaves)

    def _is_ours(self, step: int) -> bool:
        """Whether a checkpoint is one of this run: others are not deleted."""
        with contextlib.suppress(Exception):
            return not differences(self._read_meta(step)["identity"], self.identity)
        return False

    def _guard(self, act: Any) -> None:
        try:
            act()
        except Exception as error:
            self.failed = True
            kept = self.steps()
            full = "No space left" in str(error)
            raise CheckpointError(
                f"a checkpoint could not be written to {self.directory}: "
                f"{'the disk is full (No space left on device)' if full else _first_line(error)}; "
                f"those of steps {kept} are unharmed"
            ) from error


def saved_strata(directory: str | Path) -> int | None:
    """The strata of the run whose checkpoints these are, so that other devices can continue it."""
    for step in sorted(_steps_in(Path(directory)), reverse=True):
        with contextlib.suppress(Exception):  # `restore` will say what is wrong
            path = Path(directory) / f"{_PREFIX}_{step}" / "meta" / "metadata"
            _require_files(path.parent)
            meta = json.loads(path.read_text(encoding="utf-8"))
            if _intact(meta):
                return int(meta["identity"]["strata"])
    return None


def _steps_in(directory: Path) -> list[int]:
    """The steps of the finished checkpoints in a directory; none if it cannot be listed."""
    with contextlib.suppress(OSError):
        found = [_step_of(path.name) for path in directory.iterdir()]
        return [step for step in found if step is not None]
    return []


def _step_of(name: str) -> int | None:
    """The step of the checkpoint of that name; None if it is no checkpoint's name."""
    found = re.fullmatch(rf"{_PREFIX}_(0|[1-9][0-9]{{0,18}})", name)
    return None if found is None else int(found[1])


def _sealed(meta: dict[str, Any]) -> dict[str, Any]:
    """The metadata with a checksum of all of it."""
    return meta | {"checksum": _digest(meta)}


def _intact(meta: Any) -> bool:
    return isinstance(meta, dict) and meta.get("checksum") == _digest(
        {name: value for name, value in meta.items() if name != "checksum"}
    )


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


# What a damaged checkpoint may look like to the operating system; other errors say nothing about the files.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
# How the library that reads arrays writes them in messages, in its older and newer versions.
_OS_ERROR = re.compile(r"(?:OS error |os_error_code=')(\d+)")


def _may_pass(error: BaseException) -> bool:
    """Whether a read failed for a reason that says nothing about the file: it may work the next time."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    codes = [one.errno for one in chain if isinstance(one, OSError) and one.errno is not None]
    codes += [int(code) for one in chain for code in _OS_ERROR.findall(str(one))]
    return any(isinstance(one, MemoryError) for one in chain) or any(code not in _DAMAGE for code in codes)


def _require_files(folder: Path) -> None:
    """Raises if a folder holds anything but files and folders: a pipe would be waited for."""
    for path in (folder, *folder.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a file")


def _sync(checkpoint: Path) -> None:
    """Returns when a checkpoint and its name would survive a power failure."""
    for path in (*checkpoint.rglob("*"), checkpoint, checkpoint.parent):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync this
                raise
        finally:
            os.close(handle)


def _delete(checkpoint: Path) -> None:
    """Deletes a checkpoint. It loses its name first, so that none is found with files missing."""
    gone = checkpoint.with_name(f"{checkpoint.name}{_UNFINISHED}")
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def _unused(path: Path) -> Path:
    """A path that does not exist, with a number if necessary."""
    names = itertools.chain([path], (path.with_name(f"{path.name}_{count}") for count in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _locked_by_one(directory: Path, together: bool) -> DirectoryLock | None:
    """The lock of a directory, which the first of several processes holds; all raise if it cannot."""
    lock, failure = None, None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not together or jax.process_index() == 0:
            lock = DirectoryLock(directory)
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


def _packed(arrays: list[Any]) -> dict[str, Any]:
    """Large arrays by their number, and the bytes of all small ones, one after the other.

    (The writer keeps some memory for every array it has ever written.)
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
    """Whether several processes hold parts of an array that is large enough to be written in parts."""
    return (
        isinstance(leaf, jax.Array)
        and leaf.nbytes >= SMALL
        and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    )


def _placed(array: Any, like: jax.Array) -> jax.Array:
    """An array that was read, placed like another one."""
    single = len(like.sharding.device_set) == 1
    return jnp.asarray(array) if single else processes.put(array, like.sharding)


def _name(number: int) -> str:
    return f"array_{number:04d}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
