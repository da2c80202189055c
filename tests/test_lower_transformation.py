"""An optax transformation moves the lower variables of visited blocks, with a state of its own per slot."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_kinds_transcription as kinds_test
from closed_forms import Quadratic
from reference import kinds
from test_checkpoint import same_bits

import bilevax as bx
from bilevax._step.slots import Moving
from bilevax.solvers.toolkit import Memory, Recipe, TrackedSolve, Tracker

VISITED = {"KSONG", "MMBO", "SOBA", "MASOBA", "F2SA", "SONG", "MSVR", "BlockSAGA"}
LAZY = [bx.BSVRBv1, bx.BSVRBv2, bx.BlockPAGE, bx.F3SA, bx.RSVRB]
ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-3}
STEPS = {"a": 0.05, "p": 0.03, "q": 0.02}


class Corrected(Recipe):
    """BSVRB v2 whose visited blocks alone move: it must undo the last move of each."""

    upper_step: float = 0.02
    lower_step: object = None
    inverse_step: float = 0.04
    alpha: float = 0.3
    alpha_bar: float = 0.2
    beta: float = 0.25

    corrected = True
    lazy = False
    curvature = TrackedSolve()


def adam(step, **more):
    return optax.adam(step, **ADAM, **more)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", [*sorted(VISITED), "Corrected"])
def test_methods_follow_their_transcription_with_adam_per_block(method, monkeypatch):
    blocks = kinds.Kinds(saddle=False)
    y0 = {"a": np.zeros((5, 4)), "p": np.full((5, 2), 0.1), "q": np.full((5, 3), -0.1)}
    steps = {name: adam(step) for name, step in STEPS.items()} | {"q": 0.05}  # q takes plain steps
    solver, reference, fixed = kinds_test.METHODS.get(
        method, (Corrected, kinds_test.tracked(corrected=True, everyone=False, curvature="v"), {})
    )
    moves = {name: kinds.Adam(STEPS[name], **ADAM) for name in ("a", "p")}
    monkeypatch.setitem(
        kinds_test.METHODS, method, (solver, functools.partial(reference, moves=moves), fixed)
    )
    given = {}
    if method in ("MSVR", "SONG"):
        given["a"] = np.random.default_rng(2).normal(size=(5, 4))
        problem, y0 = kinds_test.without_lower_level(blocks, given["a"]), {n: y0[n] for n in "pq"}
        steps = {name: steps[name] for name in "pq"}
    else:
        problem = kinds_test.as_library(blocks)
    steps = {"lower_step": steps}
    if method == "F2SA":  # its second variable moves as y does
        moves["v"], steps["inverse_step"] = kinds.Adam(STEPS["a"], **ADAM), None
    made = kinds_test.make_solver
    monkeypatch.setattr(kinds_test, "make_solver", lambda method: made(method, **steps))
    kinds_test.follow(method, blocks, problem, y0, **given)


@pytest.mark.usefixtures("x64")
def test_adam_ascends_where_a_saddle_point_maximises(monkeypatch):
    blocks = kinds.Kinds(saddle=True)
    pair = np.zeros((5, 2)), np.full((5, 2), 0.1)
    y0 = {"a": pair, "p": np.full((5, 2), 0.1), "q": np.full((5, 3), -0.1)}
    solver, reference, fixed = kinds_test.METHODS["MMBO"]
    moves = {name: kinds.Adam(0.03, **ADAM) for name in "apq"}
    monkeypatch.setitem(
        kinds_test.METHODS, "MMBO", (solver, functools.partial(reference, moves=moves), fixed)
    )
    made = kinds_test.make_solver
    monkeypatch.setattr(kinds_test, "make_solver", lambda method: made(method, lower_step=adam(0.03)))
    kinds_test.follow("MMBO", blocks, kinds_test.as_library(blocks, bx.saddle), y0)


CASE = Quadratic(m=6, rows=7, d_y=3, d_x=3)


def run(solver=None, case=CASE, **options):
    options = {"steps": 200, "every": 20, "blocks_per_step": 2, "batch_size": 3, "progress": None} | options
    solver = bx.MMBO(0.05, lower_step=optax.adam(0.05)) if solver is None else solver
    options = {"stop": bx.Stop(verify=False)} | options
    return bx.minimize(case.problem, case.x0, case.y0, solver=solver, **options)


def test_the_state_of_a_transformation_moves_only_when_its_slot_is_visited():
    solver = bx.SOBA(0.05, lower_step=optax.adam(0.05))
    state = solver.init(
        CASE.problem, CASE.x0, CASE.y0, key=jax.random.key(3), blocks_per_step=2, batch_size=3
    )
    visits = np.zeros(6, int)
    for _ in range(7):
        visits[np.asarray(solver.draw(CASE.problem, state).blocks)] += 1
        state, _ = solver.step(CASE.problem, state)
    counts = state.levels["lower"].y.optimizer[0].count
    assert visits.min() < visits.max()
    np.testing.assert_array_equal(counts, visits)


def test_plain_gradient_steps_of_optax_are_plain_steps():
    plain = run(bx.MMBO(0.05, lower_step=0.1, inverse_step=0.1))
    sgd = run(bx.MMBO(0.05, lower_step=optax.sgd(0.1), inverse_step=0.1))
    np.testing.assert_allclose(sgd.x, plain.x, rtol=1e-6)
    np.testing.assert_allclose(sgd.y, plain.y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [bx.MMBO, bx.KSONG, bx.F2SA, bx.BlockSAGA])
def test_a_run_with_adam_below_nears_the_solution(method):
    case = Quadratic(m=12, rows=10, d_y=3, d_x=3)
    result = run(method(0.02, lower_step=optax.adam(0.03)), case, steps=2000, batch_size="all")
    assert np.linalg.norm(case.gradient(result.x)) < 0.1 * np.linalg.norm(case.gradient(case.x0))


def test_a_stopped_run_is_resumed_with_the_same_bits(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    whole = run()
    run(steps=60, checkpoint=tmp_path)
    same_bits(whole, run(checkpoint=bx.Checkpoint(tmp_path, resume=True, steps=50)))
    other = bx.MMBO(0.05, lower_step=optax.adam(0.06))
    with pytest.raises(bx.CheckpointError, match="lower_step"):
        run(other, checkpoint=bx.Checkpoint(tmp_path, resume=True))


def test_a_sweep_over_step_sizes_takes_the_runs_of_minimize():
    def solver(rate):
        return bx.MMBO(0.05, lower_step=optax.adam(rate))

    options = {"steps": 50, "blocks_per_step": 2, "batch_size": 3, "progress": None}
    keys = jax.random.split(jax.random.key(1), 2)
    found = bx.sweep(
        CASE.problem, CASE.x0, CASE.y0, solver=solver, settings={"rate": [0.01, 0.1]}, keys=keys, **options
    )
    for row, rate in enumerate((0.01, 0.1)):
        alone = run(solver(rate), key=keys[1], **options)
        np.testing.assert_allclose(found.x[row, 1], alone.x, rtol=1e-4)
        np.testing.assert_allclose(found.y[row, 1], alone.y, rtol=1e-3, atol=1e-5)


def test_the_memory_estimate_counts_the_state_per_slot():
    def slots(step):
        solver = bx.SOBA(0.05, lower_step=step, inverse_step=0.1)
        return bx.memory_estimate(CASE.problem, CASE.x0, CASE.y0, solver=solver, blocks_per_step=2).slots

    assert slots(optax.adam(0.05)) - slots(0.1) == 6 * (2 * 3 + 1) * 4  # two moments and a count


def test_settings_say_so_and_give_the_automatic_step_of_v_back():
    result = run()
    lines = {line.name: line for line in result.settings.lines}
    assert lines["lower_step"].value == "optax transformation"
    assert lines["lower_step"].chosen == "given"
    assert lines["inverse_step"].chosen == "automatic"
    assert isinstance(result.settings.solver.inverse_step, bx.PerEntry)
    again = bx.minimize(
        CASE.problem, CASE.x0, CASE.y0, **result.settings.arguments(), progress=None, every=20
    )
    np.testing.assert_allclose(again.x, result.x, rtol=0.05)


def test_settings_name_the_levels():
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y["a"] - block) ** 2) + jnp.sum((y["b"] - x) ** 2),
        {
            "a": lambda x, y, block, batch: jnp.sum((y - x) ** 2),
            "b": lambda x, y, block, batch: jnp.sum(y**2),
        },
        jnp.arange(8.0).reshape(4, 2),
    )
    y0 = {"a": jnp.zeros((4, 2)), "b": jnp.zeros((4, 2))}
    solver = bx.MMBO(0.05, lower_step={"a": optax.adam(0.1)})
    result = bx.minimize(problem, jnp.zeros(2), y0, solver=solver, steps=20, progress=None)
    lines = {line.name: line for line in result.settings.lines}
    assert lines["lower_step[a]"].value == "optax transformation"
    assert lines["lower_step[b]"].chosen == "automatic"
    assert set(result.settings.solver.inverse_step) == {"a"}  # that of b is shared with its lower step


def test_restarts_and_recoveries_shrink_the_moves():
    solver = bx.SOBA(0.0, lower_step=optax.sgd(0.1), inverse_step=0.1)
    state = solver.init(CASE.problem, CASE.x0, CASE.y0, key=jax.random.key(0))
    whole, _ = solver.step(CASE.problem, state)
    staged, _ = solver.step(CASE.problem, state, stage=2)
    np.testing.assert_allclose(staged.y - state.y, (whole.y - state.y) / 2, rtol=1e-5, atol=1e-7)
    restraint = dataclasses.replace(state.restraint, lower=jnp.asarray(0.25))
    held, _ = solver.step(CASE.problem, dataclasses.replace(state, restraint=restraint))
    np.testing.assert_allclose(held.y - state.y, (whole.y - state.y) / 4, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore::bilevax.RecoveryWarning")
def test_too_long_a_transformation_is_shortened():
    result = run(bx.MMBO(0.01, lower_step=optax.sgd(30.0), inverse_step=0.1), steps=600)
    assert result.outcome is bx.Outcome.FINISHED
    assert {one.what for one in result.recoveries} == {"lower_step"}


def test_a_divergence_names_the_transformation():
    stop = bx.Stop(recover=False, verify=False)
    with pytest.raises(bx.DivergedError, match=r"lower_step=optax.chain\(…, optax.scale\(0.01\)\)"):
        run(bx.MMBO(0.01, lower_step=optax.sgd(30.0), inverse_step=0.1), steps=600, stop=stop)


def test_offsets_are_what_the_transformation_moves():
    """Weight decay on offsets pulls y towards x, not towards 0."""
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y - block) ** 2),
        bx.argmin(lambda x, y, block, batch: 0.0 * jnp.sum(y * x), around=lambda x: x),
        jnp.ones((4, 2)),
    )
    decay = optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-0.5))
    solver = bx.SOBA(0.0, lower_step=decay, inverse_step=0.0)
    x0 = jnp.array([1.0, 2.0])
    result = bx.minimize(problem, x0, jnp.zeros((4, 2)), solver=solver, steps=30, progress=None)
    np.testing.assert_allclose(result.y, jnp.broadcast_to(x0, (4, 2)), atol=1e-5)


def test_slots_shared_by_blocks_have_one_state_each():
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        bx.argmin(
            lambda x, y, block, batch: jnp.sum((y - 1.0) ** 2),
            slots=lambda block, batch: block[:2].astype(int),
            count=5,
        ),
        jnp.array([[0, 1], [2, 3], [3, 4]]),
    )
    solver = bx.MMBO(0.1, lower_step=optax.adam(0.1))
    options = {"steps": 300, "blocks_per_step": 1, "progress": None}
    result = bx.minimize(problem, jnp.full((), 3.0), jnp.zeros(5), solver=solver, **options)
    assert result.state.levels["lower"].y.optimizer[0].mu.shape == (5,)
    np.testing.assert_allclose(result.y, 1, atol=0.05)


@pytest.mark.parametrize("method", LAZY)
@pytest.mark.parametrize("by_level", [False, True])
def test_lazy_methods_refuse_a_transformation_by_name(method, by_level):
    if by_level and method is bx.RSVRB:
        pytest.skip("it has one level")
    step = {"a": optax.adam(0.1)} if by_level else optax.adam(0.1)
    with pytest.raises(
        TypeError, match=rf"lower_step of {method.__name__} .*optax.*Use MMBO, MASOBA or SOBA"
    ):
        method(0.1, lower_step=step)


def test_bad_transformations_are_named():
    with pytest.raises(TypeError, match=r"inverse_step must be a number or a schedule"):
        bx.MMBO(0.1, inverse_step=optax.adam(0.1))
    with pytest.raises(TypeError, match=r"inverse_step of the lower level 'lower' .*got a PerEntry"):
        run(bx.MMBO(0.1, lower_step=0.1, inverse_step=bx.PerEntry(0.1, jnp.ones(3))))
    with pytest.raises(TypeError, match=r"lower_step of the lower level 'lower', update, fails.*value"):
        run(bx.MMBO(0.1, lower_step=optax.polyak_sgd()))
    keys = optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, jax.random.key(0)))
    with pytest.raises(TypeError, match=r"the state of .*must hold numbers, got key"):
        run(bx.MMBO(0.1, lower_step=keys))
    wide = optax.GradientTransformation(lambda y: (), lambda g, s, y=None: (jnp.zeros(7), s))
    with pytest.raises(ValueError, match=r"must return moves of the shapes of y, float32\[3\]"):
        run(bx.MMBO(0.1, lower_step=wide))
    growing = optax.GradientTransformation(
        lambda y: jnp.zeros(1), lambda g, s, y=None: (g, jnp.concatenate([s, s]))
    )
    with pytest.raises(ValueError, match=r"must return a state of the shapes of the one before"):
        run(bx.MMBO(0.1, lower_step=growing))


def test_a_tracker_with_steps_of_its_own_refuses_it():
    class Plain(Tracker):
        coefficients = frozenset({"lower_step"})

        def blank(self, y, corrected, lazy, smoothness):
            return Memory(y=Moving(y, y, None))

    class Method(bx.SOBA):
        curvature = Plain()

    with pytest.raises(TypeError, match=r"its tracker Plain takes plain steps only"):
        run(Method(0.1, lower_step=optax.adam(0.1)))
