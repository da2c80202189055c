"""The three gradients of ℓ against closed forms, block by block, on the very rows of the sample."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import problems

import bilevax as bx
from bilevax._problem.levels import Argmin
from bilevax._step.lagrangian import Point, gradients, hessians, upper_gradients

FAMILIES = [problems.QuadraticBlocks, problems.LogisticHyper, problems.MeanBlocks, problems.Mixed]
BLOCKS = np.array([3, 0, 4])
TOLERANCE = 1e-10

pytestmark = pytest.mark.usefixtures("x64")


def source(rows, offsets):
    """The rows with their places, by which a sample tells which ones it holds."""
    rows = rows | {"place": np.arange(len(next(iter(rows.values()))))}
    return bx.Shared(rows) if offsets is None else bx.PerBlock(rows, offsets)


def as_library(reference):
    if isinstance(reference, problems.Mixed):
        lower = {"a": reference.lower, "b": bx.mean(reference.inner)}
    elif isinstance(reference, problems.MeanBlocks):
        lower = bx.mean(reference.inner)
    else:
        lower = reference.lower
    return bx.Problem(
        reference.upper,
        lower,
        reference.blocks,
        source(reference.upper_rows, reference.upper_offsets),
        source(reference.lower_rows, reference.lower_offsets),
    )


def rows_of(batch):
    """The places of the rows of every sampled block, without padding."""
    places = np.asarray(batch.rows["place"])
    if batch.shared:
        places = np.broadcast_to(places, (len(BLOCKS), *places.shape))
    weights = np.ones(places.shape) if batch.weight is None else np.asarray(batch.weight)
    return [own[weight > 0] for own, weight in zip(places, weights, strict=True)]


@functools.cache
def looked_at(family, ragged, batch_size):
    """A problem, a point, and all that the library and the closed forms say there."""
    reference = family(ragged=ragged, seed=2)
    problem = as_library(reference)
    rng = np.random.default_rng(1)
    x = rng.normal(size=reference.dx)
    widths = {"a": reference.dy, "b": reference.db} if problem.named else {"lower": reference.dy}
    y, v = ({name: rng.normal(size=(len(BLOCKS), width)) for name, width in widths.items()} for _ in range(2))
    sampler = bx.Sampling(len(BLOCKS), batch_size).sampler(problem, jax.random.key(0))

    @jax.jit
    def look(problem, x, y, v):
        sample = sampler.visit(problem, jnp.asarray(BLOCKS), sampler.random, batch_size)
        point = Point(x, y)
        curved = [name for name, level in problem.levels.items() if isinstance(level, Argmin)]
        found = {name: hessians(problem, name, point, sample) for name in curved}
        return gradients(problem, point, v, sample), upper_gradients(problem, point, sample), found, sample

    seen, by_y, found, sample = look(problem, jnp.asarray(x), y, v)
    lower = next(iter(sample.lower.values()))
    expected = [
        closed_form(
            reference, i, x, {n: a[k] for n, a in y.items()}, {n: a[k] for n, a in v.items()}, upper, own
        )
        for k, (i, upper, own) in enumerate(zip(BLOCKS, rows_of(sample.upper), rows_of(lower), strict=True))
    ]
    return seen, by_y, found, expected


def closed_form(reference, i, x, y, v, upper, lower):
    """A block's ∂ℓ/∂x, and per level ∂ℓ/∂y, ∂ℓ/∂v, ∇_y f and ∇²_yy g, from the pieces on its own rows."""
    if isinstance(reference, problems.Mixed):
        f_x = reference.f_x(i, x, y["a"], y["b"], upper)
        f_y = {
            "a": reference.f_a(i, x, y["a"], y["b"], upper),
            "b": reference.f_b(i, x, y["a"], y["b"], upper),
        }
        means = {"b"}
    else:
        f_x, f_y = reference.f_x(i, x, y["lower"], upper), {"lower": reference.f_y(i, x, y["lower"], upper)}
        means = {"lower"} if isinstance(reference, problems.MeanBlocks) else set()
    by_x, by_y, by_v, curvature = f_x, {}, {}, {}
    for name in y:
        if name in means:
            by_x = by_x + reference.c_x(i, x, lower) @ v[name]
            by_y[name], by_v[name] = f_y[name], reference.c(i, x, lower)
        else:
            curvature[name] = reference.g_yy(i, x, y[name], lower)
            by_x = by_x - reference.g_xy(i, x, y[name], lower) @ v[name]
            by_y[name] = f_y[name] - curvature[name] @ v[name]
            by_v[name] = -reference.g_y(i, x, y[name], lower)
    block, batch = reference.block(i), reference.upper_batch(upper)
    f = float(reference.upper(x, y if "a" in y else y["lower"], block, batch))
    return {"x": by_x, "y": by_y, "v": by_v, "f_y": f_y, "g_yy": curvature, "f": f}


def stacked(expected, piece):
    return {name: np.stack([one[piece][name] for one in expected]) for name in expected[0][piece]}


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == np.float64
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


every_problem = pytest.mark.parametrize(
    ("family", "ragged", "batch_size"),
    [(family, ragged, size) for family in FAMILIES for ragged in (False, True) for size in (4, None)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)


@every_problem
def test_the_gradient_in_x_is_the_mean_hyper_gradient_term(family, ragged, batch_size):
    seen, _, _, expected = looked_at(family, ragged, batch_size)
    close(seen.x, np.mean([one["x"] for one in expected], axis=0))


@every_problem
def test_the_gradient_in_y_is_that_of_the_quadratic_in_v(family, ragged, batch_size):
    seen, _, _, expected = looked_at(family, ragged, batch_size)
    close(seen.y, stacked(expected, "y"))


@every_problem
def test_the_gradient_in_v_is_the_lower_gradient_or_the_mean(family, ragged, batch_size):
    seen, _, _, expected = looked_at(family, ragged, batch_size)
    close(seen.v, stacked(expected, "v"))


@every_problem
def test_upper_gradients_hessians_and_the_objective_are_those_of_the_pieces(family, ragged, batch_size):
    seen, by_y, found, expected = looked_at(family, ragged, batch_size)
    close(by_y, stacked(expected, "f_y"))
    close(found, stacked(expected, "g_yy"))
    np.testing.assert_allclose(seen.objective, np.mean([one["f"] for one in expected]), atol=TOLERANCE)


def half_problem(dtype):
    """∇_y g_i is 2e-5 in every block."""
    return bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(x * y),
        lower=lambda x, y, block, batch: jnp.asarray(2e-5, dtype) * jnp.sum(y) + jnp.sum(x * y),
        blocks=jnp.zeros(1000, dtype),
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_have_the_precision_of_their_dtype_with_either_sign(dtype, sign):
    problem = half_problem(dtype)
    sample = bx.Sampling().sampler(problem, jax.random.key(0)).draw(problem, jnp.asarray(0))
    x, y = jnp.zeros(2, dtype), {"lower": jnp.ones((1000, 2), dtype)}
    seen = gradients(problem, Point(x, y), y, sample, sign)
    precision = 2 * float(jnp.finfo(dtype).eps)
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    np.testing.assert_allclose(np.asarray(seen.v["lower"], float), -2e-5, rtol=precision, atol=smallest)
    # f and −⟨v, ∇_y g⟩ cancel at x: y − v = 0.
    np.testing.assert_allclose(np.asarray(seen.x, float), 0, atol=precision)
    shifted = gradients(problem, Point(x, {"lower": 3 * y["lower"]}), y, sample, sign)
    np.testing.assert_allclose(np.asarray(shifted.x, float), 2 * sign, rtol=4 * precision)  # a sum of 1,000
