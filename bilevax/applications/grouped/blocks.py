"""Blocks of rows: folds of groups, groups as if they were new, or whole groups.

A block has rows that it is fitted to and rows that it is judged on; a whole group has none of the latter.
"""

from __future__ import annotations

import dataclasses

import numpy as np

import bilevax as bx
from bilevax.applications.grouped.panel import Panel

TILE = 16  # rows
_KNOWN = np.array([0, 1, 3, 10, 30])  # rows of a group that a newcomer is fitted to


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the rows of blocks are.

    Block b has `count` rows from `start + skip` on, in a circle of `around` rows from `start` on.
    """

    start: np.ndarray
    skip: np.ndarray
    around: np.ndarray
    count: np.ndarray

    @property
    def tiles(self) -> np.ndarray:
        """The number of tiles of every block."""
        return -(-self.count // TILE)

    def part(self, blocks: np.ndarray | slice) -> Places:
        """The places of some blocks."""
        return Places(self.start[blocks], self.skip[blocks], self.around[blocks], self.count[blocks])

    def tiled(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tiles of some blocks: whose they are (counted within these blocks), the places of their rows,
        and which of these are no padding."""
        tiles = self.tiles[blocks]
        owner = np.repeat(np.arange(len(blocks)), tiles)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        inside = number[:, None] * TILE + np.arange(TILE)
        of = blocks[owner]
        place = self.start[of, None] + (self.skip[of, None] + inside) % np.maximum(self.around[of, None], 1)
        return owner, place, inside < self.count[of, None]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a panel.

    Attributes:
      panel: the rows, in the order in which the blocks have them.
      group: the group of every block.
      kept: the rows that it is fitted to.
      held: the rows that it is judged on.
      judged: the weight in F of its held-out rows, for a row of weight one.
      folds: how many blocks are folds, which hold out every row once; newcomers follow them.
    """

    panel: Panel
    group: np.ndarray
    kept: Places
    held: Places
    judged: np.ndarray
    folds: int

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.group)

    def of_groups(self, most: int, seed: int) -> np.ndarray:
        """The places of all blocks of at most so many groups, drawn at random."""
        if self.panel.groups <= most:
            return np.arange(self.count)
        chosen = np.zeros(self.panel.groups, bool)
        chosen[np.random.default_rng(seed).permutation(self.panel.groups)[:most]] = True
        return np.flatnonzero(chosen[self.group])

    def part(self, places: np.ndarray) -> Blocks:
        """Some blocks, with weights in F that add up to one again."""
        kept, held = self.kept.part(places), self.held.part(places)
        reached, first = np.concatenate([[0.0], np.cumsum(self.panel.weight)]), held.start + held.skip
        share = self.judged[places] * (reached[first + held.count] - reached[first])
        folds = int(np.searchsorted(places, self.folds))
        return Blocks(self.panel, self.group[places], kept, held, self.judged[places] / share.sum(), folds)

    def rows_alike(self, places: np.ndarray) -> Blocks:
        """Some folds, whose held-out rows count alike."""
        return dataclasses.replace(self.part(places), judged=np.ones(len(places)))


def whole_groups(panel: Panel) -> Blocks:
    """Every group as a block that is fitted to all its rows."""
    start, length = panel.offsets[:-1], np.diff(panel.offsets)
    nothing = np.zeros_like(length)
    fitted, none = Places(start, nothing, length, length), Places(start, nothing, length, nothing)
    return Blocks(panel, np.arange(panel.groups), fitted, none, np.zeros(panel.groups), 0)


def folds_of(panel: Panel, folds: int, seed: int, *, judge: str = "rows", newcomers: float = 0.0) -> Blocks:
    """Every fold of every group as a block, by `bx.Folds`, and every group as a newcomer.

    A group of one row has one fold, which is fitted to nothing: the prior itself is judged on that row. A
    newcomer is a group that is fitted to a few of its rows, from none to 30, and judged on as many others as
    a fold has. Without newcomers the prior's mean is hardly seen where groups have many rows.

    Args:
      panel: the rows.
      folds: of a group, at most.
      seed: of the folds and the newcomers.
      judge: "groups", each counts alike, or "rows".
      newcomers: their share of F.
    """
    lengths = np.diff(panel.offsets)
    order, group = np.arange(len(panel.target)), np.arange(panel.groups)
    start, around, held = panel.offsets[:-1], lengths, lengths
    after = lengths  # where the rows that follow the fold begin, counted from the start of the group
    several = np.flatnonzero(lengths > 1)
    if len(several):
        own = np.repeat(lengths > 1, lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths[several])])
        made = bx.Folds(np.arange(int(own.sum())), offsets, folds, seed=seed)
        order[own] = np.flatnonzero(own)[made.order]
        single = np.flatnonzero(lengths == 1)
        group = np.concatenate([several[made.group], single])
        sizes = np.asarray(made.held_out.lengths, np.int64)
        start, around = panel.offsets[:-1][group], lengths[group]
        held = np.concatenate([sizes, np.ones(len(single), np.int64)])
        ends = np.cumsum(sizes) - offsets[made.group]
        after = np.concatenate([ends, np.ones(len(single), np.int64)])
    mixed = panel.reordered(order)
    kept, judged_on = Places(start, after, around, around - held), Places(start, after - held, around, held)
    # Groups count alike, or by their weight; in either case the weights of all blocks in F add up to one.
    total = np.add.reduceat(panel.weight, panel.offsets[:-1])
    shares = np.full(panel.groups, 1 / panel.groups) if judge == "groups" else total / total.sum()
    per_row = shares / total
    blocks = Blocks(mixed, group, kept, judged_on, per_row[group], len(group))
    if newcomers and len(several):
        return _with_newcomers(blocks, several, folds, seed, newcomers, shares)
    return blocks


def _with_newcomers(
    blocks: Blocks, several: np.ndarray, folds: int, seed: int, newcomers: float, shares: np.ndarray
) -> Blocks:
    """The blocks with one more for each of these groups."""
    panel = blocks.panel
    start, lengths = panel.offsets[several], np.diff(panel.offsets)[several]
    possible = np.searchsorted(_KNOWN, lengths - 1, "right")
    known = _KNOWN[(np.random.default_rng([seed, 1]).random(len(several)) * possible).astype(int)]
    held = np.minimum(lengths - known, -(-lengths // folds))
    reached = np.concatenate([[0.0], np.cumsum(panel.weight)])
    weight = reached[start + known + held] - reached[start + known]
    judged = newcomers * shares[several] / shares[several].sum() / weight
    zero = np.zeros_like(known)
    return Blocks(
        panel,
        np.concatenate([blocks.group, several]),
        _joined(blocks.kept, Places(start, zero, lengths, known)),
        _joined(blocks.held, Places(start, known, lengths, held)),
        np.concatenate([(1 - newcomers) * blocks.judged, judged]),
        blocks.folds,
    )


def _joined(one: Places, other: Places) -> Places:
    pairs = zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    return Places(*(np.concatenate(pair) for pair in pairs))
