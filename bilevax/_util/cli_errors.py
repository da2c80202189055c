"""Errors that a user of the command line can correct, as one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup


@contextmanager
def errors_as_messages(command: str = "bilevax", extra: str = "experiments") -> Iterator[None]:
    """Turns errors of input, of files and of missing packages into a line and exit code 1.

    Ctrl-C becomes a line and exit code 130, as of a program that the signal ends.

    Args:
      command: what the line begins with.
      extra: of bilevax, which has the packages that a command needs.
    """
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        message = str(error)
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            message = f'this needs {error.name.split(".")[0]}: pip install "bilevax[{extra}]"'
        elif isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        typer.echo(f"{command}: {' '.join(message.split())}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo(f"{command}: interrupted before it was finished", err=True)
        raise typer.Exit(130) from error


class OneLineErrors(TyperGroup):
    """Commands whose mistaken words are answered by one line on stderr, and exit code 2."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **named: Any) -> Any:
        """Runs a command; typer calls it."""
        if not standalone_mode:
            return super().main(*arguments, standalone_mode=False, **named)
        try:
            code = super().main(*arguments, standalone_mode=False, **named)
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            # What typer raises for mistaken words has no public base class in all its versions.
            if not hasattr(error, "format_message"):
                raise
            told: Any = error
            if type(error).__name__ != "NoArgsIsHelpError":  # for which the help was printed
                words = " ".join(told.format_message().split()).removesuffix(".")
                path = told.ctx.command_path if getattr(told, "ctx", None) else "bilevax"
                typer.echo(f"{path}: {words}; see {path} --help", err=True)
            sys.exit(told.exit_code)
        sys.exit(code if isinstance(code, int) else 0)
