"""Time per step of this tree beside that of another one, and what the automatic upper step takes.

`python -m benchmarks.against ../other-tree` has a process of each tree, which take turns at some steps of the
same method; nothing else differs but the packages. Both must have the same dependencies. A second process of
this tree takes its turns too: by how much its ratio to the first is off one is what cannot be told apart.
Where programs and their arrays happen to lie in memory is good for some percent, so there are several
`--pairs` of new processes, each with a ratio: the median over rounds of that of two turns in a row. What is
printed is the median of these, with the least and the largest. Steps of this tree with the automatic upper
step take their turns between them, unless `--fixed`. Seconds are those of the processor, which hardly depend
on what else the machine does; what the compiler counts in a step, operations and bytes, does not at all.

`taskset -c 3 python -m benchmarks.against …` keeps all processes on one core, where they do not work at once
and where a step has no helping threads, whose seconds would count, too.
`--join` makes one table of those of several runs, with different methods each.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bilevax.experiments.report import Report

METHODS = "BSVRBv1 BSVRBv2 KSONG MMBO SOBA MASOBA F2SA F3SA BlockNewton BlockSAGA BlockPAGE RSVRB MSVR SONG"
UPPER_STEP = 0.1
HERE = Path(__file__).parent


class Side:
    """A process with the packages of a tree, before those that this process may use."""

    def __init__(self, tree: Path):
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "turns.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": path},
        )

    def ask(self, method: str, upper_step: float | None, steps: int) -> Any:
        """What steps of a method take now; for none, the operations and bytes of one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([[method, upper_step], steps]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def turns(sides: dict[str, Side], method: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of a step in every turn of each side."""
    cases = {name: (side, None if name == "automatic" else UPPER_STEP) for name, side in sides.items()}
    for side, upper_step in cases.values():  # compiled
        side.ask(method, upper_step, 1)
    first = sides["this"]
    steps = max(1, round(seconds / min(first.ask(method, UPPER_STEP, 3) / 3 for _ in range(2))))
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases) if number % 2 else list(reversed(cases)):
            side, upper_step = cases[name]
            taken[name].append(side.ask(method, upper_step, steps) / steps)
    return taken


def measured(trees: dict[str, Path], method: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    found: list[dict[str, list[float]]] = []
    counts: dict[str, list[float]] = {}
    for _ in range(options.pairs):
        sides = {name: Side(tree) for name, tree in trees.items()}
        if not options.fixed:
            sides["automatic"] = sides["this"]
        found.append(turns(sides, method, options.rounds, options.seconds))
        counts = counts or {name: sides[name].ask(method, UPPER_STEP, 0) for name in trees}
        for name in trees:
            sides[name].close()
    fastest = min(min(one["this"]) for one in found)
    row: dict[str, Any] = {"method": method, "µs per step": f"{1e6 * fastest:.1f}"}
    for name, title in (("other", "to the other"), ("again", "to itself"), ("automatic", "automatic")):
        if name not in found[0]:
            continue
        over, by = ("automatic", "this") if name == "automatic" else ("this", name)
        ratios = [statistics.median(a / b for a, b in zip(one[over], one[by], strict=True)) for one in found]
        row[title] = f"{statistics.median(ratios):.3f}"
        row[f"{title}, from to"] = f"{min(ratios):.3f} {max(ratios):.3f}"
        if name == "other":
            for what, mine, theirs in zip(
                ("operations", "bytes"), counts["this"], counts["other"], strict=True
            ):
                row[f"{title}, {what}"] = f"{mine / theirs:.3f}"
    return row


def joined(files: list[Path]) -> list[dict[str, Any]]:
    """The rows of several tables, in the order of the methods."""
    rows = [row for path in files for row in csv.DictReader(path.open(encoding="utf-8"))]
    return sorted(rows, key=lambda row: METHODS.split().index(row["method"]))


def facts(files: list[Path]) -> dict[str, Any]:
    """What the settings of several runs say together: each with its options, and all their seconds."""
    runs = [json.loads(path.with_name("settings.json").read_text(encoding="utf-8")) for path in files]
    return {
        "runs": [run["options"] for run in runs],
        "seconds": round(sum(run["seconds"] for run in runs), 1),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the root of another checkout; left out, none")
    parser.add_argument("--pairs", type=int, default=5, help="of new processes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.03, help="of a turn")
    parser.add_argument("--methods", nargs="*", default=METHODS.split())
    parser.add_argument("--fixed", action="store_true", help="no turns with the automatic upper step")
    parser.add_argument("--join", type=Path, nargs="+", metavar="CSV", help="tables of several runs")
    parser.add_argument("--out", type=Path, default=Path("results/against"))
    options = parser.parse_args()
    trees = {"this": HERE.parent}
    if options.other is not None:
        trees |= {"other": options.other.resolve(), "again": HERE.parent}
    noted = {
        name: str(value) for name, value in vars(options).items() if name not in ("other", "join", "out")
    }
    report, rows = Report(options.out, noted), []
    note = (
        "Ratios of times per step: the median over pairs of processes, and the least and largest of them; "
        "to itself: of two processes of this tree, which is what cannot be told apart."
    )
    if options.join:
        rows = joined(options.join)
        report.table("against", rows, "Time per step", note)
    else:
        for method in options.methods:
            rows.append(measured(trees, method, options))
            report.table("against", rows, "Time per step", note)  # as far as it has come
    report.finish()
    if options.join:
        for name, value in facts(options.join).items():
            report.fact(name, value)


if __name__ == "__main__":
    main()
