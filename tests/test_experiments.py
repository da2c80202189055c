"""The experiments on the hyper-parameter problem run and write their results; on generated rows."""

from __future__ import annotations

import csv
import dataclasses
import json

import numpy as np
import pytest
from scipy import sparse

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from bilevax import data
from bilevax.cli import app
from bilevax.experiments import ablation, hyperopt, tune, validation


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """A data set of 300 rows in place of a8a and w8a."""

    def load(name, **options):
        rng = np.random.default_rng(0)
        rows = (rng.random((400, 6)) < 0.4).astype(np.float32)
        labels = np.where(rows @ rng.normal(size=6) > 0, 1, -1)
        whole = sparse.csr_matrix(rows)
        return data.Dataset(name, whole[:300], labels[:300], whole[300:], labels[300:])

    monkeypatch.setattr(data, "load", load)


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_no_validation_row_is_trained_on():
    split = validation.load_split("a8a", seed=3)
    assert (split.X.shape[0], split.X_validation.shape[0]) == (240, 60)
    train, held = data.split_rows(300, 0.2, seed=3)
    assert not set(train) & set(held)


def test_the_validation_loss_is_the_mean_over_blocks_and_rows():
    import jax

    import bilevax as bx

    split = validation.load_split("a8a", seed=0)
    task = validation.make_task(split, 1e-3, 0, blocks=5)
    state = bx.minimize(
        task.problem,
        task.x0,
        task.y0 + 0.3,
        solver=bx.BSVRBv2(upper_step=1.0),
        steps=0,
        key=jax.random.key(0),
        blocks_per_step=2,
        batch_size=4,
        progress=None,
    ).state
    logits = task.logits(split.X_validation, state.y)
    signed = np.where(split.y_validation == 1, logits, -logits)
    expected = np.mean(np.logaddexp(0, -signed))
    assert float(validation.validation_loss(task.problem, state)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["a8a", "w8a"])
def test_tuned_hyperparameters_exist_for_every_method(name):
    config = validation.tuned(name)
    assert config["ridge"] in tune.RIDGES
    for method in validation.METHODS:
        assert validation.make_solver(method, config[method])
        assert set(config[method]) == set(tune.WIDE[method])


def test_hyperopt_writes_a_table_a_plot_and_its_options(tmp_path):
    options = hyperopt.HyperoptOptions(
        data=("a8a",), methods=("BSVRBv2", "RSVRB"), trials=2, steps=40, blocks=10
    )
    curves = hyperopt.run(options, tmp_path)
    rows = read(tmp_path / "hyperopt.csv")
    assert [row["method"] for row in rows] == ["BSVRBv2", "RSVRB"]
    assert rows[1]["times faster"] == "1.0"
    facts = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert facts["options"]["trials"] == 2
    assert (tmp_path / "hyperopt.png").stat().st_size > 1000
    (first, _) = curves["a8a"]["BSVRBv2"]
    assert first.epochs[-1] == pytest.approx(40 / (240 / 32))
    assert first.loss[-1] < first.loss[0]


def test_the_papers_protocol_tunes_on_its_grid_and_resumes(tmp_path, monkeypatch):
    options = hyperopt.HyperoptOptions(
        protocol="paper", data=("a8a",), methods=("BSVRBv2", "RSVRB"), trials=1
    )
    options = dataclasses.replace(options.quick(), trials=1, steps=20)
    (first,) = hyperopt.run(options, tmp_path)["a8a"]["BSVRBv2"]
    chosen = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))["tuned a8a"]
    assert all(chosen["RSVRB"][name] in values for name, values in tune.PAPER["RSVRB"].items())
    text = (tmp_path / "hyperopt.md").read_text(encoding="utf-8")
    assert "alpha = 10, 100" in text
    assert "BSVRBv2 tried them with each of 4 values" in text

    monkeypatch.setattr(hyperopt, "_trial", lambda *given: pytest.fail("nothing is left to run"))
    (again,) = hyperopt.run(options, tmp_path, resume=True)["a8a"]["BSVRBv2"]
    np.testing.assert_array_equal(again.loss, first.loss)
    with pytest.raises(ValueError, match="resume needs the options"):
        hyperopt.run(dataclasses.replace(options, steps=30), tmp_path, resume=True)


def test_the_size_of_the_search_is_chosen_on_the_command_line(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hyperopt, "run", lambda options, folder, **others: asked.append(options))
    words = ["--protocol", "paper", "--settings", "3", "--tuning-steps", "50", "--rows", "900"]
    assert CliRunner().invoke(app, ["reproduce", "hyperopt", *words, "--out", str(tmp_path)]).exit_code == 0
    assert (asked[0].settings, asked[0].tuning_steps, asked[0].rows) == (3, 50, 900)


def test_the_note_of_our_protocol_says_that_budgets_differed(tmp_path):
    options = hyperopt.HyperoptOptions(data=("a8a",), methods=("BSVRBv2",), trials=1, steps=20, blocks=10)
    hyperopt.run(options, tmp_path)
    assert "RSVRB on w8a had 15 settings" in (tmp_path / "hyperopt.md").read_text(encoding="utf-8")


def test_an_unknown_protocol_is_an_error_message(tmp_path):
    for name in ("hyperopt", "noise"):
        words = ["reproduce", name, "--protocol", "theirs", "--out", str(tmp_path)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1
        assert "protocol must be 'ours' or 'paper', got 'theirs'" in result.output


@pytest.mark.parametrize("protocol", ["ours", "paper"])
def test_a_quick_check_of_hyperopt_gets_below_its_start(protocol, tmp_path):
    """And takes all of its steps, however busy the machine is."""
    options = hyperopt.HyperoptOptions(protocol, data=("a8a",), methods=("BSVRBv2",)).quick()
    assert options.seconds is None
    for curve in hyperopt.run(options, tmp_path)["a8a"]["BSVRBv2"]:
        assert curve.loss[-1] < np.log(2)  # that of y = 0


def test_a_curve_knows_when_it_reached_a_loss():
    curve = hyperopt.TrialCurve(np.arange(3.0), np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.3, 0.2]))
    assert curve.seconds_to(0.3) == 2.0
    assert curve.seconds_to(0.1) == np.inf


def test_a_trial_that_has_ended_keeps_its_loss_while_slower_ones_go_on():
    at = np.array([1.0, 2.0])
    fast = hyperopt.TrialCurve(at, at, np.array([0.9, 0.2]))
    slow = hyperopt.TrialCurve(at, 3 * at, np.array([0.9, 0.4]))
    assert hyperopt._reached([fast, slow], 0.3) == 6.0
    assert hyperopt._reached([fast, slow], 0.29) == np.inf


def test_a_short_ablation_lowers_the_loss_with_every_size(tmp_path):
    options = dataclasses.replace(ablation.AblationOptions(methods=("BSVRBv2",)).quick(), batch_sizes=(32,))
    for curve in ablation.run(options, tmp_path):
        assert curve.loss[-1] < curve.loss[0]


def test_ablation_reports_the_speed_up_in_steps():
    step, seconds = np.arange(1, 5) * 10, np.arange(1.0, 5.0)

    def curve(value, loss):
        return ablation.SizeCurve("BSVRBv2", "I", value, step, seconds, np.array(loss), np.zeros(4))

    slow, fast = curve(1, [0.9, 0.8, 0.7, 0.6]), curve(2, [0.8, 0.6, 0.5, 0.4])
    rows = ablation.table([slow, fast])
    assert [row["steps"] for row in rows] == [40, 20]
    assert rows[1]["speed-up in steps"] == "2.0"


def test_the_panels_of_the_ablation_are_not_squeezed_by_their_legends(tmp_path):
    pytest.importorskip("matplotlib")
    step, loss = np.arange(1.0, 5.0), np.ones(4)
    curves = [
        ablation.SizeCurve("BSVRBv2", varied, value, step, step, loss, 0 * loss)
        for varied in ("I", "B")
        for value in ablation.AblationOptions.blocks_per_step
    ]
    figure = ablation._plot(curves)
    figure.savefig(tmp_path / "ablation.png")  # sets the places of the panels
    assert min(axis.get_position().width for axis in figure.axes) > 0.35


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["reproduce", "ablation", "--quick", "--method", "BSVRBv2"], ["ablation.csv", "ablation.png"]),
        (["tune", "a8a", "--quick", "--method", "BSVRBv2"], ["tune.md", "settings.json"]),
    ],
)
def test_commands_write_their_results(arguments, files, tmp_path):
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    for file in files:
        assert (folder / file).stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", "a8a", "--method", "SGD"], "methods must be some of"),
        (["tune", "a8a", "--grid", "fine"], "grid must be one of"),
    ],
)
def test_wrong_arguments_are_an_error_message(arguments, words, tmp_path):
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert words in result.output


def test_trials_are_distinct_points_of_the_grid():
    drawn = tune.draw_trials({"a": (1, 2, 3), "b": (4, 5)}, 4, seed=0)
    pairs = set(zip(drawn["a"], drawn["b"], strict=True))
    assert len(pairs) == 4
    assert len(tune.draw_trials({"a": (1, 2, 3)}, 10, seed=0)["a"]) == 3
