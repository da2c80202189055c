"""Small runs, started by `test_sharding.py` in processes of their own, with as many devices as it says.

`python sharded_program.py FOLDER ORDER…` runs cases on all devices and leaves their final states in FOLDER.
With the environment variable COORDINATOR (address, processes, own number) it is one of several.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from calls import grouped

import bilevax as bx
from bilevax._util.processes import on_host

BLOCKS, PER_STEP, BATCH, STRATA, D_X, D_Y = 16, 8, 2, 8, 4, 3


def upper(x, y, block, batch):
    return 0.5 * jnp.mean(jnp.sum((y - batch["c"]) ** 2, 1)) + 0.5 * x @ x + 0.1 * jnp.sin(x) @ block["D"] @ y


def lower(x, y, block, batch):
    gap = y - block["B"] @ x
    return 0.5 * gap @ gap + 0.25 * jnp.mean((batch["a"] @ y) ** 2 - batch["a"] @ y)


def inner(x, block, batch):
    return jnp.mean(jnp.tanh(batch["a"] + block["B"] @ x), axis=0)


def make_problem(level, seed=0, risk=None):
    """Ragged blocks with rows of their own below, shared rows above."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 7, BLOCKS))])

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    problem = bx.Problem(
        upper,
        level,
        {"B": normal(BLOCKS, D_Y, D_X), "D": normal(BLOCKS, D_X, D_Y)},
        bx.Shared({"c": normal(20, D_Y)}),
        bx.PerBlock({"a": normal(int(offsets[-1]), D_Y)}, offsets),
        risk=risk,
    )
    return problem, normal(D_X), problem.levels["lower"].bounded(jnp.asarray(normal(BLOCKS, D_Y)))


def wide_problem():
    """Variables large enough for checkpoints to be written in parts, by several processes."""
    aim = np.linspace(-1, 1, BLOCKS, dtype=np.float32)
    problem = bx.Problem(
        lambda x, y, block, batch: 0.5 * jnp.mean((y - block) ** 2) + 0.05 * x @ x,
        lambda x, y, block, batch: 0.5 * jnp.sum(jnp.mean((y - x[0] * batch["w"][:, None] - x[1]) ** 2, 0)),
        aim,
        lower_data=bx.Shared({"w": np.linspace(0.5, 1.5, 12, dtype=np.float32)}),
    )
    return problem, np.ones(2, np.float32), np.zeros((BLOCKS, 1100), np.float32)


def table_problem():
    """x has a weight for every row below, of which a batch looks up its own, and an entry for all."""
    plain, x0, y0 = make_problem(lower)
    rows = plain.lower_data[0]
    count = rows.count

    def weighted(x, y, block, batch):
        weight = jax.nn.sigmoid(x["weights"] + x["rest"][0])
        return 0.5 * y @ y + jnp.mean(weight * (batch["a"] @ y - 1) ** 2) - y @ block["B"] @ x["rest"]

    problem = bx.Problem(
        lambda x, y, block, batch: upper(x["rest"], y, block, batch),
        weighted,
        plain.blocks,
        plain.upper_data,
        bx.PerBlock(
            {"a": rows.rows["a"], "index": np.arange(count, dtype=np.int32) // 2},
            np.append(rows.starts, count),
        ),
        tables={"weights": lambda block, batch: batch.get("index")},
    )
    return problem, {"weights": np.zeros(count, np.float32), "rest": x0}, y0


def nested_problem():
    """A level within bounds, and one that reads it."""
    plain, x0, y0 = make_problem(lower)

    def second(x, y, block, batch):
        return lower(x, y["second"], block, batch) + jnp.sum((y["second"] - jnp.sin(y["first"])) ** 2)

    levels = {"first": bx.argmin(lower, project=(-0.5, 0.4)), "second": bx.argmin(second, reads="first")}
    problem = bx.Problem(
        lambda x, y, block, batch: upper(x, y["second"], block, batch) + jnp.mean(y["first"]),
        levels,
        plain.blocks,
        plain.upper_data,
        plain.lower_data[0],
    )
    return problem, x0, {"first": levels["first"].bounded(y0), "second": y0}


def saddle_problem():
    """A saddle point, a maximum of f within bounds, and a mean that reads the saddle point."""
    plain, x0, y0 = make_problem(lower)

    def pair(x, y, block, batch):
        return lower(x, y[0], block, batch) + y[0] @ y[1] - lower(x, y[1], block, batch)

    def read(x, y, block, batch):
        return jnp.mean(jnp.tanh(batch["a"] * y["pair"][0]), 0)

    def f(x, y, block, batch):
        game = y["dual"] @ (y["mean"] - y["pair"][1]) - y["dual"] @ y["dual"]
        return upper(x, y["pair"][0], block, batch) + game

    levels = {"pair": bx.saddle(pair), "mean": bx.mean(read, reads="pair")}
    levels["dual"] = bx.maximum(project=(-0.2, 0.1))
    rows = dict.fromkeys(levels, plain.lower_data[0])
    problem = bx.Problem(f, levels, plain.blocks, plain.upper_data, rows)
    return problem, x0, {"pair": (y0, -y0), "mean": None, "dual": jnp.zeros_like(y0)}


def keyed_problem():
    """f and g with keys, and rows that all visited blocks of all devices see alike."""
    plain, x0, y0 = make_problem(lower)

    def f(x, y, block, batch, key):
        return upper(x, y + 0.1 * jax.random.normal(key, y.shape), block, batch)

    def g(x, y, block, batch, key):
        return lower(x, y, block, {"a": batch["c"]}) + 0.1 * jax.random.normal(key, y.shape) @ y

    rows = bx.Shared(plain.upper_data.rows, common=True)
    return bx.Problem(f, g, plain.blocks, rows, rows, random=True), x0, y0


def ball(y):
    """The nearest y of length at most one half."""
    return y / jnp.maximum(1.0, 2 * jnp.sqrt(jnp.sum(y**2) + 1e-12))


def sets_problem():
    """A lower problem and a minimum of f, each within a set that is given by its projection."""
    plain, x0, y0 = make_problem(lower)
    levels = {"lower": bx.argmin(lower, project=ball), "own": bx.minimum(project=ball)}
    problem = bx.Problem(
        lambda x, y, block, batch: upper(x, y["lower"], block, batch) + upper(x, y["own"], block, batch),
        levels,
        plain.blocks,
        plain.upper_data,
        dict.fromkeys(levels, plain.lower_data[0]),
    )
    inside = jax.vmap(ball)(y0)
    return problem, x0, dict.fromkeys(levels, inside)


def normal_problem(level):
    return lambda: make_problem(level)


def risk_problem(risk, *given, **named):
    """Made when it is run: arrays must not be made before processes know one another."""
    return lambda: make_problem(lower, risk=risk(*given, **named))


STEPS = {"upper_step": 0.05, "lower_step": 0.1}

# Name: the solver, the problem, and what is given to `minimize` besides. Every method that shares blocks is
# in some case, and so is every kind of problem.
CASES = {
    "BSVRBv2": (bx.BSVRBv2(upper_step=0.05, radius=5.0), normal_problem(lower), {"batch_size": BATCH}),
    "cvar": (bx.BlockNewton(upper_step=0.05), risk_problem(bx.cvar, 0.3), {"batch_size": BATCH}),
    "groups": (
        bx.MMBO(**STEPS),
        risk_problem(bx.worst_group, np.arange(BLOCKS) % 3, temperature=0.5),
        {"batch_size": BATCH},
    ),
    "soft": (bx.SOBA(**STEPS), risk_problem(bx.soft_maximum, 0.5), {"batch_size": BATCH}),
    "wide": (bx.BSVRBv2(**STEPS), wide_problem, {"batch_size": 1, "patience": 100}),
    "MSVR": (
        bx.Restart(bx.MSVR(upper_step=0.05), first=10, stages=3),
        normal_problem(bx.mean(inner)),
        {"batch_size": None, "shuffle": False},
    ),
    "KSONG": (
        bx.KSONG(upper_step=bx.averaged(optax.adam(0.05), 10), lower_step=0.1, floor=0.1),
        normal_problem(lower),
        {"batch_size": BATCH},
    ),
    "BlockPAGE": (bx.BlockPAGE(**STEPS), normal_problem(lower), {"batch_size": BATCH}),
    "minimum": (
        bx.SONG(upper_step=0.05),
        normal_problem(bx.minimum(project=(-0.5, 4.0))),
        {"batch_size": BATCH},
    ),
    "saddle": (bx.BSVRBv2(upper_step=0.05), saddle_problem, {"batch_size": BATCH}),
    "keys": (bx.MASOBA(**STEPS), keyed_problem, {"batch_size": BATCH}),
    "nested": (bx.BSVRBv1(upper_step=0.05), nested_problem, {"batch_size": BATCH}),
    "transformation": (
        bx.F2SA(upper_step=0.05, lower_step=optax.adam(0.05)),
        normal_problem(lower),
        {"batch_size": BATCH},
    ),
    "sets": (bx.F3SA(upper_step=0.05), sets_problem, {"batch_size": BATCH}),
    "RSVRB": (bx.RSVRB(upper_step=0.05), normal_problem(lower), {"batch_size": BATCH}),
    "table": (bx.BSVRBv2(**STEPS), table_problem, {"batch_size": BATCH}),
    "lazy Adam": (
        bx.BSVRBv2(**STEPS | {"upper_step": bx.lazy_adam(0.02, eps=1e-3)}),
        table_problem,
        {"batch_size": BATCH},
    ),
}


def spread_rows(mesh):
    """Zeros and ones, spread over all devices before the problem gets them; each process has a part."""
    own = np.arange(100_000 // jax.process_count()).reshape(-1, 100) % 3 == 0
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("blocks"))
    rows = jax.make_array_from_process_local_data(whole, own.astype(np.float32))
    return bx.PerBlock(rows, np.arange(0, rows.shape[0] + 1, 100)).packed.stored


def spread(problem, state):
    """A metric that needs all blocks, of the state and of the problem."""
    return jnp.mean(jax.tree.leaves(state.y)[0] ** 2) + jnp.mean(jax.tree.leaves(problem.blocks)[0])


def run(name, **given):
    """The case on one device, on the samples of eight strata, unless more is given."""
    solver, make, arguments = CASES[name]
    arguments = arguments | {"steps": 40, "every": 20, "blocks_per_step": PER_STEP, "strata": STRATA}
    arguments |= {"metrics": {"spread": spread}, "progress": None, "key": jax.random.key(0)}
    problem, x0, y0 = make()
    return bx.minimize(problem, x0, y0, solver=solver, **grouped(**(arguments | given)))


def arrays(result):
    """Everything that a run ends with, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(result.state)
    found = {jax.tree_util.keystr(path): on_host(leaf) for path, leaf in leaves}
    return found | {f"history {n}": result.history[n] for n in result.history if n != "seconds"}


def main() -> None:
    """`NAME` runs a case, `NAME@CHECKPOINT@STEPS` goes on from a checkpoint in the folder up to a step.

    {process} in CHECKPOINT is the number of the process; a checkpoint that cannot be used is printed.
    `estimate` prints the memory of a run, `rows` how rows are kept that are spread over the devices.
    """
    folder, *orders = sys.argv[1:]
    folder = Path(folder)
    mesh = jax.make_mesh((jax.device_count(),), ("blocks",))
    for order in orders:
        name, *rest = order.split("@")
        if name == "estimate":
            problem, x0, y0 = make_problem(lower)
            plan = {"blocks_per_step": PER_STEP, "batch_size": BATCH, "mesh": mesh}
            print(
                bx.memory_estimate(problem, x0, y0, solver=bx.MMBO(**STEPS), **grouped(**plan)).__repr__(),
                flush=True,
            )
            continue
        if name == "rows":
            kept = spread_rows(mesh)
            print("rows as", kept.dtype, "split along", *kept.sharding.spec, flush=True)
            continue
        given = {"log": folder / f"{order}.jsonl"}
        if rest:
            place = folder / rest[0].format(process=jax.process_index())
            given |= {"checkpoint": place, "resume": True, "steps": int(rest[1])}
        try:
            result = run(name, mesh=mesh, **given)
        except bx.CheckpointError as error:
            print(order, "raised", error, flush=True)
            continue
        found = arrays(result)
        if jax.process_index() == 0:
            np.savez(folder / f"{order}.npz", **found)
        split = jax.tree.leaves(result.y)[0].sharding
        print(order, "on", len(split.device_set), "devices, y split along", *split.spec, flush=True)


if __name__ == "__main__":
    if "COORDINATOR" in os.environ:
        address, count, number = os.environ["COORDINATOR"].split()
        jax.distributed.initialize(address, int(count), int(number))
    main()
