"""Time per step of this tree beside that of another one, and what the automatic upper step takes.

`python -m benchmarks.against ../other-tree` has a process of each tree, which take turns at some steps of the
same method; nothing else differs but the packages. Both must have the same dependencies. Steps of this tree
with the automatic upper step take their turns between them. A ratio is the median over rounds of that of two
turns in a row, beside the ratio of the best turns. What the compiler counts in a step, operations and bytes,
does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
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
    """A process with the packages of a tree."""

    def __init__(self, tree: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "turns.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
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


def measured(sides: dict[str, Side], method: str, rounds: int, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    this, other = sides["this"], sides.get("other")
    turns = {"fixed": (this, UPPER_STEP), "automatic": (this, None)}
    turns |= {} if other is None else {"other": (other, UPPER_STEP)}
    for side, upper_step in turns.values():  # compiled
        side.ask(method, upper_step, 1)
    steps = max(1, round(seconds / min(this.ask(method, UPPER_STEP, 3) / 3 for _ in range(2))))
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        names = list(turns) if number % 2 else list(reversed(turns))
        for name in names:
            side, upper_step = turns[name]
            taken[name].append(side.ask(method, upper_step, steps) / steps)

    def ratio(one: str, by: str) -> dict[str, str]:
        pairs = [a / b for a, b in zip(taken[one], taken[by], strict=True)]
        best = min(taken[one]) / min(taken[by])
        return {"median": f"{statistics.median(pairs):.3f}", "best": f"{best:.3f}"}

    row: dict[str, Any] = {"method": method, "µs per step": f"{1e6 * min(taken['fixed']):.1f}"}
    if other is not None:
        row |= {f"to the other, {kind}": value for kind, value in ratio("fixed", "other").items()}
        counts = this.ask(method, UPPER_STEP, 0), other.ask(method, UPPER_STEP, 0)
        for name, mine, theirs in zip(("operations", "bytes"), *counts, strict=True):
            row[f"to the other, {name}"] = f"{mine / theirs:.3f}"
    return row | {f"automatic, {kind}": value for kind, value in ratio("automatic", "fixed").items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the root of another checkout; left out, none")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.03, help="of a turn")
    parser.add_argument("--methods", nargs="*", default=METHODS.split())
    parser.add_argument("--out", type=Path, default=Path("results/against"))
    options = parser.parse_args()
    trees = {"this": HERE.parent} | ({} if options.other is None else {"other": options.other.resolve()})
    report = Report(
        options.out, {name: str(value) for name, value in vars(options).items() if name != "other"}
    )
    sides = {name: Side(tree) for name, tree in trees.items()}
    rows = []
    note = f"Ratios of {options.rounds} pairs of turns: their median, and that of the best turns."
    for method in options.methods:
        rows.append(measured(sides, method, options.rounds, options.seconds))
        report.table("against", rows, "Time per step", note)  # as far as it has come
    for side in sides.values():
        side.close()
    report.finish()


if __name__ == "__main__":
    main()
