"""The command `bilevax`: one group of sub-commands per topic, each in its own module."""

from __future__ import annotations

import typer

from bilevax.data.cli import data_app

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")


@app.callback()
def bilevax() -> None:
    """Stochastic multi-block bilevel optimization: data sets, experiments, tuning."""
