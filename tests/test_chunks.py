"""A chunk's loop as accelerators run it: in turns of fixed length, with the same steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import Quadratic

import bilevax as bx
from bilevax._run import chunks
from bilevax._util.hurried import HurriedJit

CASE = Quadratic(m=4, d_x=3, d_y=2, rows=20)


def begin(upper_step=0.05, x0=CASE.x0):
    """A solver and its state."""
    solver = chunks.numbers_as_arrays(bx.BSVRBv2(upper_step=upper_step, lower_step=0.05))
    sampler = bx.Sampling(blocks_per_step=2, batch_size=4).sampler(CASE.problem, jax.random.key(3))
    return solver, chunks.compiled_start(solver, CASE.problem, x0, CASE.y0, sampler)


@pytest.fixture(scope="module")
def loops():
    """Chunks as they are compiled for a CPU and for an accelerator: functions of solver, state and steps."""

    def on(backend):
        advance = HurriedJit(chunks.chunk_program, kept=1)  # traced for this one alone

        def run(solver, state, steps):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax, "default_backend", lambda: backend)
                patch.setattr(chunks, "_advance", advance)
                return chunks.compiled_chunk((solver, CASE.problem), state, steps)

        return run

    return {backend: on(backend) for backend in ("cpu", "gpu")}


@pytest.mark.parametrize(
    ("step", "steps", "legs"),
    [
        (0, 20, [(1, 20)]),
        (0, 75, [(1, 32), (32, 32), (1, 11)]),
        (32, 64, [(32, 64)]),
        (40, 100, [(1, 24), (32, 64), (1, 12)]),
        (40, 3, [(1, 3)]),
        (64, 0, [(1, 0), (32, 0)]),
    ],
)
def test_an_accelerator_takes_turns_of_32_steps_where_they_fit(step, steps, legs, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chunks._legs(step, steps) == legs


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 64, 75])
def test_runs_of_steps_are_the_same_steps(loops, steps):
    (one, total), (other, other_total) = (run(*begin(), steps) for run in loops.values())
    assert int(one.step) == int(other.step) == steps
    np.testing.assert_allclose(other.x, one.x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other_total.high, total.high, rtol=1e-5)


def test_a_run_that_diverges_ends_within_its_32_steps(loops):
    (exact, _), (late, total) = (run(*begin(1e6), 10_000) for run in loops.values())
    assert 1 < int(exact.step) < 10_000
    assert int(exact.step) <= int(late.step) < int(exact.step) + chunks._TURN
    assert not np.isfinite(total.high)


def test_a_start_that_is_not_finite_ends_after_one_step(loops):
    for steps in (64, 100):
        state, _ = loops["gpu"](*begin(x0=jnp.full_like(CASE.x0, jnp.nan)), steps)
        assert int(state.step) == 1


def test_steps_do_not_depend_on_where_chunks_end_on_an_accelerator(monkeypatch):
    """Estimates are renewed at the same steps, whether these are taken one by one or in turns."""
    targets = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2) + 0.1 * jnp.sum(x**2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.asarray(targets),
        risk=bx.cvar(0.3),
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chunks, "_advance", HurriedJit(chunks.chunk_program, kept=1))
    solver = chunks.numbers_as_arrays(bx.BSVRBv2(upper_step=0.005))
    sampler = bx.Sampling(blocks_per_step=3).sampler(problem, jax.random.key(0))

    def run(*ends):
        state = chunks.compiled_start(solver, problem, jnp.ones(2), jnp.zeros((40, 2)), sampler)
        for end in ends:
            state, _ = chunks.compiled_chunk((solver, problem), state, end - int(state.step))
        return np.asarray(state.x)

    whole = run(200)
    np.testing.assert_allclose(run(40, 72, 150, 200), whole, rtol=1e-4)
    np.testing.assert_allclose(run(10, 64, 199, 200), whole, rtol=1e-4)
