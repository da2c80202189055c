"""Which faults there are, how many of each, and the processes that inject them."""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

KINDS = {
    # name: (module, function, faults of a hundred)
    "damaged file": ("files", "damaged_file", 30),
    "damaged folder": ("files", "damaged_folder", 7),
    "hostile JSON": ("files", "hostile_json", 10),
    "error at a file operation": ("operations", "error", 14),
    "folder lost during a run": ("operations", "lost_folder", 4),
    "signal at a file operation": ("operations", "stop", 4),
    "limits of the system": ("operations", "limit", 3),
    "full disk": ("operations", "full_disk", 2),
    "error in a callback": ("callbacks", "callback", 8),
    "killed at a file operation": ("kills", "kill_at_operation", 5),
    "killed at any moment": ("kills", "kill_at_moment", 4),
    "hostile data file": ("data", "hostile_data", 4),
    "hostile server": ("data", "hostile_server", 5),
    "tampered recommender": ("data", "tampered_recommender", 3),
}
SMALL_DISK = "full disk"  # needs a process of its own
TESTS = Path(__file__).parent.parent


def plan(count, kinds=tuple(KINDS)):
    """(kind, number within its kind) of so many faults, the kinds mixed."""
    faults, owed = [], dict.fromkeys(kinds, 0.0)
    numbers = collections.Counter()
    whole = sum(KINDS[kind][-1] for kind in kinds)
    for _ in range(count):
        for kind in kinds:
            owed[kind] += KINDS[kind][-1] / whole
        kind = max(owed, key=owed.get)
        owed[kind] -= 1
        faults.append((kind, numbers[kind]))
        numbers[kind] += 1
    return faults


def inject(kind, number, seed):
    """Injects one fault in this process; returns "resumed" or "refused", or raises."""
    import importlib

    module, name, _ = KINDS[kind]
    rng = np.random.default_rng([seed, list(KINDS).index(kind), number])
    return getattr(importlib.import_module(f"faults.{module}"), name)(rng, number)


def serve(seed):
    """What a worker does: injects the faults that it reads, and writes what came of them."""
    from faults.runs import observed

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing else may be written between the answers
    with observed():
        for line in sys.stdin:
            kind, number = json.loads(line)
            try:
                answer = inject(kind, number, seed)
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            answers.write(json.dumps(answer) + "\n")


def small_disk(size="6m"):
    """(prefix of a command under which a folder is a small disk, the folder); None where not allowed."""
    folder = tempfile.mkdtemp(prefix="fault-disk-")
    mount = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$0" "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
    if shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
        return prefix, folder
    os.rmdir(folder)
    return None


class Worker:
    """A process that injects faults, one after the other; a new one if it dies or hangs.

    Args:
      seed: of the random choices.
      longest: seconds; a fault that takes longer hangs. None for any time.
      prefix: of the command.
      temporary: the folder for temporary files.
    """

    def __init__(self, seed, longest=None, prefix=(), temporary=None):
        self.seed, self.longest, self.prefix, self.process = seed, longest, prefix, None
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        self.environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        if temporary:
            self.environment["TMPDIR"] = temporary

    def inject(self, kind, number):
        if self.process is None:
            command = [*self.prefix, sys.executable, "-m", "faults", "--serve", "--seed", str(self.seed)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, text=True, env=self.environment, **pipes)
        hung, late = [], None
        if self.longest is not None:
            late = threading.Timer(self.longest, lambda: hung.append(1) or self.process.kill())
            late.start()
        try:
            self.process.stdin.write(json.dumps([kind, number]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            if late is not None:
                late.cancel()
        if answer:
            return json.loads(answer)
        status, self.process = self.process.wait(), None
        return f"hangs: not finished after {self.longest} s" if hung else f"it died with status {status}"

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def run(count, seed, workers=2, longest=None, tell=lambda text: None):
    """Injects faults in several processes.

    Returns:
      {kind: Counter of answers}, where an answer is "resumed", "refused" or what went wrong.
    """
    found = {kind: collections.Counter() for kind in KINDS}
    disk = small_disk()
    if disk is None:
        tell("full disk: skipped, as this machine lets nobody mount a small disk")
    faults = plan(count, [kind for kind in KINDS if kind != SMALL_DISK or disk is not None])
    apart = collections.deque([one for one in faults if one[0] == SMALL_DISK])
    faults = collections.deque([one for one in faults if one[0] != SMALL_DISK])
    lock, done = threading.Lock(), []

    def work(worker, queue):
        while True:
            with lock:
                if not queue:
                    break
                kind, number = queue.popleft()
            began = time.monotonic()
            answer = worker.inject(kind, number)
            if time.monotonic() - began > 20:
                tell(f"{kind}, number {number}: {time.monotonic() - began:.0f} s")
            with lock:
                found[kind][answer] += 1
                done.append(kind)
                if answer not in ("resumed", "refused"):
                    tell(f"{kind}, number {number}: {answer}")
                elif len(done) % 100 == 0:
                    tell(f"{len(done)} of {count}")
        worker.close()

    jobs = [(Worker(seed, longest), faults) for _ in range(workers)]
    if disk is not None:
        jobs.append((Worker(seed, longest, *disk), apart))
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if disk is not None:
        shutil.rmtree(disk[1], ignore_errors=True)
    return found


def table(found):
    """Counts by kind as lines of text, and how many failures there are."""
    lines = [f"{'fault':28}{'injected':>10}{'resumed':>10}{'refused':>10}{'failures':>10}"]
    sums = np.zeros(4, int)
    for kind, answers in found.items():
        good = [answers["resumed"], answers["refused"]]
        row = [answers.total(), *good, answers.total() - sum(good)]
        sums += row
        lines.append(f"{kind:28}" + "".join(f"{one:>10}" for one in row))
    lines.append(f"{'all':28}" + "".join(f"{one:>10}" for one in sums))
    return lines, int(sums[3])
