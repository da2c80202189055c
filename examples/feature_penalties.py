"""A penalty per feature, chosen by cross-validation.

A linear regression on 40 features, of which six matter, from 100 rows. Cross-validation over a grid
cannot choose 40 penalties; here they are x, the upper variable. The blocks are ten folds: block i
is fitted to the other nine (lower level) and judged on its own (upper level), so that F is the
cross-validated error itself. The picture shows the learnt penalties beside the true coefficients,
and the error on new rows beside a ridge and a lasso with one penalty.
"""

import argparse

import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import LassoCV, RidgeCV

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="feature_penalties.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()

random = np.random.default_rng(0)
truth = np.zeros(40)
truth[:6] = [2.0, -1.5, 1.0, -0.7, 0.5, -0.3]


def draw(count):
    rows = random.normal(size=(count, 40)).astype(np.float32)
    return rows, (rows @ truth + random.normal(size=count)).astype(np.float32)


def upper(x, y, block, batch):  # the error on the rows of the fold
    return jnp.mean((batch["row"] @ y - batch["target"]) ** 2)


def lower(x, y, block, batch):  # the error on all other rows, and a penalty exp(x_j) for feature j
    return jnp.mean((batch["row"] @ y - batch["target"]) ** 2) + jnp.exp(x) @ y**2


(rows, target), (new_rows, new_target) = draw(100), draw(5_000)
folds = bx.Folds({"row": rows, "target": target}, offsets=[0, 100], folds=10)
problem = bx.Problem(upper, lower, folds.count, upper_data=folds.held_out, lower_data=folds.kept)
x0, y0 = jnp.full(40, -2.0), jnp.zeros((folds.count, 40))
result = bx.minimize(problem, x0, y0, steps=100 if options.quick else 3_000)

# The model itself: fitted to all rows, with the learnt penalties.
everything = bx.PerBlock({"row": rows, "target": target}, [0, 100])
coefficients = np.asarray(bx.adapt(problem, result.x, everything))[0]
plain = {"ridge": RidgeCV(np.logspace(-3, 3, 25), fit_intercept=False), "lasso": LassoCV(fit_intercept=False)}
errors = {
    name: np.mean((model.fit(rows, target).predict(new_rows) - new_target) ** 2)
    for name, model in plain.items()
}
errors["a penalty per feature"] = np.mean((new_rows @ coefficients - new_target) ** 2)
print({name: round(float(value), 3) for name, value in errors.items()}, "and 1.0 is noise")

figure, ((left, right),) = figures.panels(1, 2)
left.bar(range(40), np.exp(result.x), color=np.where(truth != 0, "#0072B2", "#BBBBBB"), width=0.8)
left.set(xlabel="feature (blue: it matters)", ylabel="learnt penalty", yscale="log")
bars = right.barh(list(errors), list(errors.values()), color=["#888888", "#44AA99", "#0072B2"])
right.bar_label(bars, fmt="%.2f", padding=2)
right.axvline(1, color="black", linewidth=0.8, linestyle=":")
right.set(xlabel="squared error on new rows (dotted: the noise)", xlim=(0, 1.25 * max(errors.values())))
figure.savefig(options.picture, dpi=150)
