"""Errors that a user of the command line can correct, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_as_messages(command: str = "bilevax") -> Iterator[None]:
    """Turns errors of input, of files and of missing packages into a line and exit code 1.

    Ctrl-C becomes a line and exit code 130, as of a program that the signal ends.
    """
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo(f"{command}: interrupted before it was finished", err=True)
        raise typer.Exit(130) from error
