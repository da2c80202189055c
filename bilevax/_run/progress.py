"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from bilevax._util import extras


class Progress(Protocol):
    """Something that is told how far a run has come; use it in a `with` statement."""

    def __enter__(self) -> Progress: ...
    def __exit__(self, *error: Any) -> None: ...
    def update(self, step: int, speed: float, metrics: Mapping[str, float]) -> None:
        """Called between compiled chunks, with the steps done, steps per second and the last metrics.

        In a run, `metrics["F"]` is an estimate of F: a number with an `error`, a `trend` and an `advice`.
        """


class Silent:
    """No output."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, step: int, speed: float, metrics: Mapping[str, float]) -> None:
        pass


class Lines:
    """One plain line at most every few seconds, and one at the end."""

    def __init__(self, total: int, every_seconds: float = 5.0):
        self.total, self.every_seconds = total, every_seconds
        self.printed = 0.0

    def __enter__(self) -> Lines:
        self.printed = time.monotonic()
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, step: int, speed: float, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if step < self.total and now - self.printed < self.every_seconds:
            return
        self.printed = now
        _say(f"step {step}/{self.total}  {speed:,.0f} steps/s  {describe(metrics)}".rstrip())
        if step >= self.total:
            _say(advice(metrics))


class Bar:
    """A rich progress bar with speed, time left and the last metrics."""

    def __init__(self, total: int):
        rich = extras.required("rich.progress", "a progress bar", "data")
        self.bar = rich.Progress(
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[speed]}"),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[metrics]}"),
        )
        self.task = self.bar.add_task("steps", total=total, speed="compiling", metrics="")
        self.advice = ""

    def __enter__(self) -> Bar:
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not end a run
            self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.bar.stop()
        _say(self.advice)

    def update(self, step: int, speed: float, metrics: Mapping[str, float]) -> None:
        with contextlib.suppress(OSError, ValueError):
            shown = {"speed": f"{speed:,.0f} steps/s", "metrics": describe(metrics)}
            self.bar.update(self.task, completed=step, **shown)
        self.advice = advice(metrics)


def describe(metrics: Mapping[str, float]) -> str:
    """Metrics as one short line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def advice(metrics: Mapping[str, float]) -> str:
    """What to do if F does not get better; empty if there is nothing to say."""
    return getattr(metrics.get("F"), "advice", "")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stream must not end a run
        if text and sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def make_progress(choice: str | Progress | None, total: int) -> Progress:
    """The progress display of a run of `total` steps."""
    if choice is None:
        return Silent()
    if choice == "auto":
        choice = "bar" if _is_terminal(sys.stderr) or _is_terminal(sys.stdout) else "lines"
        if choice == "bar":
            try:
                return Bar(total)
            except ImportError:
                return Lines(total)
    if choice == "bar":
        return Bar(total)
    if choice == "lines":
        return Lines(total)
    if not isinstance(choice, str) and hasattr(choice, "update"):
        return choice
    raise ValueError(f"progress must be 'auto', 'bar', 'lines', None or a Progress, got {choice!r}")


def _is_terminal(stream: Any) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False
