"""Programs that are found on disk without tracing: which calls are the same, and that results are."""

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._util import stored
from bilevax._util.described import Description, UnknownError
from bilevax._util.hurried import HurriedJit

SCALE = 2.0


def helper(x):
    return SCALE * x


def digest(*values):
    return Description(*values).digest


def scaled(by):
    return lambda x: by * x


def test_given_arrays_count_by_shape_and_those_closed_over_by_their_entries():
    assert digest(jnp.ones(3)) == digest(np.zeros(3, np.float32)) != digest(jnp.ones(4))
    assert digest(jnp.ones(3)) == digest(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert digest(scaled(jnp.ones(3))) == digest(scaled(jnp.ones(3))) != digest(scaled(jnp.zeros(3)))


def test_code_closures_defaults_and_globals_tell_functions_apart(monkeypatch):
    functions = {
        "x": lambda x: x,
        "x + 1": lambda x: x + 1,
        "x + 1.0": lambda x: x + 1.0,
        "x + 2": lambda x: x + 2,
        "a default": lambda x, y=2: x + y,
        "another": lambda x, y=3: x + y,
        "closed over": scaled(2.0),
        "another, closed over": scaled(3.0),
        "partial": functools.partial(helper, x=1),
        "another partial": functools.partial(helper, x=2),
        "nested": lambda x: [one + 1 for one in x],
        "another nested": lambda x: [one + 2 for one in x],
        "called": lambda x: helper(x),
    }
    found = {name: digest(function) for name, function in functions.items()}
    assert len(set(found.values())) == len(functions)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert digest(functions["called"]) != found["called"]  # two functions away
    assert digest(functions["closed over"]) == found["closed over"]


class Mine:
    pass


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x * float(os.environ["SCALE"]),
        lambda x: x * np.random.normal(),
        lambda x: x * eval("SCALE"),
        lambda x: x * pytest.approx(1),
        scaled(Mine()),
        Mine(),
        jax.jit(helper),
    ],
)
def test_what_may_depend_on_more_than_values_is_not_described(value):
    with pytest.raises(UnknownError):
        digest(value)


def test_what_a_function_needs_of_known_packages_is_described():
    def f(x):
        from jax.nn import softplus

        return math.pi * jnp.mean(softplus(x)) + bx.dot(x, x) + jax.random.normal(jax.random.key(0))

    assert digest(f) == digest(f)


@pytest.fixture
def traced():
    """The names of what is traced."""
    names = []

    def note(event, duration, **about):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def a_run(times):
    def upper(x, y, block, batch):
        return times * jnp.sum((y - block) ** 2)

    def lower(x, y, block, batch):
        return jnp.sum((y - x) ** 2)

    problem = bx.Problem(upper, lower, jnp.arange(8.0).reshape(4, 2))
    return bx.minimize(problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=bx.BSVRBv2(), steps=40, progress=None)


@pytest.fixture
def processes(monkeypatch):
    """Forgets what is compiled, as a new process has none of it."""
    made, program = [], HurriedJit.program

    def noted(self, small):
        made.append(self)
        return program(self, small)

    monkeypatch.setattr(HurriedJit, "program", noted)

    def forget():
        for one in made:
            one._programs.clear()
        jax.clear_caches()

    jax.clear_caches()  # what was compiled before is not written
    yield forget
    forget()


def test_a_second_process_traces_no_step_and_has_the_same_bits(tmp_path, traced, processes):
    with no_cache_of_jax(), bx.program_cache(tmp_path):
        first = a_run(1.0)
        assert {"start_program", "chunk_program"} <= set(traced)
        processes()
        traced.clear()
        second = a_run(1.0)
        assert not {"start_program", "chunk_program", "sizes"} & set(traced)
        for one, other in zip(*map(jax.tree.leaves, (first.state, second.state)), strict=True):
            np.testing.assert_array_equal(key_data(one), key_data(other))
        assert jax.tree.structure(first.state) == jax.tree.structure(second.state)
        processes()
        traced.clear()
        a_run(2.0)  # another f
        assert {"start_program", "chunk_program"} <= set(traced)


def test_damaged_programs_are_made_again(tmp_path, traced, processes):
    with no_cache_of_jax(), bx.program_cache(tmp_path):
        first = a_run(1.0)
        files = list((tmp_path / "untraced").iterdir())
        assert len(files) >= 3
        for path in files:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        processes()
        traced.clear()
        second = a_run(1.0)
    assert {"start_program", "chunk_program"} <= set(traced)
    np.testing.assert_array_equal(first.x, second.x)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions of POSIX")
def test_a_folder_that_others_may_write_to_is_left_alone(tmp_path):
    folder = tmp_path / "untraced"
    folder.mkdir()
    folder.chmod(0o777)
    with stored.kept_in(tmp_path):
        assert not stored.is_on()
    folder.chmod(0o700)
    with stored.kept_in(tmp_path):
        assert stored.is_on()


def test_nothing_is_kept_without_being_asked_for(tmp_path):
    assert not stored.is_on()
    assert stored.place_of("some", helper, {}, None, (jnp.ones(2),)) is None


def key_data(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


class no_cache_of_jax:  # noqa: N801
    """The cache that the session's tests share is put aside."""

    name = "jax_compilation_cache_dir"

    def __enter__(self):
        self.before = getattr(jax.config, self.name)
        jax.config.update(self.name, None)

    def __exit__(self, *_):
        jax.config.update(self.name, self.before)
