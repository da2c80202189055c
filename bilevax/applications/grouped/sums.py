"""Sums of squares of the rows of blocks: all that the squared loss sees of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from bilevax.applications.grouped.blocks import Blocks, Places
from bilevax.applications.grouped.panel import Panel

_ROWS = 2**12  # that are made at once: they stay in a cache


def span_sums(panel: Panel, *spans: Places) -> list[np.ndarray]:
    """Σ a (r, t)(r, t)ᵀ over the rows of every block, (blocks, d + 1, d + 1), for each of the `spans`.

    The rows of a block must be consecutive, and those of two blocks in one of the `spans` must differ. Rows
    are made in pieces, and each is used for all spans. A block is a product of two small matrices, in a loop:
    in stacked arrays, blocks would have to be padded.
    """
    size, plain = panel.size + 1, bool((panel.weight == 1).all())
    out = [np.zeros((len(one.count), size, size)) for one in spans]
    shift, scale = panel.centring
    by = 1 / scale
    both, found = np.empty((_ROWS, size)), []
    for one in spans:
        first = one.start + one.skip
        order = np.argsort(first, kind="stable")
        order = order[one.count[order] > 0]
        found.append((order, first[order], first[order] + one.count[order]))
    for low in range(0, len(panel.target), _ROWS):
        high = min(low + _ROWS, len(panel.target))
        parts = [slice(*_within(first, ends, low, high)) for _, first, ends in found]
        if all(part.start == part.stop for part in parts):
            continue
        rows = both[: high - low]
        _fill(rows, panel, low, high, shift, by)
        weighted = rows if plain else rows * panel.weight[low:high, None]
        turned = weighted.T
        for total, (order, first, ends), part in zip(out, found, parts, strict=True):
            begin = np.maximum(first[part] - low, 0).tolist()
            end = np.minimum(ends[part] - low, high - low).tolist()
            for block, a, b in zip(order[part].tolist(), begin, end, strict=True):
                total[block] += turned[:, a:b] @ rows[a:b]
    return out


def _fill(out: np.ndarray, panel: Panel, low: int, high: int, shift: np.ndarray, by: np.ndarray) -> None:
    """Rows from one place to another, without a copy on the way, and their targets."""
    X = panel.X[low:high] if panel.order is None else panel.X[panel.order[low:high]]
    first = len(shift) - X.shape[1]  # the one, which X may not have
    out[:, :first], out[:, -1] = 1.0, panel.target[low:high]
    np.subtract(X, shift[first:], out=out[:, first:-1])
    out[:, :-1] *= by


def _within(first: np.ndarray, ends: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """Which of the ascending spans have rows from low to high."""
    return int(np.searchsorted(ends, low, "right")), int(np.searchsorted(first, high, "left"))


def group_sums(panel: Panel) -> np.ndarray:
    """The sums of all rows of every group."""
    lengths = np.diff(panel.offsets)
    return span_sums(panel, Places(panel.offsets[:-1], np.zeros_like(lengths), lengths, lengths))[0]


@dataclasses.dataclass(frozen=True)
class BlockSums:
    """Sums of the rows of blocks and of their groups.

    Attributes:
      kept: (blocks, d + 1, d + 1), of the rows that a block is fitted to.
      held: of those that it is judged on.
      total: (groups, d + 1, d + 1), of all rows of a group.
    """

    kept: np.ndarray
    held: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, blocks: Blocks) -> BlockSums:
        """The sums of all blocks of a panel."""
        folds, new = slice(blocks.folds), slice(blocks.folds, None)
        held, few, of_few = span_sums(
            blocks.panel, blocks.held.part(folds), blocks.kept.part(new), blocks.held.part(new)
        )
        group = blocks.group[folds]
        firsts = np.flatnonzero(np.diff(group, prepend=-1))  # the folds of a group are next to each other
        total = np.zeros((blocks.panel.groups, *held.shape[1:]))
        total[group[firsts]] = np.add.reduceat(held, firsts, 0)
        # The rows outside a fold are all of the group but those of the fold; newcomers are fitted to fewer.
        kept = total[blocks.group]
        kept[folds] -= held
        kept[new] = few
        return cls(kept, np.concatenate([held, of_few]), total)
