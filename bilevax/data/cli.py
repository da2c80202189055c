"""`bilevax data`: list the known data sets, find them and download them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bilevax._util.cli_errors import errors_as_messages
from bilevax.data.locate import found, obtain
from bilevax.data.registry import ENTRIES, Entry, entry_of

Name = Annotated[
    str,
    typer.Argument(
        help="the data set, as `bilevax data list` calls it", autocompletion=lambda: list(ENTRIES)
    ),
]

data_app = typer.Typer(no_args_is_help=True, help="List the known data sets, download them, find them.")


@data_app.command("list", epilog="Example: bilevax data list")
def list_command() -> None:
    """All known data sets, and where they were found."""
    table = Table("name", "what", "size", "where")
    with errors_as_messages("bilevax data", "data"):
        for entry in ENTRIES.values():
            table.add_row(entry.name, entry.what, _size(entry), _where(entry))
    # Off a terminal, lines are not wrapped: paths can be copied from the output.
    Console(width=None if sys.stdout.isatty() else 250).print(table)


@data_app.command("fetch", epilog="Example: bilevax data fetch a8a")
def fetch_command(name: Name) -> None:
    """Download a data set into the cache, unless it is there, and check it."""
    with errors_as_messages("bilevax data", "data"):
        for source in entry_of(name).sources:
            typer.echo(obtain(source))


@data_app.command("path", epilog="Example: head -1 $(bilevax data path a8a | head -1)")
def path_command(name: Name) -> None:
    """Print where the files of a data set are, one per line; download nothing."""
    with errors_as_messages("bilevax data", "data"):
        for source in entry_of(name).sources:
            typer.echo(obtain(source, download=False))


def _size(entry: Entry) -> str:
    size = sum(source.size for source in entry.sources)
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _where(entry: Entry) -> str:
    paths = [found(source) for source in entry.sources]
    if all(path is not None for path in paths):
        return str(paths[0])
    if any(path is not None for path in paths):
        return "incomplete; fetch downloads the rest"
    return "to be downloaded" if all(source.url for source in entry.sources) else "to be obtained by hand"
