"""Groups with few rows as arrays, each with the weights of its rows in every block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from bilevax.applications.grouped.blocks import Blocks
from bilevax.applications.grouped.tiles import power_of_two

_ENTRIES = 2**22  # of the rows, or of the matrices, of a chunk


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some groups with their blocks, as arrays; what is padded has no weight.

    Attributes:
      groups: the numbers of the groups that are no padding.
      data: "X" (groups, rows, d), "t" (groups, rows), "known" (groups, p), and for every block of a group the
        weights "a" of the rows that it is fitted to and "h" of those that it is judged on, (groups, blocks,
        rows).
    """

    groups: np.ndarray
    data: dict[str, np.ndarray]


def chunks(blocks: Blocks) -> Iterator[Chunk]:
    """The blocks, by groups of similar length."""
    panel, lengths = blocks.panel, np.diff(blocks.panel.offsets)
    have = np.bincount(blocks.group, minlength=panel.groups)
    order = np.argsort(blocks.group, kind="stable")
    first, most = np.cumsum(have) - have, int(have.max())
    padded = np.array([power_of_two(int(one)) for one in lengths])
    for rows in np.unique(padded[have > 0]).tolist():
        members = np.flatnonzero((padded == rows) & (have > 0))
        size = max(_ENTRIES // (rows * max(most * rows, panel.size)), 1)
        size = min(size, power_of_two(len(members)))
        for begin in range(0, len(members), size):
            yield _chunk(blocks, members[begin : begin + size], order, first, (size, most, rows))


def _chunk(
    blocks: Blocks, groups: np.ndarray, order: np.ndarray, first: np.ndarray, shape: tuple[int, int, int]
) -> Chunk:
    size, _, rows = shape
    panel, inside = blocks.panel, np.arange(rows)
    lengths = np.diff(panel.offsets)[groups]
    real = inside < lengths[:, None]
    place = panel.offsets[groups][:, None] + np.where(real, inside, 0)
    data = {
        "X": np.zeros((size, rows, panel.size)),
        "t": np.zeros((size, rows)),
        "known": np.zeros((size, panel.known.shape[1])),
        "a": np.zeros(shape),
        "h": np.zeros(shape),
    }
    count = len(groups)
    data["X"][:count] = np.where(real[..., None], panel.at(place), 0.0)
    data["t"][:count], data["known"][:count] = panel.target[place], panel.known[groups]
    weight = np.where(real, panel.weight[place], 0.0)
    numbers = np.bincount(blocks.group, minlength=panel.groups)[groups]
    whose = np.repeat(np.arange(count), numbers)
    slot = np.arange(len(whose)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    own = order[first[groups][whose] + slot]
    for name, places, judged in (("a", blocks.kept, 1.0), ("h", blocks.held, blocks.judged[own, None])):
        around = np.maximum(places.around[own], 1)[:, None]
        chosen = (inside - places.skip[own][:, None]) % around < places.count[own][:, None]
        data[name][whose, slot] = np.where(chosen, weight[whose], 0.0) * judged
    return Chunk(groups, data)
