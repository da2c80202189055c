"""What a person sees of a training: epochs, the metric of the development data, and the objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bilevax as bx


class EpochProgress:
    """Shows the epoch, the metric on development data and its best value so far, and the objective.

    Args:
      display: what to show it on, as in `bx.minimize`.
      steps: the steps of the whole run.
      per_epoch: the steps of an epoch.
      metric: such as "ndcg@10"; None if there are no development data.
    """

    def __init__(
        self, display: bx.Progress | str | None, steps: int, per_epoch: int, metric: str | None = None
    ):
        self.display = bx.make_progress(display, steps)
        self.per_epoch, self.metric, self.best = per_epoch, metric, float("-inf")

    def __enter__(self) -> EpochProgress:
        self.display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.display.__exit__(*error)

    def update(self, step: int, speed: float, metrics: Mapping[str, float]) -> None:
        """Called between compiled chunks; `metrics` are those of the history."""
        shown = {"epoch": step / self.per_epoch}
        missed = metrics.get(missed_name(self.metric))
        if missed is not None:
            self.best = max(self.best, 1 - missed)
            shown |= {f"{self.metric}": 1 - missed, "best": self.best}
        self.display.update(step, speed, shown | {"objective": metrics["objective"]})


def missed_name(metric: str | None) -> str:
    """The name in the history of 1 − a metric."""
    return f"missed {metric}"
