r"""Whether to store y as offsets from a part of x, where lower solutions move along with x.

In a proximal problem, :math:`g_i = h_i(y) + \lambda \|y - x\|^2`, all solutions move with x, but only the
visited blocks would follow it. Stored as :math:`y_i = x + \delta_i`, all of them do.

Whether they do is measured: :math:`-\nabla_{yx}^2 g\, r` is how y is pushed if x moves by r. In a proximal
problem it is along r, whatever h is. Offsets are stored if its cosine with a random r is above one half, and
if its size fits the curvature of g in y: otherwise x is in other units than y.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import START, Sample, Sampler
from bilevax._problem.stream import Stream
from bilevax._problem.view import BlockView, each_block
from bilevax._step.coefficients import FIRST_STEP, evaluate
from bilevax._step.slots import gather
from bilevax._step.smoothness import random_like
from bilevax._step.trackers import Tracker
from bilevax._util.hurried import HurriedJit
from bilevax._util.per_entry import PerEntry
from bilevax._util.trees import PyTree, inner, norm, zeros_like
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.restart import Restart
from bilevax.solvers.start_checks import checked_start

_BLOCKS = 8
_ALONG = 0.5
_LEAST_SHARE, _MOST_SHARE = 0.01, 2.0  # of the coupling in the curvature: else x is in other units than y


@dataclasses.dataclass(frozen=True)
class PartOf:
    """x itself, or one of its entries."""

    key: Any = None

    def __call__(self, x: PyTree) -> PyTree:
        return x if self.key is None else x[self.key]

    def put(self, x: PyTree, part: PyTree) -> PyTree:
        """x with another such entry."""
        if self.key is None:
            return part
        return (
            x | {self.key: part}
            if isinstance(x, dict)
            else type(x)(part if key == self.key else one for key, one in enumerate(x))
        )


def with_offsets(
    problem: Problem, solver: AbstractSolver, x0: PyTree, y0: PyTree, sampler: Sampler
) -> Problem:
    """The problem, with offsets for the levels whose solutions move along with a part of x.

    Levels with `around=…`, and those whose step the user gave, stay as they are.
    """
    method = solver.solver if isinstance(solver, Restart) else solver
    if not isinstance(method, Recipe) or problem.through is not None or problem.tables:
        return problem
    free = [
        name
        for name, tracker in method.trackers(problem).items()
        if problem.levels[name].centre_is_open
        and problem.levels[name].slots is None
        and _is_automatic(method, name, tracker)
    ]
    if not free:
        return problem
    x, y, _ = checked_start(problem, x0, y0, sampler)
    centres = dict(problem.centre_functions)
    for name in free:
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), y[name])
        part = next((part for part in _parts(x) if _same_shapes(part(x), like)), None)
        if part is not None and bool(_follows(problem, name, part, x, y, sampler)):
            centres[name] = part
    return problem.with_centres(centres.items())


def _is_automatic(method: Recipe, name: str, tracker: Tracker) -> bool:
    """Whether the step of a level was left out, or is one that was automatic in another run."""
    if "lower_step" not in tracker.coefficients:
        return False
    given = evaluate(method.option("lower_step"), FIRST_STEP, name)
    return given is None or isinstance(given, PerEntry)


def _parts(x: PyTree) -> list[PartOf]:
    keys: list[Any] = []
    if type(x) is dict:
        keys = list(x)
    elif type(x) in (tuple, list):
        keys = list(range(len(x)))
    return [PartOf(), *map(PartOf, keys)]


def _same_shapes(one: PyTree, other: PyTree) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.shape == b.shape for a, b in pairs) and len(jax.tree.leaves(one)) > 0


def _follows(
    problem: Problem, name: str, part: PartOf, x: PyTree, y: dict[str, PyTree], sampler: Sampler
) -> Array:
    """Whether lower solutions move along with a part of x, in most of a few blocks."""
    return _cosine(problem, name, part, sampler, x, y[name]) > _ALONG


@HurriedJit
def _cosine(problem: Problem, name: str, part: PartOf, sampler: Sampler, x: PyTree, y: PyTree) -> Array:
    """Of how a part of x and the lower solutions move, the median of a few blocks."""
    count = min(_BLOCKS, problem.count)
    blocks = jnp.asarray(np.unique(np.linspace(0, problem.count - 1, count).round().astype(int)))

    def cosine(view: BlockView, y: PyTree) -> Array:
        r = random_like(Stream(np.uint32(0), np.uint32(1)), y)
        along = part.put(zeros_like(x), jax.tree.map(lambda a, b: a.astype(b.dtype), r, part(x)))

        def gradient(x: PyTree) -> PyTree:
            return jax.grad(lambda y: view.at(x).g(name, y))(y)

        pushed = jax.jvp(gradient, (x,), (along,))[1]
        sizes = norm(pushed) * norm(r)
        curved = jax.jvp(jax.grad(lambda y: view.g(name, y)), (y,), (r,))[1]
        share = -inner(pushed, r) / jnp.abs(inner(curved, r))
        in_units_of_y = (share > _LEAST_SHARE) & (share < _MOST_SHARE)
        return jnp.where(in_units_of_y, -inner(pushed, r) / jnp.where(sizes > 0, sizes, 1), 0)

    def some() -> Sample:
        return sampler.visit(problem, blocks, sampler.random.at(START), sampler.batch_size)

    sample = sampler.probe(problem, some)
    return jnp.median(each_block(problem, x, sample, cosine, gather(y, sample.blocks)))
