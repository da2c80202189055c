"""Small programs, compiled in a hurry, and any program ahead of its first call.

A program that runs once, on few numbers, is done before its optimisation would be. So whether the compiler
optimises is decided by how many numbers a program will read. Nothing else may decide it: the same call must
have the same bits, whatever was called before.

The compiler needs no Python: while it works on one program, the next one is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from bilevax._util.ahead import Program, split
from bilevax._util.checks import is_traced

FEW = 15_000_000  # numbers: a program that reads more, in all, is worth some seconds of compilation
_OPTIONS: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": "1",  # parts for many threads take longer together
}


@functools.cache
def hurry() -> dict[str, str | bool]:
    """The compiler options that save time, as far as the installed compiler knows them."""
    if _are_known(_OPTIONS):
        return _OPTIONS
    return {name: value for name, value in _OPTIONS.items() if _are_known({name: value})}


def _are_known(options: dict[str, str | bool]) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except Exception:  # an option that this compiler does not know
        return False
    return True


class HurriedJit:
    """A function, compiled in a hurry where it reads few numbers; within another program it is itself.

    Arrays are traced, all other arguments are static.

    Args:
      function: the function.
      calls: about how often it is called.
      options: compiler options for any size.
      kept: how many of the first arguments the caller keeps; it takes over the arrays of all others. Left
        out, it takes over none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        calls: int = 1,
        options: dict[str, Any] | None = None,
        kept: int | None = None,
    ):
        functools.update_wrapper(self, function)
        self._function, self._calls = function, calls
        self._options, self._kept = options or {}, kept
        self._programs: dict[bool, Program] = {}

    def __call__(self, *arguments: Any, work: float | None = None) -> Any:
        """The function of the arguments.

        Args:
          *arguments: what the function is given.
          work: how many numbers it reads in all calls; left out, those in the arguments at each.
        """
        arrays, static = split(arguments)
        if any(map(is_traced, arrays)):
            return self._function(*arguments)
        program = self.program(self._is_small(arrays, work))
        try:
            return program(arrays, static)
        except ValueError as error:
            if "compiler_options" not in str(error):
                raise
        # Within another program, which knows these arguments: JAX allows compiler options at the top alone.
        with jax.ensure_compile_time_eval():
            return program(arrays, static)

    def prepare(self, *arguments: Any, work: float | None = None) -> Any:
        """Traces the function, and compiles it in another thread.

        Args:
          *arguments: what it will be given; arrays, or their shapes (`jax.ShapeDtypeStruct`).
          work: as in a call.

        Returns:
          What it will return, with shapes for arrays.
        """
        arrays, static = split(arguments)
        return self.program(self._is_small(arrays, work)).prepare(arrays, static)

    def program(self, small: bool) -> Program:
        """The compiled function, for few numbers or for many."""
        if small not in self._programs:
            options = self._options | (hurry() if small else {})
            self._programs[small] = Program(self._function, options, self._kept)
        return self._programs[small]

    def _is_small(self, arrays: list[Any], work: float | None) -> bool:
        return (self._calls * sum(one.size for one in arrays) if work is None else work) <= FEW
