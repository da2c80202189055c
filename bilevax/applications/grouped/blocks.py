"""Rows of blocks in tiles of equal size.

A block is a fold of a group, with the rows it is fitted to and the rows it is judged on; or a whole group,
with no rows to be judged on. Its rows are cut into tiles of 16 rows, the last one padded. So blocks of any
length are arrays of one shape, for which one program is compiled, and little is padded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import bilevax as bx

TILE = 16  # rows
_MOST = 2**12  # tiles and blocks of a chunk


@dataclasses.dataclass(frozen=True)
class Panel:
    """Rows sorted by group.

    Attributes:
      rows: (n, d), standardised; the first column is ones.
      target: (n,).
      weight: (n,).
      offsets: group i owns rows offsets[i] to offsets[i + 1].
      known: (m, p), the metadata of every group; p may be zero.
    """

    rows: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    offsets: np.ndarray
    known: np.ndarray

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.offsets) - 1

    def part(self, chosen: np.ndarray) -> Panel:
        """The panel of some groups."""
        lengths = np.diff(self.offsets)[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        rows = self.rows[place], self.target[place], self.weight[place]
        return Panel(*rows, offsets, self.known[chosen])


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
class Chunk:
    """Some blocks as arrays on the device; padded blocks and rows have no weight.

    Attributes:
      blocks: the numbers of the blocks that are no padding.
      data: tiles to fit ("X", "t", "a": rows, targets and weights, and "of": the block of each) and to judge
        ("Xh", "th", "h", "ofh"), and the metadata of every block ("known").
    """

    blocks: np.ndarray
    data: dict[str, Any]


def whole_groups(panel: Panel) -> tuple[np.ndarray, Places, Places]:
    """Every group as a block that is fitted to all its rows: its groups, and the places of the rows."""
    start, length = panel.offsets[:-1], np.diff(panel.offsets)
    nothing = np.zeros_like(length)
    fitted = Places(start, nothing, length, length)
    return np.arange(panel.groups), fitted, Places(start, nothing, length, nothing)


def folds_of(panel: Panel, folds: int, seed: int) -> tuple[Panel, np.ndarray, Places, Places]:
    """Every fold of every group as a block, by `bx.Folds`.

    A group of one row has one fold, which is fitted to nothing: the prior itself is judged on that row.

    Returns:
      The panel with its rows in the order of the folds, the group of every block, and the places of the rows
      that it is fitted to and judged on.
    """
    lengths = np.diff(panel.offsets)
    order, group = np.arange(len(panel.rows)), np.arange(panel.groups)
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
    mixed = Panel(panel.rows[order], panel.target[order], panel.weight[order], panel.offsets, panel.known)
    kept = Places(start, after, around, around - held)
    return mixed, group, kept, Places(start, after - held, around, held)


def chunks(
    panel: Panel, group: np.ndarray, kept: Places, held: Places, *, squared: bool = False
) -> Iterator[Chunk]:
    """The blocks in chunks of one shape, so that one program is compiled.

    Args:
      panel: the rows.
      group: the group of every block.
      kept: the rows that blocks are fitted to.
      held: the rows that they are judged on.
      squared: replace many rows by a few with the same sums of squares, for the squared loss.
    """
    tiles, of_held = kept.tiles, held.tiles
    if squared:
        most = -(-(panel.rows.shape[1] + 1) // TILE)
        tiles, of_held = np.minimum(tiles, most), np.minimum(of_held, most)
    bounds = _boundaries(tiles, of_held)
    spans = [np.arange(first, after) for first, after in itertools.pairwise(bounds)]
    sizes = [_power(max(int(count[span].sum()) for span in spans)) for count in (tiles, of_held)]
    blocks_of_all = _power(max(map(len, spans)))
    for span in spans:
        data = _filled(panel, kept, span, sizes[0], squared, ("X", "t", "a", "of"))
        if held.count.any():
            data |= _filled(panel, held, span, sizes[1], squared, ("Xh", "th", "h", "ofh"))
        data["known"] = np.zeros((blocks_of_all, panel.known.shape[1]))
        data["known"][: len(span)] = panel.known[group[span]]
        yield Chunk(span, {name: jnp.asarray(one, _dtype(one)) for name, one in data.items()})


def _boundaries(*tiles: np.ndarray) -> list[int]:
    """Where chunks begin and end: at most `_MOST` tiles of a kind, and blocks, unless one block has more."""
    bounds, count = [0], len(tiles[0])
    ends = [np.concatenate([[0], np.cumsum(one)]) for one in tiles]
    while bounds[-1] < count:
        first = bounds[-1]
        after = min(int(np.searchsorted(one, one[first] + _MOST, "right")) - 1 for one in ends)
        bounds.append(min(max(after, first + 1), first + _MOST, count))
    return bounds


def _power(count: int) -> int:
    """The power of two to which a number is rounded up."""
    return 1 << max(count - 1, 0).bit_length()


def _dtype(array: np.ndarray) -> Any:
    return np.int32 if array.dtype.kind == "i" else jnp.result_type(float)


def _filled(
    panel: Panel, places: Places, blocks: np.ndarray, size: int, squared: bool, names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The tiles of some blocks, filled up with empty ones, which belong to the last of them."""
    owner, place, real = places.tiled(blocks)
    weight = np.where(real, panel.weight[place], 0.0)
    parts = [panel.rows[place], panel.target[place], weight, owner]
    if squared:
        parts = _squeezed(*parts)
    out = {}
    for name, part in zip(names, parts, strict=True):
        out[name] = np.zeros((size, *part.shape[1:]), part.dtype)
        out[name][: len(part)] = part
    out[names[-1]][len(parts[-1]) :] = len(blocks) - 1  # owners ascend
    return out


def _squeezed(
    rows: np.ndarray, target: np.ndarray, weight: np.ndarray, owner: np.ndarray
) -> list[np.ndarray]:
    """Blocks of more than d + 1 rows in so many that have the same sums of squares and products."""
    width = rows.shape[-1] + 1
    most = -(-width // TILE)
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    counts = np.diff(firsts, append=len(owner))
    long = counts > most
    stay = ~np.repeat(long, counts)
    if not long.any():
        return [rows, target, weight, owner]
    kept = [rows[stay], target[stay], weight[stay], owner[stay]]
    both = np.concatenate([rows, target[..., None]], -1)[~stay] * np.sqrt(weight[~stay])[..., None]
    starts = np.concatenate([[0], np.cumsum(counts[long])[:-1]])
    # Rᵀ R = Σ weight · (row, target)(row, target)ᵀ
    values, vectors = np.linalg.eigh(np.add.reduceat(np.swapaxes(both, 1, 2) @ both, starts, 0))
    few = np.zeros((len(starts), most * TILE, width))
    few[:, :width] = np.sqrt(np.maximum(values, 0.0))[..., None] * np.swapaxes(vectors, 1, 2)
    few = few.reshape(-1, TILE, width)
    made = [few[..., :-1], few[..., -1], np.ones(few.shape[:2]), np.repeat(owner[firsts[long]], most)]
    order = np.argsort(np.concatenate([kept[-1], made[-1]]), kind="stable")
    return [np.concatenate(pair)[order] for pair in zip(kept, made, strict=True)]
