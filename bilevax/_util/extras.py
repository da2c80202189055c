"""Packages that only some functions need."""

from __future__ import annotations

import importlib
from types import ModuleType


def required(module: str, what: str, extra: str) -> ModuleType:
    """A module of an optional package.

    Raises:
      ImportError: if the package is missing, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f'{what} needs {package}: pip install "bilevax[{extra}]"') from error
