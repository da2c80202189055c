"""Compiled functions of trees, which can be compiled before they are called."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


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
            arrays, (rest, tree) = _split(function(*_joined(held + taken, static)))
            return arrays, _Static((rest, tree))

        name = getattr(function, "__name__", "program")
        pure.__name__ = pure.__qualname__ = name
        self._kept = kept
        self._jitted = jax.jit(pure, static_argnums=0, donate_argnums=2, compiler_options=options)
        self._compiling: list[threading.Thread] = []

    def __call__(self, *arguments: Any) -> Any:
        """The function of the arguments."""
        while self._compiling:  # else it would be compiled twice
            self._compiling.pop().join()
        with warnings.catch_warnings():  # the compiler uses what it can
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            arrays, static = self._jitted(*self._divided(arguments))
        return _joined(arrays, static.value)

    def prepare(self, *arguments: Any) -> Any:
        """Traces the function now, and compiles it in another thread, for arguments like these.

        The next call waits for that. If the compiler fails there, it fails in the call, too.

        Returns:
          What a call will return, with shapes (`jax.ShapeDtypeStruct`) for arrays.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            traced = self._jitted.trace(*self._divided(arguments))
            lowered = traced.lower()
        compiling = threading.Thread(target=_compile, args=(lowered, []), daemon=True)
        self._compiling.append(compiling)
        compiling.start()
        _, static = traced.out_info
        shapes = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type)
            for one in traced.jaxpr.out_avals
        ]
        return _joined(shapes, static.value)

    def _divided(self, arguments: tuple[Any, ...]) -> tuple[Any, list[Any], list[Any]]:
        """What is static, and the arrays that the caller keeps, and those that it does not."""
        arrays, static = _split(arguments)
        count = len(arrays) if self._kept is None else len(_split(arguments[: self._kept])[0])
        return static, arrays[:count], arrays[count:]


def _compile(lowered: Any, held: list[Any]) -> None:
    try:
        held.append(lowered.compile())
    except Exception:  # the call will say why
        held.clear()


def _split(tree: Any) -> tuple[list[Any], tuple[tuple[Any, ...], Any]]:
    """The arrays of a tree, and all the rest of it; `_split` marks the place of an array with itself."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]
    return arrays, (tuple(_split if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves), structure)


def _joined(arrays: list[Any], static: tuple[tuple[Any, ...], Any]) -> Any:
    """The tree that was split."""
    rest, structure = static
    remaining = iter(arrays)
    return jax.tree.unflatten(structure, [next(remaining) if leaf is _split else leaf for leaf in rest])
