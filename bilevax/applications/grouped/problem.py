"""The same problem for bilevax's own methods and diagnostics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.grouped.losses import Loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior, X


def make_problem(
    panel: Panel, prior: Prior, loss: Loss, *, folds: int = 5, judge: str = "groups", seed: int = 0
) -> bx.Problem:
    """Grouped data as a `bx.Problem`: a block per fold of a group, x the prior and y a fold's w.

    Every group needs two rows or more. F is what the estimators minimise with `newcomers=0` and
    `evidence=0`, but for the small penalty on the prior itself.

    Args:
      panel: the rows.
      prior: the form of the prior.
      loss: of a row.
      folds: of a group, at most.
      judge: whether F is the mean loss of "groups" or of "rows".
      seed: of the folds.
    """
    rows = {"row": panel.all(), "target": panel.target, "weight": panel.weight}
    made = bx.Folds(rows, panel.offsets, folds, seed=seed)
    kept, held = (np.asarray(one.lengths, float) for one in (made.kept, made.held_out))
    # As upper levels are means over rows and blocks, and weights those of rows within a group or of all.
    total = np.add.reduceat(panel.weight, panel.offsets[:-1])
    of_all = panel.groups * total[made.group] if judge == "groups" else total.sum()
    share = held * made.count / of_all

    def losses(x: X, w: Array, block: Any, batch: Any) -> Array:
        beta = prior.mean(x, block["known"]) + prior.spread(x) @ w
        return jnp.mean(batch["weight"] * jax.vmap(loss)(batch["row"] @ beta, batch["target"]))

    def upper(x: X, w: Array, block: Any, batch: Any) -> Array:
        return block["share"] * losses(x, w, block, batch)

    def lower(x: X, w: Array, block: Any, batch: Any) -> Array:
        return losses(x, w, block, batch) + 0.5 * jnp.sum(w**2) / block["kept"]

    blocks = {"known": panel.known[made.group], "share": share, "kept": kept}
    return bx.Problem(upper, lower, blocks, made.held_out, made.kept)
