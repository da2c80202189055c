"""Folds within blocks: every block is judged on rows that it was not fitted to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.rows import Batch, PerBlock, Rows
from bilevax._problem.stream import Stream
from bilevax._util import checks

PyTree = Any


class OtherFolds(PerBlock):
    """The rows of a group outside one of its folds; `Folds` makes it.

    They are stored in a circle: those of group i at `starts` to `starts + around`, and those of the fold
    before `skipped`, counted from the start. So the rows outside begin there and go once around.
    """

    around: Array
    skipped: Array

    split = False

    def __init__(self, held_out: PerBlock, starts: np.ndarray, around: np.ndarray, skipped: np.ndarray):
        lengths = around - np.asarray(held_out.lengths)
        self.packed, self.count = held_out.packed, held_out.count
        self.starts, self.lengths = jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32)
        self.around, self.skipped = jnp.asarray(around, jnp.int32), jnp.asarray(skipped, jnp.int32)
        self.average = float(lengths.mean())
        self.longest, self.even = int(lengths.max()), bool((lengths == lengths[0]).all())

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        start, length = self.starts[blocks][:, None], self.lengths[blocks][:, None]
        around, skipped = self.around[blocks][:, None], self.skipped[blocks][:, None]
        if size is not None:
            place = random.integers((blocks.shape[0], size), length)
            return Batch(self.packed.take(start + (skipped + place) % around))
        place = jnp.arange(self.longest)[None, :]
        rows = self.packed.take(start + (skipped + jnp.minimum(place, length - 1)) % around)
        if self.even:
            return Batch(rows)
        return Batch(rows, weight=(place < length) / length.astype(float))

    def spread(self, devices: int) -> PerBlock:
        Rows.spread(self, devices)  # raises: the folds of a group may be on two devices, which need its rows
        return self


class Folds:
    r"""Rows of groups, divided into folds within each group: cross-validation as blocks.

    Block b is one fold k of one group i. It is fitted to the group's other rows (`kept`) and judged on the
    rows of the fold (`held_out`), so that with these as the data of the two levels

    .. math:: F(x) = \frac1m \sum_{(i, k)} f(x, y_{ik}(x); \text{rows of fold } k), \qquad
              y_{ik}(x) = \arg\min_y g(x, y; \text{rows of group } i \text{ outside fold } k)

    is the cross-validated loss itself. A group with fewer rows than folds has a fold per row.

    Args:
      rows: pytree of arrays with the same leading axis, one entry per row of any group.
      offsets: group i owns rows offsets[i] to offsets[i + 1], as in `PerBlock`; at least two.
      folds: into how many folds a group's rows are divided, at most.
      seed: of the choice of the rows of a fold; None takes them in turn, as they are stored.

    Attributes:
      count: m, the number of blocks.
      group: (m,), the group of every block; ascending.
      fold: (m,), which of the group's folds it is.
      held_out: the rows of the fold, a `PerBlock`.
      kept: the group's other rows.
      order: where in `rows` the rows are that are stored by group and fold.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> folds = bx.Folds({"row": jnp.arange(7.0)}, offsets=[0, 3, 7], folds=2)
      >>> folds.group.tolist(), folds.held_out.lengths.tolist(), folds.kept.lengths.tolist()
      ([0, 0, 1, 1], [2, 1, 2, 2], [1, 2, 2, 2])
    """

    def __init__(self, rows: PyTree, offsets: Any, folds: int = 5, *, seed: int | None = 0):
        most = checks.whole_number("folds", folds, 2)
        if seed is not None:
            seed = checks.whole_number("seed", seed, 0)
        lengths = np.asarray(PerBlock(rows, offsets).lengths).astype(np.int64)
        if lengths.min() < 2:
            place = int(np.argmin(lengths))
            raise ValueError(
                "Folds needs at least two rows in every group, to fit one and hold out the other, got "
                f"{lengths[place]} in group {place}"
            )
        firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        owner = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(owner)) - firsts[owner]
        if seed is not None:
            shuffled = np.argsort(owner + np.random.default_rng(seed).random(len(owner)))
            place[shuffled] = place.copy()
        count = np.minimum(lengths, most)
        # Fold k of n rows in c folds has the rows whose place is k modulo c, in this order.
        turn, fold = np.divmod(place, count[owner])
        whole, more = np.divmod(lengths, count)
        stored_at = firsts[owner] + fold * whole[owner] + np.minimum(fold, more[owner])
        self.order = np.empty(len(owner), np.int64)
        self.order[stored_at + turn] = np.arange(len(owner))
        self.group = np.repeat(np.arange(len(lengths)), count)
        self.fold = np.arange(len(self.group)) - np.repeat(np.cumsum(count) - count, count)
        self.count = len(self.group)
        sizes = (lengths[self.group] - self.fold - 1) // count[self.group] + 1
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        stored = jax.tree.map(lambda leaf: np.asarray(leaf)[self.order], rows)
        self.held_out = PerBlock(stored, bounds)
        starts = firsts[self.group]
        self.kept = OtherFolds(self.held_out, starts, lengths[self.group], bounds[1:] - starts)
