"""A long run with checkpoints: killed, resumed, and the same to the last bit.

A run of days should survive a crash. `bx.Checkpoint` saves everything a run needs, and
`resume=True` continues from the latest save. This program starts a run in a process of its own,
kills it (SIGKILL, as a power failure would), starts it again, and compares it with a run that
nobody disturbed. The picture shows the objective of all three.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="long_run.png", help="where the picture goes")
parser.add_argument("--folder", type=Path, help="run with checkpoints in this folder, and do nothing else")
options = parser.parse_args()
figures.use_style()
STEPS = 400 if options.quick else 2_000

# 200 ridge regressions that share their penalties.
keys = jax.random.split(jax.random.key(0), 3)
rows = jax.random.normal(keys[0], (200, 40, 10))
weights = jax.random.normal(keys[1], (200, 1, 10)) * jnp.logspace(0, -2, 10)
target = jnp.sum(rows * weights, -1) + jax.random.normal(keys[2], (200, 40))


def upper(x, y, block, batch):
    return jnp.mean((block["row"][20:] @ y - block["target"][20:]) ** 2)


def lower(x, y, block, batch):
    return jnp.mean((block["row"][:20] @ y - block["target"][:20]) ** 2) + jnp.exp(x) @ y**2


def run(folder):
    problem = bx.Problem(upper, lower, {"row": rows, "target": target})
    often = bx.Checkpoint(folder / "checkpoints", steps=STEPS // 20, resume=True)
    plan = {"steps": STEPS, "blocks_per_step": 20, "checkpoint": often, "log": folder / "log.jsonl"}
    return bx.minimize(problem, jnp.zeros(10), jnp.zeros((200, 10)), **plan)


if options.folder:
    run(options.folder)
    sys.exit()

with tempfile.TemporaryDirectory() as made:
    disturbed, log = Path(made, "disturbed"), Path(made, "disturbed", "log.jsonl")
    process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--folder", disturbed])
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 40):
        time.sleep(0.05)
    process.kill()
    process.wait()
    killed_at = json.loads(log.read_text().splitlines()[-1])["step"]
    resumed, whole = run(disturbed), run(Path(made, "undisturbed"))

same = bool(np.array_equal(resumed.x, whole.x)) and bool(np.array_equal(resumed.y, whole.y))
print(f"killed after step {killed_at} of {STEPS}; the same bits at the end: {same}")

figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=2.8)
axis.plot(whole.history["step"], whole.history["objective"], color="0.75", linewidth=5, label="undisturbed")
axis.plot(resumed.history["step"], resumed.history["objective"], color="#0072B2", label="killed and resumed")
axis.axvline(killed_at, color="#D55E00", linestyle=":", label="killed")
axis.set(xlabel="step", ylabel="held-out error", title=f"the same bits at the end: {same}")
figures.legend_below(axis, columns=3)
figure.savefig(options.picture, dpi=150)
