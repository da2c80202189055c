"""Where x was, after how many seconds: one run of one method, and the clock it is run by."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass
class Track:
    """One run: where x was, after how many seconds."""

    method: str
    numbers: str
    seconds: list[float]
    xs: list[np.ndarray]
    compile_seconds: float
    losses: list[float] = dataclasses.field(default_factory=list)

    def seconds_to(self, loss: float) -> float:
        """When F was first as low as this; infinite if never."""
        reached = [at for at, value in zip(self.seconds, self.losses, strict=True) if value <= loss]
        return reached[0] if reached else float("inf")


def follow(
    method: str,
    numbers: str,
    start: Callable[[], Any],
    step: Callable[[Any, Any], Any],
    draws: Any,
    budget: float,
) -> Track:
    """Takes steps for a time, and notes x at times that grow by a factor.

    Args:
      method, numbers: what the run is called.
      start: the state before the first step; its first entry is x.
      step: from a state and a draw to the next state, finished when it returns.
      draws: a sequence, or an array of keys; what each step's randomness comes from.
      budget: seconds, of steps alone.
    """
    began = time.perf_counter()
    step(start(), draws[0])  # compiles; its result is not used
    track = Track(method, numbers, [], [], time.perf_counter() - began)
    state, spent, pause = start(), 0.0, 0.0
    for draw in draws:
        began = time.perf_counter()
        state = step(state, draw)
        spent += time.perf_counter() - began
        if spent >= pause:
            track.seconds.append(spent)
            track.xs.append(np.array(state[0]))
            pause = spent * 1.3
        if spent >= budget:
            break
    return track
