"""The diagnostics are exact: against closed forms, NumPy truths and finite differences."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import grouped
from reference import algorithms, problems

import bilevax as bx
from benchmarks.newcomer_cases import huber_sensors
from bilevax._truth import exact

ARGMIN = [problems.QuadraticBlocks, problems.LogisticHyper]
RAGGED = pytest.mark.parametrize("ragged", [False, True])
double = pytest.mark.usefixtures("x64")


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def source(rows, offsets):
    return bx.Shared(rows) if offsets is None else bx.PerBlock(rows, offsets)


def as_problem(truth, lower=None):
    """The problem a user would write for one of the reference problems."""
    return bx.Problem(
        truth.upper,
        truth.lower if lower is None else lower,
        truth.blocks,
        source(truth.upper_rows, truth.upper_offsets),
        source(truth.lower_rows, truth.lower_offsets),
    )


def mean_of_upper(truth, x, y):
    """(1/m) Σ f_i(x, y_i), block by block, where y is a list of what `upper` takes."""
    rows = [truth.upper_batch(truth.upper_of(i)) for i in range(truth.m)]
    return np.mean([truth.upper(x, y[i], truth.block(i), rows[i]) for i in range(truth.m)])


def rms(errors):
    return np.sqrt(np.mean(np.sum(np.asarray(errors) ** 2, axis=-1)))


def centred(upper=None, **options):
    """Blocks y_i(x) = block_i · x in closed form, of which one shape of y fits."""
    return bx.Problem(
        upper=upper or (lambda x, y, block, batch: jnp.sum(y**2)),
        lower=lambda x, y, block, batch: jnp.sum((y - block * x) ** 2),
        **{"blocks": jnp.arange(6.0).reshape(3, 2)} | options,
    )


# --- exactness ------------------------------------------------------------------


@double
@RAGGED
@pytest.mark.parametrize("family", ARGMIN)
def test_argmin_levels_match_the_numpy_truth(family, ragged):
    truth = family(ragged=ragged)
    problem, start = as_problem(truth), problems.random_start(truth)
    expected = algorithms.solve_lower(truth, start.x, start.y)
    close(bx.solve_lower(problem, start.x), expected)
    close(bx.solve_lower(problem, start.x, start.y), expected)
    close(bx.objective(problem, start.x), mean_of_upper(truth, start.x, expected))
    gradient = algorithms.hypergradient(truth, start.x, start.y)
    close(bx.hypergradient(problem, start.x), gradient)
    close(bx.hypergradient(problem, start.x, start.y), gradient)


@double
@RAGGED
def test_mean_levels_match_the_numpy_truth(ragged):
    truth = problems.MeanBlocks(ragged=ragged)
    problem, x = as_problem(truth, bx.mean(truth.inner)), problems.random_start(truth).x
    expected = np.array([truth.c(i, x, truth.lower_of(i)) for i in range(truth.m)])
    close(bx.solve_lower(problem, x), expected)
    close(bx.objective(problem, x), mean_of_upper(truth, x, expected))
    close(bx.hypergradient(problem, x), algorithms.hypergradient_mean(truth, x))


@double
@RAGGED
def test_named_levels_of_both_kinds_match_the_numpy_truth(ragged):
    truth = problems.Mixed(ragged=ragged)
    problem = as_problem(truth, {"a": bx.argmin(truth.lower), "b": bx.mean(truth.inner)})
    start = problems.random_start(truth)
    x = start.x
    y_a = algorithms.solve_lower(truth, x, start.y_a)
    y_b = np.array([truth.c(i, x, truth.lower_of(i)) for i in range(truth.m)])
    terms = []
    for i in range(truth.m):
        lower, f = truth.lower_of(i), (i, x, y_a[i], y_b[i], truth.upper_of(i))
        v = np.linalg.solve(truth.g_yy(i, x, y_a[i], lower), truth.f_a(*f))
        terms.append(
            truth.f_x(*f) - truth.g_xy(i, x, y_a[i], lower) @ v + truth.c_x(i, x, lower) @ truth.f_b(*f)
        )
    for y0 in (None, {"a": start.y_a, "b": None}, {"a": None, "b": start.y_b}):
        y = bx.solve_lower(problem, x, y0)
        assert set(y) == {"a", "b"}
        close(y["a"], y_a)
        close(y["b"], y_b)
        close(bx.hypergradient(problem, x, y0), np.mean(terms, axis=0))
    pairs = [{"a": a, "b": b} for a, b in zip(y_a, y_b, strict=True)]
    close(bx.objective(problem, x), mean_of_upper(truth, x, pairs))


@double
def test_hypergradient_is_the_slope_of_the_objective():
    truth = problems.LogisticHyper(ragged=True)
    problem, x = as_problem(truth), problems.random_start(truth).x
    direction = np.random.default_rng(1).normal(size=truth.dx)
    ahead, behind = (bx.objective(problem, x + step * direction) for step in (1e-5, -1e-5))
    close(bx.hypergradient(problem, x) @ direction, (ahead - behind) / 2e-5, 1e-7)


@double
def test_x_and_y_may_be_any_pytrees():
    truth = problems.QuadraticBlocks(ragged=True)
    start = problems.random_start(truth)

    def joined(x, y):
        return jnp.concatenate([x["head"][None], x["tail"]]), jnp.stack([y[0], y[1][0]])

    def split(x, y):
        return {"head": x[0], "tail": x[1:]}, (y[:, 0], y[:, 1:])

    problem = bx.Problem(
        lambda x, y, *rest: truth.upper(*joined(x, y), *rest),
        lambda x, y, *rest: truth.lower(*joined(x, y), *rest),
        truth.blocks,
        source(truth.upper_rows, truth.upper_offsets),
        source(truth.lower_rows, truth.lower_offsets),
    )
    x, y0 = split(start.x, start.y)
    solution, gradient = bx.solve_lower(problem, x, y0), bx.hypergradient(problem, x, y0)
    expected = algorithms.solve_lower(truth, start.x, start.y)
    jax.tree.map(close, solution, split(start.x, expected)[1])
    jax.tree.map(close, gradient, split(algorithms.hypergradient(truth, start.x, start.y), start.y)[0])


@double
def test_high_dimensional_blocks_are_solved_without_a_hessian():
    size = exact._DENSE + 40
    rng = np.random.default_rng(0)
    curvature, target = np.geomspace(1, 1e3, size), rng.normal(size=(3, size))
    factor = rng.normal(size=(size, 4))
    hessian = np.diag(curvature) + factor @ factor.T

    def lower(x, y, block, batch):
        return 0.5 * jnp.sum(curvature * y**2) + 0.5 * jnp.sum((factor.T @ y) ** 2) - y @ (block * x)

    problem = bx.Problem(lambda x, y, block, batch: 0.5 * jnp.sum((y - block) ** 2), lower, target)
    x = rng.normal(size=size)
    y = np.linalg.solve(hessian, (target * x).T).T
    close(bx.solve_lower(problem, x), y, 1e-8)
    close(
        bx.hypergradient(problem, x),
        np.mean(target * np.linalg.solve(hessian, (y - target).T).T, axis=0),
        1e-8,
    )


@double
@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_scale_of_the_lower_objective_does_not_matter(scale):
    truth = problems.LogisticHyper()
    scaled = as_problem(truth, lambda *arguments: scale * truth.lower(*arguments))
    start = problems.random_start(truth)
    close(bx.solve_lower(scaled, start.x), algorithms.solve_lower(truth, start.x, start.y))
    close(bx.hypergradient(scaled, start.x), algorithms.hypergradient(truth, start.x, start.y))


@double
def test_a_start_at_the_edge_of_the_domain_is_left_safely():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: y**2,
        lower=lambda x, y, block, batch: y * x * block - jnp.log(y),
        blocks=jnp.array([0.01, 1.0, 100.0]),
    )
    close(bx.solve_lower(problem, 2.0, jnp.array([1e-6, 1e3, 1.0])), [50.0, 0.5, 0.005])


@double
def test_groups_of_blocks_give_what_all_blocks_at_once_give():
    truth = problems.QuadraticBlocks(m=7, ragged=True)
    problem, x = as_problem(truth), problems.random_start(truth).x
    for count in (1, 3):
        close(bx.solve_lower(problem, x, blocks_at_once=count), bx.solve_lower(problem, x))
        close(bx.objective(problem, x, blocks_at_once=count), bx.objective(problem, x))
        close(bx.hypergradient(problem, x, blocks_at_once=count), bx.hypergradient(problem, x))


@pytest.mark.parametrize("family", ARGMIN)
def test_single_precision_gives_single_precision_answers(family):
    truth = family(ragged=True)
    problem, start = as_problem(truth), problems.random_start(truth)
    x = jnp.asarray(start.x, jnp.float32)
    y, gradient = bx.solve_lower(problem, x), bx.hypergradient(problem, x)
    assert y.dtype == gradient.dtype == jnp.float32
    close(y, algorithms.solve_lower(truth, start.x, start.y), 1e-4)
    close(gradient, algorithms.hypergradient(truth, start.x, start.y), 1e-4)


@double
def test_the_dtype_is_that_of_x():
    start = jnp.ones((3, 2), jnp.float32)
    assert bx.solve_lower(centred(), jnp.ones(2, jnp.float64), start).dtype == jnp.float64
    assert bx.solve_lower(centred(), jnp.ones(2, jnp.float32), start.astype(jnp.float64)).dtype == jnp.float32


# --- cost -----------------------------------------------------------------------


@double
def test_another_x_compiles_nothing_anew(monkeypatch):
    traces = []
    minimise = exact._minimise
    monkeypatch.setattr(exact, "_minimise", lambda *args: traces.append(1) or minimise(*args))
    problem = centred()
    for value in (1.0, 2.0, 3.0):
        bx.solve_lower(problem, jnp.full(2, value))
    assert len(traces) == 1


@double
def test_shared_rows_are_not_copied_per_block():
    def lower(x, y, block, batch):
        return jnp.mean((batch @ x - y @ block) ** 2) + jnp.sum(y**2)

    problem = bx.Problem(
        lambda x, y, *_: jnp.sum(y**2), lower, jnp.ones((5, 2)), None, bx.Shared(jnp.ones((97, 7)))
    )
    plan = exact.Accuracy(1e-8, 9, 5)
    solve = jax.make_jaxpr(lambda x, y: exact._solve(problem, x, {"lower": y}, plan))
    text = str(solve(jnp.ones(7), jnp.ones((5, 2))))
    assert "[97,7]" in text
    assert "5,97,7]" not in text


# --- what cannot be solved --------------------------------------------------------


@double
def test_a_block_that_is_not_solved_is_named():
    def lower(x, y, block, batch):  # block 2 has no minimiser
        return jnp.sum(jnp.where(block > 3, jnp.exp(-y), (y - x) ** 2))

    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(y**2), lower, jnp.arange(5.0).reshape(5, 1))
    with pytest.raises(
        RuntimeError, match=r"lower level 'lower' of block 4 was not solved: ‖∇_y g‖ = .*1 of 5 blocks"
    ):
        bx.solve_lower(problem, 1.0)
    with pytest.raises(RuntimeError, match="not solved"):
        bx.objective(problem, 1.0)


def test_a_value_that_is_not_a_number_is_not_returned():
    problem = bx.Problem(
        lambda x, y, *_: y**2, lambda x, y, block, _: jnp.log(-1 - y**2 - x**2) + block, jnp.ones(3)
    )
    with pytest.raises(RuntimeError, match="nan"):
        bx.solve_lower(problem, 1.0)


@double
def test_a_singular_hessian_is_reported():
    problem = centred(upper=lambda x, y, *_: jnp.sum(y), blocks=jnp.array([[1.0, 1.0], [1.0, 0.0]]))
    flat = bx.Problem(problem.upper, lambda x, y, block, _: jnp.sum(block * (y - x) ** 2), problem.blocks)
    bx.solve_lower(flat, jnp.ones(2))
    with pytest.raises(RuntimeError, match="block 1 has a Hessian that was not inverted"):
        bx.hypergradient(flat, jnp.ones(2))


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("curvature", [-1e-3, -0.1])
def test_a_saddle_is_not_returned_as_a_minimiser(curvature, start):
    """∇_y g is zero there; from another start Newton's steps go further and further away."""

    def lower(x, y, block, batch):
        return 0.5 * jnp.sum(block * y**2) - y[0] * x[0]

    blocks = jnp.asarray([[1.0, 1.0], [1.0, curvature]])
    problem = bx.Problem(lambda x, y, *_: jnp.sum(y**2), lower, blocks)
    with pytest.raises(RuntimeError, match=r"block 1 was not solved"):
        bx.solve_lower(problem, jnp.ones(2), jnp.full((2, 2), start))


def test_levels_with_their_own_slots_are_refused():
    level = bx.mean(lambda x, block, batch: x[:1], slots=lambda block, batch: block[None], count=3)
    problem = bx.Problem(lambda x, y, *_: jnp.sum(y), level, 3)
    with pytest.raises(ValueError, match="diagnostics need one slot per block"):
        bx.hypergradient(problem, jnp.ones(2))


@pytest.mark.parametrize("library", ["optimistix", "lineax"])
def test_missing_libraries_are_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r'pip install "bilevax\[diagnostics\]"'):
        bx.objective(centred(), jnp.ones(2))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"x": jnp.arange(2)}, TypeError, "x must be a floating array"),
        ({"y0": jnp.zeros((4, 2))}, ValueError, "y0 must have a leading axis of 3"),
        ({"y0": {"a": jnp.zeros((3, 2))}}, TypeError, "lower level 'lower'"),
        ({"tolerance": 0.0}, ValueError, "tolerance must lie in"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
        ({"blocks_at_once": 0}, ValueError, "blocks_at_once must be at least 1"),
        ({"problem": "problem"}, TypeError, "problem must be a bilevax.Problem"),
    ],
)
def test_wrong_arguments_are_named(options, kind, message):
    with pytest.raises(kind, match=message):
        bx.solve_lower(**{"problem": centred(), "x": jnp.ones(2)} | options)


# --- the shape of y -----------------------------------------------------------------


def test_the_shape_of_y_is_found_among_the_lengths_of_the_data():
    assert bx.solve_lower(centred(), jnp.ones(2)).shape == (3, 2)
    truth = problems.QuadraticBlocks()  # x in R³, y in R²
    assert bx.solve_lower(as_problem(truth), jnp.ones(3)).shape == (5, 2)


def test_a_number_per_block_is_found_if_no_vector_fits():
    problem = bx.Problem(
        lambda x, y, block, batch: y**2,
        lambda x, y, block, batch: jnp.mean((y - batch @ x) ** 2),
        blocks=3,
        lower_data=bx.Shared(jnp.ones((5, 4))),
    )
    assert bx.solve_lower(problem, jnp.ones(4)).shape == (3,)


def test_rows_handed_over_one_by_one_do_not_broadcast_to_a_vector():
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum(y**2),
        lambda x, y, block, batch: jnp.mean((y - batch @ x) ** 2),
        blocks=2,
        lower_data=bx.PerBlock(jnp.ones((5, 4)), [0, 2, 5]),
    )
    np.testing.assert_allclose(bx.solve_lower(problem, jnp.ones(4)), [4.0, 4.0], rtol=1e-5)


def test_a_vector_of_one_entry_is_found():
    problem = bx.Problem(lambda x, y, *_: jnp.sum(y**2), lambda x, y, *_: jnp.sum((y - x) ** 2), 3)
    assert bx.solve_lower(problem, jnp.ones(1)).shape == (3, 1)


def test_the_upper_level_decides_between_shapes_that_fit_the_lower_level():
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum(y * x),
        lambda x, y, block, batch: jnp.sum(y**2) + jnp.sum(block),
        jnp.ones((3, 5)),
    )
    assert bx.solve_lower(problem, jnp.ones(2)).shape == (3, 2)


def test_several_shapes_that_fit_are_listed():
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.sum(y**2) + jnp.sum(x),
        lambda x, y, *_: jnp.sum(y**2),
        jnp.ones((3, 5)),
    )
    with pytest.raises(
        ValueError, match=r"several shapes .*: \(2,\); \(5,\)\. So give y0, with a leading axis of 3"
    ):
        bx.solve_lower(problem, jnp.ones(2))
    assert bx.solve_lower(problem, jnp.ones(2), jnp.ones((3, 4))).shape == (3, 4)
    named = bx.Problem(
        lambda x, y, block, batch: jnp.sum(y["a"] ** 2) + jnp.sum(x * y["b"]),
        dict.fromkeys("ab", problem.levels["lower"]),
        problem.blocks,
    )
    with pytest.raises(ValueError, match=r"'a': \(2,\), 'b': \(2,\); 'a': \(5,\), 'b': \(2,\)"):
        bx.solve_lower(named, jnp.ones(2))
    assert bx.solve_lower(named, jnp.ones(2), {"a": jnp.ones((3, 7)), "b": None})["b"].shape == (3, 2)


def test_no_shape_that_fits_is_reported_with_its_cause():
    problem = bx.Problem(lambda x, y, *_: y["a"], lambda x, y, *_: jnp.sum((y["a"] - x) ** 2), 3)
    with pytest.raises(ValueError, match=r"no shape .* \(tried \(2,\), \(\)\)\. So give y0") as caught:
        bx.solve_lower(problem, jnp.ones(2))
    assert caught.value.__cause__ is not None


# --- residuals ----------------------------------------------------------------------


def run(problem, solver, start, y0, steps=4):
    options = {"steps": steps, "key": jax.random.key(0), "blocks_per_step": 2, "batch_size": 3}
    return bx.minimize(problem, start.x, y0, solver=solver, progress=None, **grouped(**options)).state


@double
@pytest.mark.parametrize("solver", [bx.BSVRBv1, bx.BSVRBv2, bx.RSVRB])
def test_residuals_are_the_distances_to_the_truth(solver):
    truth = problems.LogisticHyper(ragged=True)
    problem, start = as_problem(truth), problems.random_start(truth)
    state = run(problem, solver(upper_step=0.1), start, start.y)
    found = bx.residuals(problem, state)
    x, y = np.asarray(state.x), np.asarray(state.y)
    blocks = [(i, x, y[i], truth.lower_of(i)) for i in range(truth.m)]
    close(found.y, rms(y - algorithms.solve_lower(truth, x, y)))
    close(found.gradient, rms([truth.g_y(*block) for block in blocks]))
    if solver is bx.BSVRBv2:
        v = [np.linalg.solve(truth.g_yy(*b), truth.f_y(*b[:3], truth.upper_of(b[0]))) for b in blocks]
        close(found.v, rms(np.asarray(state.v) - v))
    else:
        assert found.v is None


@double
def test_residuals_of_named_levels_are_named():
    truth = problems.Mixed()
    problem = as_problem(truth, {"a": bx.argmin(truth.lower), "b": bx.mean(truth.inner)})
    start = problems.random_start(truth)
    state = run(problem, bx.BSVRBv2(upper_step=0.1), start, {"a": start.y_a, "b": start.y_b})
    found = bx.residuals(problem, state)
    x = np.asarray(state.x)
    means = [truth.c(i, x, truth.lower_of(i)) for i in range(truth.m)]
    close(found.y["b"], rms(np.asarray(state.y["b"]) - means))
    assert found.gradient["b"] == found.y["b"]
    assert found.v["b"] is None
    f = [(i, x, state.y["a"][i], state.y["b"][i], truth.upper_of(i)) for i in range(truth.m)]
    v = [np.linalg.solve(truth.g_yy(*f[i][:3], truth.lower_of(i)), truth.f_a(*f[i])) for i in range(truth.m)]
    close(found.v["a"], rms(np.asarray(state.v["a"]) - v))


def test_residuals_print_as_an_aligned_table_of_numbers():
    numbers = (jnp.asarray(0.26239), jnp.asarray(1234.5), None)
    assert str(bx.Residuals(*numbers)) == "y         0.262\ngradient  1.23e+03\nv         None"
    named = bx.Residuals(*({"first": number, "b": jnp.asarray(2.0)} for number in numbers))
    assert str(named).splitlines() == [
        "          first     b",
        "y         0.262     2",
        "gradient  1.23e+03  2",
        "v         None      2",
    ]


def test_residuals_want_a_state():
    with pytest.raises(TypeError, match="state must be the state of a run"):
        bx.residuals(centred(), jnp.ones(2))


def test_a_robust_loss_with_heavy_tails_is_solved_from_zero():
    case = huber_sensors()
    found = bx.solve_lower(case.problem, case.x0, case.y0)  # raises if a block is not solved
    assert jnp.isfinite(found).all()


def test_blocks_whose_loss_nearly_cancels_are_solved():
    exposure = jnp.asarray([[1.6553127, 0.7916021, 0.7903706, 1.6310132]])
    count = jnp.asarray([[5.0, 1.0, 1.0, 3.0]])  # the loss at its minimum is .094, a sum of terms near one

    def deviance(y, block):
        return jnp.mean(block["exposure"] * jnp.exp(y) - block["count"] * (y + jnp.log(block["exposure"])))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: deviance(y, block),
        lower=lambda x, y, block, batch: deviance(y, block) + jnp.exp(x) * y**2,
        blocks={"exposure": exposure, "count": count},
    )
    y = bx.solve_lower(problem, jnp.zeros(()), jnp.zeros(1), tolerance=1e-6)
    slope = exposure.mean() * jnp.exp(y[0]) - count.mean() + 2 * y[0]
    assert abs(slope) < 1e-6 * count.mean()
