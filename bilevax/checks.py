"""Checks of what users hand in: every message says what was got and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
        dtype = getattr(leaf, "dtype", np.asarray(leaf).dtype)
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise TypeError(f"{where} must be numeric, got dtype {dtype}")
        lengths[where] = shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name}: all arrays need the same leading axis, got {lengths}")
    (length,) = set(lengths.values())
    if length < 1:
        raise ValueError(f"{name} must hold at least one row, got an empty leading axis")
    return int(length)


def floating(name: str, tree: PyTree) -> PyTree:
    """The tree as arrays, which must all be floating."""
    if not jax.tree.leaves(tree):
        raise ValueError(f"{name} must hold at least one array, got {tree!r}")

    def convert(path: Any, leaf: Any) -> jax.Array:
        where = name + jax.tree_util.keystr(path)
        try:
            array = jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where} must be a floating array, got {type(leaf).__name__}") from error
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


def coefficient(name: str, value: Any, *, low: float = 0.0, high: float | None = None, zero: bool = False) -> None:
    """A float, a schedule, or a dict of them by lower level; concrete numbers must lie in (low, high].

    Tracers and schedules pass: their values are not known yet.
    """
    if value is None or callable(value):
        return
    if isinstance(value, Mapping):
        for level, one in value.items():
            coefficient(f"{name}[{level!r}]", one, low=low, high=high, zero=zero)
        return
    if isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
        raise TypeError(f"{name} must be a number or a schedule, got {type(value).__name__}")
    number = np.asarray(value)
    interval = f"{'[' if zero else '('}{low}, {'∞)' if high is None else f'{high}]'}"
    inside = (number >= low if zero else number > low) & (np.isfinite(number) if high is None else number <= high)
    if not bool(np.all(inside)):
        raise ValueError(f"{name} must lie in {interval}, got {value}")


def upper_step(value: Any) -> None:
    """A positive number, a schedule or an optax transformation."""
    if isinstance(value, optax.GradientTransformation):
        return
    if value is None:
        raise TypeError("upper_step must be a number, a schedule or an optax transformation, got None")
    coefficient("upper_step", value, zero=True)


def scalar_output(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Traces a user's function abstractly: it must run and return one floating scalar."""
    out = traced(name, function, *arguments)
    leaves = jax.tree.leaves(out)
    if len(leaves) != 1 or leaves[0].shape != ():
        raise ValueError(f"{name} must return a scalar, got {_shapes(out)}")
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise TypeError(f"{name} must return a floating scalar, got dtype {leaves[0].dtype}")


def traced(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes a user's function returns; a missing key is reported with the keys there are."""
    try:
        return jax.eval_shape(function, *arguments)
    except KeyError as error:
        held = [f"{sorted(map(str, a))}" for a in arguments if isinstance(a, Mapping)]
        raise ValueError(
            f"{name} asked for the key {error}, which it was not given: its arguments hold {', '.join(held)}"
        ) from error


def _shapes(tree: PyTree) -> str:
    return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree))
