"""A tiny run that faults are injected into, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax._run import identity
from bilevax._run.checkpoint_store import CheckpointStore

STEPS, EVERY, SAVE_EVERY, STOPPED_AT = 200, 20, 40, 120
RESUMED, REFUSED = "resumed", "refused"
COLUMNS = ("step", "objective", "gradient_norm", "lower_residual", "inverse_residual")
M, D = 1024, 16  # arrays of 64 KiB, each of which is stored by itself

# What a person keeps in the same folder.
OWN = {
    "2022/notes.txt": b"my notes",
    "step_notes/mine.txt": b"mine",
    "step_7.txt": b"",
    "step_80_old/a": b"a",
}


class ViolationError(AssertionError):
    """The property does not hold."""


@functools.cache
def _inputs():
    """(problem, x0, y0) and the other arguments, the same objects each time: nothing is compiled again."""
    draw = np.random.default_rng(0).normal
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block["target"]) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - block["slope"] * x) ** 2),
        blocks={name: draw(size=(M, D)).astype(np.float32) for name in ("slope", "target")},
    )
    options = {"solver": bx.BSVRBv2(upper_step=0.05), "key": jax.random.key(0), "blocks_per_step": 4}
    options |= {"steps": STEPS, "every": EVERY, "progress": None}
    return (problem, np.ones(D, np.float32), np.zeros((M, D), np.float32)), options


class Recorder:
    """A log that notes how far a run came."""

    reached = 0

    def start(self, entries):
        pass

    def write(self, entry):
        self.reached = entry["step"]

    def close(self):
        pass


class Attempt:
    """A run that may fail with a `CheckpointError`, or with the error that a fault has raised.

    Attributes:
      result: what it returned, if it did.
      error: what it raised, if it did.
      warnings: the texts of the warnings.
      log: how far it came.
      begun: the step that it began at.
    """

    latest = 0  # the step of the checkpoint that was read last; see `observed`

    def __init__(self, folder=None, expected=(), keep=10, save_every=SAVE_EVERY, **arguments):
        self.result, self.error, self.log = None, None, Recorder()
        Attempt.latest = 0
        given, options = _inputs()
        options = options | {"log": [self.log, *arguments.pop("logs", [])]} | arguments
        if folder is not None:
            options["checkpoint"] = bx.Checkpoint(folder, steps=save_every, keep=keep, resume=True)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                self.result = bx.minimize(*given, **options)
            except (bx.CheckpointError, *expected) as error:
                self.error = error
        self.begun = Attempt.latest
        self.warnings = [str(one.message) for one in seen if "damaged" in str(one.message)]
        if self.error is not None:
            self._check_error()

    def _check_error(self):
        if not str(self.error).strip():
            raise ViolationError(f"{type(self.error).__name__} gives no reason")
        if self.log.reached:  # steps were taken: they must not be lost
            result = getattr(self.error, "result", None)
            if result is None or int(result.state.step) < self.log.reached:
                raise ViolationError(f"the run had reached step {self.log.reached}, the error holds {result}")

    @property
    def finished(self):
        return self.result is not None and self.result.outcome is bx.Outcome.FINISHED


def bits(result):
    """All of a result that does not depend on the clock."""
    state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.state)]
    return state, [result.history[name].tobytes() for name in COLUMNS]


@functools.cache
def never_stopped():
    """The bits of a run that was never stopped."""
    return bits(Attempt().result)


def require_same(result, history=True):
    """Raises unless a result has the bits of a run that was never stopped."""
    (state, columns), (expected, expected_columns) = bits(result), never_stopped()
    if state != expected:
        raise ViolationError(f"the state has other bits at step {int(result.state.step)}")
    if history and columns != expected_columns:
        raise ViolationError("the history has other bits")


def require_resumed(attempt):
    """Raises unless a run that finished has begun at the latest checkpoint, and has the right bits."""
    if attempt.finished:
        require_same(attempt.result)
        if attempt.begun != STOPPED_AT:
            raise ViolationError(f"began at step {attempt.begun}, not at {STOPPED_AT}")


def contents(folder):
    """Everything in a folder but the lock file: for each name, what is below it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        top, *below = path.relative_to(folder).parts
        if path.is_symlink():
            what = ("link", os.readlink(path))
        elif path.is_dir():
            what = ("folder",)
        else:
            what = ("file", path.read_bytes()) if path.is_file() else ("other",)
        if top != ".lock":
            found.setdefault(top, {})["/".join(below)] = what
    return found


def saved_steps(folder):
    names = [path.name.removeprefix("step_") for path in folder.glob("step_*")]
    return sorted(int(name) for name in names if name.isdecimal())


def require_nothing_lost(before, after):
    """Raises unless everything is still there; a checkpoint may have been set aside as damaged."""
    for name, below in before.items():
        aside = re.compile(rf"damaged_{re.escape(name)}(_\d+)?")
        if not any(after[one] == below for one in after if one == name or aside.fullmatch(one)):
            raise ViolationError(f"{name} is gone or has changed")


@contextlib.contextmanager
def nothing_moved(folder):
    """For a fault that says nothing about checkpoints: none may be lost or called damaged."""
    before = contents(folder)
    yield
    after = contents(folder)
    moved = [name for name, below in before.items() if after.get(name) != below]
    if moved:
        raise ViolationError(f"{moved} are gone or have changed")


def settle(folder, may_refuse=True, may_warn=True, history=True, log=None):
    """Resumes, and raises unless the property holds.

    Args:
      folder: where the checkpoints are.
      may_refuse: False if a good checkpoint is there, so that a refusal is a violation.
      may_warn: False if no checkpoint can be damaged.
      history: False if the fault may have forged what was measured.
      log: a file of JSON lines that the run before this one wrote to.

    Returns:
      "resumed" or "refused".
    """
    before = {name: below for name, below in contents(folder).items() if "orbax-checkpoint-tmp" not in name}
    steps = saved_steps(folder)
    attempt = Attempt(folder, logs=[log])
    after = contents(folder)
    require_nothing_lost(before, after)
    if attempt.warnings and not may_warn:
        raise ViolationError(f"a checkpoint is damaged: {attempt.warnings}")
    if attempt.error is not None:
        if not may_refuse:
            raise ViolationError(f"refused: {attempt.error}") from attempt.error
        if set(before) - set(after):
            raise ViolationError("a refusal has renamed something")
        return REFUSED
    require_same(attempt.result, history)
    if log is not None:
        logged = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        if logged != attempt.result.history["step"].tolist():
            raise ViolationError(f"the log holds the steps {logged}")
    if attempt.begun < max(steps, default=0) and not attempt.warnings:
        raise ViolationError(f"began at {attempt.begun} of {steps} without a warning")
    return RESUMED


@contextlib.contextmanager
def observed():
    """Within, attempts know where a run begins, and the step is traced only once.

    (Tracing it for its digest would take most of the time, and the digest is tested elsewhere.)
    """
    digest, restore, found = identity.step_digest, CheckpointStore.restore, []

    def one_digest(*arguments):
        found or found.append(digest(*arguments))
        return found[0]

    def noted_restore(*arguments):
        saved = restore(*arguments)
        Attempt.latest = 0 if saved is None else int(saved.state.step)
        return saved

    identity.step_digest, CheckpointStore.restore = one_digest, noted_restore
    try:
        yield
    finally:
        identity.step_digest, CheckpointStore.restore = digest, restore


@functools.cache
def stopped_run():
    """A folder with the checkpoints of a run that was stopped, and with what a person keeps there."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    for name, content in OWN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    Attempt(folder, steps=STOPPED_AT)
    return folder


@contextlib.contextmanager
def copy_of_stopped_run():
    """A copy of that folder, which a fault may damage."""
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "run"
        shutil.copytree(stopped_run(), folder)
        yield folder
