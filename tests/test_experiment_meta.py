"""`bilevax reproduce meta`: the tasks and methods are what they say, and the command writes its tables."""

from __future__ import annotations

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import bilevax as bx
from bilevax.cli import app
from bilevax.data import DataError
from bilevax.experiments import meta, meta_methods, meta_solver, meta_tasks

SINES = dataclasses.replace(meta_tasks.sines(), widths=(1, 5, 5, 1))


def test_sine_tasks_are_sines_and_parts_share_no_rows():
    tasks = SINES.draw(20, 0, "train")
    for inputs, targets in (tasks.support, tasks.query):
        t, y = inputs[..., 0], targets[..., 0]
        design = np.stack([np.sin(t), np.cos(t)], -1)  # A sin(t + φ) is linear in these
        for task in range(20):
            fit = np.linalg.lstsq(design[task], y[task], rcond=None)[0]
            np.testing.assert_allclose(design[task] @ fit, y[task], atol=1e-4)
            assert 0.09 < np.linalg.norm(fit) < 5.01
    assert not np.allclose(tasks.support[0], tasks.query[0])
    assert not np.allclose(tasks.support[0], SINES.draw(20, 0, "test").support[0])


def test_digit_tasks_name_and_turn_their_digits(monkeypatch, tmp_path):
    images = np.zeros((200, 28, 28), np.uint8)
    labels = np.arange(200) % 10
    for number, label in enumerate(labels):
        images[number, : 2 + 2 * label, :4] = 255  # a bar whose length tells the digit
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    tasks = meta_tasks.digits().draw(30, 0, "train")
    (inputs, targets), (others, again) = tasks.support, tasks.query
    assert inputs.shape == (30, 25, 196)
    assert np.array_equal(targets, again)
    for task in range(30):
        seen = [
            {tuple(row) for row in part[task][targets[task] == way]}
            for part in (inputs, others)
            for way in range(5)
        ]
        assert all(len(one) == 1 for one in seen)  # one digit, turned alike in all rows of the task
        assert seen[:5] == seen[5:]
        assert len(set.union(*seen)) == 5
    assert len({tuple(inputs[task, 0]) for task in range(30)}) > 10
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match="must hold MNIST"):
        meta_tasks.digits()


def test_maml_differentiates_through_its_steps_and_anil_through_those_of_the_last_layer():
    tasks = SINES.draw(3, 0, "train")
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: jnp.asarray(a, float), SINES.start(jax.random.key(0)))
        rows = jax.tree.map(lambda a: jnp.asarray(a, float), (tasks.support, tasks.query))
        for kind in (meta_methods.MAML, meta_methods.ANIL):
            setting = {"lower": 0.05}

            def value(params, kind=kind, setting=setting):
                return kind.value(SINES, params, *rows, setting)

            by_hand = []
            for task in range(3):
                support, query = (jax.tree.map(lambda a, task=task: a[task], part) for part in rows)
                adapted = params
                for _ in range(meta_methods.INNER):
                    slope = jax.grad(SINES.mean_loss)(adapted, support)
                    first = (
                        slope[:-1] if kind is meta_methods.MAML else jax.tree.map(jnp.zeros_like, slope[:-1])
                    )
                    adapted = jax.tree.map(lambda a, b: a - 0.05 * b, adapted, [*first, slope[-1]])
                by_hand.append(SINES.mean_loss(adapted, query))
            assert float(value(params)) == pytest.approx(float(np.mean(by_hand)), rel=1e-12)
            direction = jax.tree.map(
                lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), params
            )
            slope = jax.grad(value)(params)
            along = sum(
                jnp.sum(a * b)
                for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(direction), strict=True)
            )
            ends = [
                value(jax.tree.map(lambda a, d, h=h: a + h * d, params, direction)) for h in (1e-6, -1e-6)
            ]
            assert float(along) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-4)


def test_every_method_learns_something_about_new_tasks():
    tasks, new = SINES.draw(40, 0, "train"), SINES.draw(30, 0, "test")
    for name, kind in meta_methods.METHODS.items():
        method = kind(SINES, tasks, 10)
        setting = kind.settings("sines")[4]
        state = method.begin(setting, 0)
        before, _ = meta.judged(SINES, method.adapters(state, setting)[0], new)
        for chunk in range(20):
            state = method.advance(state, setting, chunk)
        after, _ = meta.judged(SINES, method.adapters(state, setting)[0], new)
        assert after.min() < before.min(), name


def test_heads_are_solved_for_and_x_moves_along_the_exact_gradient():
    tasks = SINES.draw(6, 0, "train")
    method = meta_methods.Heads(SINES, tasks, 6)
    setting = {"upper": 1e-3, "strength": 0.1}
    problem, state = method.problem(setting), method.begin(setting, 0)
    solver = meta_solver.SolvedBlocks(1e-3, iterations=40, tolerance=1e-6)
    y0 = jax.tree.map(lambda a: jnp.broadcast_to(a, (6, *a.shape)), state.x["layers"][-1])
    exact = bx.hypergradient(problem, state.x, y0)
    found, _ = jax.jit(solver.step)(problem, state)
    for one, other in zip(jax.tree.leaves(found.z), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    adapter = method.adapters(state, setting)[0]
    loss, _ = meta.judged(SINES, adapter, tasks)
    assert loss == pytest.approx(float(bx.objective(problem, state.x, y0)), rel=1e-4)


def test_conjugate_gradients_solve_every_block_and_stop_at_the_tolerance():
    random = np.random.default_rng(0)
    roots = random.normal(size=(3, 5, 5)).astype(np.float32)
    matrices = roots @ roots.transpose(0, 2, 1) + np.eye(5, dtype=np.float32)
    right = random.normal(size=(3, 5)).astype(np.float32)
    right[1] = 0  # solved from the start
    calls = []

    def product(u):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.einsum("bij,bj->bi", matrices, u)

    found = meta_solver.conjugate_gradients(product, right, jnp.zeros((3, 5)), 20, 1e-5)
    np.testing.assert_allclose(found, np.linalg.solve(matrices, right[..., None])[..., 0], atol=1e-3)
    jax.effects_barrier()
    assert len(calls) < 15
    calls.clear()
    meta_solver.conjugate_gradients(product, right, found, 20, 0.1).block_until_ready()
    jax.effects_barrier()
    assert len(calls) == 1  # of the residual


def test_settings_that_blow_up_after_more_steps_do_not_count():
    steady = [[[0.5, 0.4]], [[0.6, 0.3]]]  # by look, adapter and steps
    blown = [[[0.5, 0.1]], [[0.6, 50.0]]]
    assert meta._best([blown, steady]) == (1, 0, 1)
    assert meta._best([blown, blown]) == (0, 0, 1)
    assert meta._best([[[[np.nan, 0.1]], [[0.6, 0.1]]], steady]) == (1, 0, 1)


def test_unrolled_methods_may_take_shorter_steps_on_new_tasks():
    for kind in (meta_methods.MAML, meta_methods.ANIL):
        method = kind(SINES, SINES.draw(4, 0, "train"), 2)
        long, short = method.adapters(([], None, None), {"upper": 0.1, "lower": 0.01})
        assert (long.rate, short.rate) == (0.01, pytest.approx(0.001))
        assert long.last_only == short.last_only == kind.last_only


def test_every_method_is_tried_with_nine_settings():
    for kind in meta_methods.METHODS.values():
        for family in meta.FAMILIES:
            settings = kind.settings(family)
            assert len({tuple(one.items()) for one in settings}) == 9


def test_the_command_writes_its_table_and_names_what_it_does_not_know(monkeypatch, tmp_path):
    small = meta.MetaOptions(("sines",), ("ANIL", "bilevax, heads"), 8, 8, 4, 4, 2, 0.0, 0.0, 2)
    monkeypatch.setattr(meta.MetaOptions, "quick", lambda self: small)
    monkeypatch.setattr(meta, "FAMILIES", {"sines": lambda: SINES})
    result = CliRunner().invoke(app, ["reproduce", "meta", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    with (tmp_path / "meta" / "meta_sines.csv").open(encoding="utf-8") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["ANIL", "bilevax, heads"]
    kept = json.loads((tmp_path / "meta" / "kept.json").read_text(encoding="utf-8"))["results"]
    assert len(kept) == 2 * (9 + 2)
    assert "sines, ANIL, upper 0.001, lower 0.01" in kept  # a setting, not its place in a grid
    assert all(", upper 0.0" in name for name in kept)
    again = meta.run(small, tmp_path / "meta", resume=True)  # from what was kept
    assert [row["method"] for row in again["sines"]] == ["ANIL", "bilevax, heads"]
    with pytest.raises(ValueError, match=r"got \['cosines'\]"):
        meta.run(meta.MetaOptions(families=("cosines",)), tmp_path)


def test_the_command_runs_for_as_long_as_the_experiment(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(meta, "run", lambda options, *_, **__: asked.append(options))
    result = CliRunner().invoke(app, ["reproduce", "meta", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert asked == [meta.MetaOptions()]
