"""`python -m bilevax`, and what the installed command `bilevax` runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what to install if its packages are missing."""
    try:
        from bilevax.cli import app
    except ModuleNotFoundError as error:
        if error.name in ("typer", "rich"):
            sys.exit(f'bilevax: the command line needs {error.name}: pip install "bilevax[cli]"')
        raise
    from bilevax import program_cache

    with program_cache():
        app(prog_name="bilevax")


if __name__ == "__main__":
    main()
