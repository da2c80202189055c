"""Products with one vector: the same on every machine, and under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_dot_is_the_product(backend, shape, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    rows, other = (jnp.asarray(rng.normal(size=(4, 5)), jnp.float32) for _ in range(2))
    vector, along = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))

    def both(function):
        return function(bx.dot), function(jnp.matmul)

    for transformed in (
        lambda f: f(rows, vector),
        lambda f: jax.vmap(f, (0, None))(jnp.stack([rows, other]), vector),
        lambda f: jax.vmap(f, (None, 0))(rows, jnp.stack([vector, along])),
        lambda f: jax.jvp(lambda v: f(rows, v), (vector,), (along,))[1],
        lambda f: jax.grad(lambda v: jnp.sum(jnp.tanh(f(rows, v))))(vector),
        lambda f: jax.grad(lambda r: jnp.sum(jnp.tanh(f(r, vector))))(rows),
        lambda f: jax.hessian(lambda v: jnp.sum(jnp.tanh(f(rows, v))))(vector),
    ):
        mine, plain = both(transformed)
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


def test_on_an_accelerator_it_is_a_sum(monkeypatch):
    def is_product(backend, *shape):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        program = jax.make_jaxpr(lambda *both: bx.dot(*both))(jnp.ones((4, 5)), jnp.ones(shape))
        return "dot_general" in str(program)

    assert not is_product("gpu", 5)
    assert is_product("gpu", 5, 2)
    assert is_product("cpu", 5)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize(("rows", "vector"), [((4, 5), (1,)), ((4, 1), (5,)), ((4, 5), (4,)), ((4, 5), ())])
def test_shapes_that_do_not_fit_are_refused(backend, rows, vector, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with pytest.raises(ValueError, match="rows must be as wide as vector is long, got shapes"):
        bx.dot(jnp.ones(rows), jnp.ones(vector))
