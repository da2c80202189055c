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
