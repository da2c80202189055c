"""Going back when a run begins to blow up, or F has risen, with a shorter step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bilevax._step.state import State
from bilevax._util.hurried import HurriedJit

MOST = 12  # recoveries of a run
MOST_BYTES = 2**28  # of a state, of which a second copy is kept unasked
_SHORTER = 0.25
_HEALTHY, _BLOWN_UP = 0.2, 10.0  # how far f may rise above its least value, in units of its size
_GROWN = 30.0  # how far the gradients of y and v may grow while x is held
_FRUITLESS = 2  # recoveries from the same state, after which the run begins again
_FAR = 1e6  # how far a tracked gradient may rise above its largest size so far
_ENTRIES = 5  # from which on that size is known
_GRADIENTS = ("gradient_norm", "lower_residual", "inverse_residual")


class RecoveryWarning(UserWarning):
    """A run went back, and on with shorter steps: a smaller step would have been better from the start."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A run went back, and on with shorter steps.

    Attributes:
      step: where it began to blow up, or F was found to have risen.
      back_to: where it went on from.
      what: "upper_step", or "lower_step" if y and v blew up even while x was held.
      factor: by which that step has been multiplied since then.
      why: "blow-up", or "F rose": on a few blocks that were solved exactly.
    """

    step: int
    back_to: int
    what: str
    factor: float
    why: Literal["blow-up", "F rose"] = "blow-up"

    def __str__(self) -> str:
        return f"from step {self.step} to {self.back_to}, with {self.factor:g} times the {self.what}"


class Guard:
    """The latest healthy state, and what shows that a run has left it for good.

    A run is judged at the entries of its history, so that what happens does not depend on clocks.

    Args:
      state: a copy of the state before the first step.

    Attributes:
      good: a copy of the latest healthy state.
      recoveries: what has happened.
      settled: the size of f when x last waited for y to settle; it may have been far smaller before.
    """

    def __init__(self, state: State):
        self.good = state
        self.recoveries: list[Recovery] = []
        self.settled = 0.0
        self.count([])

    def count(self, entries: list[dict[str, float]]) -> None:
        """Knows these entries, and no others."""
        self.first, self.least, self.seen = 0.0, math.inf, 0
        self.largest = dict.fromkeys(_GRADIENTS, 0.0)
        for entry in entries:
            self._add(entry)

    def _add(self, entry: dict[str, float]) -> None:
        self.first = self.first if self.seen else abs(entry["objective"])
        self.least, self.seen = min(self.least, entry["objective"]), self.seen + 1
        self.largest = {name: max(self.largest[name], entry[name]) for name in _GRADIENTS}

    def has_blown_up(self, entry: dict[str, float]) -> bool:
        """Whether f, or a tracked gradient, has grown by orders of magnitude."""
        if not all(math.isfinite(entry[name]) for name in ("objective", *_GRADIENTS)):
            return True
        far = self.seen >= _ENTRIES and any(
            entry[name] > _FAR * self.largest[name] > 0 for name in _GRADIENTS
        )
        return far or self._above(entry, _BLOWN_UP)

    def note(self, entry: dict[str, float], copy: State) -> None:
        """Takes an entry into account, and keeps the copy of the state there if it is healthy."""
        self._add(entry)
        if not self._above(entry, _HEALTHY):
            self.good = copy

    def _above(self, entry: dict[str, float], times: float) -> bool:
        """Whether f is far above its least value."""
        size = max(self.first, abs(self.least), self.settled) if self.seen else math.inf
        return entry["objective"] > self.least + times * size

    def held(self) -> State:
        """The good state, with x held."""
        return _restrained(copy_of(self.good), "upper_step", 0.0)

    def cause(self, good: dict[str, float], held: dict[str, float]) -> str:
        """Which step is too long, from entries of the good state and of a run from there with x held."""
        grown = any(held[name] > _GROWN * good[name] > 0 for name in ("lower_residual", "inverse_residual"))
        return "lower_step" if grown or self.has_blown_up(held) else "upper_step"

    def back(self, step: int, what: str, begin: Callable[[], State]) -> State:
        """The state to go on from, with a shorter step, after a blow-up that showed at a step.

        If the good state has not helped before, it was not good: the run begins again.
        """
        assert self.good.restraint is not None
        blamed = [one.what for one in self.recoveries if step <= one.step]
        if blamed.count(what) >= MOST // 2:  # that was not the cause
            what = next(other for other in _FIELD if other != what)
        from_here = [one for one in self.recoveries if one.back_to == int(self.good.step)]
        fruitless = len(from_here) >= _FRUITLESS or step <= int(self.good.step) + 1
        if fruitless and int(self.good.step) > 0:
            self.good = dataclasses.replace(begin(), restraint=self.good.restraint)
        self.good = _restrained(self.good, what, _SHORTER)
        factor = float(getattr(self.good.restraint, _FIELD[what]))
        self.recoveries.append(Recovery(step, int(self.good.step), what, factor))
        return copy_of(self.good)

    def give_up(self, step: int, best: State) -> State:
        """The state to go on from, with a shorter upper step, where F has risen since an earlier state.

        The step is the shorter the more often the same state was returned to.
        """
        before = [one for one in self.recoveries if one.why == "F rose" and one.back_to == int(best.step)]
        self.good = dataclasses.replace(copy_of(best), restraint=self.good.restraint)
        self.good = _restrained(self.good, "upper_step", _SHORTER ** (1 + len(before)))
        assert self.good.restraint is not None
        factor = float(self.good.restraint.upper)
        self.recoveries.append(Recovery(step, int(best.step), "upper_step", factor, "F rose"))
        return copy_of(self.good)


_FIELD = {"upper_step": "upper", "lower_step": "lower"}


def can_guard(state: State, asked: bool | None) -> bool:
    """Whether a run can go back, and is to."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return state.restraint is not None and (size <= MOST_BYTES if asked is None else asked)


def _restrained(state: State, what: str, times: float) -> State:
    assert state.restraint is not None
    field = _FIELD[what]
    changed = getattr(state.restraint, field) * times
    return dataclasses.replace(state, restraint=dataclasses.replace(state.restraint, **{field: changed}))


@functools.partial(HurriedJit, calls=100)
def copy_of(state: Any) -> Any:
    """A state that shares no buffers: a chunk takes over those of the state it is given."""
    return jax.tree.map(jnp.copy, state)
