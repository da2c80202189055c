"""Small programs, compiled in a hurry.

A program that runs once, on few numbers, is done before its optimisation would be. So whether the compiler
optimises is decided by how many numbers a program will read. Nothing else may decide it: the same call must
have the same bits, whatever was called before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

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

    Arrays are traced, all other arguments are static, as with `eqx.filter_jit`.

    Args:
      function: the function.
      calls: about how often it is called.
      options: compiler options for any size.
      donate: which arguments it takes over, as in `eqx.filter_jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        calls: int = 1,
        options: dict[str, Any] | None = None,
        donate: Any = "none",
    ):
        functools.update_wrapper(self, function)
        self._function, self._calls = function, calls
        self._options, self._donate = options or {}, donate
        self._programs: dict[bool, Any] = {}

    def __call__(self, *arguments: Any, work: float | None = None) -> Any:
        """The function of the arguments.

        Args:
          *arguments: what the function is given.
          work: how many numbers it reads in all calls; left out, those in the arguments at each.
        """
        leaves = jax.tree.leaves(arguments)
        if any(map(is_traced, leaves)):
            return self._function(*arguments)
        work = self._calls * sum(map(np.size, leaves)) if work is None else work
        # Within another program that knows these arguments: JAX allows compiler options at the top alone.
        with jax.ensure_compile_time_eval():
            return self.program(small=work <= FEW)(*arguments)

    def program(self, small: bool) -> Any:
        """The compiled function, for few numbers or for many."""
        if small not in self._programs:
            options: dict[str, Any] = {"compiler_options": self._options | (hurry() if small else {})}
            self._programs[small] = eqx.filter_jit(self._function, donate=self._donate, **options)
        return self._programs[small]
