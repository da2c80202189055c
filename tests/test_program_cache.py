"""Compiled programs on disk: what is kept, where, and what happens if that is not possible."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import bilevax as bx

SOLVE = """
import jax, jax.numpy as jnp, bilevax as bx
from jax import monitoring
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
problem = bx.Problem(
    upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
    lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
    blocks=jnp.arange(8.0).reshape(4, 2),
)
with bx.program_cache():
    result = bx.minimize(
        problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=bx.BSVRBv1(0.1), steps=5, progress=None,
    )
print(len(hits), [float(value).hex() for value in result.x])
"""


def solved(folder):
    """How many programs were read, and x, of a run in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMP")}
    environment |= {"BILEVAX_PROGRAMS": str(folder)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SOLVE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    hits, x = done.stdout.strip().splitlines()[-1].split(" ", 1)
    return int(hits), x


def test_a_second_process_reads_what_the_first_compiled_and_damage_only_costs_time(tmp_path):
    hits, x = solved(tmp_path)
    assert hits == 0
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and "-cache" in file.name]
    untraced = [file for file in (tmp_path / "untraced").iterdir() if file.stat().st_size > 1000]
    assert len(kept) > 5
    assert len(untraced) >= 3
    assert any(b"lapack_" in file.read_bytes() for file in untraced)  # which tracing sets up
    hits, again = solved(tmp_path)
    assert (hits, again) == (len(kept) - len(untraced), x)  # those are not even looked for in JAX's cache
    for file in kept + untraced:
        file.write_bytes(file.read_bytes()[:100])
    hits, again = solved(tmp_path)
    assert again == x


@contextlib.contextmanager
def configured(folder):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_configuration_is_that_of_before_when_the_context_ends(tmp_path):
    @bx.program_cache(tmp_path / "new")
    def fail():
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new")
        jax.jit(lambda x: x + len(str(tmp_path)))(jnp.ones(3))
        raise KeyError

    with configured(None):
        with pytest.raises(KeyError):
            fail()
        assert jax.config.jax_compilation_cache_dir is None
    assert list((tmp_path / "new").iterdir())


def test_a_cache_of_the_users_own_is_left_alone(tmp_path):
    with configured(str(tmp_path / "own")), bx.program_cache(tmp_path / "other") as folder:
        assert folder == tmp_path / "own"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("word", ["off", "0", "False"])
def test_nothing_is_kept_where_that_is_switched_off(word, monkeypatch):
    monkeypatch.setenv("BILEVAX_PROGRAMS", word)
    with configured(None), bx.program_cache() as folder:
        assert folder is None
        assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    with configured(None), bx.program_cache(tmp_path / "file" / "programs") as folder:
        assert folder is None


def test_programs_are_kept_beside_downloads(tmp_path, monkeypatch):
    monkeypatch.delenv("BILEVAX_PROGRAMS", raising=False)
    monkeypatch.setenv("BILEVAX_CACHE", str(tmp_path))
    with configured(None), bx.program_cache() as folder:
        assert folder == tmp_path / "programs"


def test_importing_the_library_sets_up_no_cache():
    check = "import bilevax, jax; assert jax.config.jax_compilation_cache_dir is None"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMP")}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)
