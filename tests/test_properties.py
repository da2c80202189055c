"""Whatever valid problem it is given, a run keeps shapes and finiteness, and lazy means eager."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from calls import grouped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bilevax as bx

# Every example compiles a program of its own: few examples, each different, the same in every run.
FEW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def leaf_shapes():
    return st.lists(st.integers(1, 3), min_size=0, max_size=2).map(tuple)


@st.composite
def trees(draw):
    """The shape of a variable: one array, a dict, or a nest of tuples and lists."""
    leaves = draw(st.lists(leaf_shapes(), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["one", "dict", "nested"]))
    if kind == "one":
        return leaves[0]
    if kind == "dict":
        return {f"part{place}": shape for place, shape in enumerate(leaves)}
    return {"inner": [leaves[0]], "rest": {f"part{place}": shape for place, shape in enumerate(leaves[1:])}}


@st.composite
def cases(draw):
    """A problem with ragged blocks (some of one row), any trees, dtypes and sampling."""
    m = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 5), min_size=m, max_size=m))
    return {
        "x": draw(trees()),
        "y": draw(trees()),
        "lengths": lengths,
        "dtype": draw(st.sampled_from([np.float32, np.float64])),
        "row_dtype": draw(st.sampled_from([np.float32, np.float64, np.int32, np.int8])),
        "shared": draw(st.booleans()),
        "mean": draw(st.booleans()),
        "blocks_per_step": draw(st.one_of(st.none(), st.integers(1, m))),
        "batch_size": draw(st.one_of(st.none(), st.integers(1, 4))),
        "shuffle": draw(st.booleans()),
        "initial_batch_size": draw(st.sampled_from([None, "all", 0, 3])),
        "seed": draw(st.integers(0, 1000)),
    }


def is_shape(tree):
    return isinstance(tree, tuple) and all(isinstance(size, int) for size in tree)


def filled(shapes, dtype, rng, lead=()):
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=lead + shape), dtype), shapes, is_leaf=is_shape
    )


def square(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def total(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


def build(case):
    """g = ½‖y‖² − (1 + row) Σy · tanh(Σx), f = ½‖y‖² + row Σy + ½‖x‖², up to factors."""
    rng = np.random.default_rng(case["seed"])
    dtype, m = case["dtype"], len(case["lengths"])
    x0, y0 = filled(case["x"], dtype, rng), filled(case["y"], dtype, rng, (m,))
    counts = {"upper": sum(case["lengths"]), "lower": sum(case["lengths"])}

    def source(which):
        rows = {"value": rng.integers(-1, 2, counts[which]).astype(case["row_dtype"])}
        if case["shared"]:
            return bx.Shared(rows)
        return bx.PerBlock(rows, np.cumsum([0, *case["lengths"]]))

    def size(batch):
        return jnp.mean(batch["value"].astype(dtype))

    def upper(x, y, block, batch):
        return 0.5 * square(y) + 0.1 * size(batch) * total(y) + 0.5 * square(x)

    def lower(x, y, block, batch):
        return 0.5 * square(y) - 0.1 * (1 + size(batch)) * total(y) * jnp.tanh(total(x))

    def inner(x, block, batch):
        slope = 0.1 * (1 + size(batch)) * jnp.tanh(total(x))
        return jax.tree.map(
            lambda shape: jnp.broadcast_to(slope, shape).astype(dtype), case["y"], is_leaf=is_shape
        )

    level = bx.mean(inner) if case["mean"] else lower
    problem = bx.Problem(upper, level, m, source("upper"), source("lower"))
    return problem, x0, (None if case["mean"] else y0), filled(case["y"], dtype, rng, (m,))


def sampling(case):
    return {name: case[name] for name in ("blocks_per_step", "batch_size", "shuffle", "initial_batch_size")}


def check_tree(got, like):
    assert jax.tree.structure(got) == jax.tree.structure(like)
    for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        assert np.isfinite(leaf).all()


@FEW
@given(case=cases(), name=st.sampled_from(["BSVRBv1", "BSVRBv2", "KSONG", "MMBO", "MSVR", "SONG", "RSVRB"]))
def test_any_valid_problem_runs_and_keeps_its_shapes(case, name):
    if name in ("MSVR", "SONG"):
        case["mean"] = True
    if name == "RSVRB":
        case["mean"] = False
    with jax.enable_x64(True):
        problem, x0, y0, like_y = build(case)
        result = bx.minimize(
            problem,
            x0,
            y0,
            solver=getattr(bx, name)(upper_step=0.01),
            steps=7,
            key=jax.random.key(case["seed"]),
            progress=None,
            **grouped(**sampling(case)),
        )
        check_tree(result.x, x0)
        check_tree(result.y, like_y)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.levels))
        assert result.outcome is bx.Outcome.FINISHED


@settings(FEW, max_examples=5)
@given(case=cases(), curvature=st.sampled_from(["BSVRBv1", "BSVRBv2"]), steps=st.integers(1, 12))
def test_lazy_updates_are_eager_ones_for_any_schedule(case, curvature, steps):
    """y of every block moves along its own tracked gradient in every step, visited or not."""
    case |= {"dtype": np.float64, "mean": False}
    with jax.enable_x64(True):
        problem, x0, y0, _ = build(case)
        step = lambda t: 0.05 / (1 + t)  # noqa: E731
        solver = getattr(bx, curvature)(upper_step=0.01, lower_step=step)
        init = eqx.filter_jit(solver.init)
        state = init(problem, x0, y0, key=jax.random.key(case["seed"]), **grouped(**sampling(case)))

        @jax.jit
        def take(problem, state):
            state, _ = solver.step(problem, state)
            return state, state.y, state.levels["lower"].y.slope

        eager = jax.tree.map(np.asarray, y0)
        for number in range(steps):
            state, lazy, slope = take(problem, state)
            eager = jax.tree.map(lambda y, s, t=number: y - step(t) * np.asarray(s), eager, slope)
            for one, moved in zip(jax.tree.leaves(lazy), jax.tree.leaves(eager), strict=True):
                np.testing.assert_allclose(one, moved, rtol=1e-12, atol=1e-13)


@FEW
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    size=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([np.float32, np.int32, np.int8, np.bool_]),
)
def test_a_block_sees_its_own_rows_only(lengths, size, seed, dtype):
    offsets = np.cumsum([0, *lengths])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = bx.PerBlock({"owner": owner, "value": (owner % 2).astype(dtype)}, offsets)
    blocks = np.arange(len(lengths))

    @jax.jit
    def draw(rows, key):
        random = bx.Stream.start(key)
        return [rows.draw(random, jnp.asarray(blocks), count) for count in (size, None)]

    for drawn in jax.tree.map(np.asarray, draw(rows, jax.random.key(seed))):
        assert drawn.rows["value"].dtype == dtype
        assert (drawn.rows["owner"] == blocks[:, None]).all()
        if drawn.weight is not None:
            np.testing.assert_allclose(drawn.weight.sum(1), 1, rtol=1e-6)
            np.testing.assert_array_equal((drawn.weight > 0).sum(1), lengths)
