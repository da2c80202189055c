"""Bad input is refused before anything is compiled: the argument, what was got, what was expected."""

import dataclasses
import importlib
import re

import every_kind
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import grouped

import bilevax as bx
from bilevax._run import chunks
from bilevax.solvers import rsvrb, start

BLOCKS, ROWS = 4, 5


def upper(x, y, block, batch):
    return jnp.mean(batch["b"]) * jnp.sum((y - block["c"]) ** 2) + jnp.sum(x**2)


def lower(x, y, block, batch):
    return jnp.sum((y - x - jnp.mean(batch["a"], 0)) ** 2)


def inner(x, block, batch):
    return x + jnp.mean(batch["a"], 0)


def named_upper(x, y, block, batch):
    return upper(x, y["p"] + y["q"], block, batch)


CONSTANTS = {"c": jnp.ones((BLOCKS, 2))}
UPPER_DATA = bx.Shared({"b": jnp.ones(ROWS)})
LOWER_DATA = bx.Shared({"a": jnp.ones((ROWS, 2))})


def problem(upper=upper, lower=lower, blocks=CONSTANTS, upper_data=UPPER_DATA, lower_data=LOWER_DATA):
    return bx.Problem(upper, lower, blocks, upper_data, lower_data)


def named(**other):
    return problem(**({"upper": named_upper, "lower": {"p": lower, "q": bx.mean(inner)}} | other))


def slotted(slots, count=10):
    """An argmin level of which a block's batch touches several slots."""
    return problem(
        lambda x, y, block, batch: jnp.sum(y**2),
        bx.argmin(lambda x, y, block, batch: jnp.sum((y - x) ** 2), slots=slots, count=count),
    )


X, Y = jnp.zeros(2), jnp.zeros((BLOCKS, 2))
BOTH = {"p": Y, "q": Y}


def given(solver=None, problem=problem, x0=X, y0=Y, **other):
    """A run to start: everything good but what is named."""
    plan = {"key": jax.random.key(0), "blocks_per_step": 2} | other
    return (solver or bx.BSVRBv2(0.1), problem, x0, y0, plan)


def initialise(solver, problem, x0, y0, plan):
    solver.init(problem() if callable(problem) else problem, x0, y0, **grouped(**plan))


def minimise(solver, problem, x0, y0, plan):
    problem = problem() if callable(problem) else problem
    bx.minimize(problem, x0, y0, solver=solver, **grouped(**({"steps": 10, "progress": None} | plan)))


class ReachedError(Exception):
    """The computation would have begun."""


@pytest.fixture(autouse=True)
def stop_at_the_computation(monkeypatch):
    def stop(*_, **__):
        raise ReachedError

    for module, name in [
        (start, "estimate_smoothness"),
        (start, "_first_pass"),
        (rsvrb, "estimate_smoothness"),
        (rsvrb, "_pieces"),
        (chunks, "_advance"),
    ]:
        monkeypatch.setattr(module, name, stop)


@pytest.mark.parametrize("enter", [initialise, minimise])
@pytest.mark.parametrize(
    "good",
    [
        given(),
        given(bx.BSVRBv1(0.1)),
        given(bx.RSVRB(0.1)),
        given(bx.BlockPAGE(0.1, refresh_chance=1)),
        given(bx.BlockSAGA(0.1)),
        given(bx.Restart(bx.KSONG(0.1), first=1, stages=30)),
        given(bx.MSVR(0.1), lambda: problem(lower=bx.mean(inner)), y0=None),
        given(problem=named, y0=BOTH),
        given(problem=named, y0={"p": Y, "q": None}),
        given(bx.BSVRBv2(0.1, alpha={"p": 0.1, "q": 1.0}, gamma={"q": 1.0}), named, y0=BOTH),
        given(bx.BSVRBv2(0.1, alpha=1), blocks_per_step=None),
        given(bx.BSVRBv2(0.1, alpha=1, gamma=0.5)),
        given(bx.KSONG(0.1, alpha=1)),
        given(problem=lambda: slotted(lambda block, batch: jnp.arange(3)), y0=jnp.zeros((10, 2))),
        given(bx.BSVRBv1(0.1), lambda: slotted(lambda block, batch: jnp.asarray(3)), y0=jnp.zeros((10, 2))),
        given(bx.BSVRBv2(optax.adam(0.1), lower_step=lambda step: 0.1 / (1 + step), radius=jnp.asarray(1.0))),
    ],
)
def test_good_input_reaches_the_computation(enter, good):
    with pytest.raises(ReachedError):
        enter(*good)


# --- what the parts of a problem refuse -------------------------------------------

ROW = jnp.ones((ROWS, 2))
PARTS = {
    "upper is a number": (lambda: problem(upper=3), TypeError, "upper must be a function", "got int"),
    "lower is a list": (lambda: problem(lower=[lower]), TypeError, "lower level", "a function", "got list"),
    "lower is None": (lambda: problem(lower=None), TypeError, "lower level", "a function", "got NoneType"),
    "lower is empty": (lambda: problem(lower={}), ValueError, "lower must name at least one", "empty dict"),
    "a level is a number": (
        lambda: named(lower={"p": 1}), TypeError, "lower level 'p'", "a function", "got int",
    ),
    "a level that was not called": (
        lambda: problem(lower=bx.minimum), TypeError, "lower level 'lower'", "got bilevax.minimum itself",
    ),
    "a key by name": (
        lambda: problem(upper=lambda x, y, block, batch, *, key: 0.0), TypeError, "upper takes a key", "none",
    ),
    "a level's name": (
        lambda: named(lower={1: lower}), TypeError, "names of lower levels", "strings", "got 1",
    ),
    "no blocks": (lambda: problem(blocks=0), ValueError, "blocks must be at least 1", "got 0"),
    "blocks is a float": (lambda: problem(blocks=2.5), ValueError, "blocks", "leading axis", "got a scalar"),
    "blocks is a bool": (lambda: problem(blocks=True), ValueError, "blocks", "leading axis", "got a scalar"),
    "blocks is empty": (lambda: problem(blocks={}), ValueError, "blocks", "at least one array", "got {}"),
    "blocks of no rows": (
        lambda: problem(blocks=np.ones((0, 2))), ValueError, "blocks", "at least one", "empty",
    ),
    "blocks that differ": (
        lambda: problem(blocks={"c": np.ones(3), "d": np.ones(4)}),
        ValueError, "blocks", "same leading axis", "blocks['c']\": 3", "blocks['d']\": 4",
    ),
    "blocks are strings": (
        lambda: problem(blocks=np.array(["a"])), TypeError, "blocks", "numeric", "got dtype <U1",
    ),
    "upper_data is an array": (
        lambda: problem(upper_data=ROW), TypeError, "upper_data", "bilevax.Shared", "got Array",
    ),
    "lower_data is an array": (
        lambda: problem(lower_data=ROW), TypeError, "lower_data", "bilevax.Shared", "got Array",
    ),
    "lower_data is plain rows": (
        lambda: problem(lower_data={"a": LOWER_DATA}),
        ValueError, "lower_data", "['a']", "expected one data source",
    ),
    "lower_data of an unknown level": (
        lambda: named(lower_data={"p": LOWER_DATA, "r": LOWER_DATA}),
        ValueError, "lower_data", "['p', 'r']", "expected ['p', 'q']",
    ),
    "lower_data of a level is an array": (
        lambda: named(lower_data={"p": ROW, "q": None}),
        TypeError, "lower_data", "bilevax.Shared", "got Array",
    ),
    "offsets of another number of blocks": (
        lambda: problem(lower_data=bx.PerBlock(ROW, [0, 2, ROWS])),
        ValueError, "lower_data", "offsets for 2 blocks", "expected 4",
    ),
    "argmin of a number": (lambda: bx.argmin(1), TypeError, "bilevax.argmin needs a function", "got int"),
    "mean of None": (lambda: bx.mean(None), TypeError, "bilevax.mean needs a function", "got NoneType"),
    "saddle point of a number": (lambda: bx.saddle(3), TypeError, "saddle needs a function", "got int"),
    "slots without count": (
        lambda: bx.argmin(lower, slots=lambda b, r: 0),
        ValueError, "slots and count go together", "got slots without count",
    ),
    "count without slots": (
        lambda: bx.mean(inner, count=3), ValueError, "slots and count go together", "got count without slots",
    ),
    "no slots": (
        lambda: bx.mean(inner, slots=lambda b, r: 0, count=0),
        ValueError, "count must be at least 1", "got 0",
    ),
    "half a slot": (
        lambda: bx.mean(inner, slots=lambda b, r: 0, count=1.5), TypeError, "count", "an integer", "got 1.5",
    ),
    "slots is an array": (
        lambda: bx.mean(inner, slots=(0, 1, 2), count=3), TypeError, "slots must be a function", "got tuple",
    ),
    "Shared of nothing": (lambda: bx.Shared({}), ValueError, "Shared rows", "at least one array", "got {}"),
    "Shared of None": (lambda: bx.Shared(None), ValueError, "Shared rows", "at least one array", "got None"),
    "Shared of no rows": (
        lambda: bx.Shared(np.ones((0, 2))), ValueError, "Shared rows", "at least one row", "empty",
    ),
    "Shared of unequal leaves": (
        lambda: bx.Shared({"a": np.ones(3), "b": np.ones(2)}),
        ValueError, "Shared rows", "same leading axis", "Shared rows['b']\": 2",
    ),
    "Shared of a scalar": (
        lambda: bx.Shared({"a": np.ones(3), "b": 1.0}),
        ValueError, "Shared rows['b']", "leading axis", "got a scalar",
    ),
    "Shared of objects": (
        lambda: bx.Shared({"a": np.array([None, {}])}),
        TypeError, "Shared rows['a']", "numeric", "got dtype object",
    ),
    "Shared of strings": (
        lambda: bx.Shared({"a": np.array(["x", "yz"])}),
        TypeError, "Shared rows['a']", "numeric", "got dtype <U2",
    ),
    "Shared of a string": (
        lambda: bx.Shared("rows"), ValueError, "Shared rows", "leading axis", "got a scalar",
    ),
    "Shared of dates": (
        lambda: bx.Shared(np.array(["2020-01-01"], "datetime64[D]")),
        TypeError, "Shared rows", "numeric", "datetime64",
    ),
    "Shared of integers that would wrap around": (
        lambda: bx.Shared({"id": np.array([0, 2**31])}),
        ValueError, "Shared rows['id'] must fit int32", "got 2147483648", "jax_enable_x64",
    ),
    "PerBlock of negative integers that would wrap around": (
        lambda: bx.PerBlock(np.array([0, -(2**31) - 1]), [0, 2]),
        ValueError, "PerBlock rows must fit int32", "got -2147483649",
    ),
    "unsigned block constants that would wrap around": (
        lambda: problem(blocks={"id": np.full(4, 2**32, np.uint64)}),
        ValueError, "blocks['id'] must fit uint32", "got 4294967296",
    ),
    "unsigned offsets descend": (
        lambda: bx.PerBlock(ROW, np.array([0, 3, 2, ROWS], np.uint32)),
        ValueError, "offsets must ascend", "offsets[1] = 3, offsets[2] = 2",
    ),
    "unsigned offsets of eight bits descend": (
        lambda: bx.PerBlock(ROW, np.array([0, 3, 2, ROWS], np.uint8)),
        ValueError, "offsets must ascend", "offsets[1] = 3, offsets[2] = 2",
    ),
    "owners of huge numbers": (
        lambda: bx.PerBlock.from_owners(np.ones(3), [0, 1, 10**12]),
        ValueError, "every block needs at least one row", "got none for block 2",
    ),
    "offsets beyond 32 bits": (
        lambda: bx.PerBlock(ROW, np.array([0, 2**31], np.int64)),
        ValueError, "offsets", "got",
    ),
    "offsets descend": (
        lambda: bx.PerBlock(ROW, [0, 3, 2, ROWS]),
        ValueError, "offsets must ascend", "offsets[1] = 3, offsets[2] = 2",
    ),
    "offsets of an empty block": (
        lambda: bx.PerBlock(ROW, [0, 2, 2, ROWS]),
        ValueError, "offsets must ascend", "at least one row", "[2] = 2",
    ),
    "offsets end early": (
        lambda: bx.PerBlock(ROW, [0, 2, 4]), ValueError, "offsets", "number of rows 5", "0 to 4",
    ),
    "offsets end late": (
        lambda: bx.PerBlock(ROW, [0, 2, 6]), ValueError, "offsets", "number of rows 5", "0 to 6",
    ),
    "offsets start late": (
        lambda: bx.PerBlock(ROW, [1, 5]), ValueError, "offsets", "run from 0", "got 1 to 5",
    ),
    "offsets are floats": (
        lambda: bx.PerBlock(ROW, [0.0, 5.0]), ValueError, "offsets", "integers", "float64",
    ),
    "offsets are a matrix": (
        lambda: bx.PerBlock(ROW, [[0, 5]]), ValueError, "offsets", "a vector", "shape (1, 2)",
    ),
    "offsets of no block": (
        lambda: bx.PerBlock(ROW, [0]), ValueError, "offsets", "at least two", "shape (1,)",
    ),
    # levels
    "a bound of text": (
        lambda: bx.minimum(project=("a", None)),
        TypeError, "the lower bound of project must hold real numbers", "got 'a'",
    ),
    "an upper bound of text": (
        lambda: bx.argmin(lower, project=(None, {"w": "a"})),
        TypeError, "the upper bound of project must hold real numbers", "got 'a'",
    ),
    "a complex bound": (
        lambda: bx.maximum(project=(1j, None)), TypeError, "the lower bound of project", "real numbers", "1j",
    ),
    "a bound that is True": (
        lambda: bx.maximum(project=(True, None)), TypeError, "lower bound of project", "real numbers", "True",
    ),
    "a bound that is traced": (
        lambda: jax.jit(lambda a: [bx.minimum(project=(a, None)), a][1])(1.0),
        TypeError, "the lower bound of project must be known when it is given",
    ),
    "no room above a bound": (
        lambda: bx.minimum(project=(np.inf, None)),
        ValueError, "the lower bound of project must leave room", "got inf",
    ),
    "no room below a bound": (
        lambda: bx.argmin(lower, project=(None, [0.0, -np.inf])),
        ValueError, "the upper bound of project must leave room", "got -inf",
    ),
    "a mean's bound of text": (
        lambda: bx.mean(inner, lower="a"), TypeError, "lower must hold real numbers", "got 'a'",
    ),
    "a bound of x that is text": (
        lambda: bx.bounded(0.1, upper="a"), TypeError, "upper must hold real numbers", "got 'a'",
    ),
    # risks
    "a ragged share": (lambda: bx.cvar([[1], [1, 2]]), TypeError, "share must be a number", "got list"),
    "a share that is traced": (
        lambda: jax.jit(lambda a: [bx.cvar(a), a][1])(0.1), TypeError, "share must be known when it is given",
    ),
    "a weight above one": (
        lambda: bx.soft_maximum(1.0, alpha=2), ValueError, "alpha must lie in (0.0, 1.0]", "got 2",
    ),
    # rows from the host
    "a row of text": (
        lambda: bx.Streamed(print, "row"), TypeError, "Streamed row must be numeric", "got dtype <U3",
    ),
    "a row of objects": (
        lambda: bx.Streamed(print, np.array([None])), TypeError, "Streamed row must be numeric", "object",
    ),
    "batches of text": (
        lambda: bx.Streamed(batches="abc", row=ROW[0]), TypeError, "Streamed batches must be", "got str",
    ),
    "steps of nothing": (
        lambda: bx.advance(problem(), bx.SOBA(0.1), None, 3),
        TypeError, "state must be what solver.init returns", "got NoneType",
    ),
    "steps by a class": (
        lambda: bx.advance(problem(), bx.SOBA, None, 3), TypeError, "solver must be", "the class SOBA",
    ),
    "offsets of bools": (
        lambda: bx.PerBlock(ROW[:1], [False, True]), ValueError, "offsets", "integers", "bool",
    ),
}  # fmt: skip

# --- what the methods refuse --------------------------------------------------------

NUMBER = "must be a number or a schedule"
SOLVERS = {
    "an upper step of text": (
        lambda: bx.MSVR("0.1"), TypeError, "upper_step", "an optax transformation", "got str",
    ),
    "upper steps by level": (
        lambda: bx.SONG({"p": 0.1}), TypeError, "upper_step", "a number, a schedule", "got dict",
    ),
    "an upper step that is True": (
        lambda: bx.SONG(True), TypeError, "upper_step", "a number, a schedule", "got bool",
    ),
    "a negative upper step": (
        lambda: bx.SOBA(-0.1), ValueError, "upper_step must lie in [0.0, ∞)", "got -0.1",
    ),
    "an infinite upper step": (
        lambda: bx.KSONG(np.inf), ValueError, "upper_step must lie in [0.0, ∞)", "got inf",
    ),
    "an upper step of NaN": (
        lambda: bx.RSVRB(np.nan), ValueError, "upper_step must lie in [0.0, ∞)", "got nan",
    ),
    "a complex upper step": (lambda: bx.RSVRB(1j), TypeError, "upper_step must be a number", "got complex"),
    "a negative lower step": (
        lambda: bx.BSVRBv1(0.1, lower_step=-1), ValueError, "lower_step must lie in [0.0, ∞)", "got -1",
    ),
    "a negative lower step of a level": (
        lambda: bx.KSONG(0.1, lower_step={"p": -1.0}),
        ValueError, "lower_step['p'] must lie in [0.0, ∞)", "got -1.0",
    ),
    "a negative inverse step": (
        lambda: bx.MMBO(0.1, inverse_step=-1.0), ValueError, "inverse_step must lie in [0.0, ∞)", "got -1.0",
    ),
    "a list of lower steps": (
        lambda: bx.SOBA(0.1, lower_step=[0.1]), TypeError, f"lower_step {NUMBER}", "got list",
    ),
    "alpha = 0": (lambda: bx.BSVRBv1(0.1, alpha=0), ValueError, "alpha must lie in (0.0, 1.0]", "got 0"),
    "alpha > 1": (lambda: bx.BSVRBv2(0.1, alpha=1.5), ValueError, "alpha must lie in (0.0, 1.0]", "got 1.5"),
    "alpha < 0": (lambda: bx.MSVR(0.1, alpha=-0.5), ValueError, "alpha must lie in (0.0, 1.0]", "got -0.5"),
    "alpha is NaN": (
        lambda: bx.SONG(0.1, alpha=np.nan), ValueError, "alpha must lie in (0.0, 1.0]", "got nan",
    ),
    "alpha is None": (lambda: bx.SONG(0.1, alpha=None), TypeError, f"alpha {NUMBER}", "got None"),
    "alpha is text": (lambda: bx.KSONG(0.1, alpha="high"), TypeError, f"alpha {NUMBER}", "got str"),
    "alpha is an array beyond 1": (
        lambda: bx.MMBO(0.1, alpha=jnp.asarray(2.0)), ValueError, "alpha must lie in (0.0, 1.0]", "got 2.0",
    ),
    "alpha of a level > 1": (
        lambda: bx.BSVRBv2(0.1, alpha={"p": 2}), ValueError, "alpha['p'] must lie in (0.0, 1.0]", "got 2",
    ),
    "alpha of a level is None": (
        lambda: bx.MSVR(0.1, alpha={"p": None}), TypeError, f"alpha['p'] {NUMBER}", "None",
    ),
    "alpha_bar > 1": (
        lambda: bx.BSVRBv1(0.1, alpha_bar=2), ValueError, "alpha_bar must lie in (0.0, 1.0]", "got 2",
    ),
    "beta = 0": (lambda: bx.BSVRBv2(0.1, beta=0.0), ValueError, "beta must lie in (0.0, 1.0]", "got 0.0"),
    "beta > 1": (lambda: bx.RSVRB(0.1, beta=1.1), ValueError, "beta must lie in (0.0, 1.0]", "got 1.1"),
    "beta is None": (lambda: bx.BSVRBv2(0.1, beta=None), TypeError, f"beta {NUMBER}", "got None"),
    "beta by level": (lambda: bx.BSVRBv2(0.1, beta={"p": 0.1}), TypeError, f"beta {NUMBER}", "got dict"),
    "gamma < 0": (lambda: bx.MSVR(0.1, gamma=-0.1), ValueError, "gamma must lie in [0.0, ∞)", "got -0.1"),
    "gamma_bar is NaN": (
        lambda: bx.BSVRBv1(0.1, gamma_bar=np.nan), ValueError, "gamma_bar must lie in", "got nan",
    ),
    "radius = 0": (lambda: bx.BSVRBv2(0.1, radius=0.0), ValueError, "radius must lie in (0.0, ∞)", "got 0.0"),
    "radius < 0": (lambda: bx.RSVRB(0.1, radius=-1.0), ValueError, "radius must lie in (0.0, ∞)", "got -1.0"),
    "floor = 0": (lambda: bx.KSONG(0.1, floor=0.0), ValueError, "floor must lie in (0.0, ∞)", "got 0.0"),
    "refresh_chance = 0": (
        lambda: bx.BlockPAGE(0.1, refresh_chance=0.0),
        ValueError, "refresh_chance must lie in (0.0, 1.0]", "got 0.0",
    ),
    "refresh_chance > 1": (
        lambda: bx.BlockPAGE(0.1, refresh_chance=2),
        ValueError, "refresh_chance must lie in (0.0, 1.0]", "got 2",
    ),
    "a schedule of refreshes": (
        lambda: bx.BlockPAGE(0.1, refresh_chance=lambda step: 0.1),
        TypeError, "refresh_chance must be a number", "got a function",
    ),
    "a refresh_chance of text": (
        lambda: bx.BlockPAGE(0.1, refresh_chance="often"),
        TypeError, "refresh_chance must be a number", "got str",
    ),
    "RSVRB's lower step by level": (
        lambda: bx.RSVRB(0.1, lower_step={"p": 0.1}), TypeError, f"lower_step {NUMBER}", "got dict",
    ),
    "refreshed that is no flag": (
        lambda: bx.BSVRBv1(0.1, refreshed=0), TypeError, "refreshed must be True or False", "got 0",
    ),
    "a restart of a restart": (
        lambda: bx.Restart(bx.Restart(bx.SONG(0.1), first=1, stages=1), first=1, stages=1),
        TypeError, "solver must not itself be restarted", "got a Restart",
    ),
    "a restart of a number": (
        lambda: bx.Restart(0.1, first=1, stages=1), TypeError, "solver must be a bilevax solver", "got float",
    ),
    "a restart of a class": (
        lambda: bx.Restart(bx.SONG, first=1, stages=1),
        TypeError, "solver must be a bilevax", "got the class SONG",
    ),
    "a first stage of no steps": (
        lambda: bx.Restart(bx.SONG(0.1), first=0, stages=1), ValueError, "first must be at least 1", "got 0",
    ),
    "a first stage of half steps": (
        lambda: bx.Restart(bx.SONG(0.1), first=1.5, stages=1),
        TypeError, "first must be an integer", "got 1.5",
    ),
    "no stages": (
        lambda: bx.Restart(bx.SONG(0.1), first=1, stages=0), ValueError, "stages must be between 1", "got 0",
    ),
    "a seed of text": (
        lambda: bx.Restart(bx.SONG(0.1), first=1, stages=1, seed="now"),
        TypeError, "seed must be an integer", "got 'now'",
    ),
    "a reset that is no flag": (
        lambda: bx.Restart(bx.SONG(0.1), first=1, stages=1, reset=1),
        TypeError, "reset must be True or False", "got 1",
    ),
    "too many stages": (
        lambda: bx.Restart(bx.SONG(0.1), first=1, stages=31),
        ValueError, "stages must be between 1 and 30", "got 31",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*PARTS, *SOLVERS])
def test_what_is_made_of_bad_parts_says_so_at_once(case):
    make, kind, *phrases = (PARTS | SOLVERS)[case]
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind
    for phrase in phrases:
        assert phrase in str(caught.value)


# --- what a run refuses, by `init` and by `minimize` -----------------------------------


def mean_only():
    return problem(lower=bx.mean(inner))


def gives(value):
    """A problem whose upper function returns that."""
    return lambda: problem(upper=lambda x, y, block, batch: value)


RUNS = {
    "no blocks per step": (
        given(blocks_per_step=0), ValueError, "blocks_per_step must be between 1 and 4", "got 0",
    ),
    "too many blocks per step": (given(blocks_per_step=5), ValueError, "blocks_per_step", "1 and 4", "got 5"),
    "half blocks per step": (
        given(blocks_per_step=2.5), TypeError, "blocks_per_step must be an integer", "got 2.5",
    ),
    "blocks per step is True": (
        given(blocks_per_step=True), TypeError, "blocks_per_step", "an integer", "got True",
    ),
    "a batch of nothing": (given(batch_size=0), ValueError, "batch_size must be at least 1", "got 0"),
    "a negative batch": (given(batch_size=-3), ValueError, "batch_size must be at least 1", "got -3"),
    "a batch of a float": (given(batch_size=2.0), TypeError, "batch_size must be an integer", "got 2.0"),
    "shuffle is a number": (given(shuffle=1), TypeError, "shuffle must be True or False", "got 1"),
    "the key is a seed": (given(key=0), TypeError, "key must be one key made by jax.random.key", "got 0"),
    "the key is of the old kind": (given(key=jax.random.PRNGKey(0)), TypeError, "key must be one key", "got"),
    "many keys": (given(key=jax.random.split(jax.random.key(0), 3)), TypeError, "key must be one key", "got"),
    "a negative first batch": (
        given(initial_batch_size=-1), ValueError, "initial_batch_size", "at least 0", "got -1",
    ),
    "a first batch of text": (
        given(initial_batch_size="some"), ValueError, "initial_batch_size", "'all'", "got 'some'",
    ),
    "a first batch of a float": (
        given(initial_batch_size=1.5), TypeError, "initial_batch_size", "an integer", "1.5",
    ),
    "no problem": (given(problem=3), TypeError, "problem must be a bilevax.Problem", "got int"),
    "no problem for RSVRB": (
        given(bx.RSVRB(0.1), problem=3), TypeError, "problem must be a bilevax.Problem", "int",
    ),
    # x0
    "x0 of integers": (
        given(x0=jnp.zeros(2, int)), TypeError, "x0 must be a floating array", "got dtype int32",
    ),
    "x0 of mixed leaves": (
        given(x0={"a": X, "b": 1}), TypeError, "x0['b'] must be a floating array", "dtype int32",
    ),
    "y0 of half precision, to be factorised": (
        given(solver=bx.BSVRBv1(upper_step=0.1), y0=Y.astype(jnp.bfloat16)),
        TypeError, "y0 of the lower level 'lower' must be float32 or float64", "got bfloat16",
    ),
    "y0 of half precision for RSVRB": (
        given(solver=bx.RSVRB(upper_step=0.1), y0=Y.astype(jnp.bfloat16)),
        TypeError, "y0 of the lower level 'lower' must be float32 or float64", "got bfloat16",
    ),
    "x0 of text": (given(x0="zero"), TypeError, "x0 must be a floating array", "got str"),
    "x0 of an object": (given(x0=X.at), TypeError, "x0 must be a floating array", "got _IndexUpdateHelper"),
    "x0 holds nan": (
        given(x0=X.at[1].set(np.nan)), ValueError, "x0 must hold finite numbers, got nan at [1]",
    ),
    "a leaf of x0 is infinite": (
        given(x0={"a": X, "b": -np.inf}), ValueError, "x0['b'] must hold finite numbers, got -inf",
    ),
    "x0 is None": (given(x0=None), ValueError, "x0 must hold at least one array", "got None"),
    "x0 of another shape": (
        given(x0=jnp.zeros(3)),
        TypeError, "lower level 'lower' fails", "x = float32[3]", "y = float32[2]", "(3,)",
    ),
    # y0
    "no y0": (
        given(y0=None), ValueError, "y0 must be given for an argmin level", "axis of 4 slots", "got None",
    ),
    "y0 of a level is None": (
        given(problem=named, y0={"p": None, "q": Y}),
        ValueError, "y0['p'] must be given for an argmin level", "None",
    ),
    "y0 without the block axis": (
        given(y0=jnp.zeros(2)), ValueError, "y0 must have a leading axis of 4", "got shape (2,)",
    ),
    "a scalar y0": (given(y0=0.0), ValueError, "y0 must have a leading axis of 4", "got shape ()"),
    "a leaf of y0 without the block axis": (
        given(y0={"w": Y, "b": jnp.zeros(3)}),
        ValueError, "y0['b'] must have a leading axis of 4", "got shape (3,)",
    ),
    "y0 holds nan": (
        given(y0=Y.at[2, 1].set(np.nan)), ValueError, "y0 must hold finite numbers, got nan in slot 2 at [1]",
    ),
    "y0 of a level is infinite": (
        given(problem=named, y0={"p": Y, "q": Y.at[3, 0].set(np.inf)}),
        ValueError, "y0['q'] must hold finite numbers, got inf in slot 3 at [0]",
    ),
    "y0 within bounds holds nan": (
        given(problem=lambda: problem(lower=bx.minimum(project=(-1.0, 1.0))), y0=Y.at[0, 0].set(np.nan)),
        ValueError, "y0 must hold finite numbers, got nan in slot 0 at [0]",
    ),
    "an array for the pair of a saddle": (
        given(problem=lambda: problem(lower=bx.saddle(lower))),
        ValueError, "y0 of the saddle level 'lower' must be a pair", "got an array",
    ),
    "half a pair of a saddle": (
        given(problem=lambda: problem(lower=bx.saddle(lower)), y0=(Y, None)),
        ValueError, "y0 of the saddle level 'lower' must be a pair", "got a part without arrays",
    ),
    "x0 without the rows of tables": (
        given(problem=lambda: bx.Problem(upper, lower, CONSTANTS, tables={"w": lambda block, batch: 0})),
        ValueError, "x0 must be a dict with the table 'w'", "got an array",
    ),
    "a masked array for y0": (
        given(y0=np.ma.masked_array(np.zeros((BLOCKS, 2)))),
        TypeError, "y0 must be a floating array", "got MaskedArray",
    ),
    "y0 of integers": (
        given(y0=jnp.zeros((4, 2), int)), TypeError, "y0 must be a floating array", "got dtype int32",
    ),
    "y0 of another shape": (
        given(y0=jnp.zeros((4, 3))),
        TypeError, "lower level 'lower' fails", "y = float32[3]", "x = float32[2]",
    ),
    "y0 of levels is an array": (
        given(problem=named, y0=Y),
        ValueError, "y0 must be a dict with the lower levels ['p', 'q']", "got an array",
    ),
    "y0 of an unknown level": (
        given(problem=named, y0=BOTH | {"r": Y}), ValueError, "y0", "['p', 'q']", "got ['p', 'q', 'r']",
    ),
    "y0 lacks a level": (given(problem=named, y0={"p": Y}), ValueError, "y0", "['p', 'q']", "got ['p']"),
    "y0 of a mean has another shape": (
        given(bx.MSVR(0.1), mean_only, y0=jnp.zeros((4, 3))), ValueError, "y0", "(4, 2)", "got ((4, 3)",
    ),
    "y0 of a mean has another structure": (
        given(bx.MSVR(0.1), mean_only, y0={"a": Y}),
        ValueError, "y0 must have the shapes of the mean", "got {'a'",
    ),
    "y0 of a mean has another dtype": (
        given(bx.MSVR(0.1), mean_only, y0=Y.astype(jnp.float16)),
        ValueError, "y0", "float32", "got", "float16",
    ),
    "y0 of slots": (
        given(problem=lambda: slotted(lambda block, batch: jnp.arange(3))),
        ValueError, "y0 must have a leading axis of 10", "got shape (4, 2)",
    ),
    # the user's functions
    "a missing key of the batch": (
        given(problem=lambda: problem(upper=lambda x, y, block, batch: jnp.sum(batch["label"]))),
        ValueError, "upper asked for the key 'label'", "batch = {'b': 'float32[5]'}",
    ),
    "a missing key of the block": (
        given(problem=lambda: problem(lower=lambda x, y, block, batch: block["t"] * jnp.sum(y**2))),
        ValueError, "lower level 'lower' asked for the key 't'", "block = {'c': 'float32[2]'}",
    ),
    "a missing key of a mean's batch": (
        given(bx.SONG(0.1), lambda: problem(lower=bx.mean(lambda x, block, batch: batch["z"]))),
        ValueError, "lower level 'lower' asked for the key 'z'", "batch = {'a': 'float32[5, 2]'}",
    ),
    "a missing key of ragged rows": (
        given(problem=lambda: problem(
            lambda x, y, block, batch: jnp.sum(batch["label"]),
            upper_data=bx.PerBlock({"b": jnp.ones(ROWS)}, [0, 1, 2, 3, ROWS]),
        )),
        ValueError, "upper asked for the key 'label'", "batch = {'b': 'float32[1]'}",
    ),
    "a missing level": (
        given(problem=lambda: named(upper=lambda x, y, block, batch: jnp.sum(y["r"])), y0=BOTH),
        ValueError, "upper asked for the key 'r'", "y = {'p': 'float32[2]', 'q': 'float32[2]'}",
    ),
    "no rows": (
        given(problem=lambda: problem(upper_data=None)),
        TypeError, "upper fails", "batch = None", "not subscriptable",
    ),
    "upper of three arguments": (
        given(problem=lambda: problem(upper=lambda x, y, block: jnp.sum(y))),
        TypeError, "upper fails", "function(x, y, block, batch)", "3 positional arguments but 4",
    ),
    "a mean of four arguments": (
        given(bx.SONG(0.1), lambda: problem(lower=bx.mean(lower))),
        TypeError, "lower level 'lower' fails", "function(x, block, batch)", "missing 1 required",
    ),
    "upper branches on a value": (
        given(problem=lambda: problem(upper=lambda x, y, block, batch: 1.0 if y[0] > 0 else 0.0)),
        TypeError, "upper fails", "y = float32[2]",
    ),
    "upper of a vector": (
        given(problem=gives(jnp.ones(2))), ValueError, "upper must return a scalar", "float32[2]",
    ),
    "upper of a batch of one": (
        given(problem=gives(jnp.ones(1))), ValueError, "upper must return a scalar", "[1]",
    ),
    "upper of a pair": (given(problem=gives((1.0, 2.0))), ValueError, "upper must return a scalar", "got ("),
    "upper of nothing": (given(problem=gives(None)), ValueError, "upper must return a scalar", "got None"),
    "upper of an integer": (
        given(problem=gives(jnp.asarray(1))), TypeError, "upper must return a floating", "int32",
    ),
    "lower of a vector": (
        given(problem=lambda: problem(lower=lambda x, y, block, batch: y**2)),
        ValueError, "lower level 'lower' must return a scalar", "got float32[2]",
    ),
    "lower of an integer": (
        given(problem=lambda: named(lower={"p": lambda *_: jnp.asarray(1), "q": lower}), y0=BOTH),
        TypeError, "lower level 'p' must return a floating scalar", "got dtype int32",
    ),
    "a mean of integers": (
        given(bx.MSVR(0.1), lambda: problem(lower=bx.mean(lambda x, block, batch: jnp.arange(2))), y0=None),
        TypeError, "lower level 'lower' must return floating arrays", "got int32[2]",
    ),
    "a mean of nothing": (
        given(bx.MSVR(0.1), lambda: problem(lower=bx.mean(lambda x, block, batch: None)), y0=None),
        TypeError, "lower level 'lower' must return floating arrays", "got None",
    ),
    "slots of floats": (
        given(problem=lambda: slotted(lambda block, batch: jnp.ones(3)), y0=jnp.zeros((10, 2))),
        ValueError, "slots of lower level 'lower'", "one integer or a vector", "got float32[3]",
    ),
    "slots of a matrix": (
        given(problem=lambda: slotted(lambda block, batch: jnp.ones((3, 2), int)), y0=jnp.zeros((10, 2))),
        ValueError, "slots of lower level 'lower'", "one integer or a vector", "got",
    ),
    "a missing key of slots": (
        given(problem=lambda: slotted(lambda block, batch: batch["slot"]), y0=jnp.zeros((10, 2))),
        ValueError, "slots of lower level 'lower' asked for the key 'slot'", "batch = {'a'",
    ),
    # methods that do not fit
    "MSVR of an argmin level": (
        given(bx.MSVR(0.1)), ValueError, "MSVR takes mean", "got the argmin level 'lower'",
    ),
    "SONG of an argmin level": (
        given(bx.SONG(0.1), named, y0=BOTH), ValueError, "SONG takes mean", "got the argmin level 'p'",
    ),
    "RSVRB of a mean": (
        given(bx.RSVRB(0.1), mean_only),
        ValueError, "RSVRB takes one argmin lower level", "got {'lower': 'mean'}",
    ),
    "RSVRB of two levels": (
        given(bx.RSVRB(0.1), named, y0=BOTH),
        ValueError, "RSVRB takes one", "got {'p': 'argmin', 'q': 'mean'}",
    ),
    "RSVRB of slots": (
        given(bx.RSVRB(0.1), lambda: slotted(lambda block, batch: jnp.arange(3)), y0=jnp.zeros((10, 2))),
        ValueError, "RSVRB takes one argmin lower level with a slot per block", "got",
    ),
    "many slots and a tracked Hessian": (
        given(bx.BSVRBv1(0.1), lambda: slotted(lambda block, batch: jnp.arange(3)), y0=jnp.zeros((10, 2))),
        ValueError, "a tracked Hessian needs one slot per block", "got slots of shape (3,)", "use BSVRBv2",
    ),
    "many slots and a moving Hessian": (
        given(bx.KSONG(0.1), lambda: slotted(lambda block, batch: jnp.arange(1)), y0=jnp.zeros((10, 2))),
        ValueError, "a tracked Hessian needs one slot per block", "got slots of shape (1,)", "use BSVRBv2",
    ),
    "slots of their own and refreshes": (
        given(bx.BlockPAGE(0.1), lambda: slotted(lambda block, batch: jnp.arange(3)), y0=jnp.zeros((10, 2))),
        ValueError, "BlockPAGE needs one slot per block", "lower level 'lower'", "use BSVRBv2",
    ),
    "slots of their own and stored gradients": (
        given(bx.BlockSAGA(0.1), lambda: slotted(lambda block, batch: jnp.arange(3)), y0=jnp.zeros((10, 2))),
        ValueError, "BlockSAGA needs one slot per block", "lower level 'lower'", "use BSVRBv2",
    ),
    "a table of some rows": (
        given(bx.BlockSAGA(0.1), initial_batch_size=5),
        ValueError, "initial_batch_size must be None, 'all' or 0 for BlockSAGA", "got 5",
    ),
    # coefficients that do not fit
    "alpha of an unknown level": (
        given(bx.BSVRBv2(0.1, alpha={"p": 0.1, "q": 0.1, "r": 0.1}), named, y0=BOTH),
        ValueError, "alpha names the lower levels ['p', 'q', 'r']", "expected some of ['p', 'q']",
    ),
    "a lower step of an unknown level": (
        given(bx.BSVRBv1(0.1, lower_step={"lower": 0.1}), named, y0=BOTH),
        ValueError, "lower_step names the lower levels ['lower']", "expected some of ['p', 'q']",
    ),
    "a radius by level without levels": (
        given(bx.MMBO(0.1, radius={"lower": 0.1})),
        ValueError, "radius names the lower levels ['lower']", "expected one value, as lower is not a dict",
    ),
    "alpha lacks a level": (
        given(bx.BSVRBv2(0.1, alpha={"p": 0.1}), named, y0=BOTH),
        ValueError, "alpha must name every lower level", "got ['p']", "without 'q'",
    ),
    "alpha = 1 in v2": (
        given(bx.BSVRBv2(0.1, alpha=1.0)),
        ValueError, "alpha must be less than 1 where gamma is left out", "2 of 4 slots", "got alpha = 1",
    ),
    "alpha = 1 in v1": (
        given(bx.BSVRBv1(0.1, alpha=1)), ValueError, "alpha must be less than 1", "got alpha = 1",
    ),
    "alpha = 1 in MSVR": (
        given(bx.MSVR(0.1, alpha=1.0), mean_only), ValueError, "alpha must be less than 1", "got alpha = 1",
    ),
    "alpha = 1 in stages": (
        given(bx.Restart(bx.MSVR(0.1, alpha=1.0), first=1, stages=1), mean_only),
        ValueError, "alpha must be less", "got alpha = 1",
    ),
    "alpha_bar = 1": (
        given(bx.BSVRBv2(0.1, alpha_bar=np.float32(1))),
        ValueError, "alpha_bar must be less than 1", "gamma_bar", "= 1",
    ),
    "alpha = 1 in one level": (
        given(bx.BSVRBv2(0.1, alpha={"p": 0.5, "q": 1.0}), named, y0=BOTH),
        ValueError, "alpha must be less than 1", "2 of 4 slots",
    ),
    "alpha = 1 for some slots of all blocks": (
        given(bx.BSVRBv2(0.1, alpha=1), lambda: slotted(lambda b, r: jnp.arange(2)), y0=jnp.zeros((10, 2)),
              blocks_per_step=None),
        ValueError, "alpha must be less than 1", "8 of 10 slots",
    ),
    "an optax function that was not called": (
        given(bx.BSVRBv2(optax.adam)), TypeError, "the schedule upper_step fails", "function(step)", "adam",
    ),
    "a schedule of vectors": (
        given(bx.BSVRBv2(0.1, lower_step=lambda step: jnp.ones(2))),
        ValueError, "the schedule lower_step must return a scalar", "got float32[2]",
    ),
    "a schedule of a level that gives vectors": (
        given(bx.BSVRBv2(0.1, gamma={"p": lambda step: jnp.ones(2)}), named, y0=BOTH),
        ValueError, "the schedule gamma['p'] must return a scalar", "got float32[2]",
    ),
    "a schedule of two arguments": (
        given(bx.RSVRB(lambda step, x: 0.1)),
        TypeError, "the schedule upper_step fails", "function(step)", "'x'",
    ),
    "a vector of steps": (
        given(bx.BSVRBv2(jnp.ones(3))), ValueError, "upper_step must be a scalar", "got shape (3,)",
    ),
    "a vector of floors": (
        given(bx.RSVRB(0.1, floor=np.ones(2))), ValueError, "floor must be a scalar", "got shape (2,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("enter", [initialise, minimise])
@pytest.mark.parametrize("case", RUNS)
def test_a_bad_run_is_refused_before_it_is_compiled(case, enter):
    run, kind, *phrases = RUNS[case]
    with pytest.raises(kind) as caught:
        enter(*run)
    assert type(caught.value) is kind
    for phrase in phrases:
        assert phrase in str(caught.value)


# --- data that are not finite ------------------------------------------------------------


def with_one(shape, place, value=np.nan):
    """Ones, and one entry that is not finite."""
    array = np.ones(shape, np.float32)
    array[place] = value
    return array


def seen(rows, missing=lambda row: row):
    """A problem whose f leaves out what a function makes zero."""
    return problem(lambda x, y, block, batch: jnp.mean((missing(batch["b"])) ** 2) + y @ y, upper_data=rows)


ROWS_OF_BLOCKS = bx.PerBlock({"a": with_one((8, 2), (5, 1))}, [0, 2, 4, 6, 8])
NOT_FINITE = {
    "shared rows": (
        lambda: problem(lower_data=bx.Shared({"a": with_one((ROWS, 2), (4, 1))})),
        "row 4 of lower_data['a'] is not finite, and lower level 'lower' is not finite there",
    ),
    "infinite rows of f": (
        lambda: seen(bx.Shared({"b": with_one(ROWS, 2, -np.inf)})),
        "row 2 of upper_data['b'] is not finite, and upper is not finite there",
    ),
    "rows of blocks": (
        lambda: problem(lower_data=ROWS_OF_BLOCKS),
        "row 5 of lower_data['a'] (row 1 of block 2) is not finite, and lower level 'lower'",
    ),
    "common rows": (
        lambda: problem(lower_data=bx.Shared({"a": with_one((ROWS, 2), (0, 0))}, common=True)),
        "row 0 of lower_data['a'] is not finite",
    ),
    "the rows of one of several levels": (
        lambda: named(lower_data={"p": LOWER_DATA, "q": ROWS_OF_BLOCKS}),
        "row 5 of lower_data 1['a'] (row 1 of block 2) is not finite, and lower level 'q'",
    ),
    "constants": (
        lambda: problem(blocks={"c": with_one((BLOCKS, 2), (3, 0))}),
        "blocks['c'] of block 3 is not finite, and upper is not finite there",
    ),
    "all rows": (
        lambda: seen(bx.Shared({"b": np.full(ROWS, np.nan, np.float32)})),
        "row 0 of upper_data['b'] is not finite, and 4 other rows",
    ),
    "rows whose slope alone is not finite": (
        lambda: problem(
            lambda x, y, block, batch: jnp.mean(jnp.where(jnp.isnan(batch["b"]), 0, batch["b"] * (y @ y))),
            upper_data=bx.Shared({"b": with_one(ROWS, 1)}),
        ),
        "row 1 of upper_data['b'] is not finite, and upper is not finite there",
    ),
    "rows of random functions": (
        lambda: bx.Problem(
            lambda x, y, block, batch, key: y @ y,
            lambda x, y, block, batch, key: lower(x, y, block, batch),
            BLOCKS,
            None,
            bx.Shared({"a": with_one((ROWS, 2), (4, 1))}),
            random=True,
        ),
        "row 4 of lower_data['a'] is not finite, and lower level 'lower'",
    ),
}
ENTRANCES = {
    "minimize": lambda problem, y0: bx.minimize(problem, X, y0, steps=5, progress=None),
    "sweep": lambda problem, y0: bx.sweep(
        problem, X, y0, solver=bx.SOBA, settings=bx.grid(upper_step=[0.1]), steps=5,
        keys=jax.random.split(jax.random.key(0), 1),
    ),
    "tune": lambda problem, y0: bx.tune(problem, X, y0, steps=5, progress=None),
    "objective": lambda problem, y0: bx.objective(problem, X, y0),
}  # fmt: skip


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("case", NOT_FINITE)
def test_data_that_are_not_finite_are_named(case, entrance):
    make, phrase = NOT_FINITE[case]
    made = make()
    with pytest.raises(ValueError, match=re.escape(phrase)):
        ENTRANCES[entrance](made, BOTH if made.named else Y)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_start_that_is_not_finite_is_named(entrance):
    with pytest.raises(ValueError, match=r"y0 must hold finite numbers, got nan in slot 2 at \[1\]"):
        ENTRANCES[entrance](problem(), Y.at[2, 1].set(np.nan))
    with pytest.raises(ValueError, match=r"^x must hold finite numbers, got nan at \[0\]"):
        bx.hypergradient(problem(), X.at[0].set(np.nan), Y)


@pytest.mark.parametrize(
    "good",
    [
        seen(bx.Shared({"b": with_one(ROWS, 2)}), missing=jnp.nan_to_num),
        problem(lower_data=bx.Shared({"a": np.ones((ROWS, 2)), "unused": np.full(ROWS, np.nan)})),
        problem(  # bounds that some blocks do not have
            lambda x, y, block, batch: jnp.minimum(y @ y, block),
            lambda x, y, block, batch: jnp.sum((y - x) ** 2),
            with_one(BLOCKS, 1, np.inf),
        ),
    ],
)
def test_marks_that_functions_leave_out_are_taken(good):
    with pytest.raises(ReachedError):
        bx.minimize(good, X, Y, steps=5, progress=None)


def test_finite_data_are_looked_at_once(monkeypatch):
    from bilevax._problem import finite

    looks = []
    original = np.isfinite
    made = problem(lower_data=bx.Shared({"a": np.ones((ROWS, 3), np.float32)}))
    for _ in range(2):
        monkeypatch.setattr(finite.np, "isfinite", lambda a: (looks.append(a.shape), original(a))[1])
        list(finite.not_finite(made))
        monkeypatch.undo()
    assert looks.count((ROWS, 3)) == 1


@pytest.mark.parametrize("enter", [initialise, minimise])
def test_rsvrb_states_the_bytes_that_its_jacobians_need(enter, monkeypatch):
    def wide(x, y, block, batch):
        return lower(x[:2], y, block, batch)

    run = given(bx.RSVRB(0.1), lambda: problem(lower=wide), x0=jnp.zeros(8))
    with monkeypatch.context() as patch:
        patch.setattr(rsvrb, "available_bytes", lambda: 400)
        with pytest.raises(MemoryError) as caught:
            enter(*run)
    stated = r"4 blocks × d_y = 2 × d_x = 8 in float32 need (\d+) bytes, the device has 400"
    need = re.search(stated, str(caught.value))
    assert int(need[1]) >= 4 * (2 * 8 + 8 + 2 * 2) * 4  # ∇²_xy g, ∇_x f and ∇²_yy g of every block
    monkeypatch.setattr(rsvrb, "available_bytes", lambda: 10 * int(need[1]))
    with pytest.raises(ReachedError):
        enter(*run)


class Table:
    """As those of pandas are."""

    dtype = np.dtype(np.float32)

    def to_numpy(self):
        return np.zeros(2, np.float32)


OF_MINIMIZE = {
    "a table of another library": (
        {"x0": Table()},
        TypeError,
        "x0 must be a floating array",
        "got Table",
    ),
    "negative steps": ({"steps": -1}, ValueError, "steps must be at least 0", "got -1"),
    "half a step": ({"steps": 1.5}, TypeError, "steps must be an integer", "got 1.5"),
    "steps is True": ({"steps": True}, TypeError, "steps must be an integer", "got True"),
    "steps beyond 32 bits": (
        {"steps": 2**31},
        ValueError,
        "steps must be at most 2147483647",
        "got 2147483648",
    ),
    "steps of NumPy beyond 32 bits": (
        {"steps": np.int64(2**40)},
        ValueError,
        "steps must be at most 2147483647",
        "got 1099511627776",
    ),
    "never an entry": ({"every": 0}, ValueError, "every must be at least 1", "got 0"),
    "every half step": ({"every": 0.5}, TypeError, "every must be an integer", "got 0.5"),
    "metrics is a list": ({"metrics": [print]}, TypeError, "metrics must be a dict of functions", "got list"),
    "a metric is a number": (
        {"metrics": {"loss": 1}},
        TypeError,
        "metrics['loss'] must be a function",
        "got int",
    ),
    "unknown progress": ({"progress": "loud"}, ValueError, "progress must be 'auto', 'bar'", "got 'loud'"),
    "progress is a number": ({"progress": 3}, ValueError, "progress must be 'auto', 'bar'", "got 3"),
}


@pytest.mark.parametrize("case", OF_MINIMIZE)
def test_minimize_refuses_what_only_it_is_given(case):
    options, kind, *phrases = OF_MINIMIZE[case]
    with pytest.raises(kind) as caught:
        minimise(*given(**options))
    for phrase in phrases:
        assert phrase in str(caught.value)


@pytest.mark.parametrize("name", ["seconds", "tolerance"])
@pytest.mark.parametrize("value", [lambda: 1.0, "1", None, [1.0], np.ones(2), np.nan, -1.0, True])
def test_a_limit_of_a_run_must_be_one_number(name, value):
    if value is None:
        assert getattr(bx.Stop(**{name: value}), name) is None
        return
    with pytest.raises((TypeError, ValueError), match=f"{name} must"):
        bx.Stop(**{name: value})
    if name == "seconds":
        with pytest.raises((TypeError, ValueError), match="seconds between checkpoints must"):
            bx.Checkpoint("folder", seconds=value)


def test_a_sweep_counts_its_steps_in_32_bits_too():
    options = {"settings": [{}], "keys": jax.random.split(jax.random.key(0), 1), "blocks_per_step": 2}
    with pytest.raises(ValueError, match="steps must be at most 2147483647"):
        bx.sweep(problem(), X, Y, solver=lambda: bx.BSVRBv2(0.1), steps=2**31, **options)


@pytest.mark.parametrize("solver", ["BSVRBv2", 0.1, bx.BSVRBv2])
def test_minimize_refuses_what_is_no_solver(solver):
    with pytest.raises(TypeError, match=r"solver must be a bilevax solver .*, got (str|float|the class)"):
        bx.minimize(problem(), X, Y, solver=solver, steps=1, key=jax.random.key(0))


OPTIONS = {
    name: {field.name for field in dataclasses.fields(method)} for name, method in every_kind.METHODS.items()
}


@pytest.mark.parametrize("method", OPTIONS)
def test_an_option_of_other_methods_is_refused_with_the_names_of_those_that_have_it(method):
    importlib.import_module("bilevax.experiments.meta_solver")  # has solvers of its own
    for option in {"no_such_option"}.union(*OPTIONS.values()) - OPTIONS[method]:
        having = [name for name in sorted(OPTIONS) if option in OPTIONS[name]]
        with pytest.raises(TypeError) as raised:
            every_kind.METHODS[method](**{option: 0.1})
        first, *others = str(raised.value).split("; ")
        assert first.startswith(f"{method} has no option {option!r}: it takes upper_step, ")
        assert others == ([f"{option} is an option of {', '.join(having)}"] if having else [])


def test_a_solver_of_a_users_own_may_take_any_options():
    class Own(bx.MMBO):
        def __init__(self, **options):
            super().__init__(upper_step=options["speed"])

    assert Own(speed=0.1).upper_step == 0.1
    with pytest.raises(TypeError, match="Restart has no option 'floor': it takes solver, first, stages"):
        bx.Restart(bx.MMBO(), first=1, stages=1, floor=0.1)


def test_a_bad_row_behind_an_allowed_mark_is_named():
    rows = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
    rows[1, 0] = np.nan  # a mark that g leaves out
    rows[15, 1] = np.nan

    def lower(x, y, block, batch):
        marked = jnp.where(jnp.isnan(batch[:, 0]), 0, jnp.where(jnp.isnan(batch[:, 0]), 0, batch[:, 0]))
        return jnp.mean((y - x - marked - batch[:, 1]) ** 2)

    given = bx.Problem(
        upper=lambda x, y, block, batch: (y - block) ** 2,
        lower=lower,
        blocks=jnp.arange(4.0),
        lower_data=bx.PerBlock(rows, np.arange(0, 25, 6)),
    )
    with pytest.raises(
        ValueError, match=r"row 15 of lower_data \(row 3 of block 2\) is not finite, and 1 other"
    ):
        bx.minimize(given, jnp.ones(()), jnp.zeros(4), steps=10, progress=None)
