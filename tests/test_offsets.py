"""y is stored as offsets from x unasked where it is pushed along with x, in the same units."""

import jax.numpy as jnp
import pytest

import bilevax as bx


def run(lower, x0=None, y0=None, **options):
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum((y - block) ** 2), lower, jnp.arange(8.0).reshape(4, 2)
    )
    x0, y0 = jnp.zeros(2) if x0 is None else x0, jnp.zeros((4, 2)) if y0 is None else y0
    options = {"solver": bx.MMBO(), "steps": 5, "progress": None, "blocks_per_step": 2} | options
    return bx.minimize(problem, x0, y0, **options)


def near(x, y, block, batch):
    return jnp.sum((y - block) ** 2) + 0.5 * jnp.sum((y - x) ** 2)


def test_a_proximal_level_is_stored_as_offsets_and_the_settings_say_so():
    result = run(near)
    assert [name for name, _ in result.state.centres] == ["lower"]
    assert "around" in str(result.settings)


def test_the_part_of_x_that_has_the_shape_of_y_is_found():
    result = run(lambda x, *rest: near(x["prior"], *rest), x0={"prior": jnp.zeros(2), "more": jnp.zeros(3)})
    ((_, centre),) = result.state.centres
    assert centre.key == "prior"


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_x_in_other_units_is_no_centre(scale):
    assert run(lambda x, y, block, batch: jnp.sum((y - x / scale) ** 2)).state.centres == ()


@pytest.mark.parametrize(
    ("lower", "options"),
    [
        (bx.argmin(near, around=False), {}),
        (near, {"solver": bx.MMBO(lower_step=0.1)}),
        (near, {"solver": bx.BlockNewton()}),
        (lambda x, y, block, batch: jnp.sum((y + x) ** 2), {}),
    ],
    ids=["forbidden", "step given", "newton", "opposed"],
)
def test_others_are_stored_as_they_are(lower, options):
    assert run(lower, **options).state.centres == ()
