"""What one would try for a mean when something is known of groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bilevax.experiments.grouped_baselines import Sums
from bilevax.experiments.grouped_panels import Rows, Split


def metadata_baselines(split: Split, seed: int) -> dict[str, Callable[[], np.ndarray]]:
    """Baselines by name, as functions that return predictions of the test rows."""
    train, test = split.train, split.test
    table = (split.known - split.known.mean(0)) / split.known.std(0)
    wide = np.concatenate([np.ones((len(table), 1)), table], 1)

    def em(known: np.ndarray | None) -> np.ndarray:
        sums = Sums.whole(train)
        return (test.X * sums.posterior(*sums.expectation_maximisation(known))[test.group]).sum(1)

    def around() -> np.ndarray:
        centre, sums = wide @ pooled_interactions(train, table), Sums.by_fold(train, seed)
        best = sums.best_alpha(centre, np.eye(sums.size))
        return (test.X * sums.ridge(best, centre, np.eye(sums.size))[test.group]).sum(1)

    def interactions() -> np.ndarray:
        return (test.X * (wide @ pooled_interactions(train, table))[test.group]).sum(1)

    return {
        "pooled, interactions with metadata": interactions,
        "shared α around these": around,
        "EM": lambda: em(None),
        "EM on metadata": lambda: em(table),
    }


def pooled_interactions(rows: Rows, table: np.ndarray) -> np.ndarray:
    """One regression on features, metadata and their products: coefficients (1 + p, d)."""
    wide = np.concatenate([np.ones((len(table), 1)), table], 1)
    products = (wide[rows.group][:, :, None] * rows.X[:, None, :]).reshape(len(rows.y), -1)
    system = products.T @ products
    found = np.linalg.solve(system + 1e-9 * np.trace(system) * np.eye(len(system)), products.T @ rows.y)
    return found.reshape(wide.shape[1], -1)
