"""What a first try gives on large data, with nothing chosen, beside a step over all blocks and rows.

`python -m benchmarks.first_try` solves 2,000 ridge regressions of 500 rows whose strengths, one per feature,
are shared: once with `blocks_per_step` and `batch_size` left out, once with both "all". `--sampling 100:40`
adds runs with I = 100 and B = 40. It prints what was chosen, the steps that were taken in the seconds given,
and the relative gap (F − F_best)/(F_0 − F_best), F exact and F_best by L-BFGS.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize as scipy_minimize

import bilevax as bx
from bilevax.experiments.report import Report, command_line


class Case(NamedTuple):
    """A problem with its start, and F(x) with its gradient."""

    problem: bx.Problem
    x0: Any
    y0: Any
    value_and_gradient: Any


def ridges(m: int, rows: int, d: int, seed: int = 0) -> Case:
    """Ridge regressions with a strength per feature; half of the features are useless."""
    draw = np.random.default_rng(seed)
    useful = np.linspace(0, 1, d) < 0.5
    truth = draw.normal(size=(m, d)) * useful
    features = draw.normal(size=(m, rows, d)).astype(np.float32)
    labels = np.einsum("mrd,md->mr", features, truth) + 2 * draw.normal(size=(m, rows))
    labels, cut = labels.astype(np.float32), max(1, rows // 5)

    def per_block(part: slice) -> bx.PerBlock:
        own = {"a": features[:, part], "b": labels[:, part]}
        length = own["b"].shape[1]
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in own.items()}
        return bx.PerBlock(flat, np.arange(m + 1) * length)

    def loss(y: Any, batch: Any) -> Any:
        return 0.5 * jnp.mean((batch["a"] @ y - batch["b"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        blocks=m,
        upper_data=per_block(slice(0, cut)),
        lower_data=per_block(slice(cut, None)),
    )

    def moments(part: slice) -> tuple[Any, ...]:
        a, b = features[:, part], labels[:, part]
        count = b.shape[1]
        gram, cross = np.einsum("mrd,mre->mde", a, a) / count, np.einsum("mrd,mr->md", a, b) / count
        return jnp.asarray(gram), jnp.asarray(cross), jnp.asarray((b**2).mean(1))

    held_out, fitted = moments(slice(0, cut)), moments(slice(cut, None))

    @jax.jit
    @jax.value_and_grad
    def value(x: Any) -> Any:
        y = jnp.linalg.solve(fitted[0] + jnp.diag(jnp.exp(x)), fitted[1][..., None])[..., 0]
        squares = (
            jnp.einsum("md,mde,me->m", y, held_out[0], y) - 2 * jnp.sum(held_out[1] * y, 1) + held_out[2]
        )
        return 0.5 * jnp.mean(squares)

    return Case(problem, jnp.zeros(d), jnp.zeros((m, d)), value)


def least(case: Case) -> float:
    """The least F, by L-BFGS."""

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = case.value_and_gradient(jnp.asarray(x, jnp.float32))
        return float(value), np.asarray(gradient, float)

    return float(scipy_minimize(both, np.asarray(case.x0, float), jac=True, method="L-BFGS-B").fun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--solver", default=None, help="the name of a method; left out, the default")
    parser.add_argument("--sampling", nargs="*", default=[], help="more pairs I:B")
    parser.add_argument("--out", type=Path, default=Path("results/first_try"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    case = ridges(options.blocks, options.rows, options.features)
    best, first = least(case), float(case.value_and_gradient(case.x0)[0])
    found: list[dict[str, Any]] = []
    for given in ["nothing", "all:all", *options.sampling]:
        pair: Any = (
            [] if given == "nothing" else [one if one == "all" else int(one) for one in given.split(":")]
        )
        began = time.perf_counter()
        result = bx.minimize(
            case.problem,
            case.x0,
            case.y0,
            solver=None if options.solver is None else getattr(bx, options.solver)(),
            sampling=bx.Sampling(*pair),
            stop=bx.Stop(seconds=options.seconds, verify=False, throw=False, raise_on_interrupt=True),
            progress=None,
        )
        seconds, sampler = time.perf_counter() - began, result.state.sampler
        gap = (float(case.value_and_gradient(result.x)[0]) - best) / (first - best)
        rows = "all" if sampler.batch_size is None else sampler.batch_size
        row: dict[str, Any] = {"given": given, "I": sampler.per_step, "B": rows}
        row |= {"seconds": f"{seconds:.1f}", "steps": int(result.state.step), "gap": f"{gap:.4f}"}
        found.append(row)
        note = "Seconds with compilation; gap: (F − F_best)/(F_0 − F_best)."
        report.table("first_try", found, "A first try on large data", note)
    report.finish()


if __name__ == "__main__":
    main()
