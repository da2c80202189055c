"""A model per shop, from a few rows of each: what all shops have in common is learnt, and a new shop profits.

python examples/grouped.py
"""

from __future__ import annotations

import numpy as np

from bilevax.applications.grouped import GroupedRegressor


def sales(shops: int, days: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Price, temperature and weekend on some days, the sales of these days, and the shops."""
    random = np.random.default_rng(seed)
    shop = np.repeat(np.arange(shops), days)
    X = np.column_stack(
        [random.uniform(1, 3, len(shop)), random.normal(15, 8, len(shop)), random.random(len(shop)) < 2 / 7]
    ).astype(float)
    # Shops differ much in their level, some in what a weekend is worth, and hardly in the weather's effect.
    slopes = np.array([-10.0, 0.5, 8.0]) + random.normal(size=(shops, 3)) * [2.0, 0.05, 6.0]
    level = 60 + 20 * random.normal(size=shops)
    return X, level[shop] + (X * slopes[shop]).sum(1) + 4 * random.normal(size=len(shop)), shop


def main() -> None:
    """Fits 500 shops, and adapts to a new one day by day."""
    X, y, shop = sales(501, 12, seed=0)
    old = shop < 500
    model = GroupedRegressor(random_state=0).fit(X[old], y[old], groups=shop[old])
    for name, mean, deviation in zip(
        ("price", "temperature", "weekend"), model.prior_.coef, model.prior_.deviation, strict=True
    ):
        print(f"{name:12} {mean:6.2f} ± {deviation:.2f} between shops")
    X_new, y_new = X[~old], y[~old]
    for days in (0, 1, 3, 6):
        known = model.adapt(X_new[:days], y_new[:days]) if days else model
        error = np.sqrt(np.mean((known.predict(X_new[6:]) - y_new[6:]) ** 2))
        print(f"a new shop after {days} days: root mean squared error {error:.1f} on the last six")


if __name__ == "__main__":
    main()
