"""Thousands of ridge regressions that share their penalties, on all devices of one or more hosts.

Block i is a task with its own rows and a weight vector y_i; x holds the logarithm of one penalty per feature,
learnt so that all tasks do well on their held-out rows. Blocks, rows and weights are split over the devices.

One host, all of its devices:

    python examples/many_hosts.py

Two hosts, with one command on each (the first host is the coordinator; any free port will do):

    python examples/many_hosts.py --coordinator first.host:12345 --processes 2 --process 0
    python examples/many_hosts.py --coordinator first.host:12345 --processes 2 --process 1

SLURM, which gives every process its number (see docs/scaling.md):

    srun python examples/many_hosts.py --cluster
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx


def upper(x, y, block, batch):
    """The error on held-out rows."""
    return 0.5 * jnp.mean((batch["row"] @ y - batch["target"]) ** 2)


def lower(x, y, block, batch):
    """The error on training rows, with the shared penalties."""
    return 0.5 * jnp.mean((batch["row"] @ y - batch["target"]) ** 2) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def make_problem(tasks: int, rows: int, features: int) -> bx.Problem:
    """Tasks whose true weights are large for the first features and small for the last."""
    random = np.random.default_rng(0)
    scale = np.logspace(0, -2, features)
    weights = random.normal(size=(tasks, features)) * scale

    def data(count: int) -> bx.PerBlock:
        row = random.normal(size=(tasks, count, features)).astype(np.float32)
        noise = random.normal(size=(tasks, count))
        target = (np.einsum("trf,tf->tr", row, weights) + noise).astype(np.float32)
        stacked = {"row": row.reshape(-1, features), "target": target.reshape(-1)}
        return bx.PerBlock(stacked, np.arange(tasks + 1) * count)

    return bx.Problem(upper, lower, blocks=tasks, upper_data=data(rows), lower_data=data(rows))


def main() -> None:
    """Learns the penalties and prints the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cluster", action="store_true", help="let JAX get its process number from SLURM or MPI"
    )
    parser.add_argument("--coordinator", help="address and port of the first host")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--tasks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint", help="a folder that all hosts share")
    options = parser.parse_args()
    if options.cluster:
        jax.distributed.initialize()
    elif options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)

    features, devices = 16, jax.device_count()
    tasks = options.tasks // devices * devices
    problem = make_problem(tasks, rows=24, features=features)
    mesh = jax.make_mesh((devices,), ("blocks",))
    solver = bx.BSVRBv2(upper_step=0.5, alpha=0.5)
    x0, y0 = jnp.zeros(features), jnp.zeros((tasks, features))
    sampling = {"blocks_per_step": min(tasks, 64 * devices), "batch_size": 8}
    checkpoint = None if options.checkpoint is None else bx.Checkpoint(options.checkpoint, resume=True)
    key = jax.random.key(0)
    estimate = bx.memory_estimate(problem, x0, y0, solver=solver, mesh=mesh, **sampling)
    if jax.process_index() == 0:
        print(estimate)
    result = bx.minimize(
        problem,
        x0,
        y0,
        solver=solver,
        steps=options.steps,
        key=key,
        checkpoint=checkpoint,
        mesh=mesh,
        **sampling,
    )
    if jax.process_index() == 0:
        losses = result.history["objective"]
        print(f"{tasks} tasks on {devices} devices, {result.steps_per_second:,.0f} steps/s")
        print(f"held-out error {losses[0]:.3f} → {losses[-1]:.3f}; penalties {np.exp(result.x).round(2)}")


if __name__ == "__main__":
    main()
