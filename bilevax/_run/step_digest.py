"""A digest of what a step computes: f, g, the method, its schedules, and all constants inside them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._step.state import State
from bilevax.solvers.base import AbstractSolver

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def environment() -> dict[str, str]:
    """What the text of a traced step depends on besides what it computes."""
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "x64": str(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]
        "flags": str(jax.config.jax_default_matmul_precision),  # pyright: ignore[reportAttributeAccessIssue]
    }


def step_digest(problem: Problem, solver: AbstractSolver, state: State) -> str:
    """A digest of the step's program, and of the arrays that its functions close over."""
    # As shapes: where the arrays are held is of no matter.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (problem, state))
    program, _, _ = eqx.filter_make_jaxpr(solver.step)(*shapes)
    digest = hashlib.sha256(_ADDRESS.sub("", str(program)).encode())
    for array in _constants(program):
        digest.update(str((array.dtype, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _constants(program: Any) -> Iterator[np.ndarray]:
    """The arrays that a program and those inside it close over."""
    if hasattr(program, "consts"):
        yield from (np.asarray(const) for const in program.consts)
    for equation in getattr(program, "eqns", ()):
        for value in equation.params.values():
            inside = value if isinstance(value, (tuple, list)) else [value]
            for one in inside:
                if hasattr(one, "eqns"):
                    yield from _constants(one)
