"""Risks over blocks: exact values, every method on them, and what runs do with them."""

import dataclasses
import functools
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from reference import algorithms, problems, risks

import bilevax as bx
from bilevax._problem.risk import Alone

GROUPS = [0, 1, 1, 0, 2]
PAIRS = {
    "tail of two": (functools.partial(bx.cvar, 0.4), risks.Cvar(0.4)),
    "tail with a part": (functools.partial(bx.cvar, 0.5), risks.Cvar(0.5)),
    "soft maximum": (functools.partial(bx.soft_maximum, 0.7), risks.SoftMaximum(0.7)),
    "worst group": (functools.partial(bx.worst_group, GROUPS), risks.WorstGroup(GROUPS)),
    "soft group": (
        functools.partial(bx.worst_group, GROUPS, temperature=0.5),
        risks.WorstGroup(GROUPS, 0.5),
    ),
}
STEPS, TOLERANCE, FLOOR, ALPHA = 60, 1e-9, 1.4, 0.4
SETTINGS = {"eta": 0.02, "tau": 0.05, "tau_bar": 0.04, "alpha": 0.3, "alpha_bar": 0.2, "beta": 0.25}
NAMES = {"eta": "upper_step", "tau": "lower_step", "tau_bar": "inverse_step"}
SETTINGS |= {"penalty": 3.0}
NEVER = {"alpha": 0.0, "alpha_bar": 0.0, "beta": 0.0}  # BlockPAGE forgets nothing between refreshes
METHODS = {
    "BSVRBv2": (bx.BSVRBv2, {"corrected": True, "curvature": "v"}),
    "BSVRBv1": (bx.BSVRBv1, {"corrected": True, "curvature": "H", "lam": FLOOR}),
    "MMBO": (bx.MMBO, {"corrected": False, "curvature": "v"}),
    "KSONG": (bx.KSONG, {"corrected": False, "curvature": "H", "lam": FLOOR}),
    "F2SA": (bx.F2SA, {"corrected": False, "curvature": "w"}),
    "F3SA": (bx.F3SA, {"corrected": True, "curvature": "w"}),
    "BlockPAGE": (bx.BlockPAGE, {"corrected": True, "curvature": "v"}),
    "BlockNewton": (bx.BlockNewton, {"corrected": False, "curvature": "N"}),
    "SOBA": (bx.SOBA, {"corrected": False, "curvature": "v"}),
    "MASOBA": (bx.MASOBA, {"corrected": False, "curvature": "v"}),
    "MSVR": (bx.MSVR, {"corrected": True, "curvature": None}),
    "SONG": (bx.SONG, {"corrected": False, "curvature": None}),
    "BlockSAGA": (bx.BlockSAGA, {"size": 3}),
}
PLAIN = {"alpha": 1.0, "alpha_bar": 1.0, "beta": 1.0}
FIXED = {"F2SA": PLAIN, "SOBA": PLAIN, "MASOBA": PLAIN | {"beta": 0.25}, "BlockPAGE": NEVER}
# A risk asks nothing of the method: one method has all of them, and every method one.
FOLLOWED = [("BSVRBv2", name) for name in PAIRS] + [("MMBO", "soft group"), ("BSVRBv1", "tail of two")]
FOLLOWED += [(method, "tail with a part") for method in METHODS if method != "BSVRBv2"]

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def blocks(method):
    family = problems.MeanBlocks if method in ("MSVR", "SONG") else problems.QuadraticBlocks
    return family(ragged=True)


def source(rows, offsets):
    return bx.PerBlock(rows | {"place": np.arange(offsets[-1])}, offsets)


def as_library(ours, risk):
    upper, lower = source(ours.upper_rows, ours.upper_offsets), source(ours.lower_rows, ours.lower_offsets)
    level = bx.mean(ours.inner) if isinstance(ours, problems.MeanBlocks) else ours.lower
    return bx.Problem(ours.upper, level, ours.blocks, upper, lower, risk=risk)


def make_solver(method):
    values = {NAMES.get(name, name): value for name, value in SETTINGS.items()} | {"floor": FLOOR}
    values["refresh_chance"] = 0.2
    has = {field.name for field in dataclasses.fields(METHODS[method][0])}
    return METHODS[method][0](**{name: value for name, value in values.items() if name in has})


def read(state):
    """The state by the reference's names, all blocks caught up."""
    memory, clocks = state.levels["lower"], state.clocks["lower"]
    out = {"x": state.x, "z": state.z, "y": state.y, "h": state.blocks.values}
    if hasattr(memory.y, "slope"):
        out["s"] = memory.y.slope
    if memory.v is not None:
        out |= {"u": memory.v.slope, "v": memory.v.at(clocks.v.now)}
    return out if memory.hessian is None else out | {"H": memory.hessian}


@eqx.filter_jit
def run(solver, problem, x0, y0, plan):
    state = solver.init(problem, x0, y0, key=jax.random.key(0), sampling=plan)

    def places(batch):
        rows = batch.rows["place"]
        return rows if batch.weight is None else jnp.where(batch.weight > 0, rows, -1)

    def step(state, _):
        sample = solver.draw(problem, state)
        seen = {"upper": places(sample.upper), "lower": places(sample.lower["lower"])}
        seen |= {"blocks": sample.blocks}
        if isinstance(solver, bx.BlockPAGE):
            seen["refresh"] = solver.refreshes(problem, state.sampler, state.step)
        state, info = solver.step(problem, state)
        return state, (read(state) | {"objective": info.objective}, seen)

    _, (states, seen) = jax.lax.scan(step, state, length=STEPS)
    return read(state), states, seen


@pytest.mark.parametrize(("method", "name"), FOLLOWED)
def test_methods_follow_their_transcription_under_a_risk(method, name):
    make, risk = PAIRS[name]
    ours, given = blocks(method), METHODS[method][1]
    x0, y0 = np.random.default_rng(1).normal(size=ours.dx), np.zeros((ours.m, ours.dy))
    # With α left out, it falls with the number of visits.
    alpha = None if name == "soft maximum" else ALPHA
    plan = bx.Sampling(blocks_per_step=2, batch_size=3, shuffle=method != "MMBO", initial_batch_size="all")
    problem = as_library(ours, make(alpha=alpha))
    first, states, seen = jax.tree.map(np.asarray, run(make_solver(method), problem, x0, y0, plan))
    samples = [SimpleNamespace(**{key: one[t] for key, one in seen.items()}) for t in range(STEPS)]
    for sample in samples:
        sample.upper = [rows[rows >= 0] for rows in sample.upper]
        sample.lower = [rows[rows >= 0] for rows in sample.lower]
    values = np.array([ours.f(i, x0, first["y"][i], ours.upper_of(i)) for i in range(ours.m)])
    np.testing.assert_allclose(first["h"], values, atol=TOLERANCE)
    weights = risk(values, *((risk.threshold(values), risk.tied(values)) if "tail" in name else ()))[1]
    if method in ("BSVRBv2", "MMBO", "BlockPAGE"):  # v starts from zero
        slopes = [ours.f_x(i, x0, y0[i], ours.upper_of(i)) for i in range(ours.m)]
        np.testing.assert_allclose(first["z"], np.mean(weights[:, None] * slopes, axis=0), atol=TOLERANCE)
    falls = (lambda t: min(0.3, 3 / np.sqrt(1 + 0.4 * t))) if alpha is None else (lambda t: ALPHA)
    reference = risks.saga_steps_of if method == "BlockSAGA" else risks.steps_of
    expected = reference(
        ours,
        samples,
        SimpleNamespace(**first),
        algorithms.constant(**(SETTINGS | FIXED.get(method, {}))),
        risk=risk,
        alpha=falls,
        **given,
    )
    for t, after in enumerate(expected):
        for key in states:
            wanted = getattr(after, key)
            if method == "BlockNewton" and key in ("s", "u"):
                continue  # what its Newton steps do not use
            assert np.abs(wanted).max() < 100, f"{key} diverges"
            np.testing.assert_allclose(
                states[key][t], wanted, rtol=0, atol=TOLERANCE, err_msg=f"{key} after {t + 1} steps"
            )
    # The weights are not all alike, and change.
    assert np.ptp(weights) > 0.1
    if method != "BlockSAGA":  # there the largest value stays the largest
        assert any(np.argmax(h) != np.argmax(values) for h in states["h"])
    assert any((np.argsort(h) != np.argsort(values)).any() for h in states["h"])


# --- exact values -----------------------------------------------------------------


def family(m=20, d=3, seed=0, rows=4):
    """f_i = ½ mean |y − b|² + c_i over rows b, and y_i(x) = A_i x: F is known in closed form."""
    random = np.random.default_rng(seed)
    A, b, c = random.normal(size=(m, d, d)), random.normal(size=(m, rows, d)), random.normal(size=m)

    def upper(x, y, block, batch):
        return 0.5 * jnp.mean(jnp.sum((y - batch) ** 2, -1)) + block["c"]

    def lower(x, y, block, batch):
        return 0.5 * jnp.sum((y - block["A"] @ x) ** 2)

    data = bx.PerBlock(jnp.asarray(b.reshape(-1, d)), range(0, m * rows + 1, rows))

    def values(x):
        return 0.5 * np.mean(np.sum((A @ x - b.transpose(1, 0, 2)) ** 2, -1), 0) + c

    def problem(risk):
        return bx.Problem(upper, lower, {"A": A, "c": c}, data, risk=risk)

    return problem, values, np.zeros((m, d))


def exact(name, h):
    """The risk of values by another formula than the library's."""
    m = len(h)
    if name == "cvar":
        return max(  # a linear program: the weights that make the mean largest
            -scipy.optimize.linprog(-h / m, A_eq=np.ones((1, m)) / m, b_eq=[1], bounds=(0, 1 / 0.23)).fun
            for _ in range(1)
        )
    if name == "soft":
        return 0.3 * np.log(np.mean(np.exp(h / 0.3)))
    return max(h[np.arange(m) % 3 == k].mean() for k in range(3))


EXACT = {"cvar": bx.cvar(0.23), "soft": bx.soft_maximum(0.3), "group": bx.worst_group(np.arange(20) % 3)}


@pytest.mark.parametrize("name", EXACT)
def test_exact_objective_and_hypergradient_of_a_risk(name):
    make, values, y0 = family()
    problem = make(EXACT[name])
    x = np.array([0.3, -0.5, 0.8])
    value, gradient, _ = bx.value_and_hypergradient(problem, jnp.asarray(x), y0, blocks_at_once=7)
    assert abs(float(value) - exact(name, values(x))) < 1e-9
    assert float(bx.objective(problem, jnp.asarray(x), y0)) == float(value)
    moved = [(exact(name, values(x + e)) - exact(name, values(x - e))) / 2e-6 for e in 1e-6 * np.eye(3)]
    np.testing.assert_allclose(gradient, moved, atol=1e-7)
    np.testing.assert_allclose(bx.hypergradient(problem, jnp.asarray(x), y0), gradient)


def test_ties_share_the_weight_of_a_tail():
    risk = bx.cvar(0.5)
    np.testing.assert_allclose(risk.weights_of(jnp.ones(4)), np.ones(4))
    np.testing.assert_allclose(risk.weights_of(jnp.array([2.0, 1, 1, 0])), [2, 1, 1, 0])
    np.testing.assert_allclose(bx.cvar(1.0).weights_of(jnp.arange(4.0)), np.ones(4))
    np.testing.assert_allclose(bx.cvar(0.01).weights_of(jnp.arange(4.0)), [0, 0, 0, 4])
    groups = bx.worst_group([0, 0, 1])
    np.testing.assert_allclose(groups.weights_of(jnp.array([1.0, 3, 2])), [0.75, 0.75, 1.5])


def test_soft_maximum_stays_finite_where_values_fall_or_rise_far():
    risk = bx.soft_maximum(0.01)
    values = jnp.array([5.0, 0.0, 0.1, 0.2])
    shared = risk.shared(values, None, bx._problem.risk.Alone())
    for block, value in ((0, -3.0), (2, 40.0), (2, -1.0)):
        old, values = values[block], values.at[block].set(value)
        at = jnp.array([block])
        shared = risk.refreshed(shared, at, old[None], values[at], bx._problem.risk.Alone())
        assert float(risk.estimate(shared)) >= float(values[block]) - 0.01 * np.log(4) - 1e-9
        assert bool(jnp.all(jnp.isfinite(risk.weights(shared, values, None))))


# --- runs -----------------------------------------------------------------------


@pytest.mark.usefixtures("steps_alone")
@pytest.mark.parametrize("name", EXACT)
def test_a_run_ends_at_the_optimum_of_the_exact_risk(name):
    make, _, y0 = family()
    problem = make(EXACT[name])

    def value(x):
        found = bx.value_and_hypergradient(problem, jnp.asarray(x), y0)
        return float(found.value), np.asarray(found.gradient)

    best = scipy.optimize.minimize(value, np.zeros(3), jac=True, method="L-BFGS-B")
    start = value(np.ones(3))[0]
    result = bx.minimize(
        problem,
        jnp.ones(3),
        y0,
        solver=bx.BSVRBv2(),
        steps=3000,
        blocks_per_step=5,
        batch_size=2,
        key=jax.random.key(0),
        progress=None,
    )
    end = value(result.x)[0]
    assert end - best.fun < 0.02 * (start - best.fun)
    # What the history shows is the risk, and the mean is another number.
    mean = float(bx.objective(make(None), result.x, y0))
    shown = np.mean(result.history["objective"][-20:])
    assert abs(shown - end) < 0.3 * (end - mean)
    assert result.verification.blocks == 20
    assert abs(result.verification.objective - end) < 1e-6


def test_a_step_brings_a_risk_up_to_date_in_a_time_that_does_not_depend_on_the_blocks():
    """What a step reads beside its blocks has a few numbers, and all values are read once in an epoch."""
    kinds = [
        lambda m: bx.cvar(0.25),
        lambda m: bx.soft_maximum(1.0),
        lambda m: bx.worst_group(np.arange(m) % 5),
    ]
    for make in kinds:
        sizes = []
        for m in (60, 6000):
            shared = make(m).shared(jnp.arange(m, dtype=jnp.float32), None, Alone())
            sizes.append(sum(np.size(leaf) for leaf in jax.tree.leaves(shared)))
        assert sizes[0] == sizes[1] <= 15
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.arange(60.0)[:, None],
        risk=bx.cvar(0.25),
    )
    solver = bx.MMBO(0.01, lower_step=0.1)
    start = jnp.zeros(1), jnp.zeros((60, 1))
    state = solver.init(problem, *start, key=jax.random.key(0), sampling=bx.Sampling(10))
    read = []
    for _ in range(14):
        state = bx.advance(problem, solver, state, 1)
        read.append(int(state.blocks.found))
    assert read == [0] * 6 + [6] * 6 + [12] * 2


def test_a_resumed_run_under_a_risk_has_the_same_bits(tmp_path):
    make, _, y0 = family()
    options = {"blocks_per_step": 5, "batch_size": 2, "key": jax.random.key(0), "progress": None}
    for name, risk in EXACT.items():
        solver = bx.Restart(bx.BSVRBv2(), first=40, stages=3, reset=True)
        start = make(risk), jnp.ones(3), y0
        whole = bx.minimize(*start, solver=solver, steps=100, **options)
        folder = tmp_path / name
        bx.minimize(*start, solver=solver, steps=57, checkpoint=folder, **options)
        resumed = bx.Checkpoint(folder, resume=True)
        again = bx.minimize(*start, solver=solver, steps=100, checkpoint=resumed, **options)
        for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(again.state), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_checkpoint_of_another_risk_is_refused(tmp_path):
    make, _, y0 = family()
    options = {"solver": bx.MMBO(0.01), "blocks_per_step": 5, "key": jax.random.key(0), "progress": None}
    options |= {"checkpoint": bx.Checkpoint(tmp_path, resume=True), "batch_size": 2}
    bx.minimize(make(bx.cvar(0.25)), jnp.ones(3), y0, steps=5, **options)
    with pytest.raises(bx.CheckpointError, match=r"risk is Cvar\(NoneType, 0.25\) there and Cvar"):
        bx.minimize(make(bx.cvar(0.5)), jnp.ones(3), y0, steps=10, **options)


def test_runs_side_by_side_are_those_one_by_one_under_a_risk():
    make, _, y0 = family()
    problem = make(bx.cvar(0.25))
    options = {"steps": 60, "blocks_per_step": 5, "batch_size": 2}
    keys = jax.random.split(jax.random.key(0), 2)
    settings = {"upper_step": [0.001, 0.002]}
    found = bx.sweep(
        problem, jnp.ones(3), y0, solver=bx.BSVRBv2, settings=settings, keys=keys, progress=None, **options
    )
    stop = bx.Stop(recover=False)
    start = problem, jnp.ones(3), y0
    alone = bx.minimize(*start, solver=bx.BSVRBv2(0.002), key=keys[1], progress=None, stop=stop, **options)
    np.testing.assert_allclose(found.x[1, 1], alone.x, atol=1e-12)


def rare_group():
    """Two blocks of 100 are a group of their own, far away; the others are sacrificed to them."""
    aim, groups = np.zeros((100, 2)), np.zeros(100, int)
    aim[1:3], groups[1:3] = 5.0, 1

    def upper(x, y, block, batch):
        return 0.5 * jnp.sum((y - block) ** 2)

    def lower(x, y, block, batch):
        return 0.5 * jnp.sum((y - x) ** 2)

    return bx.Problem(upper, lower, aim, risk=bx.worst_group(groups)), jnp.zeros(2), jnp.zeros((100, 2))


def test_blocks_that_are_not_the_worst_do_not_say_that_x_is_worse():
    problem, x0, y0 = rare_group()
    plan = {"steps": 600, "blocks_per_step": "all", "progress": None}
    result = bx.minimize(problem, x0, y0, solver=bx.SOBA(0.002, lower_step=0.5), **plan)
    np.testing.assert_allclose(result.x, 2.5, atol=0.2)
    few, all_of_them = (bx.verify(problem, result.state, x0, blocks=count) for count in (32, None))
    assert few.objective > few.start  # neither of the two is among them
    assert (all_of_them.blocks, few.message, all_of_them.message) == (100, "", "")
    judge = bx._run.judge.Judge(problem, jax.random.key(0), None, x0, y0)
    assert len(judge.blocks) == 100
    assert judge(result.x, y0) == pytest.approx(float(bx.objective(problem, result.x, y0)))
    assert not bx._run.judge.Judge(problem, jax.random.key(0), 8, x0, y0).worse_than_start(result.x, y0)


def test_the_memory_estimate_counts_what_a_risk_tracks():
    problem, x0, y0 = rare_group()
    solver, plan = bx.MMBO(0.1, lower_step=0.1), {"blocks_per_step": 4}
    found = bx.memory_estimate(problem, x0, y0, solver=solver, **plan).slots
    state = jax.eval_shape(lambda: solver.init(problem, x0, y0, key=jax.random.key(0), **plan))
    held = jax.tree.leaves((state.levels, state.blocks))
    assert found == sum(leaf.size * leaf.dtype.itemsize for leaf in held)
    assert state.blocks.values.shape == (100,)


# --- bad input -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: bx.cvar(0.0), ValueError, r"share must lie in \(0.0, 1.0\], got 0.0"),
        (lambda: bx.cvar(1.1), ValueError, r"share must lie in \(0.0, 1.0\], got 1.1"),
        (lambda: bx.cvar("all"), TypeError, "share must be a number, got str"),
        (lambda: bx.cvar(0.1, alpha=2.0), ValueError, r"alpha must lie in \(0.0, 1.0\], got 2.0"),
        (lambda: bx.soft_maximum(0.0), ValueError, r"temperature must lie in \(0.0, ∞\), got 0.0"),
        (lambda: bx.soft_maximum(-1.0), ValueError, r"temperature must lie in \(0.0, ∞\), got -1.0"),
        (lambda: bx.worst_group([0, 1], temperature=-1), ValueError, "temperature must lie in"),
        (lambda: bx.worst_group([0.5, 1.0]), TypeError, "vector of integers, one per block, got shape"),
        (lambda: bx.worst_group([[0], [1]]), TypeError, "vector of integers"),
        (lambda: bx.worst_group([]), TypeError, "vector of integers"),
        (lambda: bx.worst_group([0, -1]), ValueError, "groups must be 0 or larger, got -1"),
        (lambda: bx.worst_group([0, 2, 2]), ValueError, "every group needs a block, got none for group 1"),
        (lambda: bx.worst_group([0, 99]), ValueError, "without gaps, got 99 among 2"),
        (lambda: family()[0](bx.worst_group([0, 1])), ValueError, "one entry per block, 20, got 2"),
        (lambda: family()[0]("worst"), TypeError, "risk must be bilevax.cvar"),
        (lambda: family()[0](bx.cvar), TypeError, "risk must be bilevax.cvar"),
    ],
)
def test_bad_risks_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_methods_that_cannot_weigh_blocks_refuse_a_risk_by_name():
    make, _, y0 = family()
    start = make(bx.cvar(0.25)), jnp.ones(3), y0
    with pytest.raises(ValueError, match=r"RSVRB minimises the mean over the blocks only, got .*Cvar"):
        bx.minimize(*start, solver=bx.RSVRB(0.1), steps=1, key=jax.random.key(0), progress=None)
    plan = bx.Sampling(blocks_per_step=2, batch_size=2, initial_batch_size=0)
    with pytest.raises(ValueError, match="initial_batch_size must not be 0 under a risk"):
        bx.minimize(*start, steps=1, sampling=plan, key=jax.random.key(0), progress=None)
