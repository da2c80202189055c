"""Rows that stay on the host: data that do not fit on the device, read batch by batch while a run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.rows import Batch, Rows
from bilevax._problem.stream import Stream

PyTree = Any
Fetch = Callable[[int, np.ndarray, int], PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Where the batches come from: a function of the step, or an iterable that has one for every step."""

    fetch: Fetch | None
    batches: Iterable[PyTree] | None


class Window(eqx.Module):
    """The batches of consecutive steps, on the device.

    Attributes:
      first: the first of the steps.
      batches: their batches; leaves have leading axes (steps, I, B).
    """

    first: Array
    batches: PyTree


class Streamed(Rows):
    """Rows that a run reads from the host, a batch per step, while earlier steps are computed.

    Which blocks a step visits is a function of the run's key and the step, so it is known ahead: a thread
    reads the batches of many steps at once, which then run as one compiled program.

    Args:
      fetch: fetch(step, blocks, size): the rows of a step, a pytree of NumPy arrays with leading axes
        (blocks, size), `size` rows for each of the visited blocks. The same step must always give the same
        rows if resumed runs are to have the same bits.
      row: one row, as arrays or shapes (`jax.ShapeDtypeStruct`).
      batches: in place of `fetch`, an iterable that yields such batches step by step: for rows that all
        blocks share, or a loader that knows the order of the visits. Its iterator may
        have `get_state` and `set_state`, as that of a `grain` loader has; their value is kept in checkpoints.
        Otherwise a run that resumes reads the batches before its step again.

    f and g see the same batch if both get the same `Streamed`; two of them read twice.

    A `batch_size` must be given. The estimators start from zero (`initial_batch_size=0`), and means without
    y0 from what step 0 sees on average; what else looks at rows before the first step looks at those of
    step 0. Whatever needs all rows (the diagnostics, `verify`, `BlockPAGE`, `BlockSAGA`) raises, and so do a
    risk, a mesh, `sweep`, `tune` and `advance`.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp, numpy as np
      >>> rows = np.random.default_rng(0).normal(size=(4, 1000, 2)).astype(np.float32)  # or a memory map
      >>> def fetch(step, blocks, size):
      ...     places = np.random.default_rng(step).integers(0, 1000, (len(blocks), size))
      ...     return rows[blocks[:, None], places]
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - 1) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.mean(jnp.sum((y - x - batch) ** 2, 1)),
      ...     blocks=4,
      ...     lower_data=bx.Streamed(fetch, row=np.zeros(2, np.float32)),
      ... )
      >>> result = bx.minimize(
      ...     problem, jnp.zeros(2), jnp.zeros((4, 2)), steps=1000, blocks_per_step=2, batch_size=8,
      ...     progress=None,
      ... )
      >>> bool(jnp.all(jnp.abs(result.x - 1) < 0.2))
      True
    """

    source: Source = eqx.field(static=True)
    shapes: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)
    window: Window | None = None

    def __init__(self, fetch: Fetch | None = None, row: PyTree = None, *, batches: Any = None):
        if (fetch is None) == (batches is None):
            raise ValueError("Streamed needs either fetch or batches, got " + ("both", "none")[fetch is None])
        if fetch is not None and not callable(fetch):
            raise TypeError(
                f"Streamed fetch must be a function of (step, blocks, size), got {type(fetch).__name__}"
            )
        iterable = hasattr(batches, "__iter__") and not isinstance(batches, (str, bytes))
        if batches is not None and (not iterable or hasattr(batches, "__next__")):
            raise TypeError(
                "Streamed batches must be an iterable that can be begun again, such as a list or a loader, "
                f"got {type(batches).__name__}"
            )
        leaves, self.structure = jax.tree.flatten(row)
        if not leaves:
            raise ValueError(f"Streamed row must hold the arrays or shapes of one row, got {row!r}")
        self.shapes = tuple(map(_shape, leaves))
        self.source, self.window = Source(fetch, batches), None

    @property
    def row(self) -> PyTree:
        """The shapes of one row."""
        return jax.tree.unflatten(self.structure, self.shapes)

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        if size is None:
            raise ValueError(
                "Streamed rows cannot all be read: give batch_size, and leave out what needs all rows "
                "(diagnostics, verify, BlockPAGE, BlockSAGA)"
            )
        raise ValueError(
            "Streamed rows are read by bilevax.minimize, for the blocks of its steps: advance, sweep, tune "
            "and solver.init cannot read them"
        )

    def outline(self) -> Rows:
        return _Outline(self.shapes, self.structure)

    def at(self, step: Array) -> Rows:
        window = self.window
        if window is None:
            return self
        place = step - window.first
        return _Held(jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, 0, False), window.batches))

    def filled(self, window: Window) -> Streamed:
        """The same rows, with those of some steps on the device."""
        return eqx.tree_at(lambda rows: rows.window, self, window, is_leaf=lambda leaf: leaf is None)

    def checked(self, name: str, step: int, batch: Any, blocks: int, size: int) -> list[np.ndarray]:
        """The leaves of a batch that a source gave.

        Raises:
          TypeError: if it has another structure or dtype than its rows should have.
          ValueError: if it has another shape.
        """
        label = f"the batch of step {step} that {name} (Streamed) has read"
        structure = jax.tree.structure(batch)
        if structure != self.structure:
            raise TypeError(f"{label} must have the structure of a row, {self.structure}, got {structure}")
        out = []
        for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(batch), self.shapes, strict=True):
            array = np.asarray(leaf)
            got, expected = (array.dtype, array.shape), (like.dtype, (blocks, size, *like.shape))
            if got != expected:
                kind = TypeError if got[0] != expected[0] else ValueError
                raise kind(
                    f"{label}{jax.tree_util.keystr(path)} must be {expected[0]}{list(expected[1])}, "
                    f"{blocks} blocks of {size} rows, got {got[0]}{list(got[1])}"
                )
            out.append(array)
        return out


class _Outline(Rows):
    """Rows of known shapes, for programs that are traced and never run."""

    shapes: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        if size is None:
            raise ValueError("Streamed rows cannot all be read: give batch_size")
        lead = (blocks.shape[0], size)
        leaves = [jnp.zeros((*lead, *one.shape), one.dtype) for one in self.shapes]
        return Batch(jax.tree.unflatten(self.structure, leaves))


class _Held(Rows):
    """The rows of one step."""

    batch: PyTree

    def draw(self, random: Stream, blocks: Array, size: int | None) -> Batch:
        held = jax.tree.leaves(self.batch)[0].shape[:2]
        if held != (blocks.shape[0], size):
            raise ValueError(
                f"Streamed rows of a step are {held[1]} of each of {held[0]} blocks, got a request for "
                f"{size} of {blocks.shape[0]}"
            )
        return Batch(self.batch)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    like = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if not (jnp.issubdtype(like.dtype, jnp.number) or like.dtype == jnp.bool_):
        raise TypeError(f"Streamed row must be numeric, got dtype {like.dtype}")
    dtype = jax.dtypes.canonicalize_dtype(like.dtype)
    if dtype != like.dtype:
        raise TypeError(f"Streamed row must have dtypes of the device, such as {dtype}, got {like.dtype}")
    return jax.ShapeDtypeStruct(like.shape, dtype)
