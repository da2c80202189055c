"""Rows of blocks in tiles of equal size, on the device.

The rows of a block are cut into tiles of 16 rows, the last one padded. So blocks of any length are arrays of
one shape, for which one program is compiled, and little is padded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from bilevax.applications.grouped.blocks import Blocks, Places
from bilevax.applications.grouped.panel import Panel

_MOST, _ENTRIES = 2**12, 2**23  # tiles and blocks of a chunk, and entries of their matrices


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


def chunks(blocks: Blocks) -> Iterator[Chunk]:
    """The blocks in chunks of one shape, so that one program is compiled."""
    panel, kept, held = blocks.panel, blocks.kept, blocks.held
    tiles, of_held = kept.tiles, held.tiles
    most = min(_MOST, max(_ENTRIES // panel.size**2, 1))
    bounds = _boundaries(most, tiles, of_held)
    spans = [np.arange(first, after) for first, after in itertools.pairwise(bounds)]
    sizes = [power_of_two(max(int(count[span].sum()) for span in spans)) for count in (tiles, of_held)]
    blocks_of_all = power_of_two(max(map(len, spans)))
    for span in spans:
        data = _filled(panel, kept, span, sizes[0], ("X", "t", "a", "of"))
        if held.count.any():
            data |= _filled(panel, held, span, sizes[1], ("Xh", "th", "h", "ofh"))
            data["h"] *= blocks.judged[span][data["ofh"]][:, None]
        data["known"] = np.zeros((blocks_of_all, panel.known.shape[1]))
        data["known"][: len(span)] = panel.known[blocks.group[span]]
        # Converted by NumPy, as JAX compiles a program for every shape that it converts.
        yield Chunk(span, {name: jnp.asarray(one.astype(_dtype(one))) for name, one in data.items()})


def power_of_two(count: int) -> int:
    """The power of two to which a number is rounded up."""
    return 1 << max(count - 1, 0).bit_length()


def _boundaries(most: int, *tiles: np.ndarray) -> list[int]:
    """Where chunks begin and end: at most so many tiles of a kind, and blocks, unless one block has more."""
    bounds, count = [0], len(tiles[0])
    ends = [np.concatenate([[0], np.cumsum(one)]) for one in tiles]
    while bounds[-1] < count:
        first = bounds[-1]
        after = min(int(np.searchsorted(one, one[first] + most, "right")) - 1 for one in ends)
        bounds.append(min(max(after, first + 1), first + most, count))
    return bounds


def _dtype(array: np.ndarray) -> Any:
    return np.int32 if array.dtype.kind == "i" else jnp.result_type(float)


def _filled(
    panel: Panel, places: Places, blocks: np.ndarray, size: int, names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The tiles of some blocks, filled up with empty ones, which belong to the last of them."""
    owner, place, real = places.tiled(blocks)
    weight = np.where(real, panel.weight[place], 0.0)
    out = {}
    for name, part in zip(names, [panel.at(place), panel.target[place], weight, owner], strict=True):
        out[name] = np.zeros((size, *part.shape[1:]), part.dtype)
        out[name][: len(part)] = part
    out[names[-1]][len(owner) :] = len(blocks) - 1  # owners ascend
    return out
