"""Where the rows of a block come from: data shared by all blocks, or each block's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.bits import CompactRows
from bilevax._problem.random_functions import Keyed
from bilevax._problem.stream import Stream
from bilevax._util.checks import flag, leading_axis

PyTree = Any


class Batch(eqx.Module):
    """The rows drawn for the sampled blocks.

    Attributes:
      rows: pytree; leaves have leading axes (blocks, batch), or (batch,) when `shared`.
      weight: None when every row counts the same; else (blocks, batch) weights that sum to one per
        block: the padded rows of ragged blocks have weight zero.
      shared: True when all blocks see the same rows, which are then not stacked.
      random: the random stream of each block, if its functions take keys.
    """

    rows: PyTree
    weight: Array | None = None
    shared: bool = eqx.field(static=True, default=False)
    random: Stream | None = None

    @property
    def axis(self) -> int | None:
        """The axis of the blocks in the rows, for `jax.vmap`."""
        return None if self.shared else 0

    @property
    def axes(self) -> Any:
        """The axes of the blocks, for `jax.vmap`."""
        if self.random is None:
            return self.axis
        return Batch(self.axis, None if self.weight is None else self.axis, self.shared, Stream(0, 0))  # pyright: ignore[reportArgumentType]

    def average(self, function: Callable[[PyTree], PyTree]) -> PyTree:
        """The mean of a user's function over one block's batch.

        The function is itself a mean over the rows it receives. Weighted rows are passed one by one, as
        batches of one, and their values are averaged with the weights.
        """
        random = self.random
        if self.weight is None:
            return function(self.rows if random is None else Keyed(self.rows, random))
        weight = self.weight
        if random is None:
            values = jax.vmap(lambda row: function(jax.tree.map(lambda a: a[None], row)))(self.rows)
        else:

            def one(row: PyTree, place: Array) -> PyTree:
                return function(Keyed(jax.tree.map(lambda a: a[None], row), random.at(place)))

            values = jax.vmap(one)(self.rows, jnp.arange(weight.shape[0]))
        return jax.tree.map(lambda v: jnp.tensordot(weight.astype(v.dtype), v, axes=1), values)


class Rows(eqx.Module):
    """What a data source must offer: rows for the sampled blocks, drawn on the device."""

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        """Draws `size` rows for each block index in `blocks`; None takes every row of the block."""
        raise NotImplementedError

    def check(self, name: str, blocks: int) -> None:
        """Raises if the source does not fit a problem of that many blocks."""

    def outline(self) -> Rows:
        """Rows of the same shapes, for programs that are traced to see their shapes and never run."""
        return self

    def at(self, step: Array) -> Rows:
        """The rows as a step sees them."""
        return self

    @property
    def common(self) -> bool:
        """Whether all visited blocks see the same rows: they are then drawn alike for all strata."""
        return False

    # Whether the arrays are split along their leading axis when devices share the blocks, or held by all.
    split: ClassVar[bool] = False

    def spread(self, devices: int) -> Rows:
        """The same rows, laid out for this many devices, each of which holds equally many consecutive blocks.

        If `split` is set, the leading axis of every array must consist of one equal part per device.
        """
        raise TypeError(
            f"{type(self).__name__} does not say how its rows are shared among {devices} devices: "
            "give bilevax.Shared or bilevax.PerBlock, or define `spread` (and `split` and `share`)"
        )

    def share(self, device: Array) -> Rows:
        """A device's part of the rows laid out by `spread`, for blocks counted from its first one."""
        return self


class Shared(Rows):
    """Rows that all blocks draw from, uniformly and with replacement.

    Args:
      rows: pytree of arrays with the same leading axis, one entry per row.
      common: all blocks that a step visits see the same rows. What f and g compute from x and the rows alone,
        such as the features of a network, is then computed once per step and not once per block. Devices that
        share the blocks, and strata, see the same rows too.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> bx.Shared({"row": jnp.ones((5, 3)), "label": jnp.ones(5)}).count
      5
    """

    packed: CompactRows
    count: int = eqx.field(static=True)
    together: bool = eqx.field(static=True)

    def __init__(self, rows: PyTree, common: bool = False):
        flag("common of Shared", common)
        self.count, self.together = leading_axis("Shared rows", rows), common
        self.packed = CompactRows(rows)

    @property
    def rows(self) -> PyTree:
        """All rows, as they were given."""
        return self.packed.unpacked()

    @property
    def common(self) -> bool:
        """See `Rows.common`."""
        return self.together

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        if size is None:
            return Batch(self.packed.unpacked(), shared=True)
        if self.common:
            return Batch(self.packed.take(random.integers((size,), self.count)), shared=True)
        return Batch(self.packed.take(random.integers((blocks.shape[0], size), self.count)))

    def spread(self, devices: int) -> Shared:
        return self


class PerBlock(Rows):
    """Rows that belong to single blocks, stored one block after the other.

    Block i owns rows offsets[i] to offsets[i + 1]; blocks may differ in length. A batch is drawn from
    the block's own rows, uniformly and with replacement.

    Args:
      rows: pytree of arrays with the same leading axis, one entry per row of any block.
      offsets: m + 1 ascending integers from 0 to the number of rows; every block has at least one row.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> bx.PerBlock(jnp.arange(5.0), offsets=[0, 2, 5]).longest
      3
      >>> bx.PerBlock.from_blocks([jnp.zeros(2), jnp.ones(3)]).lengths.tolist()
      [2, 3]
      >>> bx.PerBlock.from_blocks({"row": jnp.zeros((4, 3, 2)), "label": jnp.zeros((4, 3))}).lengths.tolist()
      [3, 3, 3, 3]
      >>> bx.PerBlock.from_owners(jnp.arange(5.0), owners=[1, 0, 1, 0, 1]).rows.tolist()
      [1.0, 3.0, 0.0, 2.0, 4.0]
    """

    packed: CompactRows
    starts: Array
    lengths: Array
    count: int = eqx.field(static=True)
    longest: int = eqx.field(static=True)
    average: float = eqx.field(static=True)  # rows of a block
    even: bool = eqx.field(static=True)  # all blocks have equally many rows

    split = True

    def __init__(self, rows: PyTree, offsets: Any = None):
        if offsets is None:
            raise ValueError(
                "PerBlock needs offsets, where the rows of each block begin and the last ones end, got none. "
                "PerBlock.from_blocks takes the rows of each block, PerBlock.from_owners a block for each row"
            )
        self.count = leading_axis("PerBlock rows", rows)
        bounds = np.asarray(offsets)
        if bounds.ndim != 1 or bounds.size < 2 or not np.issubdtype(bounds.dtype, np.integer):
            raise ValueError(
                "PerBlock offsets must be a vector of at least two integers, got "
                f"shape {bounds.shape} of dtype {bounds.dtype}"
            )
        if bounds.max() > np.iinfo(np.int32).max:
            raise ValueError(f"PerBlock offsets must fit into 32 bits, got {bounds.max()}")
        bounds = bounds.astype(np.int64)  # differences of unsigned integers would wrap
        lengths = np.diff(bounds)
        if (lengths < 1).any():
            i = int(np.argmax(lengths < 1))
            raise ValueError(
                "PerBlock offsets must ascend (each block owns at least one row), got "
                f"offsets[{i}] = {bounds[i]}, offsets[{i + 1}] = {bounds[i + 1]}"
            )
        if bounds[0] != 0 or bounds[-1] != self.count:
            raise ValueError(
                f"PerBlock offsets must run from 0 to the number of rows {self.count}, "
                f"got {bounds[0]} to {bounds[-1]}"
            )
        self.average = self.count / len(lengths)
        self.longest, self.even = int(lengths.max()), bool((lengths == lengths[0]).all())
        self.starts, self.lengths = jnp.asarray(bounds[:-1], jnp.int32), jnp.asarray(lengths, jnp.int32)
        self.packed = CompactRows(rows)

    @classmethod
    def from_blocks(cls, blocks: Iterable[PyTree]) -> PerBlock:
        """The rows of each block, one pytree after the other, all with the same leaves.

        Blocks of equally many rows may be given as one dictionary of arrays of shape (m, n, …).
        """
        if isinstance(blocks, dict):
            return cls._from_arrays(blocks)
        parts = list(blocks)
        if not parts:
            raise ValueError("PerBlock.from_blocks needs the rows of at least one block, got none")
        lengths = [leading_axis(f"rows of block {place}", one) for place, one in enumerate(parts)]
        try:
            rows = jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *parts)
        except ValueError as error:
            raise ValueError(
                f"PerBlock.from_blocks: the rows of all blocks must have the same form: {error}"
            ) from error
        return cls(rows, np.cumsum([0, *lengths]))

    @classmethod
    def _from_arrays(cls, blocks: dict[str, Any]) -> PerBlock:
        shapes = {np.shape(leaf)[:2] for leaf in jax.tree.leaves(blocks)}
        if len(shapes) != 1 or len(shape := shapes.pop()) < 2:
            raise ValueError(
                "PerBlock.from_blocks takes a dictionary of arrays of shape (m, n, …) with the same m and n, "
                f"got shapes {[np.shape(leaf) for leaf in jax.tree.leaves(blocks)]}"
            )
        count, length = shape
        rows = jax.tree.map(lambda a: np.reshape(a, (count * length, *np.shape(a)[2:])), blocks)
        return cls(rows, np.arange(count + 1) * length)

    @classmethod
    def from_owners(cls, rows: PyTree, owners: Any) -> PerBlock:
        """Rows in any order, with the number of the block that each belongs to, from 0 to m - 1.

        For names of groups: `groups, owners = np.unique(names, return_inverse=True)`; block i is groups[i].
        """
        count, owner = leading_axis("PerBlock rows", rows), np.asarray(owners)
        if owner.shape != (count,) or not np.issubdtype(owner.dtype, np.integer):
            raise ValueError(
                f"owners must have the number of a block for each of the {count} rows, got shape "
                f"{owner.shape} of dtype {owner.dtype}"
            )
        if count and owner.min() < 0:
            raise ValueError(f"owners must be numbers of blocks from 0, got {owner.min()}")
        order = np.argsort(owner, kind="stable")
        found = np.unique(owner)
        missing = np.flatnonzero(found != np.arange(found.size))
        if missing.size:
            raise ValueError(f"every block needs at least one row, got none for block {missing[0]}")
        lengths = np.bincount(owner)
        return cls(jax.tree.map(lambda leaf: np.asarray(leaf)[order], rows), np.cumsum([0, *lengths]))

    @property
    def rows(self) -> PyTree:
        """All rows, as they were given."""
        return self.packed.unpacked()

    def check(self, name: str, blocks: int) -> None:
        owners = self.starts.shape[0]
        if owners != blocks:
            raise ValueError(f"{name} has offsets for {owners} blocks, expected {blocks}")

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        start, length = self.starts[blocks][:, None], self.lengths[blocks][:, None]
        if size is not None:
            return Batch(self.packed.take(start + random.integers((blocks.shape[0], size), length)))
        place = jnp.arange(self.longest)[None, :]
        rows = self.packed.take(start + jnp.minimum(place, length - 1))
        if self.even:
            return Batch(rows)
        return Batch(rows, weight=(place < length) / length.astype(float))

    def up_to(self, longest: int) -> PerBlock:
        """The same rows, for draws of all rows of blocks that have at most so many: they are padded to it."""
        out = copy.copy(self)
        object.__setattr__(out, "longest", longest)
        object.__setattr__(out, "even", self.even and longest == self.longest)
        return out

    def spread(self, devices: int) -> PerBlock:
        """Every device's rows, padded to the largest number that a device has."""
        starts = np.asarray(self.starts)
        firsts = starts[:: len(starts) // devices]
        counts = np.diff(firsts, append=self.count)
        most = int(counts.max())
        if most * devices == self.count:
            return self

        def padded(array: Any) -> Any:
            if isinstance(array, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((devices * most, *array.shape[1:]), array.dtype)
            rows = np.asarray(array)
            out = np.zeros((devices * most, *rows.shape[1:]), rows.dtype)
            for device, (first, count) in enumerate(zip(firsts, counts, strict=True)):
                out[device * most : device * most + count] = rows[first : first + count]
            return out

        moved = starts + np.repeat(np.arange(devices) * most - firsts, len(starts) // devices)
        stored = jax.tree.map(padded, self.packed.stored)
        return eqx.tree_at(lambda r: (r.packed.stored, r.starts), self, (stored, moved.astype(np.int32)))

    def share(self, device: Array) -> PerBlock:
        rows = jax.tree.leaves(self.packed.stored)[0].shape[0]
        return eqx.tree_at(lambda r: r.starts, self, self.starts - device * rows)
