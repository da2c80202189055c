"""An upper step with nothing to tune, for every method."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_forms import LinearMean, Quadratic
from scipy import optimize

import bilevax as bx
from bilevax._step.newton import _shortened

pytestmark = pytest.mark.usefixtures("steps_alone")

ARGMIN = [
    bx.BlockNewton,
    bx.BSVRBv1,
    bx.BSVRBv2,
    bx.RSVRB,
    bx.KSONG,
    bx.MMBO,
    bx.SOBA,
    bx.MASOBA,
    bx.BlockPAGE,
    bx.BlockSAGA,
]
MEAN = [bx.MSVR, bx.SONG]
CASES = [(method, Quadratic) for method in ARGMIN] + [(method, LinearMean) for method in MEAN]


def gap(case, x, start=None):
    """(F − F_best)/(F_0 − F_best), from the gradient: F is quadratic."""
    first = np.linalg.norm(case.gradient(case.x0 if start is None else start))
    return np.linalg.norm(case.gradient(x)) / first


@pytest.mark.parametrize(("method", "family"), CASES)
def test_every_method_works_with_nothing_given(method, family):
    case = family(m=20, rows=20, d_y=4, d_x=4)
    result = bx.minimize(
        case.problem, case.x0, case.y0, solver=method(), steps=3000, blocks_per_step=5, batch_size=8,
        progress=None, stop=bx.Stop(verify=False),
    )  # fmt: skip
    assert gap(case, result.x) < 0.1


@pytest.mark.parametrize("family", [Quadratic, LinearMean])
def test_a_call_with_nothing_but_steps_finds_the_minimum(family):
    case = family(m=8, rows=10, d_y=3, d_x=3)
    result = bx.minimize(case.problem, case.x0, case.y0, steps=1500, progress=None)
    np.testing.assert_allclose(result.x, case.solution, atol=1e-3)
    assert result.verification.message == ""


def bowl(scale_x, scale_f):
    """f = scale_f · Σ w (x/scale_x − t)² of one block; the lower level is y = x/scale_x."""
    weights, target = jnp.array([1.0, 30.0]), jnp.array([2.0, -1.0])
    return bx.Problem(
        upper=lambda x, y, block, batch: scale_f * (1.0 + weights @ (y - target) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x / scale_x) ** 2),
        blocks=1,
    )


@pytest.mark.parametrize("scale_x", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("scale_f", [1e-3, 1.0, 1e3])
def test_units_of_x_and_f_do_not_matter(scale_x, scale_f):
    problem = bowl(scale_x, scale_f)
    result = bx.minimize(
        problem, jnp.zeros(2), jnp.zeros((1, 2)), steps=2000, progress=None, stop=bx.Stop(verify=False)
    )
    np.testing.assert_allclose(np.asarray(result.x) / scale_x, [2.0, -1.0], atol=1e-2)


def test_x_waits_before_it_moves_and_then_speeds_up():
    step = bx.automatic_step()
    update = jax.jit(lambda z, state, x: step.update(z, state, x, value=1.0, chance=1.0))
    x = jnp.zeros(3)
    state, path = step.init(x), []
    for _ in range(250):
        moves, state = update(jnp.array([1.0, -2.0, 0.5]), state, x)
        x = optax.apply_updates(x, moves)
        path.append(np.asarray(moves))
    sizes = np.abs(np.array(path)).max(1)
    assert (sizes[:50] == 0).all()
    assert sizes[50] > 0
    assert sizes[-1] > 5 * sizes[50]
    np.testing.assert_array_equal(np.sign(path[-1]), [-1, 1, -1])
    # Every entry moves at the same speed, whatever the size of its gradient.
    np.testing.assert_allclose(np.abs(path[-1]), np.abs(path[-1][0]), rtol=1e-5)


def sequence(gradients, values):
    """The scales r after a sequence of gradients and values."""
    step = bx.automatic_step()
    x = jnp.zeros(2)
    state, scales = step.init(x), []
    update = jax.jit(lambda z, state, x, value: step.update(z, state, x, value=value))
    for z, value in zip(gradients, values, strict=True):
        moves, state = update(jnp.asarray(z), state, x, jnp.asarray(value))
        x = optax.apply_updates(x, moves)
        scales.append(float(state.scale))
    return np.array(scales)


def test_the_speed_falls_when_x_turns_back():
    ahead = np.tile([1.0, 1.0], (150, 1))
    back = np.concatenate([np.tile([-1.0, -1.0], (25, 1)), np.tile([1.0, 1.0], (25, 1))] * 4)
    scales = sequence(np.concatenate([ahead, back]), np.linspace(2, 1, 350))
    assert scales[149] > 2 * scales[60]
    assert scales[-1] < 0.6 * scales[149]


def scales_for(value, steps=400):
    """The scales r while z keeps its direction, and f is a function of the step and of how far x went."""
    step = bx.automatic_step()
    x = jnp.zeros(2)
    state, scales = step.init(x), []
    update = jax.jit(lambda state, x, value: step.update(jnp.ones(2), state, x, value=value))
    for count in range(steps):
        moves, state = update(state, x, jnp.asarray(value(count, -float(jnp.sum(x)))))
        x = optax.apply_updates(x, moves)
        scales.append(float(state.scale))
    return np.array(scales)


def test_the_speed_falls_when_f_rises_with_x():
    falling = scales_for(lambda count, way: 2 - way)
    turn = [None]

    def valley(count, way):
        turn[0] = way if count == 150 else turn[0]
        return 2 - way if count <= 150 else 2 - turn[0] + 5 * (way - turn[0])

    rising = scales_for(valley)
    assert rising[150] == falling[150]
    assert rising[-1] < 0.1 * falling[-1]
    assert rising[-1] < rising[150]


def test_the_speed_does_not_fall_when_f_rises_by_itself():
    """While y settles, f rises or falls whatever x does: x goes on."""
    falling = scales_for(lambda count, way: 2 - way)
    settling = scales_for(lambda count, way: 2 - way - 0.3 * np.exp(-count / 100))
    assert settling[-1] > 0.2 * falling[-1]


def test_the_speed_falls_when_y_stays_behind():
    """f falls by the same amount throughout; its distance from F grows faster than f falls by visit."""
    steps, step = 400, bx.automatic_step()
    update = jax.jit(lambda state, x, value, lag: step.update(jnp.ones(2), state, x, value=value, lag=lag))

    def last_scale(lags):
        x = jnp.zeros(2)
        state = step.init(x)
        for value, lag in zip(np.linspace(2, 1, steps), lags, strict=True):
            moves, state = update(state, x, jnp.asarray(value + lag), jnp.asarray(lag))
            x = optax.apply_updates(x, moves)
        return float(state.scale)

    follows = last_scale(np.zeros(steps))
    assert last_scale(np.full(steps, 0.5)) == pytest.approx(follows)  # it does not grow
    assert last_scale(np.maximum(0, np.linspace(-1, 1, steps))) < 0.1 * follows


def test_x_returns_to_where_it_was_when_f_has_certainly_risen():
    step = bx.automatic_step()
    x = jnp.zeros(2)
    state, path, scales = step.init(x), [], []
    update = jax.jit(lambda state, x, value: step.update(jnp.ones(2), state, x, value=value))
    edge, limit = 400, 0.0  # from here on, f rises with every step
    for count in range(550):
        way = -float(jnp.sum(x))
        value = 10 - way if count < edge else 10 - limit + 3 * (way - limit)
        moves, state = update(state, x, jnp.asarray(value))
        limit = way if count < edge else limit
        x = optax.apply_updates(x, moves)
        path.append(-float(jnp.sum(x)))
        scales.append(float(state.scale))
    steps = np.diff(path)
    jump = int(np.flatnonzero(steps < 0)[0])
    assert edge < jump < edge + 60
    assert abs(path[jump + 1] - limit) < 0.2 * limit  # about where f began to rise
    assert scales[jump + 1] == 0.5 * scales[jump]
    assert (steps[jump + 1 : jump + 75] == 0).all()  # y and v settle
    assert steps[jump + 76] > 0


def test_a_lag_that_grows_with_the_speed_does_not_stop_x_where_f_is_noisy():
    random = np.random.default_rng(0)
    step = bx.automatic_step()
    x = jnp.zeros(2)
    state = step.init(x)
    update = jax.jit(lambda state, x, f, lag: step.update(jnp.ones(2), state, x, value=f, lag=lag))
    for _ in range(600):
        way = -float(jnp.sum(x))
        moves, state = update(state, x, 10 - way + random.normal(), 1e-3 * float(state.scale))
        x = optax.apply_updates(x, moves)
    assert way > 1  # of f = 10, whose noise is 1


def test_entries_without_a_gradient_stay():
    step = bx.automatic_step()
    x = {"seen": jnp.zeros(2), "unseen": jnp.ones(3)}
    z = {"seen": jnp.ones(2), "unseen": jnp.zeros(3)}
    state, update = step.init(x), jax.jit(lambda state: step.update(z, state, x, value=1.0))
    for _ in range(60):
        moves, state = update(state)
    assert (moves["unseen"] == 0).all()
    assert (moves["seen"] < 0).all()


def test_it_can_be_part_of_a_chain_and_of_an_average():
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3)
    upper_step = bx.averaged(optax.chain(optax.clip(10.0), bx.automatic_step()), window=50)
    result = bx.minimize(
        case.problem, case.x0, case.y0, solver=bx.MMBO(upper_step), steps=1500, progress=None
    )
    np.testing.assert_allclose(result.x, case.solution, atol=1e-2)


def test_a_speed_that_is_no_positive_number_is_rejected():
    with pytest.raises(ValueError, match="speed must lie in"):
        bx.automatic_step(speed=-1.0)
    with pytest.raises(TypeError, match="speed"):
        bx.automatic_step(speed="fast")


def test_the_curvature_of_the_lower_problems_is_followed():
    """x multiplies the lower curvature by a thousand: steps that fit the start would diverge."""
    target = jnp.array([2.0, -3.0])
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - target) ** 2) + jnp.sum((x - 7.0) ** 2),
        lower=lambda x, y, block, batch: jnp.exp(x[0]) * jnp.sum((y - target) ** 2),
        blocks=4,
    )
    for solver in (bx.MMBO(), bx.SOBA(), bx.BSVRBv2(), bx.BlockNewton()):
        result = bx.minimize(
            problem, jnp.zeros(1), jnp.zeros((4, 2)), solver=solver, steps=2000, progress=None
        )
        np.testing.assert_allclose(result.x, 7.0, atol=0.05)
        np.testing.assert_allclose(result.y, np.tile(target, (4, 1)), atol=0.05)


def test_steps_may_be_left_out_if_something_else_ends_the_run():
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3)
    stop = bx.Stop(tolerance=1e-4)
    result = bx.minimize(case.problem, case.x0, case.y0, stop=stop, progress=None)
    assert result.outcome is bx.Outcome.CONVERGED
    with pytest.raises(ValueError, match="steps must be given"):
        bx.minimize(case.problem, case.x0, case.y0, progress=None)


def test_the_default_solver_fits_the_size_of_the_lower_problems():
    wide = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - 1.0) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=2,
    )
    for size, tracks_hessians in ((4, True), (1000, False)):
        result = bx.minimize(wide, jnp.zeros(size), jnp.zeros((2, size)), steps=1, progress=None)
        assert (result.state.levels["lower"].hessian is not None) == tracks_hessians


@pytest.mark.parametrize("seed", [1, 3])
def test_blocks_that_share_slots_are_averaged(seed):
    """A visit sees one of the five blocks that a slot's variable depends on, with all its rows."""
    random = np.random.default_rng(seed)
    slot = np.arange(50) % 10
    matrices, centres = (random.normal(size=(50, 2, *rest)).astype(np.float32) for rest in ((3,), ()))

    def lower(x, y, block, batch):
        return 0.5 * jnp.sum((y - block["matrix"] @ x - block["centre"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: 0.5 * jnp.sum((y - 1) ** 2) + 0.05 * x @ x,
        lower=bx.argmin(lower, slots=lambda block, batch: block["slot"], count=10),
        blocks={"slot": slot, "matrix": matrices, "centre": centres},
    )

    def objective(x):
        means = np.stack([(matrices @ x + centres)[slot == k].mean(0) for k in range(10)])
        return 0.5 * np.mean(np.sum((means - 1) ** 2, 1)) + 0.05 * x @ x

    x0 = jnp.full(3, 3.0)
    found = bx.minimize(problem, x0, jnp.zeros((10, 2)), steps=3000, blocks_per_step=1, progress=None)
    least = optimize.minimize(objective, np.zeros(3)).fun
    assert objective(np.asarray(found.x)) - least < 0.01 * (objective(np.asarray(x0)) - least)


def test_lower_problems_whose_curvature_jumps_are_solved():
    """A Huber loss is flat far from its minimum: Newton steps that forget what they saw overshoot."""
    random = np.random.default_rng(5)
    true, sizes = random.normal(size=(60, 5)), random.integers(10, 40, 60)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = 50 * random.normal(size=(offsets[-1], 5))
    targets = np.sum(rows * np.repeat(true, sizes, axis=0), 1) + 20 * random.standard_t(2, size=offsets[-1])
    data = bx.PerBlock({"row": rows.astype(np.float32), "y": targets.astype(np.float32)}, offsets)

    def loss(y, batch):
        error = jnp.abs(batch["row"] @ y - batch["y"])
        return jnp.mean(jnp.where(error < 30, error**2 / 2, 30 * error - 450))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x["log"]) @ (y - x["centre"]) ** 2,
        blocks=60,
        upper_data=data,
        lower_data=data,
    )
    x0 = {"log": jnp.full(5, 5.0), "centre": jnp.zeros(5)}
    result = bx.minimize(problem, x0, jnp.zeros((60, 5)), steps=2000, progress=None)
    assert result.verification.message == ""
    assert result.verification.y_error < 1e-2


def test_x_waits_for_lower_variables_that_stay_behind():
    """The features of wine as they are, between 0.1 and 1,700, with their logarithmic scales as x.

    y follows x with a delay of a few steps; but margins of thousands, multiplied by scales that change, make
    that delay large. A step that grows as long as f falls ends above where it began.
    """
    datasets = pytest.importorskip("sklearn.datasets")
    rows, labels = datasets.load_wine(return_X_y=True)
    fold = np.random.default_rng(0).permutation(len(labels)) % 4

    def data(inside):
        members = [np.flatnonzero(inside(number)) for number in range(4)]
        index, offsets = np.concatenate(members), np.cumsum([0, *map(len, members)])
        return bx.PerBlock({"row": rows[index].astype(np.float32), "label": labels[index]}, offsets)

    def loss(x, y, batch):
        scores = (batch["row"] * jnp.exp(x["scale"])) @ y["w"] + y["b"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]))

    def lower(x, y, block, batch):
        return loss(x, y, batch) + jnp.exp(x["strength"]) / 2 * (jnp.sum(y["w"] ** 2) + 0.1 * y["b"] @ y["b"])

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(x, y, batch),
        lower=lower,
        blocks=4,
        upper_data=data(lambda number: fold == number),
        lower_data=data(lambda number: fold != number),
    )
    x0 = {"strength": jnp.zeros(()), "scale": jnp.zeros(13)}
    result = bx.minimize(
        problem, x0, {"w": jnp.zeros((4, 13, 3)), "b": jnp.zeros((4, 3))}, steps=1500, progress=None
    )
    assert result.recoveries == ()
    found = result.verification
    assert found.objective < 0.4 * found.start
    assert abs(found.tracked - found.objective) < 0.1 * found.objective


def counts(m=60, d=3, rows=24):
    """Poisson regressions whose rates are far from those of y = 0, with a shared prior as x."""
    random = np.random.default_rng(0)
    features = np.concatenate([np.ones((m, 2 * rows, 1)), random.normal(size=(m, 2 * rows, d - 1))], 2)
    truth = np.array([2.5, 0.7, -0.6]) + 0.3 * random.normal(size=(m, d))
    seen = random.poisson(np.exp(np.einsum("mnd,md->mn", features, truth)))

    def part(which):
        flat = {"row": features[:, which].reshape(-1, d), "count": seen[:, which].reshape(-1)}
        flat = {name: jnp.asarray(array, jnp.float32) for name, array in flat.items()}
        return bx.PerBlock(flat, np.arange(m + 1) * rows)

    def loss(y, batch):
        scores = batch["row"] @ y
        return jnp.mean(jnp.exp(scores) - batch["count"] * scores)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.sum(jnp.exp(-x["s"]) * (y - x["mean"]) ** 2),
        blocks=m,
        upper_data=part(slice(rows)),
        lower_data=part(slice(rows, None)),
    )
    return problem, {"mean": jnp.zeros(d), "s": jnp.zeros(d)}, jnp.zeros((m, d))


@pytest.mark.parametrize("sizes", [{}, {"blocks_per_step": 15, "batch_size": 8}])
def test_exponential_losses_far_from_their_minimum_are_no_trap(sizes):
    problem, x0, y0 = counts()
    result = bx.minimize(problem, x0, y0, steps=1000, key=jax.random.key(0), progress=None, **sizes)
    assert result.recoveries == ()
    assert result.verification.objective < result.verification.start
    assert result.verification.y_error < 0.1


def test_a_newton_step_that_overshoots_is_shortened():
    here, step = jnp.array([[-19.0], [2.0]]), jnp.array([[-5.7], [1.0]])
    there = jnp.array(
        [[280.0], [0.5]]
    )  # far beyond the minimiser of the first, not yet at that of the second
    hessian = jnp.full((2, 1, 1), 3.0)
    share, raised = _shortened(here, there, step, hessian)
    np.testing.assert_allclose(share, [[19 / 299], [1.0]], rtol=1e-6)
    np.testing.assert_allclose(raised.ravel(), [2 * 19 / 5.7, 3.0], rtol=1e-6)
    np.testing.assert_allclose(_shortened(here, jnp.full((2, 1), jnp.inf), step, hessian)[0][0], 1e-3)


@pytest.mark.parametrize("far", [30.0, 250.0])
def test_newton_steps_on_a_loss_that_grows_like_a_root_come_back_from_afar(far):
    """Its Hessian nearly vanishes there, and Newton steps are a million times too long."""
    problem = bx.Problem(
        upper=lambda x, y, block, batch: (y - block) ** 2 + x**2,
        lower=lambda x, y, block, batch: jnp.sqrt(1 + (y - block) ** 2) + 0 * x,
        blocks=far + jnp.arange(4.0),
    )
    result = bx.minimize(
        problem, jnp.ones(()), jnp.zeros(4), solver=bx.BlockNewton(), steps=200, progress=None
    )
    np.testing.assert_allclose(result.y, far + np.arange(4.0), atol=1e-2)


def test_x_moves_while_y_settles_slowly():
    """Lower problems of condition 100 that start far from their solutions, which lie near x."""
    random = np.random.default_rng(1)
    curvature = jnp.geomspace(0.01, 1.0, 6)
    targets = jnp.asarray(3.0 + 0.3 * random.normal(size=(20, 6)), jnp.float32)
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((curvature + 0.01) * y**2) - 2 * y @ (0.01 * x + curvature),
        blocks=targets,
    )
    x0, y0 = jnp.zeros(6), jnp.zeros((20, 6))
    result = bx.minimize(problem, x0, y0, solver=bx.MMBO(), steps=3000, progress=None)
    found, first = bx.objective(problem, result.x, y0), bx.objective(problem, x0, y0)
    least = 0.09 * 6 * 1.1  # the spread of the targets
    assert found - least < 0.5 * (first - least)


def test_newton_steps_settle_on_lower_problems_that_are_not_convex():
    """Small networks near a prior: H is indefinite at first, and v must not be multiplied by that."""
    random = np.random.default_rng(15)
    place = random.uniform(-3, 3, (20, 5)).astype(np.float32)
    target = random.uniform(0.5, 2, (20, 1)) * np.tanh(2 * place + random.uniform(-1, 1, (20, 1)))
    x0 = jnp.asarray(random.normal(size=(3, 8)) * 0.5, jnp.float32)

    def error(y, block):
        return jnp.mean((jnp.tanh(block["place"][:, None] * y[0] + y[1]) @ y[2] - block["target"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(y, block),
        lower=lambda x, y, block, batch: error(y, block) + 0.1 * jnp.sum((y - x) ** 2),
        blocks={"place": place, "target": target.astype(np.float32)},
    )
    stop = bx.Stop(recover=False, verify=False)
    y0 = jnp.broadcast_to(x0, (20, 3, 8))
    result = bx.minimize(problem, x0, y0, steps=100, every=20, stop=stop, progress=None)
    assert result.history["lower_residual"][-1] < 1e-3
    assert result.history["inverse_residual"][-1] < 0.1


def panel(m=30, rows=20, d=4):
    """Ridge regressions with a penalty per feature, f and g without batches, and the exact F."""
    random = np.random.default_rng(1)
    spread = 10 ** random.uniform(-1, 0.3, d)
    features = random.normal(size=(2, m, rows, d))
    own = random.normal(size=(m, d)) * spread
    targets = np.einsum("kmrd,md->kmr", features, own) + random.normal(size=(2, m, rows))

    def error(y, block, part):
        return jnp.mean((block["X"][part] @ y - block["t"][part]) ** 2)

    def problem(constant=0.0):
        return bx.Problem(
            upper=lambda x, y, block, batch: error(y, block, 1) + constant,
            lower=lambda x, y, block, batch: error(y, block, 0) + jnp.exp(x) @ y**2,
            blocks={"X": jnp.asarray(features.swapaxes(0, 1)), "t": jnp.asarray(targets.swapaxes(0, 1))},
        )

    def value(x):
        squares = np.einsum("mri,mrj->mij", features[0], features[0]) / rows
        mixed = np.einsum("mri,mr->mi", features[0], targets[0]) / rows
        y = np.linalg.solve(squares + np.diag(np.exp(np.asarray(x, float))), mixed[..., None])[..., 0]
        return float(np.mean((np.einsum("mrd,md->mr", features[1], y) - targets[1]) ** 2))

    return problem, value, d


def test_penalties_that_begin_on_a_plateau_do_not_end_on_another():
    problem, value, d = panel()
    ends = [
        value(bx.minimize(problem(), jnp.full(d, x0), jnp.zeros((30, d)), steps=1500, progress=None).x)
        for x0 in (0.0, -7.0, 6.0)
    ]
    assert max(ends) - min(ends) < 0.04 * (value(np.full(d, -7.0)) - min(ends))


def test_a_constant_in_f_does_not_matter():
    problem, value, d = panel()
    x0, y0 = jnp.zeros(d), jnp.zeros((30, d))
    ends = [
        value(bx.minimize(problem(constant), x0, y0, steps=1000, progress=None).x)
        for constant in (0.0, 100.0, -1000.0)
    ]
    assert max(ends) - min(ends) < 0.02 * (value(np.zeros(d)) - min(ends))


def test_x_moves_where_f_is_zero_at_the_start():
    rows = jax.random.normal(jax.random.key(0), (200, 3))
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.log(y) - jnp.array([1.0, 0.5, -0.5]) @ x,
        lower=bx.mean(lambda x, block, batch: jnp.mean(jnp.exp(batch @ x))),
        blocks=1,
        lower_data=bx.Shared(rows),
    )
    result = bx.minimize(problem, jnp.zeros(3), steps=1000, progress=None)
    slope = jax.grad(lambda x: jnp.log(jnp.mean(jnp.exp(rows @ x))) - jnp.array([1.0, 0.5, -0.5]) @ x)
    assert float(jnp.abs(slope(result.x)).max()) < 0.02  # 1 at x0
