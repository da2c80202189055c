"""A method of your own.

A `Recipe` makes three choices (moving averages or corrected estimators; which blocks move; how
curvature is tracked) and names its hyper-parameters; the library does the rest: sampling,
compilation, checkpoints, meshes. This one takes plain steps of y and v, and moves x along an
average that forgets slowly. The picture shows the distance from the solution, which is known for
this problem, beside methods of the library, with nothing tuned for any of them.
"""

import argparse
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

import bilevax as bx
from bilevax.experiments import figures
from bilevax.solvers.toolkit import Coefficient, TrackedSolve, UpperStep

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="own_method.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()


class HeavyBall(bx.Recipe):
    """Plain steps of y and v; x moves along a moving average of its gradients."""

    upper_step: UpperStep | None = None
    _: KW_ONLY
    lower_step: Coefficient | None = None
    inverse_step: Coefficient | None = None
    radius: Coefficient | None = None
    beta: float = 0.03

    alpha: ClassVar[float] = 1.0  # a part of the method, which nobody may change
    corrected = False  # looks at the newest point only
    lazy = False  # moves the visited blocks only
    curvature = TrackedSolve()  # v by products with the Hessian


blocks, size = 100, 10
keys = jax.random.split(jax.random.key(0), 3)
centres = jax.random.normal(keys[0], (blocks, size))
rows = (centres[:, None] + jax.random.normal(keys[1], (blocks, 20, size))).reshape(-1, size)
stiffness = jax.random.uniform(keys[2], (blocks, size), minval=0.5, maxval=2.0)


def upper(x, y, block, batch):
    return 0.5 * jnp.mean(jnp.sum((y - batch) ** 2, axis=-1))


def lower(x, y, block, batch):  # y_i(x) = x
    return 0.5 * jnp.sum(block * (y - x) ** 2)


problem = bx.Problem(upper, lower, stiffness, upper_data=bx.PerBlock(rows, range(0, 20 * blocks + 1, 20)))
solution = rows.mean(axis=0)

figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=3.0)
for solver in (HeavyBall(), bx.SOBA(), bx.BSVRBv2())[: 1 if options.quick else 3]:
    name = type(solver).__name__
    result = bx.minimize(
        problem,
        jnp.zeros(size),
        jnp.zeros((blocks, size)),
        solver=solver,
        steps=200 if options.quick else 4_000,
        blocks_per_step=10,
        batch_size=4,
        metrics={"distance": lambda problem, state: jnp.linalg.norm(state.x - solution)},
    )
    style = figures.styles_of([name])[name]
    axis.plot(result.history["step"], result.history["distance"], color=style.colour, label=name)
    print(f"{name:10} ends at a distance of {result.history['distance'][-1]:.4f}")
axis.set(xlabel="step", ylabel="distance of x from the solution", yscale="log")
figures.legend_below(axis, columns=3)
figure.savefig(options.picture, dpi=150)
