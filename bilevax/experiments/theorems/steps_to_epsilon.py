"""T(ε): the steps of a method until the running mean of ‖∇F‖² is at most ε²."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from bilevax.experiments.theorems.curved_truth import truth_of
from bilevax.experiments.theorems.lanes import Reached, steps_until
from bilevax.experiments.theorems.problems import initial_rows, make_family, make_task, step_constants
from bilevax.experiments.theorems.rates_options import RatesOptions
from bilevax.experiments.theorems.scalings import METHODS, Method, Sizes


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
    family = make_family(options.kind(method), options.blocks, options.dimension, options.rows, copies)
    known = step_constants(family)
    solvers = [method.make(c, epsilon, sizes, known) for c in constants]
    task = make_task(family, sizes, initial_rows(epsilon))
    return steps_until(task, solvers, keys, truth_of(family).squared_gradient, epsilon**2, max_steps)


def cell(
    name: str,
    c: float,
    epsilon: float,
    options: RatesOptions,
    seeds_from: int,
    max_steps: int,
    sizes: Sizes | None = None,
) -> dict[str, Any]:
    """T(ε) of a method at one c, as a result that can be kept: lists over the seeds.

    Args:
      name: of the method.
      c, epsilon, options, max_steps, sizes: as in `steps_to_epsilon`.
      seeds_from: added to the seed of the options, so that parts use seeds of their own.

    Returns:
      "steps", "mean" and "last", as in `Reached`.
    """
    keys = jax.random.split(jax.random.key(options.seed + seeds_from), options.seeds)
    reached = steps_to_epsilon(METHODS[name], [c], epsilon, options, keys, max_steps, sizes)
    return {"steps": reached.steps[0], "mean": reached.mean[0], "last": reached.last[0]}
