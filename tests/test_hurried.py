"""Which programs are compiled in a hurry, and that this changes nothing but the time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._run import chunks
from bilevax._util import hurried
from bilevax._util.hurried import FEW, HurriedJit


@pytest.fixture
def sizes(monkeypatch):
    """Which sizes of program are asked for."""
    asked, program = [], HurriedJit.program

    def noted(self, small):
        asked.append((self.__name__, small))
        return program(self, small)

    monkeypatch.setattr(HurriedJit, "program", noted)
    return asked


def test_the_numbers_that_all_calls_read_decide(sizes):
    def double(x):
        return 2 * x

    once, often = HurriedJit(double), HurriedJit(double, calls=FEW)
    np.testing.assert_array_equal(once(np.ones(3)), 2 * np.ones(3))
    often(np.ones(3))
    once(np.ones(3), work=FEW + 1)
    assert [small for _, small in sizes] == [True, False, False]


def test_within_another_program_nothing_is_compiled_apart(sizes):
    inner = HurriedJit(lambda x: x + 1)
    assert float(jax.jit(inner)(1.0)) == 2.0
    assert sizes == []


def test_what_another_program_knows_is_computed_while_that_is_traced(sizes):
    inner = HurriedJit(lambda x: x + 1)
    assert float(jax.jit(lambda x: x * inner(np.float32(1)))(2.0)) == 4.0
    assert len(sizes) == 1


def test_options_that_the_compiler_does_not_know_are_left_out(monkeypatch):
    known = hurried.hurry()
    monkeypatch.setattr(hurried, "_OPTIONS", {"xla_there_is_no_such_option": True} | known)
    assert hurried.hurry.__wrapped__() == known


PROBLEM = bx.Problem(
    upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
    lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
    blocks=jnp.arange(8.0).reshape(4, 2),
)


@pytest.mark.parametrize(("steps", "small"), [(5, True), (10**7, False)])
def test_how_many_steps_a_run_has_decides_how_it_is_compiled(steps, small, sizes):
    seen = []

    class SeenError(Exception):
        pass

    def end(problem, state):
        seen.append(int(state.step))
        raise SeenError

    with pytest.raises(SeenError):
        bx.minimize(
            PROBLEM,
            jnp.zeros(2),
            jnp.zeros((4, 2)),
            solver=bx.SOBA(0.1, lower_step=0.1, inverse_step=0.1),
            steps=steps,
            every=2,
            metrics={"end": end},
            progress=None,
        )
    assert seen == [2]
    assert {kind for name, kind in sizes if name == "chunk_program"} == {small}


def test_the_work_of_a_run_grows_with_its_steps_and_its_batches():
    def work(steps, per_step):
        solver = bx.SOBA(0.1, lower_step=0.1, inverse_step=0.1)
        state = solver.init(
            PROBLEM, jnp.zeros(2), jnp.zeros((4, 2)), key=jax.random.key(0), blocks_per_step=per_step
        )
        return chunks.work_of(PROBLEM, state, steps)

    assert work(20, 1) == 2 * work(10, 1)
    assert work(10, 4) > work(10, 1)


@pytest.fixture
def compiled():
    """The names of the programs that are traced, lowered or compiled, one entry for each of these."""
    names = []

    def note(event, duration, **about):
        if event.startswith("/jax/core/compile/"):
            names.append(str(about.get("fun_name")).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_prepared_program_is_traced_and_compiled_once(compiled):
    def doubled(tree, number, name):
        return {"twice": 2 * tree["a"], "weak": number * 1.0, "name": name}

    program = HurriedJit(doubled)
    given = {"a": jnp.ones(3, jnp.bfloat16)}, jnp.asarray(2.0)
    shapes = program.prepare({"a": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}, given[1], "some")
    assert shapes["name"] == "some"
    compiled_before = compiled.count("doubled")
    found = program(*given, "some")
    assert compiled.count("doubled") == 3  # one of each
    assert compiled_before <= 3
    for name in ("twice", "weak"):
        assert (shapes[name].shape, shapes[name].dtype) == (found[name].shape, found[name].dtype)
        assert shapes[name].weak_type == found[name].weak_type
    np.testing.assert_array_equal(found["twice"], [2, 2, 2])


def test_a_program_takes_over_all_but_what_the_caller_keeps():
    program = HurriedJit(lambda a, b: (a + b, b * 2), kept=1)
    kept, taken = jnp.ones(3), jnp.ones(3)
    program(kept, taken)
    assert not kept.is_deleted()
    assert taken.is_deleted()


def test_what_is_wrong_with_a_prepared_program_shows_when_it_is_prepared_and_called():
    def wrong(x):
        raise LookupError("no such thing")

    program = HurriedJit(wrong)
    with pytest.raises(LookupError):
        program.prepare(jnp.ones(2))
    with pytest.raises(LookupError):
        program(jnp.ones(2))


def test_a_run_traces_its_programs_once(compiled):
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - 2 * block) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=jnp.arange(8.0).reshape(4, 2),
    )
    bx.minimize(problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=bx.BSVRBv2(), steps=3, progress=None)
    for name in ("start_program", "chunk_program", "looked_at"):
        assert compiled.count(name) == 3, name
    assert "copy_of" not in compiled  # `looked_at` copies the state
