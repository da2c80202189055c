"""The worst tenth of the blocks.

A start for 300 hospitals, each of which fits a linear model to its own 20 patients, drawn towards
that start. A tenth of the hospitals has other patients. The mean of the blocks' losses forgets
them; `risk=bx.cvar(0.1)` minimises the mean of the largest tenth instead, and nothing else in the
program changes. The picture shows the losses on new patients, from the best hospital to the worst,
for both.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="worst_tenth.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()

HOSPITALS, FEATURES, PATIENTS = 300, 5, 20
random = np.random.default_rng(0)
other = np.arange(HOSPITALS) % 10 == 0
centre = np.where(other[:, None], -1.0, 1.0) + 0.3 * random.normal(size=(HOSPITALS, FEATURES))


def draw(count):
    """Some patients of every hospital."""
    rows = random.normal(size=(HOSPITALS, count, FEATURES))
    target = np.einsum("hpf,hf->hp", rows, centre) + random.normal(size=(HOSPITALS, count))
    return {"row": rows.astype(np.float32), "target": target.astype(np.float32)}


def per_block(patients):
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), patients)
    return bx.PerBlock(flat, np.arange(HOSPITALS + 1) * patients["target"].shape[1])


def upper(x, y, block, batch):  # the loss on patients who were held out
    return jnp.mean((batch["row"] @ y - batch["target"]) ** 2)


def lower(x, y, block, batch):  # the loss on known patients, and the distance from the start
    return jnp.mean((batch["row"] @ y - batch["target"]) ** 2) + jnp.sum((y - x) ** 2)


known, held_out, new = per_block(draw(PATIENTS)), per_block(draw(PATIENTS)), draw(500)
losses = {}
for name, risk in {"mean of all": None, "mean of the worst tenth": bx.cvar(0.1)}.items():
    problem = bx.Problem(upper, lower, HOSPITALS, upper_data=held_out, lower_data=known, risk=risk)
    x0, y0 = jnp.zeros(FEATURES), jnp.zeros((HOSPITALS, FEATURES))
    result = bx.minimize(problem, x0, y0, steps=100 if options.quick else 500)
    y = bx.solve_lower(problem, result.x, y0)  # exact, where the run has an estimate
    losses[name] = np.sort(np.mean((np.einsum("hpf,hf->hp", new["row"], y) - new["target"]) ** 2, axis=1))
    tail = losses[name][-HOSPITALS // 10 :]
    print(f"{name:25} mean {losses[name].mean():.3f}   worst tenth {tail.mean():.3f}   x {result.x.round(2)}")

figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=2.8)
axis.axvspan(90, 100, color="0.93", label="the worst tenth")
for (name, values), colour in zip(losses.items(), ("#888888", "#0072B2"), strict=True):
    axis.plot(np.linspace(0, 100, HOSPITALS), values, color=colour, label=name)
axis.set(xlabel="hospitals, from the best to the worst (%)", ylabel="loss on new patients", xlim=(0, 100))
figures.legend_below(axis, columns=3)
figure.savefig(options.picture, dpi=150)
