"""What griffe, which reads the docstrings for the site, must be told about ours.

Docstrings have Google's sections, Markdown, and reST for mathematics alone, as JAX's have. Here the
mathematics becomes Markdown's, and things whose signature is made at run time get it: equinox modules and
decorated functions.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

_ROLE = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(
    r"^(?P<space> *)\.\. math::(?P<first>[^\n]*)\n(?P<rest>(?:(?P=space) +\S[^\n]*\n)*)", re.MULTILINE
)
# `a, b: what both are` in a list of arguments.
_TOGETHER = re.compile(r"^  (?P<names>\w+(?:, \w+)+):(?P<text>[^\n]*\n(?:    [^\n]*\n)*)", re.MULTILINE)
# Griffe knows other words for these sections.
_SECTIONS = {"Example:": "Examples:", "Reference:": "References:"}


def translated(text: str) -> str:
    """A docstring in the markup that the site renders."""

    def block(found: re.Match[str]) -> str:
        space, latex = found["space"], " ".join(f"{found['first']} {found['rest']}".split())
        return f"{space}$$\n{space}{latex}\n{space}$$\n"

    def apart(found: re.Match[str]) -> str:
        return "".join(f"  {name}:{found['text']}" for name in found["names"].split(", "))

    text = _BLOCK.sub(block, text + "\n")
    text = _ROLE.sub(lambda found: f"${' '.join(found[1].split())}$", text)
    text = _TOGETHER.sub(apart, text)
    return "\n".join(_SECTIONS.get(line, line) for line in text.rstrip("\n").split("\n"))


class Docstrings(griffe.Extension):  # pyright: ignore[reportUntypedBaseClass]
    """Translates every docstring, and adds the signatures that griffe cannot read off the source."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Called by griffe for everything that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = translated(obj.docstring.value)

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        """Called by griffe when all of the package is known."""
        _sign(pkg)


# Not in the reference, and slow to import.
NOT_SHOWN = ("bilevax.experiments", "bilevax.cli", "bilevax.__main__")


def _sign(thing: Any) -> None:
    for member in list(thing.members.values()):
        if member.is_alias or member.path in NOT_SHOWN:
            continue
        if member.is_class and "__init__" not in member.members and _is_equinox_module(member.path):
            own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
            parameters = griffe.Parameters(own, *_parameters(member.path))
            member.set_member("__init__", griffe.Function("__init__", parameters=parameters, parent=member))
        elif member.is_function and thing.is_module and member.decorators:
            member.parameters = griffe.Parameters(*_parameters(member.path))
        if member.is_module or member.is_class:
            _sign(member)


def _is_equinox_module(path: str) -> bool:
    import equinox as eqx

    found = _find(path)
    return inspect.isclass(found) and issubclass(found, eqx.Module)


def _find(path: str) -> Any:
    """What a path names; None if its module needs an extra that is not installed."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _parameters(path: str) -> list[Any]:
    kinds = griffe.ParameterKind
    by_kind = {
        inspect.Parameter.POSITIONAL_ONLY: kinds.positional_only,
        inspect.Parameter.POSITIONAL_OR_KEYWORD: kinds.positional_or_keyword,
        inspect.Parameter.VAR_POSITIONAL: kinds.var_positional,
        inspect.Parameter.KEYWORD_ONLY: kinds.keyword_only,
        inspect.Parameter.VAR_KEYWORD: kinds.var_keyword,
    }
    return [
        griffe.Parameter(
            one.name,
            kind=by_kind[one.kind],
            annotation=_annotation(one.annotation),
            default=None if one.default is one.empty else _default(one.default),
        )
        for one in inspect.signature(_find(path)).parameters.values()
    ]


def _annotation(value: Any) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _default(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
