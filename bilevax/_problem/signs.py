"""Which outputs of a function cannot be negative, or cannot be positive, as its program shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

PyTree = Any
Sign = int  # 1: at least zero; −1: at most zero; 0: unknown

_POSITIVE = {"exp", "exp2", "logistic", "abs", "square", "erfc"}
_KEEPING = {  # the sign of the first operand
    "reshape", "broadcast_in_dim", "transpose", "convert_element_type", "squeeze", "expand_dims", "slice",
    "dynamic_slice", "gather", "rev", "copy", "reduce_precision", "reduce_sum", "reduce_max", "reduce_min",
    "reduce_and", "cumsum", "sqrt", "cbrt", "tanh", "sinh", "asinh", "atan", "erf", "log1p", "expm1",
}  # fmt: skip
_NAMED = {"softplus", "relu", "logaddexp"}  # at least zero, if (logaddexp) one argument is


def signs(function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """The sign of every leaf that a function returns, whatever arguments of these shapes it is given."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    program, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    found = _of_program(program, [0] * len(program.jaxpr.invars))
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _of_program(program: Any, given: list[Sign]) -> list[Sign]:
    inner = getattr(program, "jaxpr", program)
    known = dict(zip(inner.invars, given, strict=True))
    known |= {v: _of_value(c) for v, c in zip(inner.constvars, getattr(program, "consts", ()), strict=False)}

    def read(variable: Any) -> Sign:
        return _of_value(variable.val) if hasattr(variable, "val") else known.get(variable, 0)

    for equation in inner.eqns:
        found = _of_equation(equation, [read(variable) for variable in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(variable) for variable in inner.outvars]


def _of_value(value: Any) -> Sign:
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        return 0
    try:
        array = np.asarray(value)
        return 1 if np.all(array >= 0) else -1 if np.all(array <= 0) else 0
    except Exception:  # a traced constant
        return 0


def _of_equation(equation: Any, given: list[Sign]) -> list[Sign]:
    """The signs of an equation's outputs from those of its inputs."""
    name, parameters, count = equation.primitive.name, equation.params, len(equation.outvars)
    inside = next(
        (parameters[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in parameters), None
    )
    if inside is not None and name not in ("scan", "while", "cond"):
        called = str(parameters.get("name", ""))
        if called in _NAMED and (called != "logaddexp" or 1 in given):
            return [1] * count
        variables = getattr(inside, "jaxpr", inside).invars
        return _of_program(inside, given) if len(variables) == len(given) else [0] * count
    if name == "optimization_barrier":
        return given
    return [_of_primitive(name, parameters, equation.invars, given)] * count


def _of_primitive(name: str, parameters: Any, variables: list[Any], given: list[Sign]) -> Sign:
    if name in _POSITIVE:
        return 1
    if name in _KEEPING:
        return given[0]
    if name == "neg":
        return -given[0]
    if name == "integer_pow":
        return 1 if parameters["y"] % 2 == 0 else given[0]
    if name == "pow":
        return 1 if given[0] == 1 else 0
    if name in ("mul", "div", "dot_general"):
        same = name == "mul" and variables[0] is variables[1]
        return 1 if same else math.prod(given)
    if name in ("add", "add_any", "concatenate", "pad"):
        return _common(given)
    if name == "sub":
        return _common([given[0], -given[1]])
    if name == "max":
        return 1 if 1 in given else _common(given)
    if name == "min":
        return -1 if -1 in given else _common(given)
    if name == "clamp":
        return 1 if given[0] == 1 else -1 if given[2] == -1 else 0
    return _common(given[1:]) if name == "select_n" else 0


def _common(given: list[Sign]) -> Sign:
    """The sign that all have."""
    return given[0] if len(set(given)) == 1 else 0
