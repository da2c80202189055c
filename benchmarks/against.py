"""Time per step of this tree beside that of another one, by turns.

`python -m benchmarks.against ../other-tree` runs `benchmarks.step` of both trees in turns, in processes of
their own, and divides the best times. Both must have the same dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def measure(tree: Path, arguments: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """What `benchmarks.step` of a tree measures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.step", "--out", folder, *arguments]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "step.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the root of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=["BSVRBv2"])
    options = parser.parse_args()
    trees = {"this": Path(__file__).parent.parent, "other": options.other.resolve()}
    best: dict[tuple[str, str, str], float] = {}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            for data, rows in measure(tree, ["--methods", *options.methods]).items():
                for method, row in rows.items():
                    key = (name, data, method)
                    best[key] = min(best.get(key, float("inf")), row["microseconds"])
    for data in sorted({data for _, data, _ in best}):
        for method in options.methods:
            this, other = best["this", data, method], best["other", data, method]
            print(f"{data} {method}: {this:.1f} µs, other {other:.1f} µs, ratio {this / other:.3f}")


if __name__ == "__main__":
    main()
