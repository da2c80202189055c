"""The shape of one block's y if y0 is left out: the only shape that the user's functions accept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample, Sampler
from bilevax._problem.view import each_block
from bilevax._util.trees import PyTree, result_dtype

_Shape = tuple[int, ...]


def inferred(problem: Problem, sampler: Sampler, x: PyTree, given: dict[str, PyTree]) -> dict[str, PyTree]:
    """Zeros for the levels without a start, in the only shape that the user's functions accept."""
    missing = [n for n, level in problem.levels.items() if not level.is_value and given[n] is None]
    if not missing:
        return {}
    for name in missing:
        if problem.levels[name].sign == 0:
            raise ValueError(f"y0 must be given for the saddle level {name!r}, a pair (p, q), got None")
    sample = sampler.one_block(problem, None)
    lengths = _lengths(sample, x)
    if any(batch.weight is not None for batch in (sample.upper, *sample.lower.values())):
        # Weighted rows are passed one by one, and an axis of one row fits anything. So try more rows, of a
        # number that no other axis has.
        sample = sampler.one_block(problem, max(lengths, default=1) + 1)
    shapes: list[_Shape] = sorted({(), *((n,) for n in lengths)}, key=lambda shape: (_rank(shape), shape))
    choices, errors = _accepted(problem, sample, x, given, missing, shapes)
    first = min((_ranks(choice) for choice in choices), default=())
    choices = [choice for choice in choices if _ranks(choice) == first]
    if len(choices) == 1:
        found = zip(missing, choices[0], strict=True)
        zeros = {n: jnp.zeros((problem.count, *shape), result_dtype(x)) for n, shape in found}
        return {n: problem.levels[n].bounded(zero) for n, zero in zeros.items()}
    ask = f"So give y0, with a leading axis of {problem.count} (one entry per block)"
    if choices:
        named = [", ".join(f"{n!r}: {s}" for n, s in zip(missing, choice, strict=True)) for choice in choices]
        listed = "; ".join(named if problem.named else [str(choice[0]) for choice in choices])
        raise ValueError(
            f"y0 is left out, and several shapes of one block's y fit lower and upper: {listed}. {ask}"
        )
    tried = ", ".join(map(str, shapes))
    raise ValueError(
        f"y0 is left out, and no shape of one block's y fits lower and upper (tried {tried}). {ask}"
    ) from (errors[0] if errors else None)


def _rank(shape: _Shape) -> int:
    """Vectors first; a vector of one entry or a number only if no vector fits: they broadcast to anything."""
    return 2 if shape == () else int(shape == (1,))


def _ranks(choice: tuple[_Shape, ...]) -> tuple[int, ...]:
    return tuple(map(_rank, choice))


def _lengths(sample: Sample, x: PyTree) -> set[int]:
    """The lengths of all axes of x, the block constants and the rows, except the axes of blocks and rows."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(x)]
    shapes += [leaf.shape[1:] for leaf in jax.tree.leaves(sample.constants)]
    for batch in (sample.upper, *sample.lower.values()):
        shapes += [leaf.shape[1 if batch.shared else 2 :] for leaf in jax.tree.leaves(batch.rows)]
    return set(itertools.chain(*shapes))


def _accepted(
    problem: Problem,
    sample: Sample,
    x: PyTree,
    given: dict[str, PyTree],
    missing: list[str],
    shapes: list[_Shape],
) -> tuple[list[tuple[_Shape, ...]], list[Exception]]:
    """The choices of a shape per missing level that lower and upper accept, and what they raise at others."""
    errors: list[Exception] = []

    def fits(one: Any, y: PyTree) -> bool:
        try:
            out = _traced(one, problem, sample, x, y)
        except Exception as error:  # a user's function may fail on a wrong shape in any way
            errors.append(error)
            return False
        return isinstance(out, jax.ShapeDtypeStruct) and out.shape == (1,)

    def abstract(shape: _Shape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), result_dtype(x))

    known = {
        n: jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), tree)
        for n, tree in given.items()
        if tree is not None
    }

    def fits_all(choice: tuple[_Shape, ...]) -> bool:
        """Whether f accepts a choice, and every level that reads others, from the first on."""
        y = known | dict(zip(missing, map(abstract, choice), strict=True))
        for name in problem.order:
            if problem.levels[name].is_value:
                try:
                    y[name] = _traced(lambda view, y, n=name: view.c(n, y), problem, sample, x, y)
                except Exception as error:
                    errors.append(error)
                    return False
            elif problem.levels[name].reads and not fits(lambda view, y, n=name: view.g(n, y[n], y), y):
                return False
        return fits(lambda view, y: view.f(y), {name: y[name] for name in problem.levels})

    by_lower = [
        shapes
        if problem.levels[n].own or problem.levels[n].reads
        else [shape for shape in shapes if fits(lambda view, y, n=n: view.g(n, y), abstract(shape))]
        for n in missing
    ]
    return [choice for choice in itertools.product(*by_lower) if fits_all(choice)], errors


def _traced(one: Callable[..., Any], problem: Problem, sample: Sample, x: PyTree, y: PyTree) -> Any:
    """The shapes of what a function of one block and its y returns on a sample of one."""

    def look(sample: Sample, x: PyTree, y: PyTree) -> Any:
        return each_block(problem, x, sample, one, y)

    return jax.eval_shape(look, sample, x, y)
