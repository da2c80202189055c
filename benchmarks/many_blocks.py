"""Runs on tens of thousands of blocks with nothing given: what is left of the way, and what it costs.

Each problem runs twice with the same key: with its steps alone, and with the exact steps that follow on a
sample of the blocks. L-BFGS with exact gradients of all blocks, from where the runs begin, finds the least F
and is what one would use instead, where there is time. Seconds are those of the processor, compilation
included, as other programs do not count.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize as scipy_minimize

import bilevax as bx
from benchmarks.newcomer_cases import own_rows, poisson_shops, tiny_blocks
from benchmarks.solved_case import Case, solved
from bilevax.experiments.report import Report, command_line


def clicks(m: int = 60_000, d: int = 8) -> Case:
    """A logistic regression per user of few rows; centres and strengths are shared."""
    random = np.random.default_rng(11)
    own = np.geomspace(2, 0.1, d) + np.geomspace(0.1, 1, d) * random.normal(size=(m, d))

    def rows(lengths: np.ndarray) -> bx.PerBlock:
        owner = np.repeat(np.arange(m), lengths)
        features = random.normal(size=(len(owner), d))
        chance = 1 / (1 + np.exp(-np.sum(features * own[owner], 1)))
        labels = (random.random(len(owner)) < chance).astype(float)
        return own_rows({"row": features, "label": labels}, lengths)

    def loss(y: Any, batch: Any) -> jax.Array:
        score = batch["row"] @ y
        return jnp.mean(jax.nn.softplus(score) - batch["label"] * score)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x["strength"]) @ (y - x["centre"]) ** 2,
        blocks=m,
        upper_data=rows(np.full(m, 5)),
        lower_data=rows(random.integers(2, 12, m)),
    )
    x0 = {"strength": jnp.zeros(d), "centre": jnp.zeros(d)}
    return solved(problem, x0, jnp.zeros((m, d)), 3000, 10, 32)


PROBLEMS: dict[str, Callable[[], Case]] = {
    "ridge, 20,000 customers": tiny_blocks,
    "Poisson, 30,000 shops": lambda: poisson_shops(30_000, 3),
    "logistic, 60,000 users": clicks,
    "Poisson, 100,000 shops": lambda: poisson_shops(100_000, 3),
}


def by_run(case: Case, steps: int, seed: int, finish: bool) -> tuple[bx.Result, float, bool]:
    """What a run returns, its seconds, and whether it warned."""
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bx.minimize(
            case.problem,
            case.x0,
            case.y0,
            steps=steps,
            key=jax.random.key(seed),
            progress=None,
            stop=bx.Stop(finish=finish),
        )
    warned = any(issubclass(one.category, bx.AccuracyWarning) for one in caught)
    return result, time.process_time() - began, warned


def by_lbfgs(case: Case) -> tuple[float, float]:
    """The least F of all blocks, and the seconds until 1% of the way was left."""
    start, unravel = ravel_pytree(case.x0)
    seen, began = [], time.process_time()

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        assert case.value_and_gradient is not None
        value, slope = case.value_and_gradient(unravel(jnp.asarray(x, start.dtype)))
        seen.append((time.process_time() - began, value))
        return value, np.asarray(ravel_pytree(slope)[0], float)

    scipy_minimize(both, np.asarray(start, float), jac=True, method="L-BFGS-B", options={"maxfun": 40})
    least = min(value for _, value in seen)
    bound = least + 0.01 * (seen[0][1] - least)
    return least, next(at for at, value in seen if value <= bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=3000, help="of a run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/many_blocks"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    rows: list[dict[str, Any]] = []
    for name in options.problems:
        case = PROBLEMS[name]()
        first = case.value(case.x0)
        least, exact_seconds = by_lbfgs(case)
        for seed in range(options.seeds):
            row: dict[str, Any] = {"problem": name, "seed": seed}
            for what, finish in (("steps alone", False), ("with exact steps", True)):
                result, seconds, warned = by_run(case, options.steps, seed, finish)
                gap = (case.value(result.x) - least) / (first - least)
                row |= {f"{what}, gap": f"{gap:.4f}", f"{what}, seconds": f"{seconds:.1f}"}
                row |= {f"{what}, warned": "yes" if warned else "no"}
                if finish:
                    row["judges"] = 0 if result.finish is None else result.finish.judges
            row["L-BFGS on all blocks, seconds"] = f"{exact_seconds:.1f}"
            rows.append(row)
            report.table("many_blocks", rows, "Share of the way from F(x0) to the least F that is left")
    report.finish()


if __name__ == "__main__":
    main()
