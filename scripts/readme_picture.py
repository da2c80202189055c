"""Draws the picture of the README: `python -m scripts.readme_picture` writes docs/drawings/penalties.png.

It runs the README's example as it stands, with a look at x every ten steps, and finds the exact minimum of F
beside it: L-BFGS, with all lower problems solved for each gradient.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
import scipy.optimize

import bilevax as bx
from scripts.try_wheel import README, quick_start

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "drawings" / "penalties.png"


def traced_run() -> dict[str, Any]:
    """The names of the example after its run, whose history holds every entry of x."""
    minimize = bx.minimize
    seen = {f"x{k}": functools.partial(lambda problem, state, k: jnp.exp(state.x[k]), k=k) for k in range(4)}
    bx.minimize = functools.partial(minimize, metrics=seen, every=10, progress=None)
    try:
        names: dict[str, Any] = {}
        exec(compile(quick_start(README.read_text(encoding="utf-8")), "README.md", "exec"), names)
        return names
    finally:
        bx.minimize = minimize


def exact_penalties(problem: Any, start: Any, lower: Any) -> Any:
    """exp(x) where F is least."""

    def value_and_gradient(x: Any) -> tuple[float, Any]:
        value, gradient, _ = bx.value_and_hypergradient(problem, jnp.asarray(x, start.dtype), lower)
        return float(value), np.asarray(gradient, float)

    return np.exp(scipy.optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B").x)


def draw(names: dict[str, Any]) -> Any:
    """The figure: the penalties over the steps, and those of the exact minimum."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from bilevax.experiments.figures import RC

    result, spread = names["result"], np.asarray(names["spread"])
    history, exact = result.history, exact_penalties(names["problem"], 0 * result.x, result.y)
    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(6.0, 2.5), layout="constrained")
        for k, least in enumerate(exact):
            (line,) = axes.plot(history["step"], history[f"x{k}"], label=f"shops differ by {spread[k]:g}")
            axes.axhline(least, color=line.get_color(), linestyle=":", linewidth=1)
        axes.set(yscale="log", xlabel="step", ylabel="learnt penalty", xlim=(0, history["step"][-1]))
        axes.set_title(
            "A penalty per feature for 1,000 models at once (dotted: the exact minimum of F)", loc="left"
        )
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    return figure


if __name__ == "__main__":
    draw(traced_run()).savefig(PICTURE, dpi=150)
