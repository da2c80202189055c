"""Folds within blocks, and the solutions of new blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx


@pytest.fixture(autouse=True)
def _doubles():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def panel(lengths=(2, 3, 9, 5), features=3, seed=0):
    random = np.random.default_rng(seed)
    rows = random.normal(size=(sum(lengths), features))
    return rows, random.normal(size=sum(lengths)), np.concatenate([[0], np.cumsum(lengths)])


def upper(x, y, block, batch):
    return jnp.mean((batch["row"] @ y - batch["label"]) ** 2)


def lower(x, y, block, batch):
    return 0.5 * jnp.mean((batch["row"] @ y - batch["label"]) ** 2) + 0.5 * jnp.exp(x) * y @ y


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_every_row_is_held_out_once_and_kept_by_the_other_folds(seed):
    lengths = (2, 3, 9, 5)
    _, _, offsets = panel(lengths)
    folds = bx.Folds(np.arange(sum(lengths)), offsets, 4, seed=seed)
    assert folds.count == 2 + 3 + 4 + 4
    blocks, random = jnp.arange(folds.count), bx.Stream.start(jax.random.key(0))

    def rows_of(source):
        batch = source.draw(random, blocks, None)
        return [np.asarray(r)[np.asarray(w) > 0] for r, w in zip(batch.rows, batch.weight, strict=True)]

    held, kept = rows_of(folds.held_out), rows_of(folds.kept)
    for group in range(4):
        own = np.arange(offsets[group], offsets[group + 1])
        mine = np.flatnonzero(folds.group == group)
        assert folds.fold[mine].tolist() == list(range(len(mine)))
        assert sorted(np.concatenate([held[b] for b in mine])) == own.tolist()
        for b in mine:
            assert sorted([*held[b], *kept[b]]) == own.tolist()
            assert len(held[b]) in (len(own) // len(mine), -(-len(own) // len(mine)))


def test_batches_of_folds_hold_all_rows_of_the_right_side_and_no_others():
    _, _, offsets = panel()
    folds = bx.Folds(np.arange(19), offsets, 3)
    random, blocks = bx.Stream.start(jax.random.key(1)), jnp.arange(folds.count)
    for source in (folds.held_out, folds.kept):
        every = source.draw(random, blocks, None)
        some = np.asarray(source.draw(random, blocks, 200).rows)
        for b in range(folds.count):
            assert set(some[b]) == set(np.asarray(every.rows[b])[np.asarray(every.weight[b]) > 0])


def test_the_objective_is_the_cross_validated_loss():
    rows, labels, offsets = panel()
    folds = bx.Folds({"row": rows, "label": labels}, offsets, 3)
    problem = bx.Problem(upper, lower, folds.count, folds.held_out, folds.kept)
    losses = []
    for group in range(4):
        X = rows[folds.order][offsets[group] : offsets[group + 1]]
        t = labels[folds.order][offsets[group] : offsets[group + 1]]
        sizes = np.asarray(folds.held_out.lengths)[folds.group == group]
        for fold in range(len(sizes)):
            held = np.repeat(np.arange(len(sizes)), sizes) == fold
            A = X[~held].T @ X[~held] / (~held).sum() + np.exp(0.3) * np.eye(3)
            y = np.linalg.solve(A, X[~held].T @ t[~held] / (~held).sum())
            losses.append(np.mean((X[held] @ y - t[held]) ** 2))
    assert float(bx.objective(problem, jnp.array(0.3), jnp.zeros((folds.count, 3)))) == pytest.approx(
        np.mean(losses), abs=1e-9
    )


def test_a_run_over_folds_finds_the_best_strength():
    rows, labels, offsets = panel(lengths=(6,) * 30, seed=1)
    labels = labels + rows @ np.array([1.0, -1.0, 0.5])
    folds = bx.Folds({"row": rows, "label": labels}, offsets, 3)
    problem = bx.Problem(upper, lower, folds.count, folds.held_out, folds.kept)
    y0 = jnp.zeros((folds.count, 3))
    found = bx.minimize(problem, jnp.array(1.0), y0, steps=800, progress=None)
    grid = [float(bx.objective(problem, jnp.array(x), y0)) for x in np.linspace(-4, 1, 6)]
    assert float(bx.objective(problem, found.x, y0)) < min(grid) + 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folds": 1}, "folds must be at least 2"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"offsets": [0, 1, 19]}, "at least two rows in every group.*got 1 in group 0"),
    ],
)
def test_bad_folds_are_refused(change, message):
    arguments = {"rows": np.arange(19.0), "offsets": [0, 5, 19]} | change
    with pytest.raises(ValueError, match=message):
        bx.Folds(**arguments)


# --- new blocks ------------------------------------------------------------------


def ridge_problem():
    rows, labels, offsets = panel()
    data = bx.PerBlock({"row": rows, "label": labels}, offsets)
    return bx.Problem(upper, lower, 4, data, data)


def test_new_blocks_of_any_length_are_solved_as_the_closed_form_says():
    lengths = (1, 40, 2, 7, 7, 3)
    rows, labels, offsets = panel(lengths, seed=5)
    new = bx.PerBlock({"row": rows, "label": labels}, offsets)
    y = bx.adapt(ridge_problem(), jnp.array(-1.0), new)
    for block, n in enumerate(lengths):
        X, t = rows[offsets[block] : offsets[block + 1]], labels[offsets[block] : offsets[block + 1]]
        expected = np.linalg.solve(X.T @ X / n + np.exp(-1.0) * np.eye(3), X.T @ t / n)
        np.testing.assert_allclose(y[block], expected, atol=1e-8)


def test_blocks_of_the_problem_itself_have_their_exact_solutions():
    problem, x = ridge_problem(), jnp.array(0.2)
    np.testing.assert_allclose(
        bx.adapt(problem, x, problem.lower_data[0], blocks_at_once=3),
        bx.solve_lower(problem, x, jnp.zeros((4, 3))),
        atol=1e-7,
    )


def test_new_blocks_have_constants_offsets_and_named_levels():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(y["a"] ** 2) + jnp.sum(y["b"]),
        lower={
            "a": bx.argmin(lambda x, y, block, batch: jnp.sum((y - block["c"] - x) ** 2), around=lambda x: x),
            "b": bx.mean(lambda x, block, batch: jnp.mean(batch) * x),
        },
        blocks={"c": jnp.ones((3, 2))},
        lower_data={"a": None, "b": bx.PerBlock(jnp.arange(3.0), [0, 1, 2, 3])},
    )
    rows = {"a": None, "b": bx.PerBlock(jnp.arange(4.0), [0, 1, 4])}
    y0 = {"a": jnp.zeros((2, 2)), "b": None}
    found = bx.adapt(problem, jnp.ones(2), rows, blocks={"c": jnp.array([[0.0, 1.0], [2.0, 3.0]])}, y0=y0)
    np.testing.assert_allclose(found["a"], [[1.0, 2.0], [3.0, 4.0]], atol=1e-8)
    np.testing.assert_allclose(found["b"], [[0.0, 0.0], [2.0, 2.0]])


def test_what_cannot_be_adapted_is_refused():
    problem, x = ridge_problem(), jnp.array(0.0)
    rows, labels, offsets = panel((2, 2))
    new = bx.PerBlock({"row": rows, "label": labels}, offsets)
    with pytest.raises(TypeError, match=r"problem must be a bilevax.Problem, got int"):
        bx.adapt(3, x, new)
    with pytest.raises(ValueError, match="y0 must have one entry for each of the 2 new blocks, got 3"):
        bx.adapt(problem, x, new, y0=jnp.zeros((3, 3)))
    with pytest.raises(ValueError, match="blocks must be given"):
        bx.adapt(bx.Problem(upper, lower, {"c": jnp.ones(4)}, lower_data=problem.lower_data[0]), x, new)
    with pytest.raises(TypeError, match="lower_data must be"):
        bx.adapt(problem, x, rows, blocks=2)
    without_minimum = bx.Problem(upper, lambda x, y, block, batch: y @ batch["row"][0], 2, new, new)
    with pytest.raises(RuntimeError, match=r"was not solved.*strongly convex"):
        bx.adapt(without_minimum, x, new, y0=jnp.zeros((2, 3)))
