"""Options of experiments: names that are checked, and command lines of single modules.

These command lines are made from a dataclass of options, and do not need the extra `cli`.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def check_names(name: str, got: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError if some names are unknown.

    Example:
      >>> check_names("data", ("a8a", "mars"), ("a8a", "w8a"))
      Traceback (most recent call last):
      ValueError: data must be among ['a8a', 'w8a'], got ['mars']
    """
    unknown = sorted(set(got) - set(known))
    if unknown:
        raise ValueError(f"{name} must be among {list(known)}, got {unknown}")


def make_parser(kind: type[Any], description: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with one argument per field of a dataclass of options, and `--out`, the folder of the results.

    Example:
      >>> @dataclasses.dataclass
      ... class Options:
      ...     methods: tuple[str, ...] = ("a", "b")
      ...     warm_up: int | None = None
      >>> given = make_parser(Options, "Example.", "results").parse_args(["--warm-up", "3", "--methods", "c"])
      >>> read_options(Options, given), given.out
      (Options(methods=('c',), warm_up=3), 'results')
    """
    parser = argparse.ArgumentParser(description=description)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        first = (typing.get_args(hint) or (hint,))[0]  # of tuple[str, ...] or int | None
        nargs = "*" if typing.get_origin(hint) is tuple else None
        parser.add_argument(flag, type=first, nargs=nargs, default=field.default)
    parser.add_argument("--out", default=out)
    return parser


def read_options(kind: type[T], given: argparse.Namespace) -> T:
    """The options that a parser of `make_parser` found."""
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(typing.cast(Any, kind))}
    return kind(**{name: tuple(one) if isinstance(one, list) else one for name, one in values.items()})
