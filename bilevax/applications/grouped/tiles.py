"""Rows of blocks in tiles of equal size, on the device.

The rows of a block are cut into tiles of 16 rows, the last one padded. So blocks of any length are arrays of
one shape, for which one program is compiled, and little is padded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.blocks import TILE, Blocks, Places
from bilevax.applications.grouped.device_sums import on_accelerator
from bilevax.applications.grouped.panel import Panel

_MOST, _ENTRIES = 2**12, 2**23  # tiles and blocks of a chunk, and entries of their matrices
_WIDER = 16  # times as many on an accelerator, which does not wait for the host then


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some blocks as arrays on the device; padded blocks and rows have no weight.

    Attributes:
      blocks: the numbers of the blocks that are no padding.
      data: tiles to fit ("X", "t", "a": rows, targets and weights, and "of": the block of each) and to judge
        ("Xh", "th", "h", "ofh"), and the metadata of every block ("known"). Rows are (tiles, d, 16): products
        are several times as fast that way.
    """

    blocks: np.ndarray
    data: dict[str, Any]


def chunks(blocks: Blocks) -> Iterator[Chunk]:
    """The blocks in chunks of one shape, so that one program is compiled."""
    panel, kept, held = blocks.panel, blocks.kept, blocks.held
    tiles, of_held = kept.tiles, held.tiles
    wider = _WIDER if on_accelerator() else 1
    most = min(wider * _MOST, max(wider * _ENTRIES // panel.size**2, 1))
    # By group: newcomers, which are fitted to few rows, are spread over all chunks.
    order = np.argsort(blocks.group, kind="stable")
    bounds = _boundaries(most, tiles[order], of_held[order])
    spans = [order[first:after] for first, after in itertools.pairwise(bounds)]
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
        yield Chunk(span, {name: _on_device(one) for name, one in data.items()})


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


def _on_device(array: Any) -> Array:
    if isinstance(array, Array):
        return array
    return jnp.asarray(array.astype(np.int32 if array.dtype.kind == "i" else jnp.result_type(float)))


def _filled(
    panel: Panel, places: Places, blocks: np.ndarray, size: int, names: tuple[str, ...]
) -> dict[str, Any]:
    """The tiles of some blocks, filled up with empty ones, which belong to the last of them."""
    owner, place, real = places.tiled(blocks)
    weight = np.where(real, panel.weight[place], 0.0)
    if on_accelerator():
        rows = _device_rows(panel, place, size)
    else:
        rows = _host_rows(panel, places.part(blocks), owner, place, size)
    filled = rows, *(_padded(one, size) for one in (panel.target[place], weight, owner))
    out: dict[str, Any] = dict(zip(names, filled, strict=True))
    out[names[-1]][len(owner) :] = len(blocks) - 1  # owners ascend
    return out


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros((size, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


def _host_rows(panel: Panel, places: Places, owner: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Rows in tiles; those of a group are standardised once, although its blocks have most of them."""
    start, first, whose = np.unique(places.start, return_index=True, return_inverse=True)
    length = places.around[first]
    before = np.cumsum(length) - length
    inside = np.arange(length.sum()) + np.repeat(start - before, length)
    rows = panel.at(inside).astype(jnp.result_type(float))
    out = np.zeros((size, panel.size, TILE), rows.dtype)
    out[: len(place)] = rows[place - (start - before)[whose[owner], None]].swapaxes(1, 2)
    return out


def _device_rows(panel: Panel, place: np.ndarray, size: int) -> Array:
    """Rows in tiles that are made on the device: each goes there once, as the user has it, although folds
    have most rows several times."""
    low, high = (int(place.min()), int(place.max()) + 1) if place.size else (0, 1)
    X = panel.X[low:high] if panel.order is None else panel.X[panel.order[low:high]]
    shift, scale = np.zeros(panel.size), np.ones(panel.size)
    if panel.scaling is not None:
        shift, scale = panel.scaling.shift, panel.scaling.scale
    inside, dtype = _padded((place - low).astype(np.int32), size), jnp.result_type(float)
    with jax.enable_x64(True):  # what is left of large numbers must not be lost
        raw = _padded(X, power_of_two(len(X)))
        return _standardised(raw, inside, shift, scale, panel.scaling is not None, dtype)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _standardised(X: Array, place: Array, shift: Array, scale: Array, scaled: bool, dtype: Any) -> Array:
    rows = ((X - shift) / scale).astype(dtype)
    if scaled:  # and without the one, which rows begin with
        rows = jnp.concatenate([jnp.ones((len(rows), 1), dtype), rows], 1)
    return jnp.swapaxes(rows[place], 1, 2)
