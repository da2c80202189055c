"""Results of a long experiment that are kept as they come, so that it can go on where it was stopped."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bilevax.experiments.report import as_plain

Task = Callable[[], Any]  # computes a result that can be kept


class Kept:
    """Named results in one JSON file, which belongs to the options that it was begun with.

    Args:
      path: the file.
      options: of the experiment; a dataclass, or what JSON can hold.
      resume: whether to take over what the file holds; otherwise it is begun anew.

    Raises:
      ValueError: the file was begun with other options.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "kept.json"
      >>> Kept(path, {"seeds": 3}).get("a", lambda: 1.5)
      1.5
      >>> Kept(path, {"seeds": 3}, resume=True).get("a", lambda: 2.5)
      1.5
    """

    def __init__(self, path: str | Path, options: Any, *, resume: bool = False):
        self.path, self.options = Path(path), as_plain(options)
        self.results: dict[str, Any] = {}
        if not resume or not self.path.exists():
            return
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        different = sorted(
            name
            for name in set(stored["options"]) | set(self.options)
            if stored["options"].get(name) != self.options.get(name)
        )
        if different:
            got = {name: self.options.get(name) for name in different}
            was = {name: stored["options"].get(name) for name in different}
            raise ValueError(f"resume needs the options that {self.path} was begun with: {was}, got {got}")
        self.results = stored["results"]

    def get(self, name: str, compute: Task) -> Any:
        """The result of that name: the one that is kept, or a new one, which is written at once."""
        if name not in self.results:
            self._keep(name, compute())
        return self.results[name]

    def fill(self, tasks: Mapping[str, Task], processes: int = 1, *, alone: bool = False) -> dict[str, Any]:
        """The results of all tasks, by name; those that are missing are computed, in several processes.

        Args:
          tasks: what computes each result; with several processes it must be picklable. Long ones first.
          processes: how many run at a time; 1 stays in this process.
          alone: whether every process has a core to itself and stays away from accelerators, as tasks need
            that measure time or have many small arrays.

        Returns:
          The results of the tasks.
        """
        missing = {name: task for name, task in tasks.items() if name not in self.results}
        if processes > 1 and len(missing) > 1:
            # A fork of a process that runs JAX may hang.
            context = multiprocessing.get_context("spawn")
            free, cores = _cores(), context.SimpleQueue()
            for number in range(processes if alone else 0):
                cores.put(free[number % len(free)])
            pool = concurrent.futures.ProcessPoolExecutor(processes, context, _begin, (cores, alone))
            with _one_thread() if alone else nullcontext(), pool:
                waiting = {pool.submit(task): name for name, task in missing.items()}
                for count, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                    self._keep(waiting[done], done.result())
                    print(f"{waiting[done]} ({count} of {len(waiting)})", flush=True)
        return {name: self.get(name, task) for name, task in tasks.items()}

    def _keep(self, name: str, result: Any) -> None:
        self.results[name] = as_plain(result)
        text = json.dumps({"options": self.options, "results": self.results}, indent=1)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.path)


def _cores() -> list[int]:
    """The cores that this process may use: all of them on a system that cannot tell."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def _begin(cores: Any, alone: bool) -> None:
    """Keeps the messages of many processes from mixing, and this process to a core if it is `alone`."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if alone and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that are started here keep to one thread each, and to the CPU."""
    own = {"JAX_PLATFORMS": "cpu"} | {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
