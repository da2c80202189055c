"""Tables of x: a step touches what it looks up, and a run is what it would be if all of x had moved."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import grouped

import bilevax as bx

BLOCKS, USERS, ITEMS, WIDTH, ROWS = 6, 6, 9, 2, 30
RNG = np.random.default_rng(0)
DATA = {"item": RNG.integers(0, ITEMS, (ROWS, 2)), "label": RNG.normal(size=ROWS)}
HELD = {"other": RNG.integers(0, ITEMS, 8), "label": RNG.normal(size=8)}
X0 = {
    "users": RNG.normal(size=(USERS, WIDTH)),
    "items": RNG.normal(size=(ITEMS, WIDTH)),
    "scale": np.ones(()),
}
Y0 = np.zeros((BLOCKS, WIDTH))

# A row of the training data looks up two items, one of the others one item, and f no user.
TABLES = {
    "users": lambda block, batch: block if "item" in batch else None,
    "items": lambda block, batch: batch["item" if "item" in batch else "other"],
}


def f(x, y, block, batch):
    scores = x["items"] @ y
    return jnp.mean((scores - batch["label"]) ** 2) + 0.1 * x["scale"] ** 2 + 0.05 * jnp.mean(x["items"] ** 2)


def g(x, y, block, batch):
    weight = jax.nn.softplus(jnp.sum(x["items"], (1, 2)))
    pull = jnp.sum((y - x["scale"] * x["users"]) ** 2)
    return jnp.mean(weight * (jnp.mean(x["items"], 1) @ y - batch["label"]) ** 2) + pull


def looked_up(function):
    """The function of whole tables that a user writes who does not declare them."""

    def whole(x, y, block, batch):
        found = {name: index(block, batch) for name, index in TABLES.items()}
        rows = {name: None if at is None else x[name][at] for name, at in found.items()}
        return function(x | rows, y, block, batch)

    return whole


@functools.cache
def make(tables, dtype=np.float64, **given):
    def data(rows):
        return bx.Shared(
            {name: jnp.asarray(one, dtype if one.dtype.kind == "f" else None) for name, one in rows.items()}
        )

    functions = (f, g) if tables else (looked_up(f), looked_up(g))
    return bx.Problem(*functions, BLOCKS, data(HELD), data(DATA), tables=TABLES if tables else None, **given)


def start(dtype=np.float64):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (X0, Y0))


# These runs are short: compiling them is all their cost.
@functools.partial(eqx.filter_jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
def run(problem, solver, x0, y0, key, steps, plan):
    """A state after some steps, and the same settled."""
    state = solver.init(problem, x0, y0, key=key, **plan)
    state = bx.advance(problem, solver, state, steps)
    return state, state.settled


def both(solver, steps=60, problems=None, x=None, **plan):
    """The settled states of a run with tables, and of one without."""
    plan, ends = grouped(**({"blocks_per_step": 2, "batch_size": 4} | plan)), []
    for problem in problems or (make(True), make(False)):
        state, settled = run(problem, solver, *(start() if x is None else x), jax.random.key(1), steps, plan)
        ends.append(settled)
        assert (state.tables is not None) == bool(problem.tables)
    return ends


def assert_same(one, other, tolerance=1e-11):
    for a, b in zip(
        jax.tree.leaves((one.x, one.z, one.y)), jax.tree.leaves((other.x, other.z, other.y)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def decaying(start):
    return lambda t: start / (1 + 0.02 * t)


STEP = {"upper_step": decaying(0.1), "lower_step": 0.05}
SOLVERS = {
    "STORM": bx.BSVRBv2(**STEP, beta=decaying(0.3)),
    "moving average, and a lower step that is left out": bx.MASOBA(decaying(0.1), beta=0.1),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_with_tables_is_the_run_without(name, x64):
    tabled, dense = both(SOLVERS[name])
    assert_same(tabled, dense)
    assert np.abs(tabled.x["users"] - X0["users"]).max() > 0.01


def test_rows_may_rest_for_longer_than_steps_are_remembered(x64):
    """5,000 rows are looked up once in 1,250 steps; the timeline has 4,096 steps, and goes round twice."""
    rows = 5000
    index = RNG.permutation(rows)

    def lower(weight, y, block, batch):
        return jnp.mean((y - jnp.sin(weight)) ** 2)

    def problem(tables):
        given = {"lower": lower, "tables": lambda block, batch: batch}
        if not tables:
            given = {"lower": lambda x, y, block, batch: lower(x[batch], y, block, batch)}
        return bx.Problem(
            lambda x, y, block, batch: (y - block) ** 2,
            blocks=jnp.arange(2.0),
            upper_data=bx.Shared(index),
            lower_data=bx.Shared(index),
            **given,
        )

    solver, start = bx.MASOBA(1.0, lower_step=0.1, beta=1e-3), (jnp.zeros(rows), jnp.zeros(2))
    plan = {"blocks_per_step": 1, "problems": (problem(True), problem(False))}
    ends = both(solver, 9000, x=start, **plan)
    assert_same(*ends)
    assert float(jnp.max(jnp.abs(ends[0].x))) > 0.01


def test_a_function_that_all_others_see_x_through_looks_up_too(x64):
    def scores(x, block, batch):
        return x["items"].sum((1, 2)) + x["users"].sum()

    def build(tables):
        def through(x, block, batch):
            found = {n: x[n][index(block, batch)] for n, index in TABLES.items()}
            return scores(x if tables else x | found, block, batch)

        return bx.Problem(
            lambda s, y, block, batch: jnp.mean((s - y[0]) ** 2),
            lambda s, y, block, batch: jnp.mean((s - jnp.sum(y)) ** 2) + y @ y,
            BLOCKS,
            "lower",
            bx.Shared(DATA),
            through=scores if tables else through,
            tables=TABLES if tables else None,
        )

    assert_same(*both(bx.BSVRBv2(**STEP), problems=(build(True), build(False))))


def test_tables_that_are_looked_up_together_lie_side_by_side(x64):
    """Two tables of one index, of rows of different shapes, and one with another index."""

    def own(block, batch):
        return batch

    def lower(x, y, block, batch):
        return jnp.mean((y - jnp.sin(x["a"]) * x["b"].sum((1, 2)) - x["c"]) ** 2)

    def build(tables):
        def looked_up(x, y, block, batch):
            return lower({name: x[name][batch] for name in "abc"}, y, block, batch)

        return bx.Problem(
            lambda x, y, block, batch: (y - block) ** 2,
            lower if tables else looked_up,
            jnp.arange(4.0),
            lower_data=bx.Shared(np.arange(20)),
            tables={"a": own, "b": own, "c": lambda block, batch: batch} if tables else None,
        )

    shapes = {"a": (), "b": (2, 3), "c": ()}
    x = {name: jnp.asarray(RNG.normal(size=(20, *shape))) for name, shape in shapes.items()}
    solver = bx.BSVRBv2(0.3, lower_step=0.1, beta=0.2)
    problems = (build(True), build(False))
    assert_same(*both(solver, x=(x, jnp.zeros(4)), problems=problems))
    given = {"key": jax.random.key(1), "blocks_per_step": 2, "batch_size": 4}
    state = eqx.filter_eval_shape(solver.init, problems[0], x, jnp.zeros(4), **given)
    assert {name: table.shape for name, table in state.tables.tables.items()} == {"a": (20, 15), "c": (20, 3)}


def test_so_it_is_with_random_functions_and_strata_and_without_a_first_pass(x64):
    def noisy(function):
        def drawn(x, y, block, batch, key):
            return function(x, y + 0.1 * jax.random.normal(key, y.shape), block, batch)

        return drawn

    def build(tables):
        functions = (f, g) if tables else (looked_up(f), looked_up(g))
        given = {"tables": TABLES} if tables else {}
        return bx.Problem(
            *map(noisy, functions), BLOCKS, bx.Shared(HELD), bx.Shared(DATA), random=True, **given
        )

    plan = {"strata": 2, "initial_batch_size": 0, "problems": (build(True), build(False))}
    assert_same(*both(bx.BSVRBv2(**STEP), **plan))


ADAM = {"b1": 0.8, "eps": 1e-6, "weight_decay": 0.1}


def test_lazy_adam_is_adam_where_every_step_looks_up_every_row(x64):
    """All six users, and of the nine items all 60 places of the rows: many of them several times."""
    given = {"blocks_per_step": BLOCKS, "batch_size": None}
    moves = [bx.averaged(adam(decaying(0.05), **ADAM), 20) for adam in (bx.lazy_adam, optax.adamw)]
    lazy, dense = (bx.BSVRBv2(move, lower_step=0.05, beta=0.3) for move in moves)
    ends = []
    for solver, tables in ((lazy, True), (dense, False)):
        state, settled = run(make(tables), solver, *start(), jax.random.key(1), 60, grouped(**given))
        assert (state.tables is not None) == tables
        ends.append((settled, state.average))
    assert_same(ends[0][0], ends[1][0])
    for name in X0:
        np.testing.assert_allclose(ends[0][1][name], ends[1][1][name], rtol=0, atol=1e-11)


def test_lazy_adam_of_rows_that_rest_is_close_to_adam(x64):
    """A step looks up one of six users: x goes where Adam moves it, and not where it would rest."""
    ends = []
    for adam, tables in ((bx.lazy_adam, True), (optax.adamw, False)):
        solver = bx.MASOBA(adam(0.01, eps=1e-6), lower_step=0.05, beta=0.3)
        plan = {"blocks_per_step": 1, "batch_size": 4}
        _, settled = run(make(tables), solver, *start(), jax.random.key(1), 60, grouped(**plan))
        ends.append(settled.x["users"])
    lazy, dense = (np.linalg.norm(end - X0["users"]) for end in ends)
    assert np.linalg.norm(ends[0] - ends[1]) < 0.1 * dense
    assert 0.9 * dense < lazy < 1.02 * dense


def test_lazy_adam_inside_of_another_transformation_is_adam():
    given = {"key": jax.random.key(1), "blocks_per_step": 2, "batch_size": 4}
    for step in (optax.chain(bx.lazy_adam(0.1), optax.scale(0.5)), bx.bounded(bx.lazy_adam(0.1), -1.0, 1.0)):
        solver = bx.MASOBA(step, lower_step=0.05)
        state = eqx.filter_eval_shape(solver.init, make(True, np.float32), *start(np.float32), **given)
        assert state.tables is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must lie in"),
        ({"b1": 1.0}, "b1 must be less than 1, got 1.0"),
        ({"b2": lambda t: 0.9}, "b2 must be a number, got function"),
        ({"eps": 0.0}, "eps must lie in"),
        ({"weight_decay": "much"}, "weight_decay must be a number, got str"),
    ],
)
def test_a_wrong_number_of_lazy_adam_is_refused(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        bx.lazy_adam(**{"learning_rate": 0.1} | wrong)


@pytest.mark.parametrize(
    "solver",
    [bx.BSVRBv2(lower_step=0.05), bx.MASOBA(optax.adam(0.1)), bx.BlockPAGE(**STEP), bx.RSVRB(**STEP)],
    ids=["automatic step", "Adam", "BlockPAGE", "RSVRB"],
)
def test_methods_that_cannot_catch_rows_up_move_them_all(solver):
    given = {"key": jax.random.key(1), "blocks_per_step": 2, "batch_size": 4}
    state = eqx.filter_eval_shape(solver.init, make(True, np.float32), *start(np.float32), **given)
    assert state.tables is None


# --- runs -----------------------------------------------------------------------


def minimize(solver=SOLVERS["STORM"], problem=None, **given):
    given = {"steps": 60, "every": 20, "blocks_per_step": 2, "batch_size": 4, "progress": None} | given
    problem = make(True, np.float32) if problem is None else problem
    return bx.minimize(problem, *start(np.float32), solver=solver, key=jax.random.key(0), **grouped(**given))


def test_results_and_metrics_have_all_of_x():
    result = minimize(metrics={"size": lambda problem, state: jnp.sum(state.x["items"] ** 2)}, patience=100)
    assert jax.tree.map(jnp.shape, result.x) == jax.tree.map(np.shape, X0)
    assert result.history["size"][-1] == pytest.approx(float(jnp.sum(result.x["items"] ** 2)), rel=1e-6)
    assert jax.tree.map(jnp.shape, result.best.x) == jax.tree.map(np.shape, X0)
    state = result.state.settled
    assert result.history["gradient_norm"][-1] == pytest.approx(float(optax.tree.norm(state.z)), rel=1e-5)
    found = bx.verify(make(True, np.float32), result.state, start(np.float32)[0], blocks=2)
    assert np.isfinite([found.objective, found.start]).all()


LAZY = bx.BSVRBv2(bx.averaged(bx.lazy_adam(decaying(0.05), **ADAM), 20), lower_step=0.05)


@pytest.mark.parametrize("solver", [SOLVERS["STORM"], LAZY], ids=["plain", "lazy Adam"])
def test_a_run_with_tables_resumes_with_the_same_bits(solver, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    whole = minimize(solver)
    minimize(solver, steps=30, checkpoint=tmp_path)
    resumed = minimize(solver, checkpoint=tmp_path, resume=True, save_every=10)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_run_with_another_rate_of_lazy_adam_does_not_resume(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    solver = bx.MASOBA(bx.lazy_adam(0.1), lower_step=0.05)
    minimize(solver, steps=20, checkpoint=tmp_path)
    with pytest.raises(bx.CheckpointError, match="upper_step"):
        minimize(bx.MASOBA(bx.lazy_adam(0.2), lower_step=0.05), checkpoint=tmp_path, resume=True)


def test_the_result_of_averaged_lazy_adam_is_the_average():
    result = minimize(LAZY, metrics={"size": lambda problem, state: jnp.sum(state.average["items"] ** 2)})
    assert jax.tree.map(jnp.shape, result.x) == jax.tree.map(np.shape, X0)
    assert result.history["size"][-1] == pytest.approx(float(jnp.sum(result.x["items"] ** 2)), rel=1e-6)
    assert float(jnp.max(jnp.abs(result.x["items"] - result.state.settled.x["items"]))) > 1e-4


@pytest.mark.parametrize("move", [lambda rate: rate, bx.lazy_adam], ids=["plain", "lazy Adam"])
def test_a_sweep_catches_the_tables_of_all_runs_up(move):
    found = bx.sweep(
        make(True, np.float32),
        *start(np.float32),
        solver=lambda upper_step: bx.BSVRBv2(move(upper_step), lower_step=0.05),
        settings=bx.grid(upper_step=[0.01, 0.1]),
        steps=30,
        keys=jax.random.split(jax.random.key(0), 2),
        metrics={"size": lambda problem, state: jnp.sum(state.x["users"] ** 2)},
        blocks_per_step=2,
        batch_size=4,
        progress=None,
    )
    assert found.x["users"].shape == (2, 2, USERS, WIDTH)
    sizes = np.sum(np.asarray(found.x["users"]) ** 2, (2, 3))
    np.testing.assert_allclose(found.history["size"][..., -1], sizes, rtol=1e-5)


def test_a_step_has_no_second_copy_of_a_table():
    rows = 10**6
    problem = bx.Problem(
        lambda x, y, block, batch: (y - block) ** 2,
        lambda x, y, block, batch: jnp.mean((y - x) ** 2),
        jnp.arange(10.0),
        bx.Shared(np.arange(rows, dtype=np.int32)),
        bx.Shared(np.arange(rows, dtype=np.int32)),
        tables=lambda block, batch: batch,
    )
    x0, y0 = jax.ShapeDtypeStruct((rows,), np.float32), jax.ShapeDtypeStruct((10,), np.float32)
    estimate = bx.memory_estimate(
        problem, x0, y0, solver=bx.BSVRBv2(0.1, lower_step=0.1), blocks_per_step=2, batch_size=4
    )
    stamps = 4 * rows
    assert estimate.x < 2 * 4 * rows + stamps + 2**20  # x and z, and the timeline
    assert estimate.step < 2**20


# --- errors ---------------------------------------------------------------------


def problem_with(tables, **given):
    return bx.Problem(f, g, BLOCKS, bx.Shared(HELD), bx.Shared(DATA), tables=tables, **given)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"users": 3}, r"tables\['users'\] must be a function index\(block, batch\), got int"),
        (
            {"nobody": TABLES["users"]},
            r"x0 must be a dict with the table 'nobody', got \['items', 'scale', 'users'\]",
        ),
        (
            {"scale": TABLES["users"]},
            r"x0\['scale'\] is a table and must be one array with rows, got shape \(\)",
        ),
        (
            {"users": lambda block, batch: batch["label"]},
            r"tables\['users'\] must return an array of integers",
        ),
        ({"users": lambda block, batch: None}, r"tables\['users'\] must return row numbers for some batch"),
        ({"users": lambda block, batch: batch["no"]}, r"tables\['users'\] asked for the key 'no'"),
    ],
)
def test_a_wrong_table_is_refused(tables, message):
    with pytest.raises((TypeError, ValueError), match=message):
        minimize(problem=problem_with(tables))


def test_tables_do_not_go_with_offsets_from_all_of_x():
    with pytest.raises(ValueError, match="tables do not go with around"):
        bx.Problem(f, bx.argmin(g, around=lambda x: x["users"][0]), BLOCKS, tables=TABLES)


def test_a_row_that_a_table_does_not_have_ends_the_run_with_its_number():
    tables = TABLES | {"users": lambda block, batch: block + 1 if "item" in batch else None}
    result = minimize(problem=problem_with(tables), throw=False, recover=False)
    assert result.outcome is bx.Outcome.DIVERGED
    assert "tables['users'] must return row numbers from 0 to 5, got 6" in result.message


@pytest.mark.parametrize("wrong", [6, -1])
@pytest.mark.parametrize("name", ["STORM", "BlockPAGE"])
def test_so_it_does_in_methods_that_move_all_rows(name, wrong):
    """One block of six looks up a row that the table does not have: no other row takes its place."""

    def users(block, batch):
        return jnp.where(block == 5, wrong, block) if "item" in batch else None

    solver = SOLVERS["STORM"] if name == "STORM" else bx.BlockPAGE(**STEP)
    with pytest.raises((bx.DivergedError, ValueError)) as caught:
        minimize(solver, problem_with(TABLES | {"users": users}), recover=False)
    told = f"must return row numbers from 0 to 5, got {wrong}" in str(caught.value)
    assert told or "indices that are out of range" in str(caught.value)
