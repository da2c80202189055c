"""Checks of arguments: every message names the argument, what was got and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

PyTree = Any


def leading_axis(name: str, tree: PyTree) -> int:
    """The common length of the leading axis of a tree's leaves, at least one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(f"{name} must hold at least one array, got {tree!r}")
    lengths = {}
    for path, leaf in leaves:
        shape = np.shape(leaf)
        where = name + jax.tree_util.keystr(path)
        if len(shape) == 0:
            raise ValueError(f"{where} must have a leading axis (one entry per row), got a scalar")
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise TypeError(f"{where} must be numeric, got dtype {dtype}")
        _require_no_wrap(where, leaf)
        lengths[where] = shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name}: all arrays need the same leading axis, got {lengths}")
    (length,) = set(lengths.values())
    if length < 1:
        raise ValueError(f"{name} must hold at least one row, got an empty leading axis")
    return int(length)


def _require_no_wrap(where: str, leaf: Any) -> None:
    """Raises if integers do not fit the dtype that JAX will store them in: they would wrap around."""
    if isinstance(leaf, np.ndarray) and leaf.size and leaf.dtype.kind in "iu":
        stored = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if stored != leaf.dtype:
            limits, found = np.iinfo(stored), (int(leaf.min()), int(leaf.max()))
            if found[0] < limits.min or found[1] > limits.max:
                worst = found[0] if found[0] < limits.min else found[1]
                raise ValueError(
                    f"{where} must fit {stored}, got {worst} (jax_enable_x64 stores integers in 64 bits)"
                )


_NETWORK = (
    ": of a network give the arrays alone, such as eqx.partition(network, eqx.is_inexact_array)[0], and put "
    "it together in f and g with eqx.combine"
)


def floating(name: str, tree: PyTree) -> PyTree:
    """The tree as arrays, which must all be floating."""
    if not jax.tree.leaves(tree):
        raise ValueError(f"{name} must hold at least one array, got {tree!r}")

    def convert(path: Any, leaf: Any) -> jax.Array:
        where = name + jax.tree_util.keystr(path)
        try:
            array = jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            hint = _NETWORK if callable(leaf) else ""
            raise TypeError(f"{where} must be a floating array, got {type(leaf).__name__}{hint}") from error
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{where} must be a floating array, got dtype {array.dtype}")
        return array

    return jax.tree_util.tree_map_with_path(convert, tree)


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer within bounds."""
    bounds = f"at least {least}" if most is None else f"between {least} and {most}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer {bounds}, got {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return int(value)


def flag(name: str, value: Any) -> None:
    """Raises if a value is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer: it is known only when the program runs."""
    return isinstance(value, Tracer)


def real_array(name: str, value: Any) -> np.ndarray:
    """An array of real numbers that are known when it is made."""
    if is_traced(value):
        raise TypeError(f"{name} must be known when it is given, got an array that is traced by jax")
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.asarray(None)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, got {value!r}")
    return array.astype(float)


def number(name: str, value: Any, least: float, *, zero: bool = True, high: float | None = None) -> None:
    """One finite number from `least` (above it, if `zero` is False) to `high`; traced ones pass."""
    if callable(value) or isinstance(value, (list, tuple)) or np.ndim(value) != 0:
        shape = getattr(value, "shape", None)
        got = type(value).__name__ if shape is None else f"shape {shape}"
        raise TypeError(f"{name} must be a number, got {got}")
    coefficient(name, value, low=least, high=high, zero=zero, optional=False, kinds="a number")


def coefficient(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float | None = None,
    zero: bool = False,
    optional: bool = True,
    by_level: bool = False,
    kinds: str = "a number or a schedule",
) -> None:
    """A float, a schedule, or (`by_level`) a dict of them; concrete numbers must lie in (low, high].

    Tracers and schedules pass: their values are not known yet.
    """
    if callable(value) or is_traced(value) or (value is None and optional):
        return
    if by_level and isinstance(value, Mapping):
        for level, one in value.items():
            coefficient(f"{name}[{level!r}]", one, low=low, high=high, zero=zero, optional=optional)
        return
    number = np.asarray(value)
    real = np.issubdtype(number.dtype, np.integer) or np.issubdtype(number.dtype, np.floating)
    if not (real and isinstance(value, (int, float, np.number, np.ndarray, jax.Array))):
        got = "None" if value is None else type(value).__name__
        raise TypeError(f"{name} must be {kinds}{', or a dict of them' if by_level else ''}, got {got}")
    interval = f"{'[' if zero else '('}{low}, {'∞)' if high is None else f'{high}]'}"
    above = number >= low if zero else number > low
    below = np.isfinite(number) if high is None else number <= high
    if not bool(np.all(above & below)):
        raise ValueError(f"{name} must lie in {interval}, got {value}")


def upper_step(value: Any) -> None:
    """A number that is not negative, a schedule or an optax transformation; or None."""
    if value is not None and not isinstance(value, optax.GradientTransformation):
        kinds = "a number, a schedule or an optax transformation"
        coefficient("upper_step", value, zero=True, optional=False, kinds=kinds)


def all_fit(values: Mapping[str, Any], levels: list[str] | None) -> None:
    """Coefficients that all fit a problem; see `fits`."""
    for name, value in values.items():
        fits(name, value, levels)


def fits(name: str, value: Any, levels: list[str] | None) -> None:
    """A coefficient that fits a problem: a scalar, a schedule of scalars, or a dict by some of the levels."""
    if value is None or isinstance(value, optax.GradientTransformation):
        return
    if isinstance(value, Mapping):
        if levels is None or set(value) - set(levels):
            expected = "one value, as lower is not a dict" if levels is None else f"some of {levels}"
            raise ValueError(f"{name} names the lower levels {sorted(map(str, value))}, expected {expected}")
        for level, one in value.items():
            fits(f"{name}[{level!r}]", one, None)
        return
    if callable(value):
        step = jax.ShapeDtypeStruct((), jnp.int32)
        out = traced(f"the schedule {name}", value, step=step)
        if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.number)):
            raise ValueError(f"the schedule {name} must return a scalar for a step, got {shapes(out)}")
    elif np.shape(value) != ():
        raise ValueError(f"{name} must be a scalar, got shape {np.shape(value)}")


def solver(value: Any, kind: type) -> None:
    """A solver; not its class."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"solver must be a bilevax solver such as BSVRBv2(upper_step=0.1), got {got}")


def scalar_output(name: str, function: Callable[..., Any], **arguments: Any) -> None:
    """Traces a user's function abstractly: it must run and return one floating scalar."""
    out = traced(name, function, **arguments)
    leaves = jax.tree.leaves(out)
    if len(leaves) != 1 or leaves[0].shape != ():
        raise ValueError(f"{name} must return a scalar, got {shapes(out)}")
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise TypeError(f"{name} must return a floating scalar, got dtype {leaves[0].dtype}")


def floating_output(name: str, function: Callable[..., Any], **arguments: Any) -> PyTree:
    """Traces a user's function abstractly: it must run and return floating arrays. Returns their shapes."""
    out = traced(name, function, **arguments)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(out)]
    if not dtypes or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise TypeError(f"{name} must return floating arrays, got {shapes(out)}")
    return out


_KEYS = (
    "An array has no names: batch is what the data source holds, and y is a dict in f if levels have names, "
    "in a level if reads=… names others"
)


def traced(name: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """The shapes a user's function returns; an error inside it is reported with its arguments."""
    try:
        return jax.eval_shape(function, *arguments.values())
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        given = ", ".join(f"{argument} = {shapes(value)}" for argument, value in arguments.items())
        if isinstance(error, KeyError):
            message = f"{name} asked for the key {error}, which it was not given: it is called with {given}"
            raise ValueError(message) from error
        kind = TypeError if isinstance(error, (TypeError, AttributeError)) else ValueError
        called = f"function({', '.join(arguments)})"
        rows = "upper_data" if name.startswith("upper") else "lower_data"
        why = f". batch is None because no {rows} was given" if arguments.get("batch", ()) is None else ""
        why = f". {_KEYS}" if "string indexing" in str(error) else why
        raise kind(f"{name} fails when it is called as {called} with {given}: {error}{why}") from error


def kind_of(value: Any) -> str:
    """What a value is, in a few words."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "an array" if hasattr(value, "shape") else type(value).__name__


def shapes(tree: PyTree) -> str:
    """Dtypes and shapes of a tree of arrays."""

    def shape(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__

    return str(jax.tree.map(shape, tree))
