"""Every method follows its plain transcription (`reference.algorithms`), step by step on the same samples.

The rows of the data carry their own places, which the problems' functions ignore: a sample of the library
thereby tells which rows it holds, and the reference is given the very same ones.
"""

import functools
from dataclasses import fields, replace
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import grouped
from jax import Array
from reference import algorithms, finite_sums, lazy_adam, problems

import bilevax as bx
from bilevax._problem.lookups import WHOLE as WHOLE_X
from bilevax._problem.sampling import SECOND_BLOCKS
from bilevax._step.lazy_tables import LazyTables
from bilevax._step.slot_table import SlotTable, pack
from bilevax._step.slots import Memory, Moving
from bilevax.solvers.rsvrb import Pieces, Tracked, _catch_up

STEPS = 200
LOOKED_AT = (1, 2, 3, 20, STEPS)  # an early slip may be forgotten in the end
TOLERANCE = 1e-9

# The library's names of what the reference calls otherwise.
NAMES = {"eta": "upper_step", "tau": "lower_step", "tau_bar": "inverse_step", "lam": "floor"}
ARGMIN = {
    "BSVRBv1": (bx.BSVRBv1, algorithms.bsvrb_v1),
    "BSVRBv2": (bx.BSVRBv2, algorithms.bsvrb_v2),
    "RSVRB": (bx.RSVRB, algorithms.rsvrb),
    "KSONG": (bx.KSONG, algorithms.ksong),
    "BlockNewton": (bx.BlockNewton, algorithms.block_newton),
    "MMBO": (bx.MMBO, algorithms.mmbo),
    "SOBA": (bx.SOBA, algorithms.soba),
    "MASOBA": (bx.MASOBA, algorithms.ma_soba),
    "F2SA": (bx.F2SA, algorithms.f2sa),
    "F3SA": (bx.F3SA, algorithms.f3sa),
}
MEAN = {"MSVR": (bx.MSVR, algorithms.msvr_v2), "SONG": (bx.SONG, algorithms.song)}
MIXED = {
    "BSVRBv1 mixed": (bx.BSVRBv1, functools.partial(algorithms.bsvrb_mixed, version=1)),
    "BSVRBv2 mixed": (bx.BSVRBv2, functools.partial(algorithms.bsvrb_mixed, version=2)),
}
FINITE = {
    "BlockPAGE": (bx.BlockPAGE, finite_sums.block_page),
    "BlockSAGA": (bx.BlockSAGA, finite_sums.block_saga),
}
METHODS = ARGMIN | MEAN | MIXED | FINITE

SETTINGS = {"eta": 0.02, "tau": 0.05, "tau_bar": 0.04, "alpha": 0.3, "alpha_bar": 0.2, "beta": 0.25}
SETTINGS |= {"penalty": 3.0}
REFRESH_CHANCE = 0.1
FLOOR = 1.4  # some Hessians are less: they have to be raised, time and again

# LLVM is not to optimise: these runs are short, and compiling them is all their cost.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


pytestmark = pytest.mark.usefixtures("x64")


# --- problems -----------------------------------------------------------------


class Curved(problems.Mixed):
    """The mixed problem with its mean level held fixed: every piece depends on x and on y."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.blocks["fixed"] = self.normal(self.m, self.db)
        del self.db

    def upper(self, x, y, block, batch):
        return super().upper(x, {"a": y, "b": block["fixed"]}, block, batch)

    def f_x(self, i, x, y, rows):
        return super().f_x(i, x, y, self.blocks["fixed"][i], rows)

    def f_y(self, i, x, y, rows):
        return self.f_a(i, x, y, self.blocks["fixed"][i], rows)


@functools.cache
def make(family, ragged):
    return family(ragged=ragged)


def source(rows, offsets):
    rows = rows | {"place": np.arange(len(next(iter(rows.values()))))}
    return bx.Shared(rows) if offsets is None else bx.PerBlock(rows, offsets)


def as_library(blocks, apart=False, tables=None):
    """The problem as a user writes it; `apart` lets two lower levels draw different rows."""
    lower_data = source(blocks.lower_rows, blocks.lower_offsets)
    if isinstance(blocks, problems.MeanBlocks):
        lower = bx.mean(blocks.inner)
    elif hasattr(blocks, "db"):
        lower = {"a": blocks.lower, "b": bx.mean(blocks.inner)}
        if apart:
            lower_data = {"a": lower_data, "b": source(blocks.lower_rows, blocks.lower_offsets)}
    else:
        lower = blocks.lower if tables is None else blocks.weighted
    upper_data = source(blocks.upper_rows, blocks.upper_offsets)
    return bx.Problem(blocks.upper, lower, blocks.blocks, upper_data, lower_data, tables=tables)


# --- coefficients -------------------------------------------------------------


class Schedule(eqx.Module):
    """c / (1 + rate t)^(1/3). Its numbers are traced: the constant one, of rate 0, compiles nothing anew."""

    c: Array
    rate: Array

    def __call__(self, t):
        return self.c / jnp.cbrt(1 + self.rate * t)


def scheduled(values, rate):
    """Coefficients that decay, for the library and for the reference."""
    ours = {name: Schedule(jnp.asarray(c), jnp.asarray(rate)) for name, c in values.items()}
    theirs = {name: (lambda t, c=c: c / (1 + rate * t) ** (1 / 3)) for name, c in values.items()}
    return ours, SimpleNamespace(**theirs)


def options(method, **given):
    """What a method's reference is given besides its coefficients."""
    if METHODS[method][0] is bx.BlockSAGA:
        given["size"] = FEW["batch_size"]
    return given | {"lam": FLOOR} if has(METHODS[method][0], "floor") else given


def has(solver, option):
    return option in {field.name for field in fields(solver)}


def make_solver(method, values):
    """The library's solver, from all the reference's names that it knows."""
    solver = METHODS[method][0]
    named = {NAMES.get(name, name): value for name, value in values.items()}
    named["refresh_chance"] = REFRESH_CHANCE
    return solver(**{name: value for name, value in named.items() if has(solver, name)})


# --- the library's run --------------------------------------------------------


@functools.partial(eqx.filter_jit, compiler_options=QUICKLY)
def run(solver, problem, start, key, plan):
    """What a run starts from and what each of its steps leaves, by the reference's names; and its sampler."""
    y = {"a": start["y_a"], "b": start["y_b"]} if problem.named else start["y"]
    state = solver.init(problem, start["x"], y, key=key, **grouped(**plan))
    state = replaced(state, start) if plan else state

    def step(state, _):
        state, _ = solver.step(problem, state)
        return state, read(state)

    return read(state), jax.lax.scan(step, state, length=STEPS)[1], state.sampler


@functools.partial(eqx.filter_jit, compiler_options=QUICKLY)
def draw(solver, problem, sampler):
    """What all steps see: their blocks, and the places of each block's rows (-1 for rows of no weight).

    The solver is None if it has nothing to say about that: such methods share a program.
    """

    def look(t):
        at = SimpleNamespace(step=t, sampler=sampler)
        sample = sampler.draw(problem, t) if solver is None else solver.draw(problem, at)
        batches = {"upper": sample.upper} | sample.lower
        seen = {name: places(batch) for name, batch in batches.items()}
        if isinstance(solver, bx.BlockPAGE):
            seen["refresh"] = solver.refreshes(problem, sampler, t)
        return seen | {"blocks": sample.blocks, "second": sampler.blocks_at(t, SECOND_BLOCKS)}

    def places(batch):
        return (
            batch.rows["place"]
            if batch.weight is None
            else jnp.where(batch.weight > 0, batch.rows["place"], -1)
        )

    return jax.lax.map(look, jnp.arange(STEPS, dtype=jnp.int32))


def drawing(solver):
    """The solver, if it draws in a way of its own."""
    solver = solver.solver if isinstance(solver, bx.Restart) else solver
    return solver if isinstance(solver, bx.BlockPAGE | bx.BlockSAGA) else None


def read(state):
    """The state by the reference's names, all blocks and rows of tables caught up."""
    named, state = "a" in state.levels, state.settled
    out = {"x": state.x, "z": state.z, "average": state.average}
    out |= {f"y_{name}": y for name, y in state.y.items()} if named else {"y": state.y}
    memory = state.levels["a" if named else "lower"]
    if not isinstance(memory.y, Moving):
        return out
    out["s"] = memory.y.slope
    if isinstance(memory, Tracked):
        blocks = jnp.arange(memory.stamp.high.shape[0])
        pieces = _catch_up(memory, blocks, state.clocks["lower"].y.now, FLOOR)
        jacobian = jnp.swapaxes(pieces.jacobian, 1, 2)
        return out | {"f_x": pieces.by_x, "f_y": pieces.by_y, "H": pieces.hessian, "g_xy": jacobian}
    if memory.v is not None:
        clocks = state.clocks["a" if named else "lower"]
        out |= {"u": memory.v.slope, "v": memory.v.at(clocks.v.now)}
    return out if memory.hessian is None else out | {"H": memory.hessian}


def replaced(state, start):
    """The state with other estimators than `init` gave it."""
    if state.tables is None:
        state = eqx.tree_at(lambda state: state.z, state, start["z"])
    else:
        tables = LazyTables.of([[WHOLE_X]], start["x"], start["z"], float, state.tables.rule)
        state = replace(state, tables=tables)
    name = "a" if "a" in state.levels else "lower"
    memory = state.levels[name]
    if not isinstance(memory.y, Moving):
        return state
    packed = isinstance(memory, SlotTable)
    memory = memory.memory if packed else memory
    memory = eqx.tree_at(lambda memory: memory.y.slope, memory, start["s"])
    if isinstance(memory, Tracked):
        pieces = Pieces(start["f_x"], start["f_y"], start["H"], jnp.swapaxes(start["g_xy"], 1, 2))
        memory = eqx.tree_at(lambda memory: memory.pieces, memory, pieces)
    elif memory.v is not None:
        memory = eqx.tree_at(lambda memory: memory.v.value, memory, start["v"])
        memory = eqx.tree_at(lambda memory: memory.v.slope, memory, start["u"])
    if isinstance(memory, Memory) and memory.hessian is not None:
        memory = eqx.tree_at(lambda memory: memory.hessian, memory, start["H"])
    if isinstance(memory, Memory) and memory.previous is not None:
        memory = eqx.tree_at(lambda memory: memory.previous, memory, start["H"])
    return eqx.tree_at(lambda state: state.levels[name], state, pack(memory) if packed else memory)


# --- the comparison -----------------------------------------------------------


def random_start(blocks, radius=np.inf):
    """A start with random estimators that are valid: H ≥ λ, and v and y in the ball."""
    start = vars(problems.random_start(blocks))
    start["H"] = np.array([algorithms.clip_eigenvalues(H, FLOOR) for H in start["H"]])
    return start | {name: in_ball(start[name], radius) for name in ("v", "y")}


def in_ball(vectors, radius):
    return np.array([algorithms.project(vector, radius) for vector in vectors])


def as_samples(drawn, blocks):
    """The reference's samples, from the places that the library's samples hold."""
    levels = {"lower": "a", "inner": "b"} if "a" in drawn else {"lower": "lower"}
    names = levels | {"blocks": "blocks", "second": "second", "upper": "upper"}
    names |= {"refresh": "refresh"} if "refresh" in drawn else {}
    samples = [
        SimpleNamespace(**{name: drawn[ours][t] for name, ours in names.items()}) for t in range(STEPS)
    ]
    for sample in samples:
        for name in ("upper", *levels):
            setattr(sample, name, [rows[rows >= 0] for rows in getattr(sample, name)])
        for place, i in enumerate(sample.blocks):
            assert set(sample.upper[place]) <= set(blocks.upper_of(i))
            assert all(set(getattr(sample, level)[place]) <= set(blocks.lower_of(i)) for level in levels)
    return samples


def compare(method, solver, blocks, coefficients, given, *, apart=False, reference=None, tables=None, **plan):
    """Runs both, with all blocks and rows unless planned otherwise; returns all the library's states.

    A sampling run starts from random estimators, a deterministic one from those that `init` found.
    """
    start = random_start(blocks, given.get("radius", np.inf))
    problem = as_library(blocks, apart, tables)
    arrays = jax.tree.map(jnp.asarray, start)
    first, states, sampler = run(solver, problem, arrays, jax.random.key(0), plan)
    first, states = jax.tree.map(np.asarray, (first, states))
    if given.get("projection") == "once":  # a `State` does not know the radius: its v is not projected
        states["v"] = np.array([in_ball(v, given["radius"]) for v in states["v"]])
    if plan:
        samples = as_samples(jax.tree.map(np.asarray, draw(drawing(solver), problem, sampler)), blocks)
    else:
        samples = problems.full_samples(blocks, STEPS)
        if isinstance(solver, bx.BlockPAGE):
            due = np.asarray(solver.refreshes(problem, sampler, jnp.arange(STEPS)))
            samples = [
                SimpleNamespace(**vars(one), refresh=now) for one, now in zip(samples, due, strict=True)
            ]
    for steps in LOOKED_AT:
        begin = SimpleNamespace(**(start | first))
        end = (reference or METHODS[method][1])(blocks, samples[:steps], begin, coefficients, **given)
        for name, expected in vars(end).items():
            actual, message = states[name][steps - 1], f"{name} after {steps} steps"
            assert actual.dtype == np.float64
            assert np.abs(expected).max() < 30, f"{name} diverges"
            np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=message)
    return states


def is_raised(states):
    """Whether Hessians were raised to the floor, also after the start."""
    least = np.linalg.eigvalsh(states["H"][20:])[..., 0]
    return np.isclose(least, FLOOR, rtol=0, atol=1e-10).any() and (least > FLOOR + 1e-3).any()


# --- the tests ----------------------------------------------------------------

SAMPLED = pytest.mark.parametrize("per_step", [2, 5], ids=["I<m", "I=m"])
RAGGED = pytest.mark.parametrize("ragged", [False, True], ids=["shared", "ragged"])
RATES = pytest.mark.parametrize("rate", [0.0, 1 / 50], ids=["constant", "decaying"])
FEW = {"blocks_per_step": 2, "batch_size": 3}
WEIGHTS = problems.LogisticHyper(rows=40)


def index(block, batch):
    return batch.get("index")


def follow(method, family, ragged, per_step, rate, apart=False):
    ours, theirs = scheduled(SETTINGS, rate)
    given = options(method)
    solver = make_solver(method, ours | given)
    plan = FEW | {"blocks_per_step": per_step, "shuffle": ragged}
    states = compare(method, solver, make(family, ragged), theirs, given, apart=apart, **plan)
    assert not has(type(solver), "floor") or is_raised(states)


@RATES
@pytest.mark.parametrize("method", ARGMIN)
@RAGGED
@SAMPLED
def test_argmin_levels(method, ragged, per_step, rate):
    follow(method, Curved, ragged, per_step, rate)


@RATES
@pytest.mark.parametrize("method", MEAN)
@RAGGED
@SAMPLED
def test_mean_levels(method, ragged, per_step, rate):
    follow(method, problems.MeanBlocks, ragged, per_step, rate)


@RATES
@pytest.mark.parametrize("method", MIXED)
@RAGGED
@SAMPLED
def test_named_levels_of_both_kinds(method, ragged, per_step, rate):
    follow(method, problems.Mixed, ragged, per_step, rate, apart=per_step < 5)


@pytest.mark.parametrize(
    ("family", "ragged", "per_step", "rate", "apart"),
    [
        (Curved, True, 2, 1 / 50, False),
        (Curved, False, 5, 0.0, False),
        (problems.MeanBlocks, False, 2, 0.0, False),
        (problems.Mixed, True, 2, 0.0, True),
        (problems.Mixed, False, 2, 1 / 50, False),
    ],
)
@pytest.mark.parametrize("method", FINITE)
def test_finite_sums(method, family, ragged, per_step, rate, apart):
    follow(method, family, ragged, per_step, rate, apart)


WHOLE = [(method, True) for method in METHODS]
WHOLE += [(method, False) for method in ("BSVRBv1", "RSVRB", "MSVR", "BSVRBv2 mixed")]


@pytest.mark.parametrize(("method", "ragged"), WHOLE)
def test_all_blocks_and_rows(method, ragged):
    """A deterministic run, from the estimators that `init` takes from all rows; with plain numbers."""
    family = Curved if method in ARGMIN else problems.MeanBlocks if method in MEAN else problems.Mixed
    given = options(method)
    given |= {"size": 1000} if "size" in given else {}
    solver = make_solver(method, SETTINGS | given)
    compare(method, solver, make(family, ragged), algorithms.constant(**SETTINGS), given)


@pytest.mark.parametrize("method", ["BSVRBv1", "BSVRBv2", "RSVRB", "BlockSAGA"])
def test_restarts(method):
    """The last of three stages goes on beyond its nominal end at step 175."""
    given = options(method)
    solver = bx.Restart(make_solver(method, SETTINGS | given), first=25, stages=3)
    staged = algorithms.restarted(SimpleNamespace(**SETTINGS), first=25, stages=3)
    compare(method, solver, make(Curved, True), staged, given, **FEW)


@pytest.mark.parametrize("method", ["BSVRBv1", "BSVRBv2", "RSVRB", "BSVRBv1 mixed"])
def test_restarts_as_printed(method):
    """Every stage ends at a random step, and the next one begins there with x_0 = x_1."""
    given = options(method)
    solver = bx.Restart(make_solver(method, SETTINGS | given), first=30, stages=4, seed=1, reset=True)
    assert LOOKED_AT[-2] < sum(solver.lengths[:-1]) < STEPS < solver.steps  # the stages begin before the end
    reference = algorithms.restarting(METHODS[method][1], solver.lengths)
    family = problems.Mixed if method in MIXED else Curved
    coefficients = SimpleNamespace(**SETTINGS)
    compare(method, solver, make(family, False), coefficients, given, reference=reference, **FEW)


@pytest.mark.parametrize("method", ["BSVRBv1", "BSVRBv2", "MASOBA", "SOBA"])
@RATES
def test_a_table_whose_rows_are_caught_up_when_they_are_looked_up(method, rate):
    """A batch looks up 6 of the 40 weights, some of them twice; the others move all the same."""
    ours, theirs = scheduled(SETTINGS, rate)
    given = options(method)
    compare(method, make_solver(method, ours | given), WEIGHTS, theirs, given, tables=index, **FEW)


@pytest.mark.parametrize("reset", [False, True])
def test_restarts_with_a_table(reset):
    solver = bx.Restart(
        make_solver("BSVRBv2", SETTINGS), first=30, stages=4, seed=1 if reset else None, reset=reset
    )
    reference, coefficients = None, algorithms.restarted(SimpleNamespace(**SETTINGS), first=30, stages=4)
    if reset:
        reference = algorithms.restarting(algorithms.bsvrb_v2, solver.lengths)
        coefficients = SimpleNamespace(**SETTINGS)
    compare("BSVRBv2", solver, WEIGHTS, coefficients, {}, reference=reference, tables=index, **FEW)


@pytest.mark.parametrize("method", ["BSVRBv2", "MASOBA"])
@RATES
def test_rows_of_a_table_that_move_by_lazy_adam(method, rate):
    """The weights that no batch looks up rest for up to 40 steps, and are then caught up."""
    ours, theirs = scheduled(SETTINGS | {"eta": 0.05}, rate)
    given = {"b1": 0.8, "b2": 0.95, "eps": 1e-4, "weight_decay": 0.3}
    adam = bx.averaged(bx.lazy_adam(ours["eta"], **given), window=30)
    follow_lazily(method, replace(make_solver(method, ours), upper_step=adam), theirs, given | {"window": 30})


@pytest.mark.parametrize("reset", [False, True])
def test_restarts_with_lazy_adam(reset):
    """A stage that forgets where x was begins with the x before as it is: BSVRB v2 looks back."""
    values = SETTINGS | {"eta": 0.05}
    solver = replace(make_solver("BSVRBv2", values), upper_step=bx.lazy_adam(0.05, b2=0.95))
    solver = bx.Restart(solver, first=30, stages=4, reset=reset)
    coefficients = algorithms.restarted(SimpleNamespace(**values), first=30, stages=4)
    if reset:
        coefficients = SimpleNamespace(**values)
    follow_lazily("BSVRBv2", solver, coefficients, {"b2": 0.95}, solver.lengths if reset else None)


def follow_lazily(method, solver, coefficients, numbers, lengths=None):
    """A run that looks up 6 of the 40 weights in a step, beside its transcription."""

    def looked_up(sample):
        return np.unique(np.concatenate([WEIGHTS.lower_rows["index"][rows] for rows in sample.lower]))

    def reference(*given):
        moving = functools.partial(METHODS[method][1], move=lazy_adam.Table(looked_up, **numbers).move)
        moving = moving if lengths is None else algorithms.restarting(moving, lengths)
        return moving(*given)

    compare(method, solver, WEIGHTS, coefficients, {}, reference=reference, tables=index, **FEW)


def test_a_stage_lasts_a_random_part_of_its_steps():
    lengths = np.array(
        [bx.Restart(bx.BSVRBv1(0.1), first=8, stages=2, seed=seed).lengths for seed in range(400)]
    )
    assert set(lengths[:, 0]) == set(range(1, 9))
    assert set(lengths[:, 1]) == set(range(1, 17))
    assert bx.Restart(bx.BSVRBv1(0.1), first=8, stages=2).lengths == (8, 16)


@pytest.mark.parametrize("method", ["BSVRBv1", "BSVRBv2"])
def test_a_given_gamma(method):
    """γ̄, left out, is then γ; given, it is itself."""
    values = SETTINGS | {"gamma": 0.9} | ({"gamma_bar": 0.6} if method == "BSVRBv1" else {})
    given = options(method)
    coefficients = algorithms.constant(**({"gamma_bar": 0.9} | values))
    solver = make_solver(method, values | given)
    compare(method, solver, make(Curved, False), coefficients, given, **FEW)


@RATES
@pytest.mark.parametrize("method", ["BSVRBv1", "BSVRBv2"])
@SAMPLED
def test_the_algorithms_as_printed(method, per_step, rate):
    """y and v move along s_t and u_t, whichever blocks were visited in the step before."""
    ours, theirs = scheduled(SETTINGS, rate)
    given = options(method) | {"refreshed": False}
    solver = make_solver(method, ours | given)
    compare(method, solver, make(Curved, True), theirs, given, **FEW | {"blocks_per_step": per_step})


def test_a_ball_that_binds_as_printed():
    given = {"radius": 0.4, "projection": "once", "refreshed": False}
    solver = make_solver("BSVRBv2", SETTINGS | given)
    coefficients = algorithms.constant(**SETTINGS)
    states = compare("BSVRBv2", solver, make(problems.QuadraticBlocks, False), coefficients, given, **FEW)
    assert np.isclose(np.linalg.norm(states["v"][20:], axis=-1), 0.4, rtol=0, atol=1e-10).any()


@pytest.mark.parametrize("method", ["BSVRBv2", "RSVRB", "MMBO", "SOBA", "BlockPAGE", "BlockSAGA"])
def test_a_ball_that_binds(method):
    """v, for RSVRB y, leaves the ball and is projected: in BSVRBv2 once, when a block is caught up."""
    radius = 0.4
    projected = "y" if method == "RSVRB" else "v"
    given = options(method, radius=radius)
    given |= {"projection": "once"} if method in ("BSVRBv2", "BlockPAGE") else {}
    solver = make_solver(method, SETTINGS | given)
    family = (
        problems.QuadraticBlocks if method in ("BSVRBv2", "RSVRB", "BlockPAGE") else problems.LogisticHyper
    )
    coefficients = algorithms.constant(**SETTINGS)
    states = compare(method, solver, make(family, False), coefficients, given, **FEW, shuffle=False)
    size = np.linalg.norm(states[projected][20:], axis=-1)
    assert np.isclose(size, radius, rtol=0, atol=1e-10).any()
    assert (size < radius - 1e-3).any()
