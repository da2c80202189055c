"""A check of the contract that f, g and c are means over the rows of a batch.

Padded batches, row groups and the diagnostics rely on it: they call a function on rows one by one and average
the values. A sum or a root of a mean would give wrong results without an error. So a few rows of one block
are compared with the batch of all of them, once per problem, at the start and at two perturbed points: where
y = 0, many losses are the same for every row.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.few_rows import (
    Checked,
    fetched,
    functions_at,
    is_unknown,
    some_rows,
    starting_point,
)
from bilevax._problem.problem import Problem
from bilevax._util.ahead import Ahead
from bilevax._util.hurried import hurry

PyTree = Any

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
    functions = [*functions_at(problem, *start, some_rows)]
    look = _begun(_rows_and_batch, functions) if functions else None
    together = None if look is None else look.found(functions)
    if together is not None:
        for one, seen in zip(functions, together, strict=True):
            _check(one, seen)
    else:  # one of them fails: the others are looked at
        for one in functions:
            _check(one, _alone(_rows_and_batch, one))
    _passed[key] = None
    if len(_passed) > _KEPT:
        _passed.popitem(last=False)


def _key(problem: Problem, x: PyTree, y: PyTree) -> Any:
    """What the outcome of a check depends on: the functions, and the shapes of all they are given."""
    functions = tuple((name, level.kind, level.function) for name, level in problem.levels.items())
    leaves, structure = jax.tree.flatten((x, y, problem))
    shapes = tuple((np.shape(leaf), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
    return problem.upper, functions, structure, shapes


def _check(one: Checked, seen: Any) -> None:
    """Raises if one function is not a mean over rows, from a look at `_rows_and_batch`, if there is one."""
    if seen is None:
        return
    whole, single = (jax.tree.leaves(part) for part in seen)
    exact = _tolerance([*_dtypes(one), *(leaf.dtype for leaf in whole)])
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
    closer = _alone(_closer, one)

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
    """A look at some functions, which another thread compiles."""

    program: Ahead

    def found(self, functions: list[Checked]) -> list[Any] | None:
        """What it shows of each, at the start and at perturbed points, stacked; None if it fails."""
        try:
            return jax.device_get(self.program.compiled()([one.given for one in functions]))
        except Exception:  # a user's function may fail in any way on other rows than those of a run
            return None


def _begun(
    look: Callable[[Callable[[PyTree], PyTree], PyTree], Any], functions: list[Checked]
) -> _Look | None:
    """Begins a look at some functions; None if one fails, or draws random numbers."""

    def at_all(given: list[PyTree]) -> Any:
        known = [fetched(one) for one in given]

        def at(amount: Array) -> list[Any]:
            return [seen(*one, amount) for one in zip(functions, known, strict=True)]

        return jax.lax.map(at, jnp.asarray(_AMOUNTS))

    def seen(one: Checked, known: PyTree, amount: Array) -> Any:
        point, constants, rows = known
        moved = _moved(point, amount)
        return look(lambda rows: one.value(moved, constants, rows), rows)

    try:
        # In full precision: an accelerator would round the products of one row and of several differently.
        with jax.default_matmul_precision("highest"):
            traced = jax.jit(at_all).trace([one.given for one in functions])
            return None if _is_random(traced.jaxpr) else _Look(Ahead(traced.lower(), hurry()))
    except Exception:  # as above
        return None


def _alone(look: Callable[[Callable[[PyTree], PyTree], PyTree], Any], one: Checked) -> Any:
    """A look at one function; None if it fails."""
    begun = _begun(look, [one])
    found = None if begun is None else begun.found([one])
    return None if found is None else found[0]


def _dtypes(one: Checked) -> list[Any]:
    """Those of all that a function is given."""
    given = jax.eval_shape(fetched, one.given)
    return [jnp.result_type(leaf) for leaf in jax.tree.leaves(given)]


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
