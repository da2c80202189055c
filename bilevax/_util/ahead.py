"""Compiled functions of trees, which can be compiled, or read from disk, before they are called."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from bilevax._util import stored

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
        static, held, taken = self._divided(arguments)
        read = None
        if self._ahead or stored.is_on():
            read = self._waited_for(_key(static, held, taken), arguments)
        if read is not None:
            arrays, found = read(held, taken)
        else:
            with _quiet():
                arrays, found = self._jitted(static, held, taken)
        return _joined(arrays, found.value)

    def prepare(self, *arguments: Any) -> Any:
        """Traces the function now, and compiles it in another thread, for arguments like these.

        Where programs are kept on disk, it is read from there, without tracing. The next call waits for
        either. If the compiler fails, it fails in the call, too.

        Returns:
          What a call will return, with shapes (`jax.ShapeDtypeStruct`) for arrays.
        """
        divided = self._divided(arguments)
        key = _key(*divided)
        if key not in self._ahead:
            place = stored.place_of(self._name, self._function, self._options, self._kept, arguments)
            self._ahead[key] = self._read(divided, place) or self._compiling(divided, place)
        ahead = self._ahead[key]
        return _joined(ahead.shapes, ahead.returned)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program of such arguments, before it is compiled."""
        with _quiet():
            return self._jitted.trace(*self._divided(arguments)).lower()

    def _waited_for(self, key: Any, arguments: Any) -> Callable[..., Any] | None:
        """The program from disk, if there is one; None if JAX has it, or is to make it."""
        if key not in self._ahead:
            if not stored.is_on():
                return None
            with contextlib.suppress(Exception):  # the call itself says what is wrong
                self.prepare(*arguments)
        ahead = self._ahead.get(key)
        read = None if ahead is None else ahead.wait()
        if read is None and not stored.is_on():
            self._ahead.pop(key, None)  # JAX finds it by itself from here on
        return read

    def _compiling(self, divided: Any, place: stored.Place | None) -> _Ahead:
        with _quiet():
            traced = self._jitted.trace(*divided)
            lowered = traced.lower()
        shapes = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type)
            for one in traced.jaxpr.out_avals
        ]
        returned = traced.out_info[1].value

        def compile() -> None:
            with stored.watched() as made:
                compiled = lowered.compile()
            held.append(compiled)
            if place is not None and made and (calls := _outside_calls(compiled)) <= {"lapack"}:
                rest, structure = returned
                program, _, _ = serialize_executable.serialize(compiled)
                place.write(program, (shapes, jax.tree.unflatten(structure, rest), bool(calls)))

        held: list[Any] = []  # until JAX itself holds it
        return _Ahead(shapes, returned, compile, held)

    def _read(self, divided: Any, place: stored.Place | None) -> _Ahead | None:
        found = None if place is None else place.read()
        if found is None:
            return None
        program, (shapes, skeleton, lapack) = found
        rest, structure = jax.tree.flatten(skeleton)
        returned = tuple(rest), structure
        given = jax.tree.structure((divided[1:], {}))
        result = jax.tree.structure((shapes, _Static(returned)))

        def load() -> Any:
            if lapack:
                _initialise_lapack()
            return serialize_executable.deserialize_and_load(program, given, result)

        return _Ahead(shapes, returned, load)

    def _divided(self, arguments: tuple[Any, ...]) -> tuple[Any, list[Any], list[Any]]:
        """What is static, and the arrays that the caller keeps, and those that it does not."""
        arrays, static = _split(arguments)
        count = len(arrays) if self._kept is None else len(_split(arguments[: self._kept])[0])
        return static, arrays[:count], arrays[count:]


class _Ahead:
    """A program that another thread compiles, or reads.

    Args:
      shapes: of the arrays that it returns.
      returned: what it returns beside them.
      work: what the thread does; it returns a program that JAX does not know, or None.
      held: what must stay alive meanwhile.
    """

    def __init__(self, shapes: list[Any], returned: Any, work: Callable[[], Any], held: Any = None):
        self.shapes, self.returned, self._held = shapes, returned, held
        self._found: list[Any] = []
        # Python waits for it before it ends: a compiler that is torn down at work crashes.
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):  # the call will say why, or do without
            self._found.append(work())

    def wait(self) -> Any:
        """What the thread has found."""
        self._thread.join()
        return self._found[0] if self._found else None


def _outside_calls(compiled: jax.stages.Compiled) -> set[str]:
    """The libraries that a program calls. Who loads it must have set them up, as JAX does in lowering."""
    targets = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or "unknown")
    own = ("__", "TopK", "AllocateBuffer", "SliceToDynamic", "PadToStatic")  # the compiler's
    return {name.partition("_")[0] for name in targets if not name.startswith(own)}


@functools.cache
def _initialise_lapack() -> None:
    jax.jit(jnp.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))


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
