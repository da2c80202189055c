"""Bounds and sets of a variable, as static data of a level: compared by value, held by every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._util import checks

PyTree = Any

_ENDS = ("lower", "upper")
_LOOKED_AT = 4  # slots
_INEXACT = 1e-2  # what a projection may change its own result by, relative to its entries


@dataclasses.dataclass(frozen=True)
class Bound:
    """A number, or a tree of arrays, that the entries of a variable must not fall below or exceed.

    Attributes:
      structure: that of the tree.
      leaves: its arrays as nested tuples.
    """

    structure: Any
    leaves: tuple[Any, ...]

    def of(self, tree: PyTree) -> list[np.ndarray]:
        """One array per leaf of a tree: a single number or array serves all of them."""
        mine = [np.asarray(leaf, float) for leaf in self.leaves]
        single = self.structure == jax.tree.structure(0.0)
        return mine * len(jax.tree.leaves(tree)) if single else mine

    def like(self, tree: PyTree) -> PyTree:
        """The same, as a tree of arrays of its dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        mine = zip(self.of(tree), leaves, strict=True)
        return jax.tree.unflatten(structure, [jnp.asarray(a, b.dtype) for a, b in mine])

    def check(self, label: str, one: PyTree, what: str = "one block's y") -> None:
        """Raises unless the bound fits a variable, given by its shapes."""
        single = self.structure == jax.tree.structure(0.0)
        shapes = [np.shape(leaf) for leaf in self.leaves]
        expected = [leaf.shape for leaf in jax.tree.leaves(one)]
        if not single and self.structure != jax.tree.structure(one):  # the shapes alone may be the same
            wanted = jax.tree.map(lambda leaf: leaf.shape, one)
            got = jax.tree.unflatten(self.structure, shapes)
            raise ValueError(
                f"{label} must be a number or a tree like {what}, with shapes {wanted}, got shapes {got}"
            )
        shapes = shapes * len(expected) if single else shapes
        if not all(_broadcasts(a, b) for a, b in zip(shapes, expected, strict=True)):
            raise ValueError(
                f"{label} must be a number or fit {what} of shapes {expected}, got shapes {shapes}"
            )


@dataclasses.dataclass(frozen=True)
class Box:
    """All variables between two bounds; either may be None.

    Class attributes:
      entrywise: whether every entry of y has a set of its own, so that it is free or held by itself.
    """

    entrywise: ClassVar[bool] = True

    lower: Bound | None
    upper: Bound | None

    def __call__(self, y: PyTree, slot_axes: int = 0) -> PyTree:
        """The nearest y within the bounds; leading axes may count slots."""
        if self.lower is not None:
            y = jax.tree.map(jnp.maximum, y, self.lower.like(y))
        if self.upper is not None:
            y = jax.tree.map(jnp.minimum, y, self.upper.like(y))
        return y

    def ends(self, y: PyTree) -> tuple[PyTree, PyTree]:
        """Both bounds, in the shape of y; infinite where there is none."""

        def end(bound: Bound | None, otherwise: float) -> PyTree:
            if bound is None:
                return jax.tree.map(lambda a: jnp.full_like(a, otherwise), y)
            return jax.tree.map(lambda a, b: jnp.broadcast_to(b, a.shape), y, bound.like(y))

        return end(self.lower, -jnp.inf), end(self.upper, jnp.inf)

    def free(self, y: PyTree) -> PyTree:
        """By entry of y whether it lies strictly between its bounds: those on a bound are held there."""
        low, high = self.ends(y)
        return jax.tree.map(lambda a, low, high: (a > low) & (a < high), y, low, high)

    def check(self, label: str, one: PyTree) -> None:
        """Raises unless the bounds fit one slot's variable, given by its shapes."""
        for which, bound in (("lower", self.lower), ("upper", self.upper)):
            if bound is not None:
                bound.check(f"the {which} bound of {label}", one)
        check_crossing(label, self.lower, self.upper, one)

    def check_values(self, label: str, y: PyTree) -> None:
        """Bounds are a projection whatever y is."""


@dataclasses.dataclass(frozen=True)
class Set:
    """A set by its projection, a function of one slot's y."""

    entrywise: ClassVar[bool] = False

    function: Callable[[PyTree], PyTree]

    def __call__(self, y: PyTree, slot_axes: int = 0) -> PyTree:
        """The nearest y in the set, slot by slot; that many leading axes count slots."""
        project = self.function
        for _ in range(slot_axes):
            project = jax.vmap(project)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), project(y), y)

    def free(self, y: PyTree) -> PyTree:
        """All entries: a set that couples them holds none by itself."""
        return jax.tree.map(lambda a: jnp.ones(a.shape, bool), y)

    def check(self, label: str, one: PyTree) -> None:
        """Raises unless the projection returns what it is given."""
        found = checks.floating_output(label, self.function, y=one)
        got, expected = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (found, one))
        if jax.tree.structure(found) != jax.tree.structure(one) or got != expected:
            raise ValueError(f"{label} must return what y is, of shapes {expected}, got {got}")

    def check_values(self, label: str, y: PyTree) -> None:
        """Raises unless the function is a projection, as far as a few slots, and points beside them, show."""

        def beside(leaf: Array) -> Array:
            some = jnp.asarray(leaf)[:_LOOKED_AT]
            turns = jnp.cos(1 + jnp.arange(some.size, dtype=some.dtype)).reshape(some.shape)
            return jnp.concatenate([some, some + turns * (1 + jnp.abs(some))])

        points = jax.tree.map(beside, y)
        once = self(points, 1)
        looks = [jax.tree.leaves(tree) for tree in (points, once, self(once, 1))]
        if any(checks.is_traced(leaf) for look in looks for leaf in look):
            return
        for start, first, second in zip(*(map(np.asarray, look) for look in looks), strict=True):
            wrong = ~np.isfinite(first)
            if wrong.any():
                slot = int(np.argwhere(wrong)[0][0])
                raise ValueError(f"{label} must return finite numbers, got {first[slot]} for {start[slot]}")
            far = np.abs(second - first) > _INEXACT * (1 + np.abs(first))
            if far.any():
                slot = int(np.argwhere(far)[0][0])
                raise ValueError(
                    f"{label} must be a projection, which leaves its own result as it is, got {second[slot]} "
                    f"for {first[slot]}, which it had returned for {start[slot]}"
                )


def as_set(label: str, project: Any) -> Box | Set | None:
    """A set that a user gave: bounds (lower, upper), or a projection; None for none."""
    if project is None or callable(project):
        return None if project is None else Set(project)
    if not (isinstance(project, tuple) and len(project) == 2):
        raise TypeError(
            f"{label} must be bounds (lower, upper) or a function of y, got {type(project).__name__} "
            f"{project!r}"
        )
    lower, upper = (as_bound(f"the {n} bound of {label}", b) for n, b in zip(_ENDS, project, strict=True))
    for name, bound, end in ((_ENDS[0], lower, np.inf), (_ENDS[1], upper, -np.inf)):
        if bound is not None and any(np.any(np.asarray(leaf) == end) for leaf in bound.leaves):
            raise ValueError(f"the {name} bound of {label} must leave room for numbers, got {end}")
    check_order(lower, upper, f"{label}: ")
    if lower is None and upper is None:
        raise ValueError(f"{label} must have at least one bound, got (None, None)")
    return Box(lower, upper)


def as_bound(label: str, tree: PyTree) -> Bound | None:
    """A bound that a user gave; None for none."""
    if tree is None:
        return None
    leaves, structure = jax.tree.flatten(tree)
    arrays = [checks.real_array(label, leaf) for leaf in leaves]
    if not arrays or any(np.isnan(array).any() for array in arrays):
        raise ValueError(f"{label} must be a number or a tree of arrays without nan, got {tree!r}")
    return Bound(structure, tuple(_nested(array.tolist()) for array in arrays))


def check_order(lower: Bound | None, upper: Bound | None, label: str = "") -> None:
    """Raises if a lower bound exceeds an upper one; those of different structures are not compared."""
    if lower is None or upper is None or lower.structure != upper.structure:
        return
    for low, high in zip(lower.leaves, upper.leaves, strict=True):
        shapes = np.shape(low), np.shape(high)
        if not any(_broadcasts(*pair) for pair in (shapes, shapes[::-1])):
            raise ValueError(
                f"{label}lower and upper must fit one another, got shapes {shapes[0]} and {shapes[1]}"
            )
        if np.any(np.asarray(low) > np.asarray(high)):
            raise ValueError(f"{label}lower must not exceed upper, got lower = {low} and upper = {high}")


def check_crossing(label: str, lower: Bound | None, upper: Bound | None, one: PyTree) -> None:
    """Raises if a lower bound exceeds an upper one, of a variable that is given by its shapes."""
    if lower is None or upper is None:
        return
    for low, high in zip(lower.of(one), upper.of(one), strict=True):
        if np.any(low > high):
            raise ValueError(
                f"{label}: lower must not exceed upper, got lower = {low.tolist()} and upper = "
                f"{high.tolist()}"
            )


def _nested(value: Any) -> Any:
    return tuple(map(_nested, value)) if isinstance(value, list) else value


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False
