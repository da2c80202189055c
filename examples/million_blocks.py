"""A million blocks on one device.

A million users have four ratings to learn from and four to be judged by, and a model of four
weights each. x holds a penalty per weight, which all users share. A step visits a sixteenth of the
users; x must not move faster than all of them are visited, or their models are out of date. Without
a GPU at most 100,000 users are drawn, unless `--users` asks for more. The picture shows x on its
way to the best penalties, which are known here, for several numbers of users: from 10,000 on the
lines coincide.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few users and steps, to try it out")
parser.add_argument("--picture", default="million_blocks.png", help="where the picture goes")
parser.add_argument("--users", type=int, help="the largest number of users")
options = parser.parse_args()
figures.use_style()
on_gpu = jax.default_backend() == "gpu"
most = options.users or (800 if options.quick else 1_000_000 if on_gpu else 100_000)
SPREAD = jnp.array([1.0, 0.5, 0.25, 0.1])  # how far users differ in a weight
BEST = 1 / (4 * SPREAD**2)  # the penalties of the best estimator from four ratings with noise of one


def draw(users):  # eight ratings of every user
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (users, 8, 4))
    own = SPREAD * jax.random.normal(keys[1], (users, 1, 4))
    return rows, jnp.sum(rows * own, -1) + jax.random.normal(keys[2], (users, 8))


def upper(x, y, block, batch):  # the error on the other ratings
    return jnp.mean((batch["row"] @ y - batch["rating"]) ** 2)


def lower(x, y, block, batch):  # the error on the known ratings, and the penalties
    return jnp.mean((batch["row"] @ y - batch["rating"]) ** 2) + jnp.exp(x) @ y**2


figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=3.0)
sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size < most] + [most]
for users, style, line in zip(sizes, figures.shades(4), ("-", "-", "--", ":"), strict=False):
    rows, ratings = draw(users)
    offsets = np.arange(users + 1) * 4
    known, others = (
        bx.PerBlock({"row": rows[:, part].reshape(-1, 4), "rating": ratings[:, part].reshape(-1)}, offsets)
        for part in (slice(4), slice(4, 8))
    )
    result = bx.minimize(
        bx.Problem(upper, lower, users, upper_data=others, lower_data=known),
        jnp.zeros(4),
        jnp.zeros((users, 4)),
        solver=bx.BlockNewton(optax.adam(0.004)),  # left out, the step of x is found, in more steps
        steps=100 if options.quick else 1_200,
        blocks_per_step=users // 16,
        batch_size="all",
        metrics={"distance": lambda problem, state: jnp.linalg.norm(state.x - jnp.log(BEST))},
    )
    print(f"{users:,} users: penalties {jnp.exp(result.x).round(2)}, {result.steps_per_second:,.0f} steps/s")
    steps, distance = result.history["step"], result.history["distance"]
    axis.plot(steps, distance, line, color=style.colour, label=f"{users:,} users")
axis.set(xlabel="step", ylabel="distance from the best penalties", ylim=(0, None))
figures.legend_below(axis, columns=3)
figure.savefig(options.picture, dpi=150)
