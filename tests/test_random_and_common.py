"""Functions that take random keys, and rows that all visited blocks see alike."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import algorithms, finite_sums, problems
from test_transcription import read

import bilevax as bx
from bilevax._problem.sampling import SECOND_BLOCKS

STEPS, TOLERANCE, FLOOR = 40, 1e-9, 1.4
SETTINGS = {"eta": 0.02, "tau": 0.05, "tau_bar": 0.04, "alpha": 0.3, "alpha_bar": 0.2, "beta": 0.25}
NAMES = {"eta": "upper_step", "tau": "lower_step", "tau_bar": "inverse_step"}
SETTINGS |= {"penalty": 3.0}
METHODS = {
    "BSVRBv1": (bx.BSVRBv1, algorithms.bsvrb_v1),
    "BSVRBv2": (bx.BSVRBv2, algorithms.bsvrb_v2),
    "MMBO": (bx.MMBO, algorithms.mmbo),
}
STAGES = {"first": 8, "stages": 3}
WITHOUT_KEYS = {"BlockPAGE": (bx.BlockPAGE, finite_sums.block_page)}
# Of these, both at once.
OTHERS = {
    "KSONG": (bx.KSONG, algorithms.ksong),
    "F2SA": (bx.F2SA, algorithms.f2sa),
    "F3SA": (bx.F3SA, algorithms.f3sa),
    "BlockNewton": (bx.BlockNewton, algorithms.block_newton),
    "RSVRB": (bx.RSVRB, algorithms.rsvrb),
    "SOBA": (bx.SOBA, algorithms.soba),
    "MASOBA": (bx.MASOBA, algorithms.ma_soba),
    "MSVR": (bx.MSVR, algorithms.msvr_v2),
    "SONG": (bx.SONG, algorithms.song),
    "RE-BSVRBv2": (bx.BSVRBv2, algorithms.bsvrb_v2),
}


def noise_of(key, size):
    """Numbers that the words of the key determine: a threefry takes long to compile."""
    one, other = jax.random.key_data(key).astype(float) / 2**32
    return jnp.sin((1 + jnp.arange(size)) * (1 + 9 * one) + 5 * other)


class Noisy(problems.QuadraticBlocks):
    """f and g with a slope that a key draws: by x in f, and by y in g."""

    def upper(self, x, y, block, batch, key):
        return super().upper(x, y, block, batch) + noise_of(key, self.dx) @ x

    def lower(self, x, y, block, batch, key):
        return super().lower(x, y, block, batch) + noise_of(key, self.dy) @ y

    def f_x(self, i, x, y, rows):
        return super().f_x(i, x, y, rows.places) + rows.noise

    def f_y(self, i, x, y, rows):
        return super().f_y(i, x, y, rows.places)

    def g_y(self, i, x, y, rows):
        return super().g_y(i, x, y, rows.places) + rows.noise

    def g_yy(self, i, x, y, rows):
        return super().g_yy(i, x, y, getattr(rows, "places", rows))

    def g_xy(self, i, x, y, rows):
        return super().g_xy(i, x, y, rows.places)


class NoisyMean(problems.MeanBlocks):
    """f and c with a slope by x that a key draws."""

    def upper(self, x, y, block, batch, key):
        return super().upper(x, y, block, batch) + noise_of(key, self.dx) @ x

    def inner(self, x, block, batch, key):
        return super().inner(x, block, batch) + noise_of(key, self.dy) * jnp.sum(x)

    def f_x(self, i, x, y, rows):
        return super().f_x(i, x, y, rows.places) + rows.noise

    def f_y(self, i, x, y, rows):
        return super().f_y(i, x, y, rows.places)

    def c(self, i, x, rows):
        return super().c(i, x, rows.places) + rows.noise * np.sum(x)

    def c_x(self, i, x, rows):
        return super().c_x(i, x, rows.places) + rows.noise


def as_library(blocks, common=False):
    def source(rows):
        return bx.Shared(rows | {"place": np.arange(len(next(iter(rows.values()))))}, common=common)

    data = source(blocks.upper_rows), source(blocks.lower_rows)
    level = bx.mean(blocks.inner) if isinstance(blocks, NoisyMean) else blocks.lower
    random = isinstance(blocks, Noisy | NoisyMean)
    return bx.Problem(blocks.upper, level, blocks.blocks, *data, random=random)


def make_solver(method):
    solver = (METHODS | OTHERS | WITHOUT_KEYS)[method][0]
    values = {NAMES.get(name, name): value for name, value in SETTINGS.items()} | {"floor": FLOOR}
    values["refresh_chance"] = 0.2
    has = {field.name for field in dataclasses.fields(solver)}
    made = solver(**{name: value for name, value in values.items() if name in has})
    return bx.Restart(made, **STAGES) if method.startswith("RE-") else made


@eqx.filter_jit
def run(solver, problem, x0, y0):
    plan = bx.Sampling(blocks_per_step=2, batch_size=3)
    state = solver.init(problem, x0, y0, key=jax.random.key(0), sampling=plan)

    def step(state, _):
        sample = state.sampler.draw(problem, state.step)
        seen = {"blocks": sample.blocks, "upper": sample.upper.rows["place"]}
        seen["lower"] = sample.lower["lower"].rows["place"]
        if isinstance(solver, bx.BlockPAGE):
            seen["refresh"] = solver.refreshes(problem, state.sampler, state.step)
        seen["second"] = state.sampler.blocks_at(state.step, SECOND_BLOCKS)
        if problem.random:
            for place, (name, batch) in enumerate((("upper", sample.upper), *sample.lower.items())):
                keys = jax.vmap(lambda one, place=place: one.at(place).key())(batch.random)
                size = (x0, y0)[place].shape[-1]
                seen[f"{name} noise"] = jax.vmap(lambda k, size=size: noise_of(k, size))(keys)
        state, _ = solver.step(problem, state)
        return state, (read(state), seen)

    end, (_, seen) = jax.lax.scan(step, state, length=STEPS)
    return read(state), read(end), seen


def follow(method, blocks, problem, sample_of):
    x0, y0 = np.random.default_rng(1).normal(size=blocks.dx), np.zeros((blocks.m, blocks.dy))
    first, end, seen = jax.tree.map(np.asarray, run(make_solver(method), problem, x0, y0))
    samples = [sample_of({name: one[t] for name, one in seen.items()}) for t in range(STEPS)]
    options = {"lam": FLOOR} if method in ("BSVRBv1", "KSONG", "RSVRB") else {}
    given = algorithms.constant(**SETTINGS)
    if method.startswith("RE-"):
        given = algorithms.restarted(SimpleNamespace(**SETTINGS), **STAGES)
    expected = (METHODS | OTHERS | WITHOUT_KEYS)[method][1](
        blocks, samples, SimpleNamespace(**first), given, **options
    )
    for name, value in vars(expected).items():
        assert np.abs(value).max() < 100, f"{name} diverges"
        np.testing.assert_allclose(end[name], value, atol=TOLERANCE, err_msg=name)
    return seen


def noisy_sample(seen):
    def rows(name):
        pairs = zip(np.broadcast_to(seen[name], (2, 3)), seen[f"{name} noise"], strict=True)
        return [SimpleNamespace(places=places, noise=noise) for places, noise in pairs]

    known = {name: seen[name] for name in ("blocks", "second")}
    return SimpleNamespace(**known, upper=rows("upper"), lower=rows("lower"))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", METHODS)
def test_keys_are_the_same_at_both_points_of_a_step_and_new_in_the_next(method):
    blocks = Noisy()
    seen = follow(method, blocks, as_library(blocks), noisy_sample)
    numbers = np.concatenate([seen["upper noise"].ravel(), seen["lower noise"].ravel()])
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_follow_their_transcription_with_keys_on_common_rows(method):
    blocks = NoisyMean() if method in ("MSVR", "SONG") else Noisy()
    seen = follow(method, blocks, as_library(blocks, common=True), noisy_sample)
    assert seen["upper"].shape == (STEPS, 3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", [*METHODS, *WITHOUT_KEYS])
def test_methods_follow_their_transcription_on_common_rows(method):
    blocks = problems.QuadraticBlocks()

    def sample(seen):
        count, more = len(seen["blocks"]), {"refresh": seen["refresh"]} if "refresh" in seen else {}
        return SimpleNamespace(
            blocks=seen["blocks"], upper=[seen["upper"]] * count, lower=[seen["lower"]] * count, **more
        )

    seen = follow(method, blocks, as_library(blocks, common=True), sample)
    assert seen["upper"].shape == (STEPS, 3)
    assert (seen["upper"] != seen["lower"]).any()
    assert (seen["upper"][1:] != seen["upper"][:-1]).any()


def features(x, batch):
    return jnp.tanh(jnp.tanh(batch["a"] @ x["in"]) @ x["out"])


def network(common, random=False):
    """A shared network, and a ridge head per block on its features."""
    rows = {"a": np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)}
    source = bx.Shared(rows, common=common)

    def upper(x, y, block, batch, *key):
        return jnp.mean((features(x, batch) @ y - block) ** 2)

    def lower(x, y, block, batch, *key):
        return upper(x, y, block, batch) + 0.1 * y @ y

    problem = bx.Problem(upper, lower, jnp.arange(32.0), source, source, random=random)
    weights = np.random.default_rng(1).normal(size=(16, 64)), np.random.default_rng(2).normal(size=(64, 4))
    x0 = {name: 0.1 * one.astype(np.float32) for name, one in zip(("in", "out"), weights, strict=True)}
    return problem, x0, jnp.zeros((32, 4))


def operations(problem, x0, y0, solver):
    plan = bx.Sampling(blocks_per_step=16, batch_size=8)
    state = solver.init(problem, x0, y0, key=jax.random.key(0), sampling=plan)
    arrays, rest = eqx.partition(state, eqx.is_array)

    def step(arrays):
        return eqx.filter(solver.bare_step(problem, eqx.combine(arrays, rest)), eqx.is_array)

    return jax.jit(step).lower(arrays).compile().cost_analysis()["flops"]


def test_common_rows_go_through_a_network_once_and_not_once_per_block():
    solver = bx.MMBO(0.01, lower_step=0.1)
    alone, together = (operations(*network(common), solver) for common in (False, True))
    assert together < alone / 8  # of 16 blocks


def test_strata_see_the_same_common_rows():
    problem, _, _ = network(common=True)
    plan = bx.Sampling(blocks_per_step=16, batch_size=8, strata=4)
    sampler = plan.sampler(problem, jax.random.key(0))
    whole = sampler.draw(problem, jnp.asarray(3))
    one = dataclasses.replace(plan, strata=None).sampler(problem, jax.random.key(0))
    np.testing.assert_array_equal(whole.upper.rows["a"], one.draw(problem, jnp.asarray(3)).upper.rows["a"])
    assert whole.upper.rows["a"].shape == (8, 16)


def test_keys_differ_between_strata_and_blocks():
    problem, _, _ = network(common=True, random=True)
    sampler = bx.Sampling(blocks_per_step=16, batch_size=8, strata=4).sampler(problem, jax.random.key(0))
    samples = [sampler.draw(problem, jnp.asarray(step)) for step in (0, 1)]
    words = np.concatenate([np.asarray(sample.upper.random.first) for sample in samples])
    assert len(np.unique(words)) == 32


def dropout(rows=16, keyed=True):
    def upper(x, y, block, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch.shape)
        return jnp.mean(jnp.sum((y - 2 * kept * batch) ** 2, -1))

    def lower(x, y, block, batch, key):
        return jnp.mean(jnp.sum((y - x - 0.1 * jax.random.normal(key, x.shape)) ** 2, -1))

    data = bx.PerBlock(np.random.default_rng(0).normal(size=(rows, 2)).astype(np.float32) + 1, [0, 5, rows])
    return bx.Problem(upper, lower, 2, data, random=keyed), jnp.zeros(2), jnp.zeros((2, 2))


@pytest.mark.parametrize("batch_size", [3, "all"])
def test_a_resumed_run_draws_the_same_keys(tmp_path, batch_size):
    options = {"solver": bx.BSVRBv2(), "key": jax.random.key(0), "progress": None, "batch_size": batch_size}
    whole = bx.minimize(*dropout(), steps=60, **options)
    bx.minimize(*dropout(), steps=23, checkpoint=tmp_path, **options)
    again = bx.minimize(*dropout(), steps=60, checkpoint=bx.Checkpoint(tmp_path, resume=True), **options)
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(again.state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_with_keys_minimises_the_mean_over_keys():
    problem, x0, y0 = dropout()
    result = bx.minimize(problem, x0, y0, steps=4000, key=jax.random.key(0), batch_size=3, progress=None)
    rows = np.asarray(problem.upper_data.rows)
    # The mean over masks of (y − 2 kept · b)² is least at y = b.
    best = (rows[:5].mean(0) + rows[5:].mean(0)) / 2
    np.testing.assert_allclose(result.x, best, atol=0.1)
    assert result.verification is None


def test_newton_steps_average_the_noise_of_keys_where_a_step_sees_all_rows():
    """The mean of g is (y − 2)² + y² exp(2x): y(x) is 2/(1 + exp(2x)), and the best x is 0."""

    def lower(x, y, block, batch, key):
        return jnp.mean((y * (1 + jnp.exp(x) * jax.random.normal(key, (4,))) - 2) ** 2)

    problem = bx.Problem(lambda x, y, block, batch, key: jnp.sum((y - 1) ** 2), lower, 20, random=True)
    x0, y0 = jnp.full(1, -1.0), jnp.zeros((20, 1))
    result = bx.minimize(problem, x0, y0, solver=bx.BlockNewton(), steps=2000, progress=None)
    assert "visits" in str(result.settings)
    assert abs(float(result.x[0])) < 0.03


def test_the_values_of_blocks_under_a_risk_average_the_noise_of_keys():
    problem = bx.Problem(
        lambda x, y, block, batch, key: jnp.sum((y - x) ** 2) + jax.random.normal(key),
        lambda x, y, block, batch, key: jnp.sum((y - x) ** 2),
        50,
        random=True,
        risk=bx.cvar(0.5),
    )
    solver = bx.MMBO(upper_step=0.0, lower_step=0.1)
    result = bx.minimize(problem, jnp.zeros(1), jnp.zeros((50, 1)), solver=solver, steps=400, progress=None)
    assert float(jnp.std(result.state.blocks.values)) < 0.6  # of one draw it is one


@pytest.mark.parametrize("ragged", [False, True])
def test_the_diagnostics_average_over_keys_of_blocks_and_ragged_rows(ragged):
    def upper(x, y, block, batch, key):
        return x * y * jax.random.uniform(key) + 0 * jnp.mean(batch)

    def lower(x, y, block, batch, key):
        return (y - jax.random.uniform(key)) ** 2 + 0 * jnp.mean(batch)

    lengths = 3 + np.arange(60) % 3 * ragged
    rows = bx.PerBlock(np.zeros(lengths.sum(), np.float32), np.cumsum([0, *lengths]))
    problem = bx.Problem(upper, lower, 60, rows, rows, random=True)
    y0 = jnp.zeros(60)
    found = np.asarray(bx.solve_lower(problem, jnp.float32(1), y0))
    assert len(set(found.round(6))) == 60
    assert abs(found.mean() - 0.5) < 0.12  # one key for all would give any number below one
    values = [float(bx.objective(problem, jnp.float32(1), y0, blocks_at_once=many)) for many in (7, 60)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert abs(values[0] - 0.25) < 0.1


def test_the_diagnostics_use_the_same_keys_whatever_blocks_are_looked_at_together():
    problem, x0, y0 = dropout()
    one, both = (bx.objective(problem, x0 + 1, y0, blocks_at_once=count) for count in (1, 2))
    np.testing.assert_allclose(one, both, rtol=1e-6)
    slope = bx.hypergradient(problem, x0 + 1, y0)
    moved = [
        (bx.objective(problem, x0 + 1 + e, y0) - bx.objective(problem, x0 + 1 - e, y0)) / 0.02
        for e in 0.01 * np.eye(2)
    ]
    np.testing.assert_allclose(slope, moved, rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda f, g: bx.Problem(f, g, 2, random=True), TypeError, "upper must take a key where random=True"),
        (lambda f, g: bx.Problem(g, f, 2), TypeError, "upper takes a key, but none is drawn"),
        (lambda f, g: bx.Problem(f, g, 2), TypeError, "lower level 'lower' takes a key, but none is drawn"),
        (
            lambda f, g: bx.Problem(lambda x, y, block, batch, dropout_rng: 0.0, f, 2),
            TypeError,
            r"upper takes a key, but none is drawn: .* got \(x, y, block, batch, dropout_rng\)",
        ),
        (
            lambda f, g: bx.Problem(f, bx.mean(lambda x, block, batch, *, rng: x), 2),
            TypeError,
            "lower level 'lower' takes a key, but none is drawn",
        ),
        (lambda f, g: bx.Problem(g, f, 2, random=True), TypeError, "lower level 'lower' must take a key"),
        (lambda f, g: bx.Problem(g, g, 2, random=1), TypeError, "random must be True or False, got 1"),
        (
            lambda f, g: bx.Problem(g, bx.mean(lambda x, block, batch: x), 2, random=True),
            TypeError,
            "lower level 'lower' must take a key",
        ),
        (lambda f, g: bx.Shared(np.ones(3), common=1), TypeError, "common of Shared must be True or False"),
    ],
)
def test_keys_that_do_not_fit_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make(lambda x, y, block, batch: jnp.sum(x * y), lambda x, y, block, batch, key: jnp.sum((x - y) ** 2))


@pytest.mark.parametrize("solver", [bx.BlockPAGE(0.1), bx.BlockSAGA(0.1)], ids=["BlockPAGE", "BlockSAGA"])
def test_methods_for_finite_sums_refuse_keys_by_name(solver):
    with pytest.raises(ValueError, match="needs functions that are the same in every step, got random=True"):
        bx.minimize(*dropout(), solver=solver, steps=1, key=jax.random.key(0), progress=None)


def test_block_saga_refuses_common_rows_by_name():
    with pytest.raises(
        ValueError, match=r"BlockSAGA draws a row group for every block, got Shared\(…, common"
    ):
        bx.minimize(*network(True), solver=bx.BlockSAGA(0.1), steps=1, key=jax.random.key(0), progress=None)
