"""All benchmarks in one command, kept with commit and machine, and compared with another commit's.

`make bench` runs `python -m benchmarks.suite`. Each part is a process of its own, with a limit in minutes;
the limits add up to an hour, and two quiet cores need less than half of it. A part that takes longer, or
fails, is named and left out. Most parts take two rounds, and how far these differ is the noise of their
times; those of one round are reported, but not compared. The record goes to results/bench/COMMIT.json and
.md; what the last round of a part wrote stays in results/bench/PART, where
`python -m scripts.evidence keep results/bench/step step "make bench BENCH=step"` takes it from.

Then the times are compared with those of the latest record of another commit on the same machine
(`--against FILE` for a given one): what is slower by more than the noise of both is listed, and the command
ends with 1. `--parts step` runs some parts only, and `--compare NEW OLD` two records that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = Path("results") / "bench"
LEAST_NOISE = 0.05  # below which no difference counts


class Part(NamedTuple):
    """A benchmark: its arguments, the most minutes of a round, and how many rounds."""

    arguments: tuple[str, ...]
    minutes: float
    rounds: int = 1


PARTS = {
    "first_result": Part(("benchmarks.first_result", "--rounds", "2"), 3, 2),
    "step": Part(("benchmarks.step", "--methods", "BSVRBv2", "BSVRBv1", "KSONG", "--turns", "8"), 4, 2),
    "growth": Part(
        (
            *("benchmarks.growth", "--sizes", "m", "d_x", "d_y", "--most", "1000000"),
            *("--turns", "5", "--seconds", "0.1"),
        ),
        3,
        2,
    ),
    "lazy_x": Part(("benchmarks.lazy_x", "--turns", "8", "--seconds", "0.1"), 3, 2),
    "launches": Part(("benchmarks.launches", "--methods", "BSVRBv2", "SOBA", "--turns", "3"), 3, 2),
    "single_block": Part(("benchmarks.single_block", "a8a", "w8a", "--speed"), 3, 2),
    "speedup": Part(("benchmarks.speedup", "--seeds", "4", "--sizes", "1", "4", "16"), 5),
    "memory": Part(("benchmarks.memory",), 4),
    "runner": Part(("benchmarks.runner", "overhead", "--turns", "2"), 3),
    "peers": Part(("benchmarks.peers", "--seconds", "8", "--fast"), 10),
}


def run(part: Part, folder: Path) -> tuple[list[dict[str, Any]], str, str]:
    """The figures of every round, the Markdown of the last one, and what went wrong.

    The folder is emptied first, and holds what the last round wrote.
    """
    found: list[dict[str, Any]] = []
    text = ""
    for _ in range(part.rounds):
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", *part.arguments, "--out", str(folder.absolute())]
        # A group of its own, so that processes that it starts end with it.
        running = subprocess.Popen(command, cwd=ROOT, env=_environment(), start_new_session=True)
        try:
            status = running.wait(60 * part.minutes)
        except BaseException as error:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return found, text, f"took more than {part.minutes:g} minutes"
            raise
        if status != 0:
            return found, text, f"ended with {status}"
        files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        pages = [path.read_text() for path in sorted(folder.glob("*.md"))]
        found.append(files)
        text = "\n".join(pages) or f"```json\n{json.dumps(files, indent=1)}\n```"
    return found, text, ""


def times(files: Any, path: str = "") -> dict[str, float]:
    """All microseconds per step in the files of a part, by where they are."""
    found: dict[str, float] = {}
    for name, value in files.items() if isinstance(files, dict) else ():
        if name == "microseconds":
            found[path] = float(value)
        else:
            found |= times(value, f"{path} {name}".strip())
    return found


def rounds_of(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Every time, in all rounds of a part; the names of its files are left out. One round has no noise."""
    if len(found) < 2:
        return {}
    each = [times({name: one for file in files.values() for name, one in _by_name(file)}) for files in found]
    return {name: [one[name] for one in each] for name in each[0]}


def slower(new: dict[str, list[float]], old: dict[str, list[float]]) -> list[str]:
    """What takes longer than it did, by more than the noise of both, in words.

    Example:
      >>> slower({"a": [12.0, 12.1], "b": [10.0, 14.0]}, {"a": [10.0, 10.1], "b": [9.0, 9.1]})
      ['a: 12.0 µs, before 10.0 µs: 1.20 times, noise 5%']
      >>> slower({"a": [2e6, 2e6]}, {"a": [1e6, 1e6]})
      ['a: 2.00 s, before 1.00 s: 2.00 times, noise 5%']
    """
    found = []
    for name in sorted(set(new) & set(old)):
        noise = max(LEAST_NOISE, *(max(one) / min(one) - 1 for one in (new[name], old[name])))
        ratio = min(new[name]) / min(old[name])
        if ratio > 1 + noise:
            found.append(
                f"{name}: {_duration(min(new[name]))}, before {_duration(min(old[name]))}: {ratio:.2f} "
                f"times, noise {100 * noise:.0f}%"
            )
    return found


def _duration(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 1e5 else f"{microseconds / 1e6:.2f} s"


def machine() -> str:
    """The processor, how many cores of it, and the versions that matter."""
    import jax
    import jaxlib

    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    device, cores = jax.devices()[0].device_kind, len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {device}; jax {jax.__version__}, jaxlib {jaxlib.__version__}"


def commit() -> str:
    """The commit of the tree, marked if files have been changed since."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def latest(folder: Path, record: dict[str, Any]) -> Path | None:
    """The latest record of another commit on the same machine."""
    others = []
    for path in folder.glob("*.json"):
        other = json.loads(path.read_text())
        if other["commit"] != record["commit"] and other["machine"] == record["machine"]:
            others.append((other["seconds"], path))
    return max(others)[1] if others else None


def compare(record: dict[str, Any], other: dict[str, Any]) -> int:
    """Prints what became slower; returns 1 if anything did."""
    found = slower(record["times"], other["times"])
    print(f"{record['commit']} beside {other['commit']}: {len(found)} of {len(record['times'])} are slower")
    print("\n".join(found))
    return int(bool(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--against", type=Path, help="the record to compare with")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("NEW", "OLD"), help="run nothing")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*(json.loads(path.read_text()) for path in options.compare)))
    record: dict[str, Any] = {"commit": commit(), "machine": machine(), "seconds": time.time()}
    record |= {"times": {}, "minutes": {}, "wrong": {}}
    pages = [f"# Benchmarks of {record['commit']}", "", record["machine"]]
    for name in options.parts:
        began = time.monotonic()
        found, text, wrong = run(PARTS[name], options.out / name)
        minutes = (time.monotonic() - began) / 60
        record["minutes"][name] = round(minutes, 1)
        record["times"] |= {f"{name}: {where}": values for where, values in rounds_of(found).items()}
        if wrong:
            record["wrong"][name] = wrong
        pages += ["", f"## {name}", "", text, "", f"{minutes:.1f} minutes. {wrong}".strip()]
    options.out.mkdir(parents=True, exist_ok=True)
    against = options.against or latest(options.out, record)
    (options.out / f"{record['commit']}.json").write_text(json.dumps(record, indent=1))
    (options.out / f"{record['commit']}.md").write_text("\n".join(pages) + "\n")
    print(f"{options.out / record['commit']}.md: {sum(record['minutes'].values()):.0f} minutes")
    for name, wrong in record["wrong"].items():
        print(f"{name} {wrong}")
    status = compare(record, json.loads(against.read_text())) if against else 0
    sys.exit(status or int(bool(record["wrong"])))


def _by_name(file: Any) -> list[tuple[str, Any]]:
    return list(file.items()) if isinstance(file, dict) else []


def _environment() -> dict[str, str]:
    more = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *([more] if more else [])])}


if __name__ == "__main__":
    main()
