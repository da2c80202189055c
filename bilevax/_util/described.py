"""What a call would compile, described without tracing it.

Two processes whose descriptions agree compile the same program. A description follows functions into their
code, their closures and the globals that they name. It knows a few kinds of values and a few packages, and
gives up on everything else: then a program is traced as usual.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax._util.checks import is_traced

_PACKAGES = ("bilevax", "jax", "jaxlib", "numpy", "equinox", "optax", "jaxtyping")
_MODULES = ("math", "functools", "operator", "itertools", "typing", "collections", "dataclasses", "builtins")
# Names in a user's code by which it may depend on what is not described.
_EFFECTS = {"environ", "getenv", "open", "input", "eval", "exec", "compile", "globals", "locals", "vars"} | {
    *("getattr", "setattr", "delattr", "__dict__", "__import__", "argv", "stdin", "time", "perf_counter"),
    *("monotonic", "now", "today", "default_rng", "RandomState"),
}
_MOST_BYTES = 2**26  # of arrays that functions close over


class UnknownError(Exception):
    """Something that cannot be described."""


class Description:
    """A digest of values, and the functions that were found in them, in order.

    Args:
      *values: what a program will be given: trees of arrays, of which only the shapes count, and of other
        values.

    Raises:
      UnknownError: a value is of an unknown kind.
    """

    def __init__(self, *values: Any):
        self.functions: list[Any] = []
        self._hash = hashlib.sha256()
        self._within: list[int] = []
        self._words: set[str] = set()  # of users' code
        self._modules: set[str] = set()
        for value in values:
            self._add(value, whole=False)
        if "random" in self._words and "numpy" in self._modules:
            raise UnknownError("maybe NumPy's random numbers")

    @property
    def digest(self) -> str:
        """Of everything."""
        return self._hash.hexdigest()

    def _write(self, *words: Any) -> None:
        self._hash.update(repr(words).encode())
        self._hash.update(b"\0")

    def _add(self, value: Any, whole: bool) -> None:
        """Describes a value; `whole`: with the entries of arrays, not their shapes alone."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            if type(value) not in (type(None), bool, int, float, complex, str, bytes):
                self._class(type(value))
            self._write(type(value).__name__, value)
        elif isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            self._array(value, whole)
        elif isinstance(value, (tuple, list, dict, set, frozenset)):
            self._container(value, whole)
        elif id(value) in self._within:  # a function that calls itself
            self._write("again", len(self._within) - self._within.index(id(value)))
        else:
            # Whether parts of values are one object or equal ones makes no difference to a program.
            self._within.append(id(value))
            self._object(value, whole)
            self._within.pop()

    def _array(self, value: Any, whole: bool) -> None:
        # NumPy's and JAX's arrays are traced alike, but are different constants.
        kind = "array" if not whole else type(value).__module__.partition(".")[0]
        self._write(kind, value.shape, str(value.dtype), bool(getattr(value, "weak_type", False)))
        if not whole:
            return
        if isinstance(value, jax.ShapeDtypeStruct) or is_traced(value):
            raise UnknownError("a traced value")
        if value.nbytes > _MOST_BYTES or value.dtype == object:
            raise UnknownError("a large array")
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        self._hash.update(np.ascontiguousarray(value).tobytes())

    def _container(self, value: Any, whole: bool) -> None:
        kind = type(value)
        if kind not in (tuple, list, dict, set, frozenset):
            self._class(kind)  # such as a NamedTuple
        self._write(kind.__name__, len(value))
        if isinstance(value, dict):
            for key, one in value.items():
                self._add(key, whole=True)
                self._add(one, whole)
        elif isinstance(value, (set, frozenset)):
            if not all(isinstance(one, (str, int)) for one in value):
                raise UnknownError("a set")
            self._write(sorted(map(repr, value)))
        else:
            for one in value:
                self._add(one, whole)

    def _object(self, value: Any, whole: bool) -> None:
        if isinstance(value, types.ModuleType):
            if not _is_known(value.__name__) or value.__name__.startswith("numpy.random"):
                raise UnknownError(f"module {value.__name__}")
            self._modules.add(value.__name__)
            self._write("module", value.__name__)
        elif _is_named(value):
            self._write("named", value.__module__, value.__qualname__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._write("method")
            self._add(value.__func__, whole=True)
            self._add(value.__self__, whole)
        elif isinstance(value, (functools.partial, jax.tree_util.Partial)):
            self._write(type(value).__name__)
            inside = whole or not isinstance(value, jax.tree_util.Partial)
            self._add(value.func, whole=True)
            self._add((value.args, value.keywords), inside)
        elif isinstance(value, jax.tree_util.PyTreeDef):
            self._write("structure", value.num_leaves)
            self._add(jax.tree.unflatten(value, range(value.num_leaves)), whole=True)
        elif isinstance(value, np.dtype):
            self._write("dtype", str(value))
        elif isinstance(value, enum.Enum):
            self._class(type(value))
            self._write(value.name)
        elif isinstance(value, eqx.Module) or dataclasses.is_dataclass(value):
            self._class(type(value))
            leaf = whole or not isinstance(value, eqx.Module)
            for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
                self._write(field.name)
                one = getattr(value, field.name, UnknownError)
                self._add(one, leaf or bool(field.metadata.get("static", False)))
        else:
            raise UnknownError(f"{type(value).__module__}.{type(value).__qualname__}")

    def _class(self, kind: type) -> None:
        if not _is_named(kind):
            raise UnknownError(f"class {kind.__module__}.{kind.__qualname__}")
        self._write("class", kind.__module__, kind.__qualname__)

    def _function(self, function: types.FunctionType) -> None:
        self.functions.append(function)
        self._write("function", function.__qualname__)
        self._add((function.__defaults__, function.__kwdefaults__), whole=True)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents, whole=True)
            except ValueError:  # a cell that is empty yet
                self._write("empty")
        if function.__dict__:
            self._add(function.__dict__, whole=True)
        if _is_known(function.__module__):  # what its globals are follows from the version
            self._code(function.__code__, {})
        else:
            self._code(function.__code__, function.__globals__)

    def _code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self._write(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._write(code.co_flags, code.co_argcount, code.co_kwonlyargcount)
        if names:
            self._check(code)
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._code(const, names)
            elif const is ...:
                self._write("...")
            else:
                self._add(const, whole=True)
        for name in code.co_names:
            if name in names:
                self._write(name)
                self._add(names[name], whole=True)

    def _check(self, code: types.CodeType) -> None:
        """Raises if a user's code may depend on more than values that are described."""
        self._words.update(code.co_names)
        if found := _EFFECTS.intersection(code.co_names):
            raise UnknownError(f"{sorted(found)}")
        if any(
            one.opname == "IMPORT_NAME" and not _is_known(one.argval) for one in dis.get_instructions(code)
        ):
            raise UnknownError("an import")


def _is_known(module: str | None) -> bool:
    return module is not None and (module in _MODULES or module.partition(".")[0] in _PACKAGES)


def _is_named(value: Any) -> bool:
    """Whether a known package has a value under its own name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not _is_known(module):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value
