"""Few false alarms are allowed: the left end of the ROC curve.

2% of the rows are frauds. Half of the others are easily told from them by one feature, which is
noise among the rest, and only a false positive rate of at most 5% is of use. `PartialAUCClassifier`
maximises the area under that part of the curve: a block is a fraud, and its lower variable the
threshold of a CVaR over the other rows. A logistic regression spends weight on the easy rows too.
The picture shows the curves of both on new rows, and the partial areas; the gain is small but real.
"""

import argparse

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevax.applications.auc import PartialAUCClassifier
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="few rows and steps, to try it out")
parser.add_argument("--picture", default="partial_auc.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()


def alarms(rows, seed):
    random = np.random.default_rng(seed)
    fraud = random.random(rows) < 0.02
    easy = random.random(rows) < 0.5
    X = random.normal(size=(rows, 10))
    X[:, 0] -= np.where(easy & ~fraud, 4.0, 0.0)  # tells frauds from easy rows, and nothing else
    X[:, 1] += 1.5 * fraud
    X[:, 2] += np.where(~easy & ~fraud, 1.0, 0.0)
    return X, fraud


X, y = alarms(2_000 if options.quick else 20_000, seed=0)
X_test, y_test = alarms(20_000, seed=1)
models = {
    "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced")),
    "partial AUC": PartialAUCClassifier(0.05, max_iter=100 if options.quick else 2_000, random_state=0),
}

figure, ((axis,),) = figures.panels(1, 1, width=4.0, height=3.4)
axis.axvspan(0, 0.05, color="0.93", label="allowed")
for (name, model), colour in zip(models.items(), ("#888888", "#0072B2"), strict=True):
    scores = model.fit(X, y).decision_function(X_test)
    area = roc_auc_score(y_test, scores, max_fpr=0.05)
    print(f"{name:20} partial AUC (0.05): {area:.4f}   AUC: {roc_auc_score(y_test, scores):.4f}")
    false, true, _ = roc_curve(y_test, scores)
    axis.plot(false, true, color=colour, label=f"{name}, {area:.3f}")
axis.set(xlim=(0, 0.1), ylim=(0, 1), xlabel="false positive rate", ylabel="true positive rate")
figures.legend_below(axis)
figure.savefig(options.picture, dpi=150)
