"""What was measured during a run, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bilevax._run.trend import Estimate, estimate
from bilevax._util import extras


class History(Mapping[str, np.ndarray]):
    """Columns by name, one entry per measurement.

    Always there: "step", "seconds", "objective" (the mean of f over the steps since the entry before),
    "gradient_norm" (‖z‖), "lower_residual" and "inverse_residual" (root mean squares of the tracked ∇_y g and
    ∇²_yy g v − ∇_y f over all slots), then the metrics.

    Example:
      >>> from bilevax._run.history import History
      >>> history = History()
      >>> history.append({"step": 1, "loss": 0.5})
      >>> history["loss"]
      array([0.5])
    """

    def __init__(self, entries: list[dict[str, float]] | None = None):
        self.entries = list(entries or [])

    def append(self, entry: Mapping[str, float]) -> None:
        """Adds a measurement."""
        self.entries.append(dict(entry))

    def __getitem__(self, name: str) -> np.ndarray:
        if self.entries and not any(name in entry for entry in self.entries):
            raise KeyError(f"no {name!r} in the history, which has {sorted(self)}")
        return np.asarray([entry.get(name, np.nan) for entry in self.entries])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for entry in self.entries for name in entry))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"History({len(self.entries)} entries of {', '.join(self)})"

    def estimate(self) -> Estimate:
        """F, from the latest quarter of the tracked f, with its standard error, and whether it improves.

        The tracked f lags behind F; `verify` compares the two. A number that prints as
        "0.0646 ± 0.0003, improving".
        """
        return estimate([entry.get("objective", np.nan) for entry in self.entries])

    def frame(self) -> Any:
        """The history as a pandas frame, one row per entry."""
        return extras.required("pandas", "a frame", "data").DataFrame(self.entries)

    def plot(self, names: list[str] | None = None, against: str = "step") -> Any:
        """One small plot per column, as a matplotlib figure."""
        figures = extras.required("matplotlib.figure", "a plot", "experiments")
        shown = names or [name for name in self if name not in ("step", "seconds")]
        figure = figures.Figure(figsize=(4 * len(shown), 3), layout="constrained")
        for axes, name in zip(np.ravel(figure.subplots(1, len(shown), squeeze=False)), shown, strict=True):
            values = self[name]
            axes.plot(self[against], values)
            axes.set(title=name, xlabel=against)
            if np.all(values > 0) and np.nanmax(values) > 10 * np.nanmin(values):
                axes.set_yscale("log")
        return figure
