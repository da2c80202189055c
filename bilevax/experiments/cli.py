"""`bilevax reproduce` and `bilevax tune`: one command per experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bilevax._util.cli_errors import errors_as_messages

PAPER, THEORY, BEYOND = "The paper's experiments", "The paper's theorems", "Beyond the paper"

reproduce_app = typer.Typer(
    no_args_is_help=True, help="Run an experiment: a table, a plot and its settings, in a folder of results."
)


def experiment(panel: str, example: str) -> Callable[[Any], Any]:
    """Makes a function a command: where the table of contents lists it, and the words of an example."""
    return reproduce_app.command(rich_help_panel=panel, epilog=f"Example: bilevax reproduce {example}")


Method = Annotated[
    list[str] | None, typer.Option(help="a method; repeat for several; default: those of the experiment")
]
Data = Annotated[list[str] | None, typer.Option(help="a8a or w8a; repeat for both; default: both")]
RankingData = Annotated[str, typer.Option(help="ml-1m, ml-20m, netflix, or generated: like-ml-1m, …")]
Trials = Annotated[int, typer.Option(help="runs per method, each with its own split and samples", min=1)]
Seeds = Annotated[int, typer.Option(help="runs per table entry, side by side", min=1)]
Seed = Annotated[int, typer.Option(help="the first seed", min=0)]
Steps = Annotated[int, typer.Option(help="steps of every run", min=1)]
Epochs = Annotated[int, typer.Option(help="epochs of every training (ranking)", min=1)]
Out = Annotated[Path, typer.Option(help="the results go to a folder of this one, named after the experiment")]
Quick = Annotated[
    bool, typer.Option("--quick", help="a check of about a minute of the processor, with few rows and steps")
]
Protocol = Annotated[str, typer.Option(help="ours, or paper: by the paper's own rules")]
Resume = Annotated[bool, typer.Option("--resume", help="run only what is missing in the folder")]
Processes = Annotated[int, typer.Option(help="how many results are computed at a time", min=1)]
Alone = Annotated[int, typer.Option(help="how many runs are made at a time, a core each", min=1)]
TheoremFamily = Annotated[
    str, typer.Option(help="quadratic, or curved: blocks whose Hessian and Jacobian move with x and y")
]
RESULTS = Path("results")


def given(**lists: list[Any] | None) -> dict[str, Any]:
    """The options that were given, as tuples; the others keep the experiment's defaults."""
    return {name: tuple(values) for name, values in lists.items() if values}


def is_paper(protocol: str) -> bool:
    """Whether the paper's own protocol is asked for."""
    if protocol not in ("ours", "paper"):
        raise ValueError(f"protocol must be 'ours' or 'paper', got {protocol!r}")
    return protocol == "paper"


@experiment(PAPER, "hyperopt --data a8a --method BSVRBv2 --trials 2")
def hyperopt(
    protocol: Protocol = "ours",
    data: Data = None,
    method: Method = None,
    trials: Trials = 4,
    steps: Steps = 5000,
    seconds: Annotated[
        float, typer.Option(help="maximum duration of a run, without compilation", min=1)
    ] = 60.0,
    settings: Annotated[int, typer.Option(help="points of the paper's grid per method (paper)", min=1)] = 24,
    tuning_steps: Annotated[int, typer.Option(help="steps of each of them (paper)", min=1)] = 1000,
    rows: Annotated[int | None, typer.Option(help="rows of the data to use; default: all", min=1)] = None,
    seed: Seed = 0,
    processes: Processes = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Validation loss over epochs and seconds: BSVRB v1, v2 and RSVRB on a8a and w8a."""
    with errors_as_messages():
        from bilevax.experiments import hyperopt

        literal = is_paper(protocol)
        options = hyperopt.HyperoptOptions(
            protocol=protocol,
            trials=trials,
            steps=steps,
            seconds=seconds,
            settings=settings,
            tuning_steps=tuning_steps,
            rows=rows,
            seed=seed,
            **given(data=data, methods=method),
        )
        folder = out / f"hyperopt{'-paper' * literal}"
        hyperopt.run(options, folder, quick=quick, resume=resume, processes=processes)


@experiment(PAPER, "ablation --method BSVRBv2")
def ablation(
    method: Method = None,
    trials: Trials = 4,
    steps: Steps = 2000,
    seed: Seed = 0,
    processes: Processes = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Speed-up from more blocks (I) and more rows (B) per step, on a8a."""
    with errors_as_messages():
        from bilevax.experiments import ablation

        options = ablation.AblationOptions(trials=trials, steps=steps, seed=seed, **given(methods=method))
        ablation.run(options, out / "ablation", quick=quick, resume=resume, processes=processes)


@experiment(PAPER, "noise --seeds 2")
def noise(
    protocol: Protocol = "ours",
    seeds: Annotated[int | None, typer.Option(help="splits; default: 5, or the paper's 3", min=1)] = None,
    noise_level: Annotated[
        list[str] | None, typer.Option(help="0*, 0, 0.1, …, 0.4; repeat for several; default: all (paper)")
    ] = None,
    seed: Seed = 0,
    processes: Processes = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Test accuracy under noisy labels, with all or few clean rows, compared with the paper and cleanlab."""
    with errors_as_messages():
        from bilevax.experiments import noise, noise_paper

        if is_paper(protocol):
            literal = noise_paper.PaperNoiseOptions(
                seeds=seeds or 3, first_seed=seed, **given(noises=noise_level)
            )
            folder = out / "noise-paper"
            noise_paper.run(literal, folder, quick=quick, resume=resume, processes=processes)
            return
        if noise_level:
            raise ValueError(f"noise levels are for the paper's protocol, got {noise_level}")
        options = noise.NoiseOptions(seeds=seeds or 5, first_seed=seed)
        noise.run(options, out / "noise", quick=quick, resume=resume, processes=processes)


@experiment(BEYOND, "grouped --part squared --splits 1")
def grouped(
    data: Annotated[str, typer.Option(help="a table of ratings: ml-1m, or a path")] = "ml-1m",
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="squared, logistic, generated, grunfeld, fertility, quantiles, skewed, metadata, known, "
            "skewed_known or new; repeat for several; default: all"
        ),
    ] = None,
    splits: Annotated[int, typer.Option(help="number of splits", min=1)] = 5,
    users: Annotated[int | None, typer.Option(help="most users (squared loss); default: all", min=1)] = None,
    logistic_users: Annotated[int, typer.Option(help="most users (logistic loss)", min=1)] = 2000,
    quantile_users: Annotated[int, typer.Option(help="most users (quantile loss)", min=1)] = 1000,
    boosted: Annotated[int, typer.Option(help="splits in which boosting takes part; it is slow", min=0)] = 1,
    processes: Annotated[int, typer.Option(help="splits that are run at a time, a core each", min=1)] = 1,
    seed: Seed = 0,
    out: Out = RESULTS,
    quick: Quick = False,
    resume: Resume = False,
) -> None:
    """Thousands of models with a learnt prior, beside own, pooled and shared models, EM and boosting."""
    with errors_as_messages():
        from bilevax.experiments import grouped

        options = grouped.GroupedOptions(
            data=data,
            splits=splits,
            users=users,
            logistic_users=logistic_users,
            quantile_users=quantile_users,
            boosted=boosted,
            processes=processes,
            seed=seed,
            **given(parts=part),
        )
        grouped.run(options, out / "grouped", quick=quick, resume=resume)


@experiment(BEYOND, "auc --part classifiers --data w8a")
def auc(
    data: Data = None,
    part: Annotated[
        list[str] | None, typer.Option(help="classifiers or tasks; repeat for both; default: both")
    ] = None,
    seeds: Annotated[int, typer.Option(help="splits, and runs of every method", min=1)] = 5,
    seed: Seed = 0,
    processes: Alone = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Partial AUC and average precision on a8a and w8a, multi-task AUC on MNIST, beside cross-entropy."""
    with errors_as_messages():
        from bilevax.experiments import auc

        options = auc.AUCOptions(seeds=seeds, seed=seed, processes=processes, **given(data=data, parts=part))
        auc.run(options, out / "auc", quick=quick, resume=resume)


@experiment(BEYOND, "meta --family sines --seeds 2")
def meta(
    family: Annotated[
        list[str] | None, typer.Option(help="sines or digits; repeat for both; default: both")
    ] = None,
    method: Method = None,
    tasks: Annotated[int, typer.Option(help="tasks to learn from", min=1)] = 1000,
    seconds: Annotated[float, typer.Option(help="processor seconds of a run", min=0)] = 15.0,
    tuning_seconds: Annotated[float, typer.Option(help="of each of nine settings", min=0)] = 15.0,
    seeds: Seeds = 5,
    seed: Seed = 0,
    processes: Alone = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """New tasks after adaptation: a learnt prior beside joint training, MAML and ANIL, at equal seconds."""
    with errors_as_messages():
        from bilevax.experiments import meta

        options = meta.MetaOptions(
            tasks=tasks,
            seconds=seconds,
            tuning_seconds=tuning_seconds,
            seeds=seeds,
            seed=seed,
            processes=processes,
            **given(families=family, methods=method),
        )
        meta.run(options, out / "meta", quick=quick, resume=resume)


@experiment(PAPER, "ndcg --data ml-1m --method k-song --seeds 2")
def ndcg(
    protocol: Protocol = "ours",
    data: RankingData = "ml-1m",
    method: Method = None,
    seeds: Seeds = 5,
    epochs: Annotated[
        int | None, typer.Option(help="epochs of every training; default: 250, or the paper's 120", min=1)
    ] = None,
    hyperparameters: Annotated[
        Path | None, typer.Option(help="a JSON file by method, such as the best.json of `bilevax tune`")
    ] = None,
    seed: Seed = 0,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Test NDCG of every ranking method, with full ranking, beside EASE and ALS; and the paper's table."""
    with errors_as_messages():
        from bilevax.experiments import ndcg, ndcg_paper

        common: dict[str, Any] = {"data": data, "seeds": seeds, "first_seed": seed, **given(methods=method)}
        if is_paper(protocol):
            if hyperparameters:
                raise ValueError(f"hyperparameters are for protocol 'ours', got {hyperparameters}")
            literal = ndcg_paper.PaperNDCGOptions(epochs=epochs or 120, **common)
            ndcg_paper.run(literal, out / "ndcg-paper", quick=quick, resume=resume)
            return
        options = ndcg.NDCGOptions(epochs=epochs or 250, **common)
        chosen = hyperparameters and ndcg.read_hyperparameters(hyperparameters)
        ndcg.run(options, out / "ndcg", quick=quick, resume=resume, hyperparameters=chosen)


@experiment(THEORY, "rates --part epsilon --seeds 2")
def rates(
    method: Method = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="epsilon, control, sizes, errors or lemmas; repeat for several; default: all"),
    ] = None,
    family: TheoremFamily = "quadratic",
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="an ε, of all methods; repeat for several, the largest first; default: six"),
    ] = None,
    constant: Annotated[
        list[float] | None,
        typer.Option(help="a c that tuning may choose; repeat for several; default: seven, .25 to 2", min=0),
    ] = None,
    tuning_steps: Annotated[int, typer.Option(help="the most steps of a run that tunes c", min=1)] = 8000,
    seeds: Seeds = 8,
    seed: Seed = 0,
    processes: Processes = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Steps until the mean of ‖∇F‖² is at most ε², against ε, m, I and B, compared with the theorems."""
    with errors_as_messages():
        from bilevax.experiments.theorems import rates

        chosen = given(
            methods=method, parts=part, epsilons=epsilon, averaged_epsilons=epsilon, constants=constant
        )
        options = rates.RatesOptions(
            seeds=seeds, seed=seed, family=family, tuning_max_steps=tuning_steps, **chosen
        )
        folder = out / f"rates{'-curved' * (family == 'curved')}"
        rates.run(options, folder, quick=quick, resume=resume, processes=processes)


@experiment(THEORY, "restarts --seeds 4")
def restarts(
    method: Method = None, seeds: Seeds = 8, seed: Seed = 0, out: Out = RESULTS, quick: Quick = False
) -> None:
    """F − min F over steps under the PL condition, with and without restarts, compared with Theorem 2."""
    with errors_as_messages():
        from bilevax.experiments.theorems import restarts

        options = restarts.RestartsOptions(seeds=seeds, seed=seed, **given(methods=method))
        restarts.run(options, out / "restarts", quick=quick)


@experiment(THEORY, "choices --question gamma --quick")
def choices(
    question: Annotated[
        list[str] | None,
        typer.Option(
            help="blocks, gamma, hessian, slope, projection, start, output; repeat for several; default: all"
        ),
    ] = None,
    family: TheoremFamily = "quadratic",
    seeds: Seeds = 8,
    seed: Seed = 0,
    processes: Processes = 1,
    resume: Resume = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Choices that the paper leaves open: which blocks move, γ, which H and s, projections, start, output."""
    with errors_as_messages():
        from bilevax.experiments.theorems import answers, choices

        options = answers.ChoicesOptions(seeds=seeds, seed=seed, family=family, **given(questions=question))
        folder = out / f"choices{'-curved' * (family == 'curved')}"
        choices.run(options, folder, quick=quick, resume=resume, processes=processes)


def tune(
    problem: Annotated[str, typer.Argument(help="a8a, w8a, or a ranking data set: ml-1m, …")],
    method: Method = None,
    grid: Annotated[str, typer.Option(help="wide, or paper: the published grid (a8a, w8a)")] = "wide",
    trials: Annotated[int, typer.Option(help="trials per method", min=1)] = 48,
    steps: Annotated[int, typer.Option(help="steps of every trial (a8a, w8a)", min=1)] = 5000,
    epochs: Epochs = 200,
    positives: Annotated[int, typer.Option(help="positives per list (ranking)", min=1)] = 20,
    averaging: Annotated[
        float, typer.Option(help="epochs over which models are averaged (ranking)", min=0)
    ] = 10.0,
    gap: Annotated[
        int, typer.Option(help="items of every user between training and development items (ranking)", min=0)
    ] = 5,
    finalists: Annotated[int, typer.Option(help="best trials that are repeated (ranking)", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="other seeds for every finalist (ranking)", min=0)] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="run only what is missing in the folder (ranking)")
    ] = False,
    ridge: Annotated[
        float | None, typer.Option(help="λ; default: chosen by the first method (a8a, w8a)", min=0)
    ] = None,
    seed: Seed = 1000,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Find the best hyper-parameters of every method, with many trials side by side."""
    with errors_as_messages():
        from bilevax.experiments import ndcg_tune, tune

        folder = out / f"tune-{Path(problem).stem}"
        if problem in ("a8a", "w8a"):
            if resume:
                raise ValueError(f"resume is for ranking data, got {problem!r}")
            options = tune.TuneOptions(
                data=problem,
                grid=grid,
                trials=trials,
                steps=steps,
                ridge=ridge,
                seed=seed,
                **given(methods=method),
            )
            tune.run(options, folder, quick=quick)
            return
        ranking = ndcg_tune.NDCGTuneOptions(
            data=problem,
            trials=trials,
            epochs=epochs,
            seed=seed,
            finalists=finalists,
            repeats=repeats,
            positives=positives,
            averaging=averaging,
            gap=gap,
            **given(methods=method),
        )
        ndcg_tune.tune(ranking, folder, quick=quick, resume=resume)
