"""Noisy labels: which training rows should be trusted?

Is a handwritten digit at least 5? Of 1,197 training labels 40% are wrong, and 60 more rows are
known to be right. x is a weight per training row. Each of 50 blocks is a logistic regression on the
weighted rows, with a ridge of its own, so that none has to be chosen; it is judged on the clean
rows. The picture shows the learnt weights of right and of wrong labels, and the test accuracy
beside logistic regressions on all rows and on the clean rows alone.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

import bilevax as bx
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few steps, to try it out")
parser.add_argument("--picture", default="noisy_labels.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()

random = np.random.default_rng(0)
pixels, digit = load_digits(return_X_y=True)
clean, test, noisy = np.split(random.permutation(len(digit)), [60, 600])
columns = PCA(20, whiten=True).fit(pixels[noisy]).transform(pixels)
rows = np.c_[columns, np.ones(len(digit))].astype(np.float32)
truth = np.where(digit >= 5, 1, -1).astype(np.float32)
wrong = random.random(len(noisy)) < 0.4
given = np.where(wrong, -truth[noisy], truth[noisy])


def upper(x, y, ridge, batch):  # the loss on clean rows
    return jnp.mean(jax.nn.softplus(-batch["label"] * (batch["row"] @ y)))


def lower(x, y, ridge, batch):  # the weighted loss on noisy rows
    loss = jax.nn.softplus(-batch["label"] * (batch["row"] @ y))
    return jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * loss) + ridge / 2 * y @ y


problem = bx.Problem(
    upper,
    lower,
    blocks=jnp.logspace(-3, 0, 50),  # a ridge per block
    upper_data=bx.Shared({"row": rows[clean], "label": truth[clean]}),
    lower_data=bx.Shared({"row": rows[noisy], "label": given, "index": np.arange(len(noisy))}),
)
steps = 100 if options.quick else 3_000
result = bx.minimize(problem, jnp.zeros(len(noisy)), jnp.zeros((50, 21)), steps=steps)
weights = np.asarray(jax.nn.sigmoid(result.x))
mean_of_blocks = (rows[test] @ np.asarray(result.y).T).mean(1)


def accuracy(X, y):
    search = GridSearchCV(LogisticRegression(), {"C": np.logspace(-4, 2, 7)}, scoring="neg_log_loss")
    return np.mean(search.fit(X, y).predict(rows[test]) == truth[test])


found = {
    "all rows": accuracy(rows[np.r_[noisy, clean]], np.r_[given, truth[clean]]),
    "clean rows": accuracy(rows[clean], truth[clean]),
    "learnt weights": np.mean((mean_of_blocks > 0) == (truth[test] > 0)),
}
print({name: round(float(value), 3) for name, value in found.items()})

figure, ((left, right),) = figures.panels(1, 2)
left.hist([weights[~wrong], weights[wrong]], bins=20, range=(0, 1), label=["label right", "label wrong"])
left.set(xlabel="learnt weight of a training row", ylabel="rows")
figures.legend_below(left)
bars = right.barh(list(found), list(found.values()), color=["#888888", "#44AA99", "#0072B2"])
right.bar_label(bars, fmt="%.3f", padding=2)
right.set(xlabel="test accuracy", xlim=(0.5, 1))
figure.savefig(options.picture, dpi=150)
