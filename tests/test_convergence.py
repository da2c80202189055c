"""What the methods do on problems whose solution is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import LinearMean, Quadratic

import bilevax as bx

ARGMIN = [bx.BSVRBv1, bx.BSVRBv2, bx.RSVRB, bx.KSONG, bx.MMBO, bx.SOBA, bx.MASOBA, bx.BlockPAGE, bx.BlockSAGA]
ARGMIN += [bx.BlockNewton]
MEAN = [bx.MSVR, bx.SONG, bx.BlockNewton, bx.BSVRBv1, bx.BSVRBv2, bx.SOBA, bx.BlockPAGE, bx.BlockSAGA]
CASES = [(method, Quadratic) for method in ARGMIN] + [(method, LinearMean) for method in MEAN]


@pytest.mark.parametrize(("method", "family"), CASES)
def test_defaults_reach_the_solution_when_nothing_is_sampled(method, family):
    case = family(m=6, rows=7, d_y=3, d_x=3)
    result = bx.minimize(
        case.problem,
        case.x0,
        case.y0,
        solver=method(upper_step=0.1),
        steps=1500,
        key=jax.random.key(0),
        progress=None,
    )
    np.testing.assert_allclose(result.x, case.solution, atol=1e-4)
    np.testing.assert_allclose(result.y, case.lower_solution(result.x), atol=1e-3)


@pytest.mark.parametrize(("method", "family"), CASES)
def test_defaults_come_near_the_solution_when_blocks_and_rows_are_sampled(method, family):
    case = family(m=50, rows=50, d_y=5, d_x=5)
    result = bx.minimize(
        case.problem,
        case.x0,
        case.y0,
        solver=method(upper_step=0.02),
        steps=4000,
        blocks_per_step=5,
        batch_size=8,
        key=jax.random.key(0),
        progress=None,
    )
    assert np.linalg.norm(case.gradient(result.x)) < 0.1 * np.linalg.norm(case.gradient(case.x0))


def second_half(method, family, coupling, **steps):
    """The mean of ‖∇F‖ over the second half of 10,000 steps with α = β = 0.003."""
    case = family(m=50, rows=200, d_y=4, d_x=4, coupling=coupling)
    solver = method(upper_step=0.05, alpha=0.003, beta=0.003, **steps)
    result = bx.minimize(
        case.problem,
        case.x0,
        case.y0,
        solver=solver,
        steps=10_000,
        every=50,
        blocks_per_step=10,
        batch_size=8,
        key=jax.random.key(0),
        progress=None,
        metrics={"gradient": lambda problem, state: np.linalg.norm(case.gradient(state.x))},
    )
    return np.mean(result.history["gradient"][100:])


@pytest.mark.parametrize(
    ("reduced", "averaged", "family", "coupling", "factor", "steps"),
    [
        (bx.BSVRBv1, bx.KSONG, Quadratic, 0.3, 20, {"lower_step": 0.05}),
        (bx.BSVRBv2, bx.MMBO, Quadratic, 0.2, 20, {"lower_step": 0.05, "inverse_step": 0.05}),
        (bx.MSVR, bx.SONG, LinearMean, 0.5, 3, {}),
    ],
)
def test_variance_reduction_is_real(reduced, averaged, family, coupling, factor, steps):
    """With a stronger coupling of x and y the moving averages diverge at these settings."""
    average = second_half(averaged, family, coupling, **steps)
    assert average < 1
    assert second_half(reduced, family, coupling, **steps) <= average / factor


@pytest.mark.parametrize("method", [bx.BSVRBv1, bx.BSVRBv2])
def test_restarts_end_ten_times_closer_to_the_minimum(method):
    case = Quadratic(m=50, rows=200, d_y=3, d_x=3, ridge=0.5)

    def gap(solver, steps):
        gaps = []
        for seed in range(2):
            result = bx.minimize(
                case.problem,
                case.x0,
                case.y0,
                solver=solver,
                steps=steps,
                blocks_per_step=10,
                batch_size=8,
                key=jax.random.key(seed),
                progress=None,
            )
            gaps.append(case.value(result.x) - case.least)
        return np.mean(gaps)

    constant = method(upper_step=0.1, alpha=0.2, beta=0.2)
    staged = bx.Restart(constant, first=150, stages=7)
    assert gap(staged, staged.steps) <= gap(constant, staged.steps) / 10


def test_a_shared_representation_with_ragged_tasks_improves():
    """x is a small network, y_i a ridge head per task; both versions cut the initial objective by eight."""
    rng = np.random.default_rng(0)
    tasks, width, features = 20, 6, 5
    sizes = rng.integers(8, 40, tasks)
    offsets = np.r_[0, np.cumsum(sizes)]
    rows = rng.normal(size=(offsets[-1], features)).astype(np.float32)
    truth = rng.normal(size=(features, 4))
    heads = np.repeat(rng.normal(size=(tasks, 4)), sizes, axis=0)
    labels = np.sum(np.tanh(rows @ truth) * heads, 1).astype(np.float32)
    train = np.concatenate([np.arange(n) % 2 == 0 for n in sizes])

    def represent(x, rows):
        hidden = jnp.tanh(rows @ x["in"] + x["bias"])
        return jnp.tanh(hidden @ x["out"])

    def upper(x, y, block, batch):
        return jnp.mean((represent(x, batch["row"]) @ y["head"] + y["offset"] - batch["label"]) ** 2)

    def lower(x, y, block, batch):
        fit = jnp.mean((represent(x, batch["row"]) @ y["head"] + y["offset"] - batch["label"]) ** 2)
        return fit + 0.1 * (jnp.sum(y["head"] ** 2) + y["offset"] ** 2)

    def data(mask):
        ends = np.r_[0, np.cumsum(np.add.reduceat(mask.astype(int), offsets[:-1]))]
        return bx.PerBlock({"row": rows[mask], "label": labels[mask]}, ends)

    problem = bx.Problem(upper, lower, tasks, data(~train), data(train))
    x0 = {
        "in": rng.normal(size=(features, 16)).astype(np.float32) / 2,
        "bias": np.zeros(16, np.float32),
        "out": rng.normal(size=(16, width)).astype(np.float32) / 4,
    }
    y0 = {"head": np.zeros((tasks, width), np.float32), "offset": np.zeros(tasks, np.float32)}
    start = float(bx.objective(problem, x0, y0))
    for solver in (bx.BSVRBv1(upper_step=0.005), bx.BSVRBv2(upper_step=0.005)):
        result = bx.minimize(
            problem,
            x0,
            y0,
            solver=solver,
            steps=6000,
            blocks_per_step=5,
            batch_size=8,
            key=jax.random.key(0),
            progress=None,
        )
        assert float(bx.objective(problem, result.x, result.y)) < start / 8


def test_the_step_of_version_two_allocates_no_gradient_per_block():
    """With d_x = 2·10⁶ and I = 64 the temporaries stay under 10 d_x floats; I × d_x would be 64."""
    size, blocks = 2_000_000, 64

    def upper(x, y, block, batch):
        return jnp.sum((y - block) ** 2) + jnp.vdot(x, x)

    def lower(x, y, block, batch):
        return 0.5 * jnp.sum((y - block * jnp.mean(jnp.tanh(x))) ** 2)

    problem = bx.Problem(upper, lower, jnp.ones((100, 3)))
    solver = bx.BSVRBv2(upper_step=0.1, lower_step=0.1, inverse_step=0.1)
    state = jax.eval_shape(
        lambda key: solver.init(
            problem, jnp.zeros(size), jnp.zeros((100, 3)), key=key, blocks_per_step=blocks
        ),
        jax.random.key(0),
    )
    compiled = jax.jit(solver.step, donate_argnums=1).lower(problem, state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * size * 4


@pytest.mark.parametrize("method", [bx.F2SA, bx.F3SA])
def test_the_bias_of_a_penalty_falls_with_the_penalty(method):
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3)
    errors = []
    for penalty in (10.0, 40.0):
        result = bx.minimize(
            case.problem,
            case.x0,
            case.y0,
            solver=method(upper_step=0.05, penalty=penalty),
            steps=4000,
            key=jax.random.key(0),
            progress=None,
        )
        errors.append(np.linalg.norm(result.x - case.solution))
        np.testing.assert_allclose(result.y, case.lower_solution(result.x), atol=1e-3)
    assert errors[1] < 0.35 * errors[0] < 0.1 * np.linalg.norm(case.x0 - case.solution)
