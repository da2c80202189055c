"""The compiler that is installed is none that computes something wrong."""

import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bilevax._util.compiler import WRONG_SUMS, warn_of_wrong_sums


def test_a_compiler_with_wrong_sums_is_excluded_and_warned_of():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = project["project"]["dependencies"]
    (excluded,) = (one for one in requirements if one.startswith("jaxlib"))
    assert set(excluded.removeprefix("jaxlib!=").split(",!=")) == WRONG_SUMS
    for version in WRONG_SUMS:
        with pytest.warns(RuntimeWarning, match=f"jaxlib {version} computes wrong sums"):
            warn_of_wrong_sums(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_wrong_sums()


def test_the_installed_compiler_sums_products_of_many_numbers_right():
    matrix, column = jnp.eye(3), jnp.stack([jnp.arange(2**15 + 1.0)] + 2 * [jnp.zeros(2**15 + 1)], 1)
    last = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(column)[-1]
    assert float(last) == 2.0**30
