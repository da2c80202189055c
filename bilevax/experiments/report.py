"""The results of an experiment in one folder: tables, plots, and the options it was run with."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax import __version__
from bilevax.experiments import figures


def spread(values: Any, digits: int = 4) -> str:
    """The mean ± the standard deviation, as text.

    Example:
      >>> spread([0.5, 0.7])
      '0.6000 ± 0.1414'
    """
    values = np.asarray(values, float)
    mean = f"{values.mean():.{digits}f}"
    return mean if values.size < 2 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; the columns are in order of first occurrence.

    Example:
      >>> print(markdown([{"noise": 0.1, "accuracy": "0.85"}]))
      | noise | accuracy |
      | --- | --- |
      | 0.1 | 0.85 |
    """
    columns = _columns(rows)
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def command_line(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a command line that say what was run, not where the results go."""
    return {name: value for name, value in vars(options).items() if name != "out"}


class Report:
    """A folder of results: `name.csv`, `name.md`, `name.pdf`, `name.png` and `settings.json`.

    The folder is created and written to at once: if that fails, it fails before any work is done.

    Args:
      folder: where the results go.
      options: of the experiment; any mix of dataclasses, dicts, paths and numbers.
      quick: marks every table as a quick check.
    """

    def __init__(self, folder: str | Path, options: Any, *, quick: bool = False):
        self.folder, self.quick, self.began = Path(folder), quick, time.perf_counter()
        self.captions: dict[str, str] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        device = jax.devices()[0]
        self.facts: dict[str, Any] = {
            "options": as_plain(options),
            "quick": quick,
            "bilevax": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "device": f"{len(jax.devices())} × {device.device_kind}",
        }
        self._write_facts()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], title: str, note: str = "") -> None:
        """Writes a table as CSV and Markdown, and prints it."""
        self.csv(name, rows)
        heading = f"# {title}{' (quick check)' if self.quick else ''}\n\n"
        text = heading + markdown(rows) + (f"\n\n{note}" if note else "") + "\n"
        (self.folder / f"{name}.md").write_text(text, encoding="utf-8")
        _show(rows, title, note)

    def csv(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows as CSV."""
        with (self.folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _columns(rows), restval="")
            writer.writeheader()
            writer.writerows(rows)

    def figure(self, name: str, figure: Any, caption: str = "") -> None:
        """Writes a matplotlib figure as PDF and PNG, and its caption to `captions.md`."""
        figures.save(figure, self.folder / name)
        self.captions[name] = caption
        text = "\n\n".join(f"**{name}.** {caption}" for name, caption in self.captions.items() if caption)
        if text:
            (self.folder / "captions.md").write_text(text + "\n", encoding="utf-8")

    def fact(self, name: str, value: Any) -> None:
        """Adds an entry to `settings.json`."""
        self.facts[name] = as_plain(value)
        self._write_facts()

    def finish(self) -> None:
        """Records the elapsed seconds, and prints where the results are."""
        self.fact("seconds", round(time.perf_counter() - self.began, 1))
        print(f"results: {self.folder} ({self.facts['seconds']} s)")

    def _write_facts(self) -> None:
        text = json.dumps(self.facts, indent=2, ensure_ascii=False)
        (self.folder / "settings.json").write_text(text + "\n", encoding="utf-8")


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


def as_plain(value: Any) -> Any:
    """The value as JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _show(rows: Sequence[Mapping[str, Any]], title: str, note: str) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"{title}\n{markdown(rows)}\n{note}")
        return
    columns = _columns(rows)
    table = Table(*columns, title=title, caption=note or None)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    # Without a terminal, lines are not wrapped at 80 characters.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
