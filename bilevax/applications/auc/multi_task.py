"""The AUC of many tasks under a shared model: every task is a block, with its own min-max variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.auc.objectives import penalty

PyTree = Any


class TaskRows(bx.Rows):
    """Rows that tasks share, each with labels of its own: a batch has as many positives as negatives.

    Args:
      rows: pytree of arrays with the same leading axis, one entry per row.
      labels: (tasks, rows): positive, negative or 0 where a task does not know the label. Every task needs
        both classes.

    Example:
      >>> import numpy as np
      >>> from bilevax.applications.auc import TaskRows
      >>> TaskRows(np.ones((4, 2)), np.array([[1, -1, -1, 0], [-1, -1, 1, 1]])).tasks
      2
    """

    rows: PyTree
    members: Array  # the numbers of rows: positives of the first task, negatives of it, those of the second …
    starts: Array  # (tasks, 2)
    counts: Array  # (tasks, 2)

    def __init__(self, rows: PyTree, labels: Any):
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(rows)}
        labels = np.asarray(labels)
        if labels.ndim != 2 or sizes != {labels.shape[1:]}:
            raise ValueError(
                f"labels must have the shape (tasks, rows) with rows of the shapes {sorted(sizes)}, got "
                f"{labels.shape}"
            )
        members = [np.flatnonzero(side) for one in labels for side in (one > 0, one < 0)]
        counts = np.array([len(one) for one in members], np.int32).reshape(-1, 2)
        if not counts.all():
            task, side = np.argwhere(counts == 0)[0]
            raise ValueError(f"labels of task {task} must have both classes, got no {_SIDES[side]} row")
        self.rows = jax.tree.map(jnp.asarray, rows)
        self.members = jnp.asarray(np.concatenate(members), jnp.int32)
        self.counts = jnp.asarray(counts)
        self.starts = jnp.asarray((np.cumsum(counts) - counts.ravel()).reshape(-1, 2), jnp.int32)

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return self.counts.shape[0]

    def check(self, name: str, blocks: int) -> None:
        """Raises if there are not as many tasks as blocks."""
        if blocks != self.tasks:
            raise ValueError(f"{name} has labels of {self.tasks} tasks, expected {blocks}")

    def draw(self, random: bx.Stream, blocks: Array, size: int | None) -> bx.Batch:
        """`size` positive rows and `size` negative ones of every task, uniformly and with replacement."""
        if size is None:
            raise ValueError("batch_size must be given: tasks have as many positive as negative rows in it")
        found = random.integers((blocks.shape[0], 2, size), self.counts[blocks][:, :, None])
        index = self.members[self.starts[blocks][:, :, None] + found]
        rows = [jax.tree.map(lambda a, side=side: a[index[:, side]], self.rows) for side in (0, 1)]
        return bx.Batch(dict(zip(_SIDES, rows, strict=True)))


_SIDES = "positive", "negative"


def multi_task_auc(
    rows: PyTree,
    labels: Any,
    score: Callable[[PyTree, Array, PyTree], Array],
    *,
    margin: float = 1.0,
    ridge: float = 0.0,
) -> bx.Problem:
    r"""Square-loss AUC of many tasks under one model, in min-max form (Ying et al.; AUCM for α ≥ 0).

    .. math::
        \min_x \frac1m \sum_k \min_{a_k, b_k} \max_{\alpha_k \ge 0} \; E_+[(h_k - a_k)^2] + E_-[(h_k - b_k)^2]
            + 2 \alpha_k (c + E_-[h_k] - E_+[h_k]) - \alpha_k^2

    E₊ and E₋ are the means over a task's positive and negative rows, c is the margin. The inner optimum is
    the variance of the scores of both classes plus the squared shortfall of the margin between their means.
    No pair of rows is formed, so that a batch is of a task's rows alone: block k is task k, its
    "centres" (a, b) are a `bilevax.minimum`, its "dual" α a `bilevax.maximum`.

    Args:
      rows: rows that all tasks share, a pytree of arrays with a leading axis.
      labels: (tasks, rows): positive, negative, or 0 where a task does not use the row.
      score: h(x, task, rows), the scores of rows for a task; best bounded, such as by a sigmoid.
      margin: c.
      ridge: r, adds r/2 ‖x‖².

    Returns:
      The problem; `centres(m)` is a y0 for it. A run of it needs a `batch_size`.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, bilevax as bx
      >>> from bilevax.applications.auc import centres, multi_task_auc
      >>> rows = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
      >>> problem = multi_task_auc(
      ...     rows, np.sign(rows.T), lambda x, task, rows: jax.nn.sigmoid(rows @ x[task])
      ... )
      >>> x0 = jnp.zeros((3, 3))
      >>> result = bx.minimize(problem, x0, centres(3), batch_size=8, steps=100, progress=None)
      >>> result.x.shape
      (3, 3)

    Reference:
      Hu et al., *Multi-block Min-max Bilevel Optimization with Applications in Multi-task Deep AUC
      Maximization*, NeurIPS 2022; Yuan et al., *Large-scale Robust Deep AUC Maximization*, ICCV 2021.
    """
    bx.checks.number("margin", margin, 0.0)
    bx.checks.number("ridge", ridge, 0.0)
    source = TaskRows(rows, labels)

    def upper(x: PyTree, y: dict[str, Any], block: Array, batch: dict[str, PyTree]) -> Array:
        positive, negative = (score(x, block, batch[side]) for side in _SIDES)
        (a, b), dual = y["centres"], y["dual"]
        spread = jnp.mean((positive - a) ** 2) + jnp.mean((negative - b) ** 2)
        short = margin + jnp.mean(negative) - jnp.mean(positive)
        return spread + 2 * dual * short - dual**2 + penalty(ridge, x)

    levels = {"centres": bx.minimum(), "dual": bx.maximum(project=(0.0, None))}
    return bx.Problem(upper, levels, source.tasks, source)


def centres(tasks: int, margin: float = 1.0) -> dict[str, Any]:
    """A y0 of `multi_task_auc`: where a, b and α are optimal if all scores are one half.

    From another α, f would first rise by itself, which looks like a run that blows up.

    Args:
      tasks: their number.
      margin: as in `multi_task_auc`.
    """
    middle = jnp.full(tasks, 0.5)
    return {"centres": (middle, middle), "dual": jnp.full(tasks, float(margin))}
