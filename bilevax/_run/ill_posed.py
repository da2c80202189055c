"""Problems that no step size can solve: lower problems without a minimum, and an f without a bound."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.risk import overall
from bilevax._problem.sampling import all_rows
from bilevax._problem.view import BlockView, each_block
from bilevax._step.slots import gather
from bilevax._truth.few_blocks import solve_few
from bilevax._util.trees import PyTree

_BLOCKS = 8
_WIDEST = 256  # lower variables whose Hessian is decomposed
_SINGULAR = 1e-6  # the least eigenvalue beside the largest, in 32 bits
_DECADES = (1.0, 1e1, 1e2, 1e3, 1e4)


def curvature_fault(problem: Problem, x: PyTree, y: PyTree) -> str:
    """What is wrong with the Hessians of some lower problems at a point, on all rows; empty if nothing is."""
    problem, blocks = problem.without_centres(), _some_blocks(problem)
    if any(level.slots is not None for level in problem.levels.values()):
        return ""
    sampler = all_rows(problem)
    sample = sampler.visit(problem, blocks, sampler.random, None)
    rows = gather(problem.split("y", y), blocks)
    for name in rows:
        entries = sum(leaf[0].size for leaf in jax.tree.leaves(rows[name]))
        if not problem.levels[name].has_hessian or entries > _WIDEST:
            continue

        def hessian(view: BlockView, y: dict[str, PyTree], name: str = name) -> Array:
            flat, unravel = ravel_pytree(y[name])
            found = jax.hessian(lambda flat: view.g(name, unravel(flat), y))(flat)
            level = view.problem.levels[name]
            if level.sign == 1:
                return found
            # Of a saddle point, what minimises must be convex and what maximises concave, each by itself.
            signs = ravel_pytree(level.signed(jax.tree.map(jnp.ones_like, y[name])))[0]
            return jnp.where(signs[:, None] == signs, signs * found, 0)

        found = np.asarray(each_block(problem, x, sample, hessian, rows), np.float64)
        good = np.flatnonzero(np.isfinite(found).all((1, 2)))
        if not good.size:
            continue
        eigenvalues, shares = np.linalg.eigvalsh(found[good]), _least_shares(found[good])
        least, most = eigenvalues[:, 0], eigenvalues[:, -1]
        worst = int(np.argmin(shares))
        where = (
            f"the Hessian of g in block {int(blocks[good[worst]])} (lower level {name!r}, "
            f"all rows) has eigenvalues from {least[worst]:.2g} to {most[worst]:.2g}"
        )
        size = max(abs(least[worst]), abs(most[worst]))
        if size == 0:
            return (
                f"{where}: g is linear in y there, as a function with kinks is between them; smooth it, or "
                "use bx.minimum() if y minimises f itself"
            )
        if shares[worst] < -_SINGULAR:
            return (
                f"{where}: g is not convex in y; add a regulariser to g, such as c/2 ‖y‖² with c = "
                f"{-2 * least[worst]:.2g}"
            )
        if shares[worst] <= _SINGULAR:
            return (
                f"{where}: g has no unique minimum in y; add a regulariser to g, such as c/2 ‖y‖² with c = "
                f"{0.01 * most[worst]:.2g}"
            )
    return ""


def _least_shares(matrices: np.ndarray) -> np.ndarray:
    """The least eigenvalues as shares of the largest, with every entry in units of its own curvature.

    Entries of y in very different units make no problem singular.
    """
    diagonal = np.abs(np.diagonal(matrices, axis1=1, axis2=2))
    scales = 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1))
    eigenvalues = np.linalg.eigvalsh(scales[:, :, None] * matrices * scales[:, None, :])
    return eigenvalues[:, 0] / np.maximum(np.abs(eigenvalues).max(1), 1e-300)


def unbounded_below(problem: Problem, x0: PyTree, x: PyTree, y: PyTree) -> str:
    """Whether F falls without end from x0 through x, on some blocks that are solved; nothing if not."""
    if any(level.slots is not None for level in problem.levels.values()):
        return ""
    problem, blocks = problem.without_centres(), _some_blocks(problem)
    rows = gather(problem.split("y", y), blocks)

    def value(share: float) -> float:
        at = jax.tree.map(lambda a, b: a + share * (b - a), x0, x)
        values = solve_few(problem, at, rows, dict.fromkeys(rows), blocks).value
        return float(overall(problem.risk, values, blocks))

    first, *values = (value(share) for share in _DECADES)
    falls = all(later < 3 * now < 0 for now, later in itertools.pairwise(values))
    if falls and np.isfinite([first, *values]).all():
        return (
            f"f seems to be unbounded below: on {len(blocks)} blocks that were solved on all their rows, F "
            f"is {first:.3g} at a point on the way of x, and {values[-1]:.3g} ten thousand times as far from "
            "x0; add a bound or a regulariser to f, such as 1e-3 ‖x‖²"
        )
    return ""


def _some_blocks(problem: Problem) -> Any:
    count = min(problem.count, _BLOCKS)
    return jnp.asarray(np.unique(np.linspace(0, problem.count - 1, count).round().astype(int)))
