"""The command `bilevax`: one group of sub-commands per topic, each in its own module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevax._util.cli_errors import OneLineErrors, errors_as_messages
from bilevax.data.cli import data_app
from bilevax.experiments.cli import reproduce_app, tune
from bilevax.version import __version__

START, RESEARCH, DATA = "Start here", "The paper and beyond", "Data"

app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`bilevax COMMAND --help` has an example of every command. "
    "`bilevax --install-completion` lets the TAB key complete commands, options and data sets.",
)


@app.command(rich_help_panel=START, epilog="Example: bilevax demo --splits 2 --steps 500")
def demo(
    splits: Annotated[int, typer.Option(help="splits of the digits to average over", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="steps of each solver", min=1)] = 3000,
    seed: Annotated[int, typer.Option(help="the first split", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="file of the plot")] = Path("results/demo/demo.png"),
) -> None:
    """Learn from noisy labels with 100 blocks: progress bar, table, plot. Half a minute."""
    with errors_as_messages("bilevax demo"):
        from bilevax.experiments.demo import main

        main([f"--splits={splits}", f"--steps={steps}", f"--seed={seed}", f"--out={out}"])


app.add_typer(reproduce_app, name="reproduce", rich_help_panel=RESEARCH)
app.command(rich_help_panel=RESEARCH, epilog="Example: bilevax tune a8a --method BSVRBv2 --trials 12")(tune)
app.add_typer(data_app, name="data", rich_help_panel=DATA)


def show_version(asked: bool) -> None:
    """Prints the version and ends."""
    if asked:
        typer.echo(f"bilevax {__version__}")
        raise typer.Exit


@app.callback()
def bilevax(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Stochastic multi-block bilevel optimization: a demo, experiments, data sets."""
