"""A thousand shops with a shared prior.

A linear model per shop, from twelve days of each: sales by price, temperature and weekend. Fitted
alone, a shop overfits; pooled, what differs is lost. The prior, which says what shops have in
common and how much they differ, is the upper variable; a block is a fold of a shop. The picture
shows the error on the next days of 50 new shops, after some days of each: with the learnt prior,
with pooled slopes and a level of its own, and by a ridge regression on its own days.
"""

import argparse

import numpy as np
from sklearn.linear_model import LinearRegression, Ridge

from bilevax.applications.grouped import GroupedRegressor
from bilevax.experiments import figures

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="fewer shops, to try it out")
parser.add_argument("--picture", default="grouped.png", help="where the picture goes")
options = parser.parse_args()
figures.use_style()
SHOPS, NEW = (100, 10) if options.quick else (1_000, 50)


def sales(shops, days, seed):
    """Price, temperature and weekend on some days, the sales of these days, and the shops."""
    random = np.random.default_rng(seed)
    shop = np.repeat(np.arange(shops), days)
    price, temperature = random.uniform(1, 3, len(shop)), random.normal(15, 8, len(shop))
    X = np.column_stack([price, temperature, random.random(len(shop)) < 2 / 7])
    # Shops differ much in their level, some in what a weekend is worth, and hardly in the weather's effect.
    slopes = np.array([-10.0, 0.5, 8.0]) + random.normal(size=(shops, 3)) * [2.0, 0.05, 6.0]
    level = 60 + 20 * random.normal(size=shops)
    return X, level[shop] + (X * slopes[shop]).sum(1) + 4 * random.normal(size=len(shop)), shop


X, y, shop = sales(SHOPS, 12, seed=0)
model = GroupedRegressor(random_state=0).fit(X, y, groups=shop)
pooled = LinearRegression().fit(X, y)
prior = zip(("price", "temperature", "weekend"), model.prior_.coef, model.prior_.deviation, strict=True)
for name, mean, deviation in prior:
    print(f"{name:12} {mean:6.2f} ± {deviation:.2f} between shops")

DAYS = (0, 1, 2, 3, 5, 8, 12)
X_new, y_new, owner = sales(NEW, 24, seed=1)
squares = {"learnt prior": [], "pooled slopes, own level": [], "ridge on its own days": []}
for days in DAYS:
    left = {name: [] for name in squares}
    for one in range(NEW):
        rows, target = X_new[owner == one], y_new[owner == one]
        known = rows[:days], target[:days]
        adapted = model.adapt(*known) if days else model
        level = np.mean(known[1] - pooled.predict(known[0])) if days else 0.0
        own = Ridge().fit(*known).predict(rows[12:]) if days else np.full(12, np.nan)
        left["learnt prior"].append(adapted.predict(rows[12:]) - target[12:])
        left["pooled slopes, own level"].append(pooled.predict(rows[12:]) + level - target[12:])
        left["ridge on its own days"].append(own - target[12:])
    for name, errors in left.items():
        squares[name].append(np.sqrt(np.mean(np.square(errors))))
print(f"after {DAYS[3]} days:", {name: round(float(values[3]), 1) for name, values in squares.items()})

figure, ((axis,),) = figures.panels(1, 1, width=4.5, height=3.0)
for (name, values), colour in zip(squares.items(), ("#0072B2", "#44AA99", "#888888"), strict=True):
    axis.plot(DAYS, values, color=colour, marker="o", label=name)
axis.axhline(4, color="black", linewidth=0.8, linestyle=":", label="noise of a day")
axis.set(xlabel="known days of a new shop", ylabel="root mean squared error, next 12 days")
figures.legend_below(axis)
figure.savefig(options.picture, dpi=150)
