"""Errors from everything that a run calls: metrics, and every method of every public protocol."""

from __future__ import annotations

import errno
import inspect

from faults.runs import REFUSED, RESUMED, Attempt, ViolationError, copy_of_stopped_run, saved_steps, settle

import bilevax as bx


class OwnError(Exception):
    """An error of a user's own."""


ERRORS = (
    lambda: OwnError("mine"),
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: bx.CheckpointError("of another run"),
    lambda: MemoryError("too large"),
    lambda: KeyboardInterrupt("by a person"),
    lambda: SystemExit("the program ends"),
    lambda: GeneratorExit("odd"),
)
# By the name of the argument of `minimize` that takes such an object.
PROTOCOLS = {
    name.lower(): getattr(bx, name)
    for name in bx.__all__
    if getattr(getattr(bx, name), "_is_protocol", False)
}


def methods(protocol):
    """The methods that a protocol asks for."""
    return [
        name
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and value.__module__ == protocol.__module__
    ]


def arguments():
    """The arguments of `minimize` that take something to call."""
    words = ("Callable", *(protocol.__name__ for protocol in PROTOCOLS.values()))
    parameters = inspect.signature(bx.minimize).parameters.items()
    return [name for name, one in parameters if any(word in str(one.annotation) for word in words)]


CALLBACKS = [("metrics", "__call__")]
CALLBACKS += [(kind, name) for kind, protocol in PROTOCOLS.items() for name in methods(protocol)]


def failing(kind, method, call, make):
    """An object of a kind whose `method` raises at its n-th call; and the list that the error goes to."""
    raised, calls = [], []

    def fail(*_):
        calls.append(1)
        if len(calls) == call:
            raised.append(make())
            raise raised[0]
        return 0.0

    names = methods(PROTOCOLS[kind]) if kind in PROTOCOLS else []
    members = {name: lambda self, *_: None for name in names} | {method: fail}
    return type("Failing", (), members)(), raised


def callback(rng, number):
    """An exception from a callback."""
    if uncovered := set(arguments()) - {kind for kind, _ in CALLBACKS}:
        raise ViolationError(f"the suite does not know how to fail in {uncovered}")
    kind, method = CALLBACKS[number % len(CALLBACKS)]
    make = ERRORS[rng.integers(len(ERRORS))]
    thing, raised = failing(kind, method, int(rng.integers(1, 5)), make)
    given = {"metrics": {"metrics": {"failing": thing}}, "log": {"logs": [thing]}}.get(kind, {kind: thing})
    with copy_of_stopped_run() as folder:
        attempt = Attempt(folder, expected=(BaseException,), **given)
        if not raised:  # it is called less often
            if not attempt.finished:
                raise ViolationError("did not finish") from attempt.error
        elif attempt.error is not raised[0]:
            raise ViolationError(f"{kind}.{method} raised {raised[0]!r}, the run {attempt.error!r}")
        result = getattr(attempt.error, "result", None)
        if (kind, method) != ("log", "start") and raised:
            if result is None:
                raise ViolationError(f"{kind}.{method}: the error has no result")
            if int(result.state.step) not in saved_steps(folder):
                raise ViolationError(f"{kind}.{method}: step {int(result.state.step)} was not saved")
        settle(folder, may_refuse=False, may_warn=False)
    return REFUSED if raised else RESUMED
