"""A chunk's loop as accelerators run it: in turns of fixed length, with the same steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import Quadratic

import bilevax as bx
from bilevax._run import chunks
from bilevax._step.clocks import CompensatedSum

CASE = Quadratic(m=4, d_x=3, d_y=2, rows=20)


def begin(upper_step=0.05, x0=CASE.x0):
    """A solver and its state."""
    solver = chunks.numbers_as_arrays(bx.BSVRBv2(upper_step=upper_step, lower_step=0.05))
    sampler = bx.Sampling(blocks_per_step=2, batch_size=4).sampler(CASE.problem, jax.random.key(3))
    return solver, chunks.compiled_start(solver, CASE.problem, x0, CASE.y0, sampler)


@pytest.fixture(scope="module")
def loops():
    """The loop as it is compiled for a CPU and for an accelerator."""
    out = {}
    for backend in ("cpu", "gpu"):

        @eqx.filter_jit
        def run(solver, state, steps):
            total = CompensatedSum(jnp.zeros(()), jnp.zeros(()))
            return chunks._loop(solver, CASE.problem, state, steps, total)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda backend=backend: backend)
            run(*begin(), jnp.asarray(0))  # traced here
        out[backend] = run
    return out


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 64, 75])
def test_runs_of_steps_are_the_same_steps(loops, steps):
    (one, total), (other, other_total) = (run(*begin(), jnp.asarray(steps)) for run in loops.values())
    assert int(one.step) == int(other.step) == steps
    np.testing.assert_allclose(other.x, one.x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other_total.high, total.high, rtol=1e-5)


def test_a_run_that_diverges_ends_within_its_32_steps(loops):
    (exact, _), (late, total) = (run(*begin(1e6), jnp.asarray(10_000)) for run in loops.values())
    assert 1 < int(exact.step) < 10_000
    assert int(exact.step) <= int(late.step) < int(exact.step) + chunks._TURN
    assert not np.isfinite(total.high)


def test_a_start_that_is_not_finite_ends_after_one_step(loops):
    for steps in (64, 100):
        state, _ = loops["gpu"](*begin(x0=jnp.full_like(CASE.x0, jnp.nan)), jnp.asarray(steps))
        assert int(state.step) == 1
