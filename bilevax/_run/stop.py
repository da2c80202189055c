"""When a run ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bilevax._util import checks


@dataclasses.dataclass(frozen=True)
class Stop:
    """When a run ends before its last step, and what happens if it diverges or is interrupted.

    Args:
      seconds: stop after about this much time, compilation included.
      tolerance: stop when ‖z‖ is at most this.
      patience: stop when `watch` has not improved for this many entries of the history; the best iterate is
        kept.
      watch: the metric that `patience` looks at; smaller is better.
      throw: raise if the run diverges; False returns the result with its outcome.
      raise_on_interrupt: after SIGINT or SIGTERM, raise `KeyboardInterrupt`, whose `result` is what the run
        has reached, so that the program around the run ends too; False prints a line to stderr and returns
        the result.
      recover: when the run begins to blow up (f or a tracked gradient grows by orders of magnitude, or is not
        finite), go back to the latest healthy entry of the history, and go on with a quarter of the step of
        x, or of those of y and v if they blow up even while x is held. Where the run is verified, also go
        back when F has risen on the blocks that are solved. This keeps copies of the state; left out, states
        of up to 256 MiB are guarded. False lets the run diverge.
      verify: now and then and at the end, solve a few blocks exactly, and warn if the answer is not to be
        trusted (see `verify`); left out, runs of 500 steps or more are verified, unless the blocks have so
        many rows that this would be a large part of the run.
      finish: at the end, solve all blocks, and go on with exact gradients (L-BFGS) while that lowers F, where
        this takes as long as the run at most, or some ten seconds, and a tenth of `seconds`. Where all
        blocks are too many, do so with a sample of them, and go there if F is clearly less on other blocks,
        too. It is done where the run is verified, the upper step was left out, and there is no `patience`;
        `result.finish` says what it did. False leaves x and y where the last step has brought them.

    Example:
      >>> import bilevax as bx
      >>> stop = bx.Stop(seconds=3600, patience=20, watch="validation")
    """

    seconds: float | None = None
    tolerance: float | None = None
    patience: int | None = None
    watch: str = "objective"
    throw: bool = True
    raise_on_interrupt: bool = False
    recover: bool | None = None
    verify: bool | None = None
    finish: bool = True

    def __post_init__(self) -> None:
        if self.seconds is not None:
            checks.number("seconds", self.seconds, 0.0, zero=False)
        if self.tolerance is not None:
            checks.number("tolerance", self.tolerance, 0.0)
        if self.patience is not None:
            checks.whole_number("patience", self.patience, 1)
        for name in ("throw", "raise_on_interrupt", "finish"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

        for name in ("recover", "verify"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, bool)):
                raise TypeError(f"{name} must be True, False or None, got {value!r}")

    def check_watch(self, known: Iterable[str]) -> None:
        """Raises unless `watch` names one of the known metrics."""
        if self.watch not in list(known):
            raise ValueError(f"watch must name a metric, one of {list(known)}, got {self.watch!r}")
