"""Steps of methods on request: one side of `benchmarks.against`.

The program is run with another tree's packages, too, and uses what all of them have. It reads lines such as
`[["BSVRBv2", 0.1], 500]` (a method, its upper step or null for the automatic one, and how many steps), and
answers each with the seconds of the processor that they took, which hardly depend on what else the machine
does. For 0 steps it answers with what the compiler counts in a step: operations, and bytes that are read and
written.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays

BLOCKS, PER_STEP, BATCH, ROWS, FEATURES = 100, 10, 32, 20_000, 100
MEANS = ("MSVR", "SONG")  # methods for problems without a lower Hessian


def weighted_rows() -> tuple[Any, Any, Any]:
    """A weight per training row, under logistic regressions of different temperatures."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(2, ROWS, FEATURES)).astype(np.float32)
    labels = np.sign(rows @ random.normal(size=FEATURES)).astype(np.float32)

    def loss(y: Any, block: Any, batch: Any) -> Any:
        return jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block)

    def upper(x: Any, y: Any, block: Any, batch: Any) -> Any:
        return jnp.mean(loss(y, block, batch))

    def lower(x: Any, y: Any, block: Any, batch: Any) -> Any:
        weights = jax.nn.sigmoid(x[batch["index"]])
        return jnp.mean(weights * loss(y, block, batch)) + 0.5e-3 * y @ y

    held = bx.Shared({"row": rows[0], "label": labels[0]})
    train = bx.Shared({"row": rows[1], "label": labels[1], "index": np.arange(ROWS, dtype=np.int32)})
    problem = bx.Problem(upper, lower, np.linspace(1, 11, BLOCKS, dtype=np.float32), held, train)
    return problem, jnp.zeros(ROWS), jnp.zeros((BLOCKS, FEATURES))


def logs_of_means() -> tuple[Any, Any, Any]:
    """The mean over blocks of the log of a mean exponential of each block's own rows."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(ROWS, FEATURES)).astype(np.float32) / 10
    own = bx.PerBlock(rows, np.arange(BLOCKS + 1) * (ROWS // BLOCKS))

    def upper(x: Any, y: Any, block: Any, batch: Any) -> Any:
        return jnp.log(y)

    def inner(x: Any, block: Any, batch: Any) -> Any:
        return jnp.mean(jnp.exp(batch @ x))

    problem = bx.Problem(upper, bx.mean(inner), BLOCKS, lower_data=own)
    return problem, jnp.zeros(FEATURES), jnp.ones(BLOCKS)


class Steps:
    """A method on its problem, compiled, with its state."""

    def __init__(self, method: str, upper_step: float | None):
        solver = getattr(bx, method)(upper_step)
        problem, x0, y0 = logs_of_means() if method in MEANS else weighted_rows()
        self.inputs = numbers_as_arrays(solver), problem
        plan = bx.Sampling(PER_STEP, BATCH).sampler(problem, jax.random.key(0))
        self.state = compiled_start(*self.inputs, x0, y0, plan)
        self.advance(3)

    def advance(self, steps: int) -> float:
        """Takes steps, and returns their seconds of the processor."""
        began = time.process_time()
        self.state, _ = compiled_chunk(self.inputs, self.state, steps)
        jax.block_until_ready(self.state)
        return time.process_time() - began

    def work(self) -> list[float]:
        """What the compiler counts in a step: operations and bytes. It does not depend on other programs."""
        arrays, others = eqx.partition((self.inputs, self.state), eqx.is_array)

        def step(arrays: Any) -> Any:
            (solver, problem), state = eqx.combine(arrays, others)
            return eqx.filter(solver.step(problem, state)[0], eqx.is_array)

        counted: Any = jax.jit(step).lower(arrays).compile().cost_analysis()
        counted = counted[0] if isinstance(counted, list) else counted
        return [counted["flops"], counted["bytes accessed"]]


def main() -> None:
    """Answers requests until there are no more."""
    known: dict[str, Steps] = {}
    for line in sys.stdin:
        case, steps = json.loads(line)
        name = json.dumps(case)
        known[name] = known.get(name) or Steps(*case)
        print(json.dumps(known[name].advance(steps) if steps else known[name].work()), flush=True)


if __name__ == "__main__":
    main()
