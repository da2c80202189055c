"""Where the seconds of the tests go: a plugin that counts tracing, lowering and compiling by test.

`TEST_COSTS=folder python -m pytest -p benchmarks.test_costs …` writes a file of rows for every process of the
session. A program that JAX's cache has is one that was traced before, by another function of the same code.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_rows: list[dict[str, Any]] = []
_now: collections.Counter[str] = collections.Counter()


def _seconds(event: str, duration: float, **about: str | int) -> None:
    if event in _PHASES:
        _now[_PHASES[event]] += duration  # pyright: ignore[reportArgumentType]
        _now[f"{_PHASES[event]}s"] += 1


def _event(event: str, **about: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _now["known"] += 1


jax.monitoring.register_event_duration_secs_listener(_seconds)
jax.monitoring.register_event_listener(_event)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Counts what one test does, with its fixtures."""
    _now.clear()
    before = os.times()
    result = yield
    after = os.times()
    row = {name: round(value, 3) for name, value in _now.items()}
    _rows.append({"test": item.nodeid, "processor": round(after.user - before.user, 2), **row})
    return result


def pytest_sessionfinish() -> None:
    """Writes the rows of this process."""
    folder = os.environ.get("TEST_COSTS")
    if folder and _rows:
        path = Path(folder) / f"costs-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rows))
