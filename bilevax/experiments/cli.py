"""`bilevax reproduce` and `bilevax tune`: one command per experiment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from bilevax._util.cli_errors import errors_as_messages

reproduce_app = typer.Typer(no_args_is_help=True, help="The paper's experiments: tables, plots and settings.")

Out = Annotated[Path, typer.Option(help="the folder that the results go to, one folder below per experiment")]
Quick = Annotated[bool, typer.Option("--quick", help="a check in about a minute, on few rows and steps")]
Seed = Annotated[int, typer.Option(help="of the first trial")]
RESULTS = Path("results")


@reproduce_app.command()
def hyperopt(
    data: Annotated[list[str] | None, typer.Option(help="data sets; both if left out")] = None,
    method: Annotated[list[str] | None, typer.Option(help="methods; all if left out")] = None,
    trials: Annotated[int, typer.Option(help="runs per method")] = 4,
    steps: Annotated[int, typer.Option(help="the most steps of a run")] = 5000,
    seconds: Annotated[float, typer.Option(help="the most seconds of a run")] = 60.0,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Validation loss over epochs and seconds: BSVRB v1, v2 and RSVRB on a8a and w8a."""
    from bilevax.experiments import hyperopt

    settings = hyperopt.Settings(trials=trials, steps=steps, seconds=seconds, seed=seed)
    settings = dataclasses.replace(
        settings, data=tuple(data or settings.data), methods=tuple(method or settings.methods)
    )
    with errors_as_messages():
        hyperopt.run(settings, out / "hyperopt", quick=quick)


@reproduce_app.command()
def ablation(
    method: Annotated[list[str] | None, typer.Option(help="methods; BSVRBv1 and BSVRBv2 if left out")] = None,
    trials: Annotated[int, typer.Option(help="runs per setting")] = 4,
    steps: Annotated[int, typer.Option(help="steps of every run")] = 2000,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Speed-up by more blocks (I) and more rows (B) per step, on a8a."""
    from bilevax.experiments import ablation

    settings = ablation.Settings(trials=trials, steps=steps, seed=seed)
    settings = dataclasses.replace(settings, methods=tuple(method or settings.methods))
    with errors_as_messages():
        ablation.run(settings, out / "ablation", quick=quick)


@reproduce_app.command()
def noise(
    seeds: Annotated[int, typer.Option(help="splits, each with corruptions of its own")] = 5,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Test accuracy under noisy labels, with all or few clean rows, beside the paper and cleanlab."""
    from bilevax.experiments import noise

    with errors_as_messages():
        noise.run(noise.Settings(seeds=seeds, first_seed=seed), out / "noise", quick=quick)


@reproduce_app.command()
def ndcg(
    data: Annotated[str, typer.Option(help="ml-1m, ml-20m, netflix, or generated: like-ml-1m, …")] = "ml-1m",
    method: Annotated[list[str] | None, typer.Option(help="methods; all if left out")] = None,
    seeds: Annotated[int, typer.Option(help="runs per method, side by side")] = 5,
    epochs: Annotated[int, typer.Option(help="of every run")] = 250,
    numbers: Annotated[
        Path | None, typer.Option(help="numbers by method, such as the best.json of `bilevax tune`")
    ] = None,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Test NDCG of every ranking method, full ranking, beside the paper's table."""
    from bilevax.experiments import ndcg

    settings = ndcg.Settings(data=data, seeds=seeds, first_seed=seed, epochs=epochs)
    settings = dataclasses.replace(settings, methods=tuple(method or settings.methods))
    if quick:
        settings = dataclasses.replace(settings, users=200, seeds=2, epochs=2, warm_up=1, every=1, width=8)
    with errors_as_messages():
        ndcg.run(settings, out / "ndcg", quick=quick, numbers=numbers and ndcg.read_numbers(numbers))


@reproduce_app.command()
def rates(
    method: Annotated[
        list[str] | None, typer.Option(help="methods, such as 'BSVRB v2'; all if left out")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="epsilon, control, sizes, errors; all if left out")
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs per setting, side by side")] = 8,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Steps until the mean of ‖∇F‖² is below ε², against ε, m, I and B, beside the theorems."""
    from bilevax.experiments.theorems import rates

    with errors_as_messages():
        settings = rates.Settings(seeds=seeds, seed=seed)
        settings = dataclasses.replace(
            settings, methods=tuple(method or settings.methods), parts=tuple(part or settings.parts)
        )
        rates.run(settings, out / "rates", quick=quick)


@reproduce_app.command()
def restarts(
    method: Annotated[list[str] | None, typer.Option(help="'BSVRB v1', 'BSVRB v2'; both if left out")] = None,
    seeds: Annotated[int, typer.Option(help="runs per setting, side by side")] = 8,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """F − min F over steps under the PL condition, in stages and without, beside Theorem 2."""
    from bilevax.experiments.theorems import restarts

    with errors_as_messages():
        settings = restarts.Settings(seeds=seeds, seed=seed)
        settings = dataclasses.replace(settings, methods=tuple(method or settings.methods))
        restarts.run(settings, out / "restarts", quick=quick)


@reproduce_app.command()
def choices(
    question: Annotated[
        list[str] | None,
        typer.Option(help="blocks, gamma, hessian, projection, start, output; all if left out"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="runs per way, side by side")] = 8,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """What the text leaves open: which blocks move, γ, which H, projections, the start, the output."""
    from bilevax.experiments.theorems import answers, choices

    with errors_as_messages():
        settings = answers.Settings(seeds=seeds, seed=seed)
        settings = dataclasses.replace(settings, questions=tuple(question or settings.questions))
        choices.run(settings, out / "choices", quick=quick)


def tune(
    problem: Annotated[str, typer.Argument(help="a8a, w8a, or a ranking data set: ml-1m, …")],
    method: Annotated[list[str] | None, typer.Option(help="methods; all if left out")] = None,
    grid: Annotated[str, typer.Option(help="wide, or paper: the grid as printed there")] = "wide",
    trials: Annotated[int, typer.Option(help="settings per method")] = 48,
    steps: Annotated[int, typer.Option(help="steps of every run (a8a, w8a)")] = 5000,
    epochs: Annotated[int, typer.Option(help="epochs of every run (ranking)")] = 200,
    positives: Annotated[int, typer.Option(help="of every list (ranking)")] = 20,
    averaging: Annotated[float, typer.Option(help="epochs that models are averaged over (ranking)")] = 10.0,
    gap: Annotated[
        int, typer.Option(help="items of every user left out between training and dev data (ranking)")
    ] = 5,
    finalists: Annotated[int, typer.Option(help="best settings that are run again (ranking)")] = 4,
    repeats: Annotated[int, typer.Option(help="with how many other seeds (ranking)")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="run what is missing in the folder (ranking)")
    ] = False,
    ridge: Annotated[float | None, typer.Option(help="λ; chosen by the first method if left out")] = None,
    seed: Seed = 1000,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """The best settings of every method on validation rows: a grid as one vmapped program."""
    from bilevax.experiments import ndcg_tune, tune

    with errors_as_messages():
        if problem not in ("a8a", "w8a"):
            plan = ndcg_tune.Settings(
                data=problem,
                trials=trials,
                epochs=epochs,
                seed=seed,
                finalists=finalists,
                repeats=repeats,
                positives=positives,
                averaging=averaging,
                gap=gap,
            )
            plan = dataclasses.replace(plan, methods=tuple(method or plan.methods))
            if quick:
                plan = dataclasses.replace(
                    plan, users=200, trials=2, epochs=2, warm_up=1, every=1, width=8, repeats=0
                )
            ndcg_tune.tune(plan, out / f"tune-{Path(problem).stem}", quick=quick, resume=resume)
            return
        if resume:
            raise ValueError(f"resume is for ranking data, got {problem!r}")
        settings = tune.Settings(data=problem, grid=grid, trials=trials, steps=steps, ridge=ridge, seed=seed)
        settings = dataclasses.replace(settings, methods=tuple(method or settings.methods))
        tune.run(settings, out / f"tune-{problem}", quick=quick)
