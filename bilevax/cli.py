"""The command `bilevax`: one group of sub-commands per topic, each in its own module."""

from __future__ import annotations

import typer

from bilevax.data.cli import data_app
from bilevax.experiments.cli import reproduce_app, tune

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")
app.add_typer(reproduce_app, name="reproduce")
app.command()(tune)


@app.callback()
def bilevax() -> None:
    """Stochastic multi-block bilevel optimization: data sets, experiments, tuning."""
