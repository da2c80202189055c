"""For tests and doctests alike."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a session, those that tests start among them, compile equal programs once.

    A folder of the session's own: what a killed process leaves there harms no other session.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # a user's own, or, in a process that xdist started, that of the session
    folder = tempfile.mkdtemp(prefix="bilevax-programs-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    options = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0.1}
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


_MAPPED = 15_000  # pieces of memory, of 65,530 that a process may map on Linux; each program takes several


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped() -> Iterator[None]:
    """After a file, if they are many; the small ones that JAX compiles by itself serve the next file too."""
    yield
    try:
        with open("/proc/self/maps") as file:
            mapped = sum(1 for _ in file)
    except OSError:  # not Linux
        mapped = _MAPPED
    if mapped >= _MAPPED:
        jax.clear_caches()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests are no garbage: the collector need not look at them, nor often at anything."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


# The files that take longest, whatever their number of tests: begun first, they do not keep one process busy
# when all others are done.
_LONGEST = (
    "test_transcription.py",
    "test_checkpoint.py",
    "test_conformance.py",
    "test_convergence.py",
    "test_diagnostics.py",
    "test_sharding.py",
    "test_classifier.py",
    "test_sweep.py",
    "test_failures.py",
    "test_reference_problems.py",
    "test_ranking_recommender.py",
    "test_memory_estimate.py",
    "test_ranking_objective.py",
    "test_sampling.py",
    "test_theorems.py",
    "test_ranking_experiment.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
