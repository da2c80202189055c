"""Compiled functions of trees, which can be compiled before they are called."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_ARRAY = object()  # marks the place of one


@jax.tree_util.register_static
class _Static:
    """What a compiled function returns beside arrays."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


class Program:
    """A function, compiled for every kind of arguments. Arrays are traced, all other arguments are static.

    Args:
      function: the function.
      options: those of the compiler.
      kept: how many of the first arguments the caller keeps; the program takes over the arrays of all others.
        Left out, it takes over none.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], kept: int | None = None):
        def pure(static: Any, held: list[Any], taken: list[Any]) -> tuple[list[Any], _Static]:
            arrays, rest = split(function(*_joined(held + taken, static)))
            return arrays, _Static(rest)

        name = getattr(function, "__name__", "program")
        pure.__name__ = pure.__qualname__ = name
        self._name, self._function, self._options, self._kept = name, function, options, kept
        self._jitted = jax.jit(pure, static_argnums=0, donate_argnums=2, compiler_options=options)
        self._ahead: dict[Any, tuple[Any, Ahead]] = {}

    def __call__(self, arrays: list[Any], static: Any) -> Any:
        """The function of its arguments, which were `split`."""
        static, held, taken = divided = self._divided(arrays, static)
        if self._ahead and (prepared := self._ahead.pop(_key(*divided), None)) is not None:
            prepared[1].wait()  # JAX finds what it has compiled by itself
        with _quiet():
            arrays, found = self._jitted(static, held, taken)
        return _joined(arrays, found.value)

    def prepare(self, arrays: list[Any], static: Any) -> Any:
        """Traces the function now, and compiles it in another thread, for arguments like these.

        The next call waits for that. If the compiler fails, it fails in the call, too.

        Returns:
          What a call will return, with shapes (`jax.ShapeDtypeStruct`) for arrays.
        """
        divided = self._divided(arrays, static)
        key = _key(*divided)
        if key not in self._ahead:
            with _quiet():
                traced = self._jitted.trace(*divided)
                self._ahead[key] = traced, Ahead(traced.lower())
        traced, _ = self._ahead[key]
        shapes = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type)
            for one in traced.jaxpr.out_avals
        ]
        return _joined(shapes, traced.out_info[1].value)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program of such arguments, before it is compiled."""
        with _quiet():
            return self._jitted.trace(*self._divided(*split(arguments))).lower()

    def _divided(self, arrays: list[Any], static: Any) -> tuple[Any, list[Any], list[Any]]:
        """What is static, and the arrays that the caller keeps, and those that it does not."""
        if self._kept is None:
            return static, arrays, []
        leaves, structure = static
        first = sum(one.num_leaves for one in structure.children()[: self._kept])
        count = sum(leaf is _ARRAY for leaf in leaves[:first])
        return static, arrays[:count], arrays[count:]


class Ahead:
    """A program that another thread compiles.

    Args:
      lowered: the program.
      options: those of the compiler, beside what the program has by itself.
    """

    def __init__(self, lowered: jax.stages.Lowered, options: dict[str, Any] | None = None):
        self._lowered, self._options = lowered, options
        self._compiled: jax.stages.Compiled | Exception | None = None
        # Python waits for it before it ends: a compiler that is torn down at work crashes.
        self._thread = threading.Thread(target=self._compile)
        self._thread.start()

    def _compile(self) -> None:
        try:
            self._compiled = self._lowered.compile(compiler_options=self._options)
        except Exception as error:  # a thread has nobody to tell
            self._compiled = error

    def wait(self) -> None:
        """Returns when it is compiled, or cannot be."""
        self._thread.join()

    def compiled(self) -> jax.stages.Compiled:
        """The compiled program; raises what the compiler has raised."""
        self.wait()
        if isinstance(self._compiled, Exception):
            raise self._compiled
        assert self._compiled is not None
        return self._compiled


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The compiler uses what it can of the arrays that it is given."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def _key(static: Any, held: list[Any], taken: list[Any]) -> Any:
    """What distinguishes calls."""
    arrays = [(one.shape, one.dtype, getattr(one, "weak_type", False)) for one in (*held, *taken)]
    return static, tuple(arrays), len(held)


def split(tree: Any) -> tuple[list[Any], tuple[tuple[Any, ...], Any]]:
    """The arrays of a tree, and all the rest of it, with a mark in the place of every array."""
    leaves, structure = jax.tree.flatten(tree)
    arrays: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, _ARRAYS):
            arrays.append(leaf)
            leaves[place] = _ARRAY
    return arrays, (tuple(leaves), structure)


def _joined(arrays: list[Any], static: tuple[tuple[Any, ...], Any]) -> Any:
    """The tree that was split."""
    rest, structure = static
    remaining = iter(arrays)
    return jax.tree.unflatten(structure, [next(remaining) if leaf is _ARRAY else leaf for leaf in rest])
