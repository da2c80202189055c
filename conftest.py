"""For tests and doctests alike."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped() -> Iterator[None]:
    """After every file: a process may map only so many pieces of memory, and each program takes several."""
    yield
    jax.clear_caches()


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
