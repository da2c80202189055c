"""Compiled programs on disk that are found without tracing.

JAX's own cache saves the compiler; a program must still be traced and lowered to be found there. Here it is
found by a description of the call (`_util/described.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import platform
import stat
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jaxlib
import numpy as np
import optax

from bilevax._util.described import Description, UnknownError

_FOLDER: list[Path] = []  # the innermost one counts
_MOST_FILES = 400
_LEFT_OUT = ("cache", "dump", "log", "traceback", "debug", "profiler")


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Programs are kept below a folder, and looked for there, if nobody else can write to it."""
    place = folder / "untraced"
    if not _is_private(place):
        yield
        return
    _FOLDER.append(place)
    try:
        yield
    finally:
        _FOLDER.pop()


def _is_private(folder: Path) -> bool:
    """Whether a folder, which is made if there is none, is the user's own: its programs are executed."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and (
        not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)
    )


def is_on() -> bool:
    """Whether programs are kept: not on accelerators, where this was not tried yet."""
    return bool(_FOLDER) and jax.default_backend() == "cpu"


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """A list that is filled if this thread compiles a program meanwhile, and does not read it.

    What JAX has read from its own cache it cannot write out again: on a CPU the file would lack functions.
    """
    _listen()
    _thread.made = made = []
    try:
        yield made
    finally:
        del _thread.made


_thread = threading.local()


@functools.cache
def _listen() -> None:
    def note(event: str, **about: str | int) -> None:
        if event == "/jax/compilation_cache/cache_misses" and hasattr(_thread, "made"):
            _thread.made.append(event)

    jax.monitoring.register_event_listener(note)


def place_of(
    name: str, function: Any, options: dict[str, Any], kept: int | None, arguments: Any
) -> Place | None:
    """Where the program of a call is, or will be, kept; None if nothing is to be kept, or it is unknown."""
    if not is_on():
        return None
    try:
        described = Description(function, sorted(options.items()), kept, arguments)
    except (UnknownError, RecursionError):
        return None
    if not _is_simple(arguments):
        return None
    digest = hashlib.sha256(f"{described.digest} {environment()} {_configuration()}".encode()).hexdigest()
    return Place(_FOLDER[-1] / f"{name.strip('<>')}-{digest[:40]}", described.functions)


class Place:
    """A file for one program.

    Args:
      path: of the file.
      functions: those of the arguments, which may be part of what the program returns.
    """

    def __init__(self, path: Path, functions: list[Any]):
        self.path, self._functions = path, functions

    def read(self) -> tuple[bytes, Any] | None:
        """The program, and what it returns with shapes for arrays; None if there is no sound file."""
        try:
            content = self.path.read_bytes()
            check, content = content[:4], content[4:]
            if int.from_bytes(check, "little") != zlib.crc32(content):
                return None
            program, result = _Unpickler(io.BytesIO(content), self._functions).load()
            os.utime(self.path)
        except Exception:  # a file of another version, or damaged: as if there were none
            return None
        return program, result

    def write(self, program: bytes, result: Any) -> None:
        """Keeps a program; a failure only costs time."""
        with contextlib.suppress(Exception):
            file = io.BytesIO()
            _Pickler(file, self._functions).dump((program, result))
            content = file.getvalue()
            content = zlib.crc32(content).to_bytes(4, "little") + content
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as made:
                made.write(content)
            Path(made.name).replace(self.path)
            self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        files = sorted(self.path.parent.glob("*-" + "?" * 40), key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST_FILES]:
            path.unlink(missing_ok=True)


class _Pickler(pickle.Pickler):
    """Functions of the arguments are written as their numbers."""

    def __init__(self, file: Any, functions: list[Any]):
        super().__init__(file, protocol=5)
        self._numbers = {id(one): number for number, one in enumerate(functions)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jax.tree_util.PyTreeDef):  # JAX can pickle those of plain containers only
            return jax.tree.structure, (jax.tree.unflatten(obj, range(obj.num_leaves)),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, functions: list[Any]):
        super().__init__(file)
        self._functions = functions

    def persistent_load(self, pid: int) -> Any:
        return self._functions[pid]


def _is_simple(arguments: Any) -> bool:
    """Whether all arrays are on the first device, or on the host."""
    first = jax.devices()[0]
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    return len(jax.devices()) == 1 and all(array.devices() == {first} for array in arrays)


@functools.cache
def environment() -> str:
    """What a program depends on beside its call: versions, the processor, flags."""
    versions = [module.__version__ for module in (jax, jaxlib, np, eqx, optax)]
    package = list(_files(Path(__file__).parents[1]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PJRT_NPROC")]
    kind = device.platform, device.device_kind, device.client.platform_version
    about = versions, package, _processor(), cores, kind, flags
    return hashlib.sha256(repr((about, platform.python_version())).encode()).hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """The files of a package, with their times and sizes."""
    for path in sorted(folder.rglob("*.py")):
        about = path.stat()
        yield str(path), about.st_mtime_ns, about.st_size


def _processor() -> str:
    """What distinguishes processors for which code is compiled differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return repr(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return f"{platform.node()} {platform.machine()} {platform.processor()}"


def _configuration() -> str:
    """JAX's options now, in this thread."""
    values: dict[str, Any] = jax.config.values  # pyright: ignore[reportAttributeAccessIssue]
    return repr([one for one in sorted(values.items()) if not any(word in one[0] for word in _LEFT_OUT)])
