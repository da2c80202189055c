"""A deadline for tests of what must not hang."""

import signal
from contextlib import contextmanager


@contextmanager
def deadline(seconds=20):
    """Fail, instead of hanging, if the block takes longer."""

    def give_up(*_):
        raise AssertionError(f"hangs: not finished after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
