"""Several hosts: 1,024 ridge regressions that share their penalties.

x holds a penalty per feature; blocks, their rows and weights are split over the devices of all
hosts. The first of two runs `python examples/many_hosts.py --hosts first.host:12345 2 0`, the second
the same with `2 1`; under SLURM all run it with `--hosts` alone. Without that, one process learns on
this machine, and then two. The picture shows that they find the same penalties, but for rounding.
"""

import argparse
import socket
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few tasks and steps, to try it out")
parser.add_argument("--picture", default="many_hosts.png", help="where the picture goes")
parser.add_argument("--hosts", nargs="*", help="first host and port, processes, number of this one")
parser.add_argument("--checkpoint", help="a folder that all hosts share")
parser.add_argument("--result", help="where the first process writes x")
options = parser.parse_args()
TASKS, STEPS, ROWS, FEATURES = (64, 100, 24, 16) if options.quick else (1024, 400, 24, 16)
if options.hosts is not None:
    jax.distributed.initialize(*options.hosts[:1], *map(int, options.hosts[1:]))


def upper(x, y, block, batch):  # the error on held-out rows
    return jnp.mean((batch["row"] @ y - batch["target"]) ** 2)


def lower(x, y, block, batch):  # the error on training rows, with the shared penalties
    return jnp.mean((batch["row"] @ y - batch["target"]) ** 2) + jnp.exp(x) @ y**2


def draw():  # rows of all tasks; features matter less and less
    row = random.normal(size=(TASKS * ROWS, FEATURES)).astype(np.float32)
    target = (row * weights.repeat(ROWS, axis=0)).sum(1) + random.normal(size=len(row))
    return bx.PerBlock({"row": row, "target": target.astype(np.float32)}, np.arange(TASKS + 1) * ROWS)


random = np.random.default_rng(0)
weights = random.normal(size=(TASKS, FEATURES)) * np.logspace(0, -2, FEATURES)
result = bx.minimize(
    bx.Problem(upper, lower, TASKS, upper_data=draw(), lower_data=draw()),
    jnp.zeros(FEATURES),
    jnp.zeros((TASKS, FEATURES)),
    solver=bx.BlockNewton(optax.adam(0.03)),  # left out, x would take some thousand steps
    steps=STEPS,
    sampling=bx.Sampling(TASKS // 8, batch_size=8, strata=max(2, jax.device_count())),
    mesh=jax.make_mesh((jax.device_count(),), ("blocks",)),
    checkpoint=options.checkpoint and bx.Checkpoint(options.checkpoint, resume=True),
)
if options.result and jax.process_index() == 0:
    np.save(options.result, result.x)
if options.hosts is not None:
    sys.exit()

with tempfile.TemporaryDirectory() as folder:
    with socket.create_server(("localhost", 0)) as free:
        place = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *sys.argv[1:], f"--result={folder}/x.npy", "--hosts", place, "2"]
    _ = [process.wait() for process in [subprocess.Popen([*command, number]) for number in "01"]]
    of_two = np.load(f"{folder}/x.npy")
print("largest difference in x between one process and two:", np.abs(of_two - result.x).max())

figures.use_style()
figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=2.8)
axis.plot(np.exp(result.x), "o", color="0.7", markersize=8, label="one process")
axis.plot(np.exp(of_two), "x", color="#0072B2", label="two processes")
axis.set(xlabel="feature", ylabel="learnt penalty", yscale="log")
figures.legend_below(axis)
figure.savefig(options.picture, dpi=150)
