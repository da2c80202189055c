"""A check of the contract that f, g and c are means over the rows of a batch.

Padded batches, row groups and the diagnostics rely on it: they call a function on rows one by one and average
the values. A sum or a root of a mean would give wrong results without an error. So a few rows of one block
are compared with the batch of all of them, once per problem, at the start and at two perturbed points: where
y = 0, many losses are the same for every row.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.bits import CompactRows
from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Rows, Shared
from bilevax._util import checks
from bilevax._util.ahead import Ahead
from bilevax._util.hurried import hurry

PyTree = Any
Value = Callable[[PyTree, PyTree, PyTree], PyTree]  # of (point, constants, rows)
Choice = Callable[[Rows | None], tuple[int, PyTree] | None]  # a block, and some of its rows

_ROWS = 8
_AMOUNTS = (0.0, 0.1, 1.0)  # how far x and y are perturbed, relative to their size
_KEPT = 64
_passed: collections.OrderedDict[Any, None] = collections.OrderedDict()

_SUM = "It looks like a sum over the rows: use jnp.mean in place of jnp.sum"
_NORM = "It looks like the root of a sum over the rows: return the mean of the squares instead"
_COUNT = "It depends on how many rows there are: return a mean over them"
_ROOT = (
    "It looks like the root of a mean (an RMSE): return the mean square instead, or track the mean square as "
    "a bx.mean level and take the root of y in the upper function"
)
_OTHER = (
    "It depends on the batch as a whole, as a ratio or log of means, weights normalised over the batch, "
    "batch statistics and pairwise losses do: track such means as bx.mean levels, and combine them in the "
    "upper function"
)


class Checked(NamedTuple):
    """A user's function, with the rows to compare.

    Attributes:
      name: what messages call it.
      value: the function, of a point (x, y by level), constants and rows.
      given: what it is evaluated on first, with parts that are `fetched` within the program.
      block: the number of the block.
    """

    name: str
    value: Value
    given: tuple[PyTree, PyTree, PyTree]
    block: int


class _Entry(eqx.Module):
    """One block's entries of some arrays. Fetching them is part of the program that uses them."""

    arrays: PyTree
    place: Any

    def fetched(self) -> PyTree:
        return jax.tree.map(lambda a: jnp.asarray(a)[self.place], self.arrays)


class _SomeRows(eqx.Module):
    """Rows with these numbers."""

    packed: CompactRows
    places: Any

    def fetched(self) -> PyTree:
        return self.packed.take(self.places)


def fetched(tree: PyTree) -> PyTree:
    """A tree with the entries and rows that parts of it stand for."""

    def is_part(node: Any) -> bool:
        return isinstance(node, (_Entry, _SomeRows))

    return jax.tree.map(lambda node: node.fetched() if is_part(node) else node, tree, is_leaf=is_part)


def check_row_means(problem: Problem, x0: PyTree, y0: PyTree) -> None:
    """Raises unless f, every g and every c is a mean over the rows of its batch, as far as a few rows show.

    Only rows of `Shared` and `PerBlock` are compared. Functions that fail on a batch of one row, draw random
    numbers or read slots of their own are left out.

    Args:
      problem: the problem.
      x0: where x starts.
      y0: where the lower variables start, as in `minimize`.

    Raises:
      ValueError: with the name of the function and what it looks like.
    """
    if not problem.means_over_rows or problem.random or is_unknown((problem, x0, y0)):
        return
    start = starting_point(problem, x0, y0)
    if start is None:
        return  # the start of a run says what is wrong
    key = _key(problem, *start)
    if key in _passed:
        _passed.move_to_end(key)
        return
    begun = [(one, _begun(_rows_and_batch, one)) for one in functions_at(problem, *start, _some_rows)]
    for one, look in begun:
        _check(one, look)
    _passed[key] = None
    if len(_passed) > _KEPT:
        _passed.popitem(last=False)


def starting_point(problem: Problem, x0: PyTree, y0: PyTree) -> tuple[PyTree, dict[str, PyTree]] | None:
    """x0 and y0 by level; None if y0 does not fit the problem."""
    y = dict.fromkeys(problem.levels) if y0 is None else problem.split("y0", y0)
    fits = all(_fits(problem, name, tree) for name, tree in y.items())
    return (checks.floating("x0", x0), y) if fits else None


def _fits(problem: Problem, name: str, y: PyTree) -> bool:
    """Whether a level's y has an entry for every slot, or is left out where it may be."""
    if y is None:
        return problem.levels[name].is_value
    slots = problem.slots_of(name)
    return all(np.ndim(leaf) and np.shape(leaf)[0] == slots for leaf in jax.tree.leaves(y))


def is_unknown(tree: PyTree) -> bool:
    """Whether some array is traced, or held by other processes."""
    leaves = jax.tree.leaves(tree)
    return any(checks.is_traced(leaf) or not getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def _key(problem: Problem, x: PyTree, y: PyTree) -> Any:
    """What the outcome of a check depends on: the functions, and the shapes of all they are given."""
    functions = tuple((name, level.kind, level.function) for name, level in problem.levels.items())
    leaves, structure = jax.tree.flatten((x, y, problem))
    shapes = tuple((np.shape(leaf), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
    return problem.upper, functions, structure, shapes


def functions_at(problem: Problem, x: PyTree, y: dict[str, PyTree], rows_of: Choice) -> Iterator[Checked]:
    """The functions that can be looked at, each with a block and rows of it that its data source has."""
    own_slots = any(level.slots is not None for level in problem.levels.values())
    sources = {name: problem.lower_data[place] for name, place in problem.source_of}
    upper = problem.upper_data if problem.upper_shares is None else sources[problem.upper_shares]
    found = None if own_slots else rows_of(upper)
    if found is not None:
        block, rows = found
        constants = _entry(problem.blocks, block)
        start = _starting_y(problem, x, y, block)
        if start is not None:
            yield Checked(
                "upper",
                lambda point, c, rows: problem.upper(point[0], problem.view(point[1]), c, rows),
                ((x, start), constants, rows),
                block,
            )
    for name, level in problem.levels.items():
        found = None if level.own or level.slots is not None else rows_of(sources[name])
        if found is None:
            continue
        block, rows = found
        constants = _entry(problem.blocks, block)
        if level.reads:
            whole = None if own_slots else _starting_y(problem, x, y, block)
            if whole is None:
                continue
            start = problem.read_by(name, whole) | ({} if level.is_value else {name: whole[name]})
            value = functools.partial(_of_lower, level.function)
        elif level.has_hessian:
            start = _entry(y[name], block)
            value = functools.partial(_of_lower, level.function)
        else:
            start, value = None, functools.partial(_of_mean, level.function)
        yield Checked(f"lower level {name!r}", value, ((x, start), constants, rows), block)


def _of_lower(function: Callable[..., Any], point: PyTree, constants: PyTree, rows: PyTree) -> PyTree:
    return function(*point, constants, rows)


def _of_mean(function: Callable[..., Any], point: PyTree, constants: PyTree, rows: PyTree) -> PyTree:
    return function(point[0], constants, rows)


def _starting_y(problem: Problem, x: PyTree, y: dict[str, PyTree], block: int) -> dict[str, PyTree] | None:
    """One block's y; a mean without a start is computed from a few rows. None if that is not possible."""
    sources = {name: problem.lower_data[place] for name, place in problem.source_of}
    start = {}
    for name in problem.order:
        level = problem.levels[name]
        if y[name] is not None:
            start[name] = _entry(y[name], block)
            continue
        found = _some_rows(sources[name], block)
        rows = None if found is None else found[1]
        if not level.is_value or (found is None and sources[name] is not None):
            return None
        try:
            read = (problem.read_by(name, start),) if level.reads else ()
            given = (x, *read, _entry(problem.blocks, block), rows)
            start[name] = jax.jit(lambda given, c=level.function: c(*fetched(given)))(given)
        except Exception:  # a user's function may fail in any way; the start of the run will say so
            return None
    return start


def _some_rows(source: Rows | None, block: int | None = None) -> tuple[int, PyTree] | None:
    """Rows of a block, the longest unless one is given, from its first to its last; None if there is one."""
    if isinstance(source, Shared):
        first, length, block = 0, source.count, block or 0
    elif isinstance(source, PerBlock):
        lengths = np.asarray(source.lengths)
        block = int(np.argmax(lengths)) if block is None else block
        first, length = int(source.starts[block]), int(lengths[block])
    else:
        return None
    count = min(_ROWS, length)
    if count < 2:
        return None
    return block, rows_at(source, first + np.linspace(0, length - 1, count))


def rows_at(source: Shared | PerBlock, places: Any) -> PyTree:
    """Rows with these numbers, to be fetched by the program that uses them."""
    return _SomeRows(source.packed, np.asarray(places, np.int32))


def _entry(tree: PyTree, place: int) -> _Entry:
    return _Entry(tree, np.int32(place))


def _check(one: Checked, look: _Look | None) -> None:
    """Raises if one function is not a mean over rows, from a look at `_rows_and_batch`."""
    seen = None if look is None else look.found(one)
    if look is None or seen is None:
        return
    whole, single = (jax.tree.leaves(part) for part in seen)
    exact = _tolerance([*look.dtypes, *(leaf.dtype for leaf in whole)])
    for place, amount in enumerate(_AMOUNTS):
        for leaf, (batch, rows) in enumerate(zip(whole, single, strict=True)):
            batch, rows = np.asarray(batch[place], float), np.asarray(rows[place], float)
            if batch.shape != rows.shape[1:]:
                continue  # not one number: the start of a run says so
            if amount == 0 and np.isnan(batch).any() and one.name != "upper" and _is_finite(one):
                raise ValueError(
                    f"{one.name} is {_short(batch)} at x0 and y0, on {len(rows)} rows of block {one.block} "
                    "that hold finite numbers: look for logarithms and roots of negative numbers, divisions "
                    "by zero, and labels or indices that are out of range"
                )
            if not np.isfinite(batch).all():
                continue
            if not np.isfinite(rows).all():
                if amount == 0:
                    raise _refused(
                        one, f"{_short(batch)} on {len(rows)} rows", "not finite on some of them alone"
                    )
                continue
            error, scale = np.abs(batch - rows.mean(0)), max(np.abs(batch).max(), np.abs(rows).max())
            if error.max() > exact * scale:
                _look_closer(one, seen, place, leaf, exact)


def _is_finite(one: Checked) -> bool:
    """Whether the point and the rows of a function are finite: if not, others say which are not."""
    point, _, rows = fetched(one.given)
    return all(np.isfinite(np.asarray(leaf, float)).all() for leaf in jax.tree.leaves((point, rows)))


def _rows_and_batch(value: Callable[[PyTree], PyTree], rows: PyTree) -> Any:
    """A function on all rows, and on each of them as a batch of one."""
    return value(rows), jax.vmap(lambda row: value(_as_batch(row)))(rows)


def _closer(value: Callable[[PyTree], PyTree], rows: PyTree) -> Any:
    """A function on the rows in reverse, twice and three times, and on the first row twice with another."""
    count = jax.tree.leaves(rows)[0].shape[0]
    order = np.arange(count)
    choices = [order[::-1], np.tile(order, 2), np.tile(order, 3)]
    seen = [value(jax.tree.map(lambda a, c=choice: a[c], rows)) for choice in choices]
    pairs = jax.vmap(lambda a: value(jax.tree.map(lambda r: jnp.stack([r[0], r[0], r[a]]), rows)))
    return *seen, pairs(order[1:])


def _look_closer(one: Checked, seen: Any, place: int, leaf: int, exact: float) -> None:
    """Raises, with what a function looks like that is not a mean; unless rounding explains it."""
    look = _begun(_closer, one)
    closer = None if look is None else look.found(one)

    def at(tree: PyTree) -> np.ndarray:
        return np.asarray(jax.tree.leaves(tree)[leaf][place], float)

    batch, rows = at(seen[0]), at(seen[1])
    worst = np.unravel_index(np.argmax(np.abs(batch - rows.mean(0))), batch.shape)
    batch, rows = float(batch[worst]), rows[(slice(None), *worst)]
    scale = max(abs(batch), float(np.abs(rows).max()))
    got = f"{batch:.6g} on {len(rows)} rows"
    expected = f"the mean of its values on each of them alone is {rows.mean():.6g}"
    if closer is None:
        raise _refused(one, got, expected)
    reverse, twice, thrice = (float(at(tree)[worst]) for tree in closer[:3])
    pairs = at(closer[3])[(slice(None), *worst)]
    # What changes with the order alone is rounding, if it is small.
    small = exact * scale + 10 * min(abs(batch - reverse), 0.01 * scale)
    if abs(batch - rows.mean()) <= small:
        return
    if abs(twice - batch) > small:
        if abs(thrice - 2 * twice + batch) <= 4 * small:
            raise _refused(one, got, expected, _SUM)
        if abs(thrice**2 - 2 * twice**2 + batch**2) <= 8 * small * scale:
            raise _refused(one, got, expected, _NORM)
        raise _refused(one, got, expected, _COUNT)
    # With a constant r added (a regulariser), a root of a mean satisfies (f − r)² = mean (f_k − r)².
    r = (np.mean(rows**2) - batch**2) / (2 * (rows.mean() - batch))
    mixed = (2 * (rows[0] - r) ** 2 + (rows[1:] - r) ** 2) / 3
    if r <= rows.min() and np.all(np.abs((pairs - r) ** 2 - mixed) <= 2 * exact * scale**2):
        raise _refused(one, got, expected, _ROOT)
    raise _refused(one, got, expected)


def _refused(one: Checked, got: str, expected: str, looks: str = _OTHER) -> ValueError:
    return ValueError(
        f"{one.name} must be a mean over the rows of its batch, got {got} of block {one.block}, while "
        f"{expected}. {looks}. (bx.Problem(…, means_over_rows=False) skips this check.)"
    )


class _Look(NamedTuple):
    """A look at a function, which another thread compiles.

    Attributes:
      program: look(function, rows) at the start and at perturbed points, stacked.
      dtypes: of all that the function is given.
    """

    program: Ahead
    dtypes: list[Any]

    def found(self, one: Checked) -> Any:
        """What the program returns; None if it fails."""
        try:
            return jax.device_get(self.program.compiled()(one.given))
        except Exception:  # a user's function may fail in any way on other rows than those of a run
            return None


def _begun(look: Callable[[Callable[[PyTree], PyTree], PyTree], Any], one: Checked) -> _Look | None:
    """Begins a look at a function; None if it fails, or draws random numbers."""
    dtypes: list[Any] = []

    def at_all(given: PyTree) -> Any:
        point, constants, rows = fetched(given)
        dtypes.extend(jnp.result_type(leaf) for leaf in jax.tree.leaves((point, constants, rows)))

        def at(amount: Array) -> Any:
            moved = _moved(point, amount)
            return look(lambda rows: one.value(moved, constants, rows), rows)

        return jax.lax.map(at, jnp.asarray(_AMOUNTS))

    try:
        # In full precision: an accelerator would round the products of one row and of several differently.
        with jax.default_matmul_precision("highest"):
            traced = jax.jit(at_all).trace(one.given)
            return None if _is_random(traced.jaxpr) else _Look(Ahead(traced.lower(), hurry()), dtypes)
    except Exception:  # as above
        return None


def _moved(tree: PyTree, amount: Array) -> PyTree:
    """Floating arrays with every entry changed by up to `amount` of itself; zeros, of a typical entry."""

    def moved(number: int, leaf: Array) -> Array:
        # A multiple of the golden ratio, in its fractional part, is noise enough, and quick to compile.
        places = jax.lax.iota(jnp.uint32, math.prod(leaf.shape)).reshape(leaf.shape)
        noise = (places * np.uint32(0x9E3779B9) + np.uint32(0x2545F491 * (number + 1) % 2**32)).astype(
            jnp.float32
        ) / 2.0**31 - 1
        typical = jnp.sqrt(jnp.mean(jnp.square(leaf)))
        typical = jnp.where(typical > 0, typical, jnp.ones_like(typical))
        return leaf + amount.astype(leaf.dtype) * noise.astype(leaf.dtype) * jnp.where(
            leaf == 0, typical, leaf
        )

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [moved(*one) for one in enumerate(leaves)])


def _is_random(program: Any) -> bool:
    """Whether a program draws random numbers, or calls back to Python: values may then differ by chance."""
    for equation in program.eqns:
        if any(word in equation.primitive.name for word in ("random_", "threefry", "rng_", "callback")):
            return True
        for value in equation.params.values():
            for inside in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inside, "jaxpr", inside)
                if hasattr(inner, "eqns") and _is_random(inner):
                    return True
    return False


def _tolerance(dtypes: list[Any]) -> float:
    """The relative error that rounding may cause in the least precise of some dtypes."""
    rounding = max(float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
    return max(4 * rounding**0.5, 1e-6)


def _as_batch(row: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a[None], row)


def _short(value: np.ndarray) -> str:
    return f"{float(value.reshape(-1)[0]):.6g}"
