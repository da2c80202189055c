"""Devices and processes that share the blocks do what one device does on the same samples."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_program as program
from calls import grouped
from devices import several_devices
from every_kind import METHODS

import bilevax as bx
from bilevax._problem.sampling import Sampler
from bilevax._problem.stream import Stream
from bilevax._run.digest import SMALL, checksum

TESTS = Path(__file__).parent
TOLERANCE = 1e-5
FOLLOWED = ["BSVRBv2", "MSVR", "RSVRB", "BlockPAGE", "minimum", "saddle", "nested", "transformation"]
FOLLOWED += ["sets", "keys", "cvar", "groups", "soft", "table", "lazy Adam"]


def start(folder, orders, devices, coordinator=None):
    """A process with so many devices that runs cases of `sharded_program`."""
    environment = several_devices(devices) | ({"COORDINATOR": coordinator} if coordinator else {})
    command = [sys.executable, str(TESTS / "sharded_program.py"), str(folder), *orders]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(processes):
    """Their outputs, when they have ended well."""
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def agrees(found, expected, tolerance=TOLERANCE):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, tolerance, tolerance, err_msg=name)


@pytest.fixture(scope="module")
def alone():
    """Cases on one device, each run once."""
    known = {}

    def of(name, **given):
        order = (name, *given.items())
        if order not in known:
            known[order] = program.arrays(program.run(name, **given))
        return known[order]

    return of


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """All cases on eight devices of one process."""
    folder = tmp_path_factory.mktemp("eight")
    return folder, finish([start(folder, [*FOLLOWED, "wide@wide@20", "estimate"], 8)])[0]


@pytest.mark.parametrize("name", FOLLOWED)
def test_eight_devices_follow_one_device(name, eight, alone):
    folder, output = eight
    assert f"{name} on 8 devices, y split along blocks" in output
    # Adam divides by what is small: rounding counts for more.
    tolerance = 3 * TOLERANCE if name == "lazy Adam" else TOLERANCE
    agrees(np.load(folder / f"{name}.npz"), alone(name), tolerance)


def test_every_method_that_shares_blocks_is_followed():
    followed = {type(program.CASES[name][0]) for name in [*FOLLOWED, "KSONG"]}
    shared = {one for one in METHODS.values() if one.distributed}
    assert shared == (followed - {bx.Restart}) | {bx.MSVR}  # MSVR is run in stages


def test_other_strata_are_another_run(alone):
    other = alone("wide", strata=4)
    assert np.abs(other[".x"] - alone("wide")[".x"]).max() > 100 * TOLERANCE


def test_a_checkpoint_of_eight_devices_restores_onto_one(eight, alone, tmp_path):
    folder, _ = eight
    shutil.copytree(folder / "wide", tmp_path / "wide")
    resumed = program.run("wide", strata=None, checkpoint=tmp_path / "wide", resume=True)
    assert resumed.state.sampler.strata == program.STRATA
    agrees(program.arrays(resumed), alone("wide"))


def test_two_processes_follow_one_device_and_restore_what_eight_devices_saved(eight, alone, tmp_path):
    """2 × 2 devices: a run of their own, and one that goes on from eight devices and is read by one.

    Processes that see different checkpoints do not resume.
    """
    shutil.copytree(eight[0] / "wide", tmp_path / "of_eight")
    (tmp_path / "own_0" / "step_20").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    orders = ["rows", "KSONG@pair@20", "KSONG@pair@40", "wide@of_eight@40", "KSONG@own_{process}@40"]
    pair = [start(tmp_path, orders, 2, f"{address} 2 {number}") for number in range(2)]
    outputs = finish(pair)
    assert all("rows as uint32 split along blocks" in output for output in outputs)
    assert all("KSONG@pair@40 on 4 devices, y split along blocks" in output for output in outputs)
    assert all("raised the processes see different checkpoints" in output for output in outputs)
    agrees(np.load(tmp_path / "KSONG@pair@40.npz"), alone("KSONG"))
    agrees(np.load(tmp_path / "wide@of_eight@40.npz"), alone("wide"))
    read = program.run("wide", checkpoint=tmp_path / "of_eight", resume=True)
    agrees(program.arrays(read), alone("wide"))
    logged = (tmp_path / "KSONG@pair@40.jsonl").read_text().splitlines()
    assert len(logged) == 2  # by one of the processes


def test_the_memory_of_a_device_is_its_share(eight):
    problem, x0, y0 = program.make_problem(program.lower)
    solver, plan = bx.MMBO(**program.STEPS), {"blocks_per_step": 8, "batch_size": 2}
    whole = bx.memory_estimate(problem, x0, y0, solver=solver, **grouped(**plan))
    padded = problem.lower_data[0].spread(8).packed.stored["a"].nbytes
    own = sum(leaf.nbytes for leaf in jax.tree.leaves((problem.blocks, problem.lower_data[0].lengths)))
    starts, shared = problem.lower_data[0].starts.nbytes, problem.upper_data.packed.stored["c"].nbytes
    expected = {"slots": whole.slots // 8, "x": whole.x, "data": (padded + own + starts) // 8 + shared}
    for name, count in expected.items():
        assert f"{name}={count}," in eight[1]


# --- the plan -------------------------------------------------------------------


def plan(problem, strata, per_step=program.PER_STEP, shuffle=True):
    return bx.Sampling(per_step, program.BATCH, shuffle, strata=strata).sampler(problem, jax.random.key(1))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_stratum_gives_as_many_blocks_and_all_come_up_in_an_epoch(shuffle):
    problem, _, _ = program.make_problem(program.lower)
    sampler = plan(problem, 4, shuffle=shuffle)
    steps = [np.asarray(sampler.blocks_at(jnp.asarray(step))) for step in range(6)]
    for blocks in steps:
        assert np.bincount(blocks // 4, minlength=4).tolist() == [2, 2, 2, 2]
        assert len(set(blocks.tolist())) == 8
    if shuffle:
        for epoch in range(3):
            together = np.concatenate(steps[2 * epoch : 2 * epoch + 2])
            assert sorted(together.tolist()) == list(range(16))


def test_one_stratum_is_none():
    problem, _, _ = program.make_problem(program.lower)
    assert plan(problem, 1).strata is None
    assert plan(problem, 1).blocks_at(3).tolist() == plan(problem, None).blocks_at(3).tolist()


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_shares_of_a_plan_are_the_whole(devices):
    """What the devices draw, one after the other, is what one device draws."""
    strata, size = 4, 12
    whole = Sampler(Stream.start(jax.random.key(0)), size, 8, None, True, strata)
    shares = Sampler(
        whole.random, size // devices, 8 // devices, None, True, strata // devices, axis="blocks"
    )

    def device(number, step):
        return number * (size // devices) + shares.blocks_at(step)

    each = jax.vmap(device, in_axes=(0, None), axis_name="blocks", axis_size=devices)
    for step in range(4):
        drawn = each(jnp.arange(devices), jnp.asarray(step)).reshape(-1)
        assert drawn.tolist() == whole.blocks_at(jnp.asarray(step)).tolist()


@pytest.mark.parametrize("size", [3, None])
def test_rows_that_are_spread_and_shared_are_the_rows_of_the_whole(size):
    lengths, devices = np.asarray([1, 4, 2, 2, 5, 1]), 3
    rows = bx.PerBlock(np.arange(15.0), np.concatenate([[0], np.cumsum(lengths)]))
    laid, random = rows.spread(devices), Stream.start(jax.random.key(0))
    assert laid.packed.stored.shape == (18,)
    laid = jax.tree.map(jnp.asarray, laid)
    for device in range(devices):
        blocks = jnp.arange(2)
        own = jax.tree.map(lambda a, d=device: jnp.split(a, devices)[d], laid)
        drawn = own.share(device).draw(random, blocks, size)
        for other in (rows, laid):
            expected = other.draw(random, 2 * device + blocks, size)
            np.testing.assert_array_equal(drawn.rows, expected.rows)
            assert (drawn.weight is None) == (expected.weight is None)
            if size is None:
                np.testing.assert_array_equal(drawn.weight, expected.weight)


# --- checksums ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, bool, np.uint32])
@pytest.mark.parametrize("count", [7, SMALL])
def test_a_checksum_sees_values_and_their_places(dtype, count):
    array = (np.arange(2 * count).reshape(count, 2) % 5 > 1).astype(dtype)
    changed, swapped = array.copy(), array.copy()
    changed[count // 2, 1] = not changed[count // 2, 1]
    swapped[[0, 2]] = swapped[[2, 0]]
    assert checksum(jnp.asarray(array)) == checksum(array)
    assert len({checksum(a) for a in (array, changed, swapped)}) == 3


# --- bad input ------------------------------------------------------------------


def mesh(*names):
    return jax.make_mesh((1,) * len(names), names)


class Own(bx.Rows):
    def draw(self, random, blocks, size):
        return bx.Batch({"a": jnp.zeros((blocks.shape[0], size, program.D_Y))})


class Foreign(bx.AbstractSolver):
    def start(self, problem, x0, y0, sampler):
        raise AssertionError

    def step(self, problem, state, stage=0):
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"mesh": 8}, TypeError, "mesh must be a jax.sharding.Mesh, got int"),
        ({"mesh": mesh("rows")}, ValueError, "mesh must have an axis 'blocks', .* got {'rows': 1}"),
        ({"strata": 3}, ValueError, "number of blocks must be divisible .* got 16 and 3 strata"),
        ({"strata": 16}, ValueError, "blocks_per_step must be divisible .* got 8 and 16 strata"),
        ({"strata": 0}, ValueError, "strata must be at least 1, got 0"),
        ({"strata": 2.0}, TypeError, "strata must be an integer"),
        ({"mesh": mesh("blocks"), "solver": Foreign()}, TypeError, "Foreign cannot run on several devices"),
        ({"mesh": mesh("blocks"), "solver": bx.BlockSAGA(upper_step=0.1)}, TypeError, "BlockSAGA cannot run"),
        ({"mesh": mesh("blocks"), "data": Own()}, TypeError, "Own does not say how its rows are shared"),
        ({"mesh": mesh("blocks"), "y0": np.zeros((5, 3))}, ValueError, "leading axis of 16"),
        (
            {"mesh": mesh("blocks"), "level": bx.argmin(program.lower, slots=lambda b, _: 0, count=4)},
            ValueError,
            "'lower' has slots of its own, which are not split",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(given, error, words):
    problem, x0, y0 = program.make_problem(given.get("level", program.lower))
    data = given.get("data", problem.lower_data[0])
    problem = bx.Problem(program.upper, problem.levels["lower"], problem.blocks, problem.upper_data, data)
    arguments = {"steps": 1, "key": jax.random.key(0), "blocks_per_step": 8, "batch_size": 2}
    arguments |= {name: given[name] for name in ("mesh", "strata") if name in given}
    solver = given.get("solver", bx.BSVRBv2(upper_step=0.1))
    with pytest.raises(error, match=words):
        bx.minimize(problem, x0, given.get("y0", y0), solver=solver, progress=None, **grouped(**arguments))


def test_strata_must_be_divisible_among_the_devices():
    source = """
        import jax, sharded_program as p
        try:
            p.run("BSVRBv2", mesh=jax.make_mesh((4,), ("blocks",)), strata=2)
        except ValueError as error:
            print(error)
        try:
            p.run("BSVRBv2", mesh=jax.make_mesh((2, 2), ("blocks", "rows")))
        except ValueError as error:
            print(error)
    """
    program_text = "\n".join(line[8:] for line in source.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", program_text],
        capture_output=True,
        text=True,
        env=several_devices(4),
        cwd=TESTS,
    )
    first, second = done.stdout.splitlines()
    assert "strata must be divisible by the devices of the mesh, got 2 strata on 4 devices" in first
    assert "no other of more than one device, got {'blocks': 2, 'rows': 2}" in second
