"""What is remembered per slot: a slot that catches up is where it would be if it had moved in every step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._step.clocks import Clock, CompensatedSum
from bilevax._step.slots import Moving, gather, project_ball, scatter

EPS = float(np.finfo(np.float32).eps)
MILLION = 10**6

# --- clocks ---------------------------------------------------------------------

SCHEDULES = {
    "constant": lambda t: 0.1 + 0 * t,
    "1/√t": lambda t: 0.5 / np.sqrt(1 + t),
    "1/t": lambda t: 1 / (1 + t),
    "t^(-2/3)": lambda t: 3 / np.cbrt((7 + t) ** 2),
    "cosine": lambda t: 0.55 + 0.45 * np.cos(np.pi * t / MILLION),
    "stages": lambda t: 0.3 * 0.5 ** (np.floor(np.log2(1 + t / 1000)) / 2),
}


@functools.cache
def readings(schedule):
    """A float32 clock's readings before and after each of a million steps, and the steps."""
    steps = SCHEDULES[schedule](np.arange(float(MILLION))).astype(np.float32)

    @jax.jit
    def tick(steps):
        def body(clock, step):
            clock = clock.advance(step)
            return clock, clock

        return jax.lax.scan(body, Clock.start(jnp.float32), steps)[1]

    return jax.tree.map(np.asarray, tick(steps)), steps


@pytest.mark.parametrize("gap", [1, 10, 1000])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_clock_tells_recent_steps_to_rounding_after_a_million(schedule, gap):
    clocks, steps = readings(schedule)
    late = slice(MILLION // 2, MILLION)
    recent = slice(MILLION // 2 - gap, MILLION - gap)
    now, then = (CompensatedSum(clocks.now.high[place], clocks.now.low[place]) for place in (late, recent))
    told = jax.jit(lambda a, b: a - b)(now, then)
    sums = np.cumsum(steps.astype(np.float64))
    exact = sums[late] - sums[recent]
    assert np.max(np.abs(told - exact) / exact) <= 3 * EPS
    # One running float32 sum cannot tell them: without this the test would prove nothing.
    plain = np.cumsum(steps, dtype=np.float32)
    assert np.max(np.abs(plain[late] - plain[recent] - exact) / exact) > 30 * EPS


def test_a_clock_remembers_the_step_before():
    clocks, _ = readings("1/√t")
    np.testing.assert_array_equal(clocks.before.high[1:], clocks.now.high[:-1])
    np.testing.assert_array_equal(clocks.before.low[1:], clocks.now.low[:-1])


def test_a_moving_variable_is_read_at_any_time():
    clock = Clock.start(jnp.float32).advance(0.5).advance(0.25)
    value, slope = (
        {"a": jnp.ones((3, 2)), "b": jnp.zeros(3)},
        {"a": jnp.full((3, 2), 2.0), "b": jnp.arange(3.0)},
    )
    stamp = CompensatedSum(jnp.asarray([0.0, 0.5, 0.75]), jnp.zeros(3))
    read = Moving(value, slope, stamp).at(clock.now)
    np.testing.assert_allclose(read["a"], [[-0.5] * 2, [0.5] * 2, [1.0] * 2])
    np.testing.assert_allclose(read["b"], [0, -0.25, 0])
    np.testing.assert_allclose(Moving(value, slope, stamp).at(clock.before)["b"], [0, 0, 0.5])
    np.testing.assert_array_equal(Moving(value, slope, None).at(clock.now)["a"], value["a"])


def test_a_moving_variable_may_turn_at_its_stamp():
    clock = Clock.start(jnp.float32).advance(0.5).advance(0.25)
    stamp = CompensatedSum(jnp.asarray([0.5, 0.75]), jnp.zeros(2))
    turning = Moving(jnp.ones(2), jnp.full(2, 2.0), stamp, jnp.full(2, -4.0))
    np.testing.assert_allclose(turning.at(clock.now), [0.5, 1.0])
    np.testing.assert_allclose(turning.at(clock.before), [1.0, 0.0])


# --- lazy and eager -----------------------------------------------------------------


def make_problem(blocks, dtype):
    rng = np.random.default_rng(blocks)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return bx.Problem(
        lambda x, y, block, batch: 0.5 * jnp.mean(jnp.sum((y - batch) ** 2, -1)) + 0.5 * x @ x,
        lambda x, y, block, batch: 0.5 * jnp.sum((y - block @ x) ** 2) + 0.2 * jnp.mean((batch @ y - 1) ** 2),
        normal(blocks, 2, 2),
        bx.Shared(normal(20, 2)),
        bx.Shared(normal(20, 2)),
    )


def lower_step(step):
    return 0.1 / jnp.sqrt(1.0 + 0.01 * step)


def inverse_step(step):
    return 0.08 / (1.0 + 0.001 * step)


def upper_step(step):
    return 0.02 / jnp.sqrt(1.0 + 0.01 * step)


def solver_of(version):
    if version == "v1":
        return bx.BSVRBv1(upper_step, lower_step=lower_step, alpha=0.3, beta=0.3, floor=0.5)
    return bx.BSVRBv2(upper_step, lower_step=lower_step, inverse_step=inverse_step, alpha=0.3, beta=0.3)


def eager(variables, state, step, dtype):
    """All slots of y (and v) moved along their refreshed slopes: what the lazy update stands for."""
    memory = state.levels["lower"]
    moves = {"y": (memory.y, lower_step), "v": (memory.v, inverse_step)}

    def move(name):
        moving, schedule = moves[name]
        # The step as the method takes it: in its own precision.
        size = jnp.asarray(schedule(step), moving.value.dtype).astype(dtype)
        return variables[name] - size * moving.slope.astype(dtype)

    return {name: move(name) for name in variables}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("blocks", "per_step", "shuffle"), [(4, 1, True), (30, 2, False)])
@pytest.mark.usefixtures("x64")
def test_lazy_slots_follow_eager_ones_to_rounding(version, dtype, blocks, per_step, shuffle):
    problem, solver = make_problem(blocks, dtype), solver_of(version)
    x0, y0 = jnp.ones(2, dtype), jnp.ones((blocks, 2), dtype)

    @jax.jit
    def run(problem):
        state = solver.init(
            problem,
            x0,
            y0,
            key=jax.random.key(0),
            blocks_per_step=per_step,
            batch_size=2,
            sampling=bx.Sampling(shuffle=shuffle),
        )
        names = ["y"] if version == "v1" else ["y", "v"]
        start = {name: getattr(state, name).astype(jnp.float64) for name in names}

        def body(carry, step):
            state, expected = carry
            state, _ = solver.step(problem, state)
            expected = eager(expected, state, step, jnp.float64)
            errors = {name: jnp.max(jnp.abs(getattr(state, name) - expected[name])) for name in names}
            sizes = {name: jnp.max(jnp.abs(expected[name])) for name in names}
            return (state, expected), (errors, sizes)

        return jax.lax.scan(body, (state, start), jnp.arange(400))[1]

    errors, sizes = jax.tree.map(np.asarray, run(problem))
    for name, error in errors.items():
        assert sizes[name].max() > 0.1
        assert error.max() <= 30 * np.finfo(dtype).eps * sizes[name].max()


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.usefixtures("x64")
def test_lazy_slots_follow_eager_ones_in_float32_over_a_million_steps(version):
    """Rounding adds up in a million steps, for lazy slots no further than for eager ones in float32."""
    problem, solver = make_problem(4, np.float32), solver_of(version)
    names = ["y"] if version == "v1" else ["y", "v"]

    @jax.jit
    def start(problem):
        x0, y0 = jnp.ones(2, jnp.float32), jnp.ones((4, 2), jnp.float32)
        state = solver.init(problem, x0, y0, key=jax.random.key(0), blocks_per_step=1, batch_size=2)
        single = {name: getattr(state, name) for name in names}
        double = jax.tree.map(lambda a: a.astype(jnp.float64), single)
        return state, single, double

    @jax.jit
    def advance(problem, carry, steps):
        def body(_, carry):
            state, single, double = carry
            after, _ = solver.step(problem, state)
            return (
                after,
                eager(single, after, state.step, jnp.float32),
                eager(double, after, state.step, jnp.float64),
            )

        return jax.lax.fori_loop(0, steps, body, carry)

    carry = start(problem)
    lazy, plain, size = ({name: 0.0 for name in names} for _ in range(3))
    for _ in range(10):
        carry = advance(problem, carry, MILLION // 10)
        state, single, double = carry
        for name in names:
            exact = double[name]
            lazy[name] = max(lazy[name], np.max(np.abs(getattr(state, name) - exact)))
            plain[name] = max(plain[name], np.max(np.abs(single[name] - exact)))
            size[name] = max(size[name], np.max(np.abs(exact)))
    assert int(state.step) == MILLION
    for name in names:
        assert size[name] > 0.1
        assert lazy[name] <= 1.5 * plain[name]
        assert lazy[name] <= np.sqrt(MILLION) * EPS * size[name]


# --- gather, scatter, project -------------------------------------------------------


@pytest.mark.parametrize("slot", [3, 7, 2**31 - 1, -1, -3])
@pytest.mark.parametrize("method", [bx.BSVRBv1, bx.BSVRBv2, bx.MMBO])
def test_slots_out_of_range_end_a_run(method, slot):
    """They would be written into the last slot, or wrap around."""
    level = bx.argmin(
        lambda x, y, block, batch: jnp.sum((y - x) ** 2), slots=lambda block, batch: block["slot"], count=3
    )
    blocks = {"slot": jnp.asarray([0, 1, 2, slot])}
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(y**2) + jnp.sum(x**2), level, blocks)
    options = {"steps": 50, "key": jax.random.key(0), "blocks_per_step": 2, "progress": None}
    with pytest.raises(bx.DivergedError, match=rf"slots of lower level 'lower' .* 0 to 2 .* got {slot}$"):
        bx.minimize(problem, jnp.ones(2), jnp.ones((3, 2)), solver=method(0.01), **options)


def test_rows_are_scattered_where_they_were_gathered():
    memory = {"a": jnp.arange(10.0).reshape(5, 2), "b": (jnp.arange(5),)}
    slots = jnp.asarray([3, 0])
    rows = gather(memory, slots)
    np.testing.assert_array_equal(rows["a"], [[6, 7], [0, 1]])
    after = scatter(memory, slots, jax.tree.map(lambda a: a + 10, rows))
    np.testing.assert_array_equal(after["a"], [[10, 11], [2, 3], [4, 5], [16, 17], [8, 9]])
    np.testing.assert_array_equal(after["b"][0], [10, 1, 2, 13, 4])


@pytest.mark.parametrize("slot_axes", [1, 2])
def test_each_slot_is_projected_onto_the_ball_as_one_vector(slot_axes):
    rng = np.random.default_rng(0)
    shape = (6, 3)[:slot_axes]
    tree = {
        "a": rng.normal(size=(*shape, 2, 2)).astype(np.float32),
        "b": rng.normal(size=shape).astype(np.float32),
    }
    for leaf in tree.values():
        leaf[0] = 0
    flat = np.concatenate([tree["a"].reshape(*shape, 4), tree["b"][..., None]], -1)
    size = np.linalg.norm(flat, axis=-1, keepdims=True)
    radius = float(np.median(size))
    expected = np.where(size > radius, radius / np.maximum(size, 1e-30), 1) * flat
    projected = jax.jit(project_ball, static_argnums=2)(tree, radius, slot_axes)
    actual = np.concatenate([projected["a"].reshape(*shape, 4), projected["b"][..., None]], -1)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    inside = size[..., 0] < radius
    assert inside.any()
    assert not inside.all()
    np.testing.assert_array_equal(actual[inside], flat[inside])  # to the last bit
    assert projected["a"].dtype == np.float32


def test_no_radius_is_no_projection():
    tree = {"a": jnp.full((2, 3), 1e30)}
    assert project_ball(tree, None, 1) is tree
