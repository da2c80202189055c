"""Compiled programs on disk, for the processes that come later."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from bilevax._util import stored

_FOLDER = "jax_compilation_cache_dir"
_OFF = ("0", "off", "no", "false")
_MOST_BYTES = 2**30


@contextlib.contextmanager
def program_cache(folder: str | Path | None = None) -> Iterator[Path | None]:
    """Keeps what is compiled within this context, and reads what other processes have kept.

    The command line, the demo and the `fit` of the estimators do this. It changes JAX's configuration for the
    time of the context; if that names a cache already (`JAX_COMPILATION_CACHE_DIR`), that one is used, and
    nothing is changed. A folder that cannot be written, or damaged files in it, only cost time.

    JAX looks programs up by what was traced. Those of a run are also kept under a description of the call,
    and found without tracing, if f, g and all they use can be described (docs/design.md). That needs a folder
    to which nobody else may write.

    Args:
      folder: where; left out, the folder that the environment variable `BILEVAX_PROGRAMS` names, or else
        "programs" in the folder for downloads (`BILEVAX_CACHE`, or the user's cache folder).
        `BILEVAX_PROGRAMS=off` keeps nothing.

    Yields:
      The folder; None if nothing is kept.

    Example:
      >>> import bilevax as bx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder, bx.program_cache(folder):
      ...     pass  # bx.minimize(…)
    """
    used = getattr(jax.config, _FOLDER)
    if used:
        yield Path(used)
        return
    place = _writable(_place() if folder is None else Path(folder))
    if place is None:
        yield None
        return
    options: dict[str, object] = {_FOLDER: str(place), "jax_persistent_cache_min_compile_time_secs": 0.0}
    if importlib.util.find_spec("filelock") is not None:  # without it, JAX cannot limit the size
        options["jax_compilation_cache_max_size"] = _MOST_BYTES
    before = {name: getattr(jax.config, name) for name in options}
    _configure(options)
    try:
        with stored.kept_in(place):
            yield place
    finally:
        _configure(before)


def _configure(options: dict[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at its folder at the first program only


def _place() -> Path | None:
    """The user's folder for programs; None if there is none, or none is wanted."""
    named = os.environ.get("BILEVAX_PROGRAMS", "")
    if named:
        return None if named.lower() in _OFF else Path(named).expanduser()
    downloads = os.environ.get("BILEVAX_CACHE", "")
    if downloads:
        return Path(downloads).expanduser() / "programs"
    if importlib.util.find_spec("platformdirs") is None:
        return None
    from platformdirs import user_cache_path

    found = user_cache_path("bilevax") / "programs"
    return found if found.is_absolute() else None  # without a home folder it starts with `~`


def _writable(folder: Path | None) -> Path | None:
    """A folder, if files can be written there; it is made if it does not exist."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.absolute()
    except OSError:
        return None
