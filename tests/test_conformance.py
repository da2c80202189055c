"""One suite over every method: what a user may rely on whichever method is chosen.

Compilation is nearly all of its time, so the tests share programs: most of them go through `run`, which
compiles once per method.
"""

import functools
import logging
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import grouped

import bilevax as bx

BLOCKS, D_X, D_Y, STEPS = 6, 3, 2, 12
PER_STEP, BATCH = 2, 2
OFFSETS = [0, 3, 4, 8, 10, 15, 16]

TRACES = Counter()

# --- a problem, in flat variables and in nested ones ----------------------------


def flat_upper(x, y, block, batch):
    return 0.5 * jnp.mean(jnp.sum((y - batch["c"]) ** 2, 1)) + 0.5 * x @ x + 0.1 * jnp.sin(x) @ block["D"] @ y


def flat_lower(x, y, block, batch):
    gap = y - block["B"] @ x
    return 0.5 * gap @ gap + 0.25 * jnp.mean((batch["a"] @ y) ** 2 - batch["a"] @ y)


def flat_inner(x, block, batch):
    return jnp.mean(jnp.tanh(batch["a"] + block["B"] @ x), axis=0)


def join_x(x):
    return jnp.concatenate([x["pair"][0], x["one"][1][None]]) if isinstance(x, dict) else x


def split_x(x):
    return {"pair": (x[:2],), "one": [(), x[2]]}


def join_y(y):
    return jnp.concatenate([y[0]["first"][..., 0], y[1][..., None]], -1) if isinstance(y, tuple) else y


def split_y(y):
    return ({"first": y[..., :1, None]}, y[..., 1])


def upper(x, y, block, batch):
    TRACES["upper"] += 1
    return flat_upper(join_x(x), join_y(y), block, batch)


def lower(x, y, block, batch):
    TRACES["lower"] += 1
    return flat_lower(join_x(x), join_y(y), block, batch)


def inner(x, block, batch):
    TRACES["lower"] += 1
    value = flat_inner(join_x(x), block, batch)
    return split_y(value) if isinstance(x, dict) else value


class Setting:
    """The problem and the starting point, drawn from a seed, in one precision."""

    def __init__(self, kind, seed=0, dtype=np.float32, nested=True, y_dtype=None):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(rng.normal(size=shape), dtype)

        self.problem = bx.Problem(
            upper,
            lower if kind == "argmin" else bx.mean(inner),
            {"B": normal(BLOCKS, D_Y, D_X), "D": normal(BLOCKS, D_X, D_Y)},
            bx.Shared({"c": normal(7, D_Y)}),
            bx.PerBlock({"a": normal(OFFSETS[-1], D_Y)}, OFFSETS),
        )
        self.x0, self.y0 = normal(D_X), normal(BLOCKS, D_Y).astype(y_dtype or dtype)
        if nested:
            self.x0, self.y0 = split_x(self.x0), split_y(self.y0)

    def leaves(self):
        return jax.tree.leaves((self.problem, self.x0, self.y0))


setting = functools.cache(Setting)

# --- the methods: of an upper step, the rest given or left to the defaults -------

ARGMIN = {
    "BSVRBv1": (bx.BSVRBv1, {"lower_step": 0.1, "floor": 0.3}),
    "BSVRBv2": (bx.BSVRBv2, {"lower_step": 0.1, "inverse_step": 0.1, "radius": 5.0}),
    "RSVRB": (bx.RSVRB, {"lower_step": 0.1, "floor": 0.3, "beta": 0.05, "radius": 10.0}),
    "KSONG": (bx.KSONG, {"lower_step": 0.3, "floor": 0.3, "alpha": 0.5}),
    "BlockNewton": (bx.BlockNewton, {"alpha": 0.3}),
    "MMBO": (bx.MMBO, {"lower_step": 0.3, "inverse_step": 0.3, "alpha": 0.5}),
    "SOBA": (bx.SOBA, {"lower_step": 0.3, "inverse_step": 0.3}),
    "MASOBA": (bx.MASOBA, {"lower_step": 0.3, "inverse_step": 0.3}),
    "F2SA": (bx.F2SA, {"lower_step": 0.3, "inverse_step": 0.3, "penalty": 4.0}),
    "F3SA": (bx.F3SA, {"lower_step": 0.1, "inverse_step": 0.1, "penalty": 4.0}),
    "BlockPAGE": (bx.BlockPAGE, {"lower_step": 0.1, "inverse_step": 0.1, "refresh_chance": 0.3}),
    "BlockSAGA": (bx.BlockSAGA, {"lower_step": 0.3, "inverse_step": 0.3}),
}
MEAN = {"MSVR": (bx.MSVR, {"alpha": 0.3}), "SONG": (bx.SONG, {"alpha": 0.5})}
RESTARTED = {"RE-BSVRBv2": "BSVRBv2", "RE-MSVR": "MSVR"}
METHODS = [*ARGMIN, *MEAN, *RESTARTED]

every_method = pytest.mark.parametrize("method", METHODS)


def kind_of(method):
    return "argmin" if RESTARTED.get(method, method) in ARGMIN else "mean"


def solver_of(method, upper_step=0.05, defaults=False):
    solver, options = (ARGMIN | MEAN)[RESTARTED.get(method, method)]
    solver = solver(upper_step, **({} if defaults else options))
    return bx.Restart(solver, first=4, stages=3) if method in RESTARTED else solver


def run(method, where=None, upper_step=0.05, seed=0, steps=STEPS, **options):
    where = where or setting(kind_of(method))
    plan = {"blocks_per_step": PER_STEP, "batch_size": BATCH, "steps": steps, "key": jax.random.key(seed)}
    solver = options.pop("solver", None) or solver_of(method, upper_step)
    return bx.minimize(
        where.problem, where.x0, where.y0, solver=solver, progress=None, **grouped(**(plan | options))
    )


def arrays(tree):
    """The leaves as NumPy arrays, random keys as their data."""

    def plain(leaf):
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return [np.array(plain(leaf)) for leaf in jax.tree.leaves(tree)]


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(arrays(actual), arrays(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def close(actual, expected, tolerance=2e-5):
    for a, b in zip(arrays(actual), arrays(expected), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def moved(method, result):
    """How far x went: a run that stands still proves nothing."""
    x0 = setting(kind_of(method)).x0
    return max(np.abs(a - b).max() for a, b in zip(arrays(result.x), arrays(x0), strict=True))


# --- purity -------------------------------------------------------------------


@every_method
def test_the_same_key_gives_the_same_run_to_the_last_bit(method):
    once, again, other = run(method), run(method), run(method, seed=1)
    assert moved(method, once) > 1e-2
    same(again.state, once.state)
    assert any((a != b).any() for a, b in zip(arrays(once.x), arrays(other.x), strict=True))


@every_method
def test_minimize_leaves_its_inputs_as_they_were(method):
    where = Setting(kind_of(method), seed=3)
    key = jax.random.key(0)
    before = arrays((where.leaves(), key))
    run(method, where, key=key)
    assert not any(leaf.is_deleted() for leaf in [*where.leaves(), key])
    for a, b in zip(arrays((where.leaves(), key)), before, strict=True):
        np.testing.assert_array_equal(a, b)


@every_method
def test_a_result_can_be_read_and_gone_on_from_after_another_run(method):
    first = run(method)
    run(method, seed=1)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((first.x, first.y, first.state)))


# --- the step, compiled by the user, with an optax transformation -----------------


@functools.cache
def adam_steps(method):
    """Three steps with Adam by `jax.jit(solver.step)` from where `run` starts, and the first once more."""
    adam = optax.adam(0.05)
    state = run(method, steps=0).state
    state = eqx.tree_at(lambda s: s.optimizer, state, adam.init(state.x), is_leaf=lambda a: a is None)
    step = jax.jit(solver_of(method, adam).step)
    problem = setting(kind_of(method)).problem
    copies, states = [arrays(state)], [state]
    for _ in range(3):
        states.append(step(problem, states[-1])[0])
        copies.append(arrays(states[-1]))
    return adam, states, copies, step(problem, states[0])[0]


@every_method
def test_a_jitted_step_is_pure(method):
    _, states, copies, again = adam_steps(method)
    same(again, states[1])
    for state, copy in zip(states, copies, strict=True):
        for a, b in zip(arrays(state), copy, strict=True):
            np.testing.assert_array_equal(a, b)


@every_method
def test_a_jitted_step_is_the_step_of_minimize(method):
    _, states, _, _ = adam_steps(method)
    expected = run(method, steps=1).state
    close((states[1].z, states[1].levels, states[1].step), (expected.z, expected.levels, expected.step), 1e-6)


@every_method
def test_an_optax_transformation_is_given_the_tracked_gradient(method):
    adam, states, _, _ = adam_steps(method)
    x, optimizer = states[0].x, adam.init(states[0].x)
    for state in states[1:]:
        updates, optimizer = adam.update(state.z, optimizer, x)
        x = optax.apply_updates(x, updates)
        close(state.x, x, 1e-6)


# --- precision ----------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.usefixtures("x64")
def test_every_leaf_keeps_its_precision(method, dtype):
    where, solver = Setting(kind_of(method), dtype=dtype), solver_of(method, optax.sgd(0.1, momentum=0.9))

    def start(problem, x0, y0):
        state = solver.init(
            problem, x0, y0, key=jax.random.key(0), blocks_per_step=PER_STEP, batch_size=BATCH
        )
        return state, solver.step(problem, state), (state.y, state.v)

    state, (after, info), variables = jax.eval_shape(start, where.problem, where.x0, where.y0)
    for leaf in jax.tree.leaves((state, after, info.objective, info.gradient_norm, variables)):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == dtype
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("method", [*ARGMIN])
@pytest.mark.usefixtures("x64")
def test_x_and_y_may_differ_in_precision(method):
    where, solver = Setting("argmin", y_dtype=np.float64), solver_of(method)

    def start(problem, x0, y0):
        state = solver.init(
            problem, x0, y0, key=jax.random.key(0), blocks_per_step=PER_STEP, batch_size=BATCH
        )
        return state, solver.step(problem, state)[0]

    for state in jax.eval_shape(start, where.problem, where.x0, where.y0):
        assert {leaf.dtype for leaf in jax.tree.leaves((state.x, state.z))} == {np.dtype(np.float32)}
        y = jax.eval_shape(lambda state: state.levels["lower"].y, state)
        assert {leaf.dtype for leaf in jax.tree.leaves(y)} == {np.dtype(np.float64)}


# --- vmap, and pytrees --------------------------------------------------------

GRID = [(0, 0.05), (1, 0.05), (2, 0.05), (0, 0.02), (0, 0.1)]


@functools.cache
def on_the_grid(method):
    """x at the end of every run of the grid of seeds and upper steps, in one program, in flat variables."""
    where = setting(kind_of(method), nested=False)

    @jax.jit
    def all_of(problem, x0, y0, keys, upper_steps):
        def one(key, upper_step):
            solver = solver_of(method, upper_step)
            state = solver.init(problem, x0, y0, key=key, blocks_per_step=PER_STEP, batch_size=BATCH)
            state = bx.advance(problem, solver, state, STEPS)
            return state.x, state.y

        return jax.vmap(one)(keys, upper_steps)

    keys = jax.vmap(jax.random.key)(jnp.asarray([seed for seed, _ in GRID]))
    return all_of(where.problem, where.x0, where.y0, keys, jnp.asarray([step for _, step in GRID]))


@every_method
@pytest.mark.parametrize("places", [(0, 1, 2), (0, 3, 4)], ids=["seeds", "upper steps"])
def test_a_vmapped_run_equals_a_loop_over(method, places):
    together = on_the_grid(method)
    for place in places:
        seed, upper_step = GRID[place]
        result = run(method, upper_step=upper_step, seed=seed)
        close((join_x(result.x), join_y(result.y)), (together[0][place], together[1][place]))


@every_method
def test_nested_variables_run_as_flat_ones_do(method):
    nested, flat = run(method), on_the_grid(method)
    assert jax.tree.structure(nested.x) == jax.tree.structure(split_x(flat[0][0]))
    close((nested.x, nested.y), (split_x(flat[0][0]), split_y(flat[1][0])))


# --- compilation ----------------------------------------------------------------


@every_method
def test_a_second_run_of_the_same_shapes_compiles_nothing(method, caplog):
    run(method)
    other = Setting(kind_of(method), seed=1)
    key = jax.random.key(7)
    traced = TRACES.copy()
    assert traced["upper"] > 0
    assert traced["lower"] > 0
    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        run(method, other, upper_step=0.07, key=key, steps=7, every=3)
    assert traced == TRACES
    assert not [record.getMessage() for record in caplog.records if "compil" in record.getMessage().lower()]


@pytest.mark.parametrize("values", [(0.1, 0.2), (1, 2), (np.float32(0.1), np.float32(0.2))], ids=str)
def test_numbers_of_any_type_are_no_part_of_the_program(values):
    for place, value in enumerate(values):
        run("MSVR", upper_step=value, recover=False)  # a run that goes back looks for faults in f
        if place == 0:
            traced = TRACES.copy()
    assert traced == TRACES


# --- chunks ---------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("every", [1, 5, 100])
def test_the_result_does_not_depend_on_how_often_it_is_looked_at(method, every):
    result = run(method, every=every)
    same(result.state, run(method, every=4).state)
    assert list(result.history["step"]) == [*range(every, STEPS, every), STEPS]


# --- deterministic runs, and schedules --------------------------------------------


def decaying(step):
    return 0.1 / (1 + step)


@functools.cache
def full_run(method, seed):
    """All blocks, all rows, a schedule of upper steps, the lower ones left out; (x, z) after every step."""
    seen = []

    def look(problem, state):
        seen.append((jax.tree.map(np.array, state.x), jax.tree.map(np.array, state.z)))
        return 0.0

    solver = solver_of(method, decaying, defaults=True)
    options = {"blocks_per_step": None, "batch_size": None, "every": 1, "metrics": {"seen": look}}
    return run(method, seed=seed, steps=4, solver=solver, **options), seen


@every_method
def test_all_blocks_and_all_rows_make_a_run_deterministic(method):
    one, other = full_run(method, 0)[0], full_run(method, 1)[0]
    assert moved(method, one) > 1e-2
    close((one.x, one.y, one.state.levels), (other.x, other.y, other.state.levels), 1e-6)


@every_method
def test_a_schedule_is_read_at_the_step_it_is_for(method):
    seen = full_run(method, 0)[1]
    x = jax.tree.map(np.array, setting(kind_of(method)).x0)
    for step, (after, z) in enumerate(seen):
        x = jax.tree.map(lambda x, z, step=step: x - decaying(step) * z, x, z)
        close(after, x, 1e-6)


def test_a_deterministic_run_of_many_blocks_has_the_same_steps_for_every_key():
    """More blocks than L_g is estimated from: which ones are looked at must not depend on the key."""
    curvatures = jnp.linspace(1.0, 9.0, 200)
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum(y**2) + (x - 1.0) ** 2,
        lambda x, y, block, batch: 0.5 * block * jnp.sum((y - x) ** 2),
        curvatures,
    )

    @jax.jit
    def smoothness(key):
        return bx.BSVRBv2(0.1).init(problem, jnp.zeros(()), jnp.zeros((200, 2)), key=key).smoothness

    close(smoothness(jax.random.key(0)), smoothness(jax.random.key(1)), 1e-6)


def test_a_problem_may_be_made_and_solved_inside_a_program():
    @jax.jit
    def solve(targets):
        problem = bx.Problem(
            lambda x, y, block, batch: jnp.sum((y - jnp.mean(batch, 0)) ** 2),
            bx.mean(lambda x, block, batch: block * x),
            jnp.ones_like(targets),
            bx.Shared(targets),
        )
        solver = bx.SONG(0.2, alpha=1.0, beta=1.0)
        state = solver.init(problem, jnp.zeros(2), key=jax.random.key(0))
        return bx.advance(problem, solver, state, 100).x

    targets = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(solve(targets), [2, 3], atol=1e-3)


@pytest.mark.parametrize("x0", [0.5, np.float32(0.5), np.array([0.5, 0.1], np.float32)], ids=str)
def test_x_may_start_from_plain_numbers(x0):
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        bx.mean(lambda x, block, batch: jnp.sum(x) * jnp.ones(2)),
        jnp.ones((3, 2)),
    )
    result = bx.minimize(problem, x0, solver=bx.SONG(0.1), steps=200, key=jax.random.key(0), progress=None)
    assert abs(float(jnp.sum(result.x)) - 1) < 0.1
