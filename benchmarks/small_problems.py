"""Up to which size L-BFGS with exact gradients beats a stochastic run: time to 1% of the way left.

Ridge regressions with shared log-strengths: m blocks of n rows and d features. Both start from nothing
compiled, and time is that of the processor, all cores together: other programs do not count. The run has all
defaults, I = 10 and B = 32; x is read off every 200 steps, and F computed afterwards.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize as scipy_minimize

import bilevax as bx
from bilevax.experiments.report import Report, command_line

SIZES = [
    (10, 50, 10),
    (100, 50, 10),
    (1_000, 50, 10),
    (100, 1_000, 10),
    (100, 50, 50),
    (10_000, 50, 10),
]


def ridges(m: int, n: int, d: int) -> tuple[bx.Problem, Any, Any]:
    """The problem, x0 and y0."""
    random = np.random.default_rng(0)
    relevant = random.normal(size=d) * (np.arange(d) < d // 2)
    coefficients = relevant + 0.3 * random.normal(size=(m, d)) * (np.arange(d) < d // 2)

    def rows() -> bx.PerBlock:
        features = random.normal(size=(m, n, d)).astype(np.float32)
        targets = np.einsum("mnd,md->mn", features, coefficients) + 3 * random.normal(size=(m, n))
        flat = {"row": features.reshape(-1, d), "y": targets.reshape(-1).astype(np.float32)}
        return bx.PerBlock(flat, np.arange(m + 1) * n)

    def error(y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(y, batch),
        lower=lambda x, y, block, batch: error(y, batch) + jnp.exp(x) @ y**2,
        blocks=m,
        upper_data=rows(),
        lower_data=rows(),
    )
    return problem, jnp.full(d, 2.0), jnp.zeros((m, d))


def by_lbfgs(problem: bx.Problem, x0: Any, y0: Any) -> list[tuple[float, float]]:
    """(seconds, F) of every evaluation."""
    latest, seen, began = [y0], [], time.process_time()

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        found = bx.value_and_hypergradient(problem, jnp.asarray(x, jnp.float32), latest[0])
        latest[0] = found.y
        seen.append((time.process_time() - began, float(found.value)))
        return float(found.value), np.asarray(found.gradient, float)

    scipy_minimize(both, np.asarray(x0, float), jac=True, method="L-BFGS-B", options={"maxfun": 40})
    return seen


def by_run(problem: bx.Problem, x0: Any, y0: Any, steps: int) -> tuple[list[tuple[float, Any]], Any]:
    """(seconds, x) along a run with all defaults, and the lower variables at its end."""
    seen: list[tuple[float, Any]] = []
    began = time.process_time()

    def keep(_: bx.Problem, state: bx.State) -> float:
        seen.append((time.process_time() - began, np.asarray(state.x)))
        return 0.0

    result = bx.minimize(
        problem,
        x0,
        y0,
        steps=steps,
        every=200,
        blocks_per_step=10,
        batch_size=32,
        key=jax.random.key(0),
        metrics={"kept": keep},
        progress=None,
        stop=bx.Stop(throw=False, finish=False),
    )
    return seen, result.y


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes to run")
    parser.add_argument("--steps", type=int, default=6000, help="of a run")
    parser.add_argument("--out", type=Path, default=Path("results/small_problems"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    rows: list[dict[str, Any]] = []
    for m, n, d in SIZES[: options.sizes]:
        problem, x0, y0 = ridges(m, n, d)
        exact = by_lbfgs(problem, x0, y0)
        bound = 0.99 * min(value for _, value in exact) + 0.01 * exact[0][1]
        count = next(number for number, (_, value) in enumerate(exact) if value <= bound)
        path, y = by_run(problem, x0, y0, options.steps)
        steps, seconds = f"not within {options.steps}", path[-1][0]
        for number, (at, x) in enumerate(path):
            if float(bx.objective(problem, jnp.asarray(x), y)) <= bound:
                steps, seconds = str(200 * (number + 1)), at
                break
        row: dict[str, Any] = {"m": m, "rows": n, "d": d, "evaluations": count + 1}
        row |= {"L-BFGS, seconds": f"{exact[count][0]:.1f}", "steps": steps, "run, seconds": f"{seconds:.1f}"}
        rows.append(row)
        report.table("small_problems", rows, "Until 1% of the way is left, in seconds of the processor")
    report.finish()


if __name__ == "__main__":
    main()
