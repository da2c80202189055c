"""T(ε): the steps of a method until the running mean of ‖∇F‖² is at most ε²."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array

from bilevax.experiments.theorems.lanes import Reached, steps_until
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import Method, Sizes
from bilevax.experiments.theorems.truth import Truth


def steps_to_epsilon(
    method: Method,
    constants: Sequence[float],
    epsilon: float,
    options: RatesOptions,
    keys: Array,
    max_steps: int,
    sizes: Sizes | None = None,
) -> Reached:
    """T(ε) of a method for every c and every key, with parameters by the scaling of its theorem.

    Args:
      method: the method.
      constants: values of c.
      epsilon: ε.
      options: of the experiment.
      keys: random keys, one per run.
      max_steps: maximum number of steps.
      sizes: m, I and B, where m is a multiple of `options.blocks`; those of the options if left out.

    Returns:
      T, with axes (constants, keys).
    """
    sizes = sizes or options.sizes
    copies = sizes.blocks // options.blocks
    family = make_family(method.mean, options.blocks, options.dimension, options.rows, copies)
    solvers = [method.make(c, epsilon, sizes, family.constants) for c in constants]
    task = make_task(family, sizes, initial_rows(epsilon))
    return steps_until(task, solvers, keys, Truth.of(family).squared_gradient, epsilon**2, max_steps)
