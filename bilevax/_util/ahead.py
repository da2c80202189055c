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
            arrays, rest = _split(function(*_joined(held + taken, static)))
            return arrays, _Static(rest)

        name = getattr(function, "__name__", "program")
        pure.__name__ = pure.__qualname__ = name
        self._name, self._function, self._options, self._kept = name, function, options, kept
        self._jitted = jax.jit(pure, static_argnums=0, donate_argnums=2, compiler_options=options)
        self._ahead: dict[Any, _Ahead] = {}

    def __call__(self, *arguments: Any) -> Any:
        """The function of the arguments."""
        static, held, taken = divided = self._divided(arguments)
        if self._ahead and (ahead := self._ahead.pop(_key(*divided), None)) is not None:
            ahead.wait()  # JAX finds what it has compiled by itself
        with _quiet():
            arrays, found = self._jitted(static, held, taken)
        return _joined(arrays, found.value)

    def prepare(self, *arguments: Any) -> Any:
        """Traces the function now, and compiles it in another thread, for arguments like these.

        The next call waits for that. If the compiler fails, it fails in the call, too.

        Returns:
          What a call will return, with shapes (`jax.ShapeDtypeStruct`) for arrays.
        """
        divided = self._divided(arguments)
        key = _key(*divided)
        if key not in self._ahead:
            with _quiet():
                traced = self._jitted.trace(*divided)
                self._ahead[key] = _Ahead(traced, traced.lower())
        traced = self._ahead[key].traced
        shapes = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type)
            for one in traced.jaxpr.out_avals
        ]
        return _joined(shapes, traced.out_info[1].value)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program of such arguments, before it is compiled."""
        with _quiet():
            return self._jitted.trace(*self._divided(arguments)).lower()

    def _divided(self, arguments: tuple[Any, ...]) -> tuple[Any, list[Any], list[Any]]:
        """What is static, and the arrays that the caller keeps, and those that it does not."""
        arrays, static = _split(arguments)
        count = len(arrays) if self._kept is None else len(_split(arguments[: self._kept])[0])
        return static, arrays[:count], arrays[count:]


class _Ahead:
    """A program that another thread compiles."""

    def __init__(self, traced: Any, lowered: jax.stages.Lowered):
        self.traced, self._lowered, self._compiled = traced, lowered, []
        # Python waits for it before it ends: a compiler that is torn down at work crashes.
        self._thread = threading.Thread(target=self._compile)
        self._thread.start()

    def _compile(self) -> None:
        with contextlib.suppress(Exception):  # the call will say why
            self._compiled.append(self._lowered.compile())  # alive until JAX itself holds it

    def wait(self) -> None:
        """Returns when it is compiled, or cannot be."""
        self._thread.join()


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
