"""Runs and diagnostics that factorise matrices, in a process of their own: `test_factorisations.py`."""

from __future__ import annotations

import numpy as np

import bilevax as bx
import bilevax.testing
from bilevax.applications.grouped import GroupedRegressor


def main() -> None:
    """Everything that factorises matrices, once."""
    family = bilevax.testing.FAMILIES["ridge"](m=20, d_x=3, d_y=4, rows=6)
    bx.value_and_hypergradient(family.problem, family.x0, family.y0)
    for solver in (bx.BSVRBv1(), bx.BlockNewton()):
        result = bx.minimize(family.problem, family.x0, family.y0, solver=solver, steps=10, progress=None)
    bx.verify(family.problem, result.state, family.x0)
    kinds = bilevax.testing.kinds_blocks(m=10)
    bx.value_and_hypergradient(kinds.problem, kinds.x0, kinds.y0)
    bx.minimize(kinds.problem, kinds.x0, kinds.y0, solver=bx.BlockNewton(), steps=10, progress=None)
    random = np.random.default_rng(0)
    rows, group = random.normal(size=(60, 2)), np.repeat(np.arange(10), 6)
    GroupedRegressor(max_iter=2).fit(rows, rows.sum(1), groups=group)


if __name__ == "__main__":
    main()
