"""The track of a run, x over seconds, and a loop that records it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Clock = Callable[[], float]


@dataclasses.dataclass
class Track:
    """x over seconds in one run.

    Attributes:
      method, settings: the names of the method and of its hyper-parameters.
      seconds, xs: times, with the start but without compilation, and x at them.
      compile_seconds: time to compile.
      losses: F at each x, filled in afterwards.
    """

    method: str
    settings: str
    seconds: list[float]
    xs: list[np.ndarray]
    compile_seconds: float
    losses: list[float] = dataclasses.field(default_factory=list)

    def seconds_to(self, loss: float) -> float:
        """The seconds until F was at most this value; infinite if it never was."""
        reached = [at for at, value in zip(self.seconds, self.losses, strict=True) if value <= loss]
        return reached[0] if reached else float("inf")


def follow(
    method: str,
    settings: str,
    start: Callable[[], Any],
    step: Callable[[Any, Any], Any],
    draws: Any,
    budget: float,
    clock: Clock = time.perf_counter,
) -> Track:
    """Takes steps for some time, and records x at times that grow by a factor.

    Args:
      method, settings: of the track.
      start: makes the state before the first step; its first entry is x.
      step: takes a state and a draw; returns the next state when it is computed.
      draws: a sequence of seeds, or an array of keys: the randomness of each step.
      budget: seconds of steps, without compilation.
      clock: what counts them.
    """
    began = clock()
    step(start(), draws[0])  # compiles; its result is not used
    track = Track(method, settings, [], [], clock() - began)
    began = clock()
    state, pause = start(), 0.0
    spent = clock() - began
    for draw in draws:
        began = clock()
        state = step(state, draw)
        spent += clock() - began
        if spent >= pause:
            track.seconds.append(spent)
            track.xs.append(np.array(state[0]))
            pause = spent * 1.3
        if spent >= budget:
            break
    return track
