"""The arrays of a checkpoint as they are written: large ones by number, small ones as one array of bytes."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._run.digest import SMALL
from bilevax._util import processes


def packed(arrays: list[Any]) -> dict[str, Any]:
    """Large arrays by their number, and the bytes of all small ones, one after the other.

    (The writer keeps some memory for every array it has ever written.)
    """
    out = {_name(number): array for number, array in enumerate(arrays) if array.nbytes >= SMALL}
    small = [_bytes(array) for array in arrays if array.nbytes < SMALL]
    return out | {"small": np.concatenate([*small, np.zeros(1, np.uint8)])}


def unpacked(read: dict[str, Any], like: list[Any]) -> list[Any]:
    """The inverse of `packed`, for arrays of those shapes and dtypes."""
    small, place, out = np.asarray(read["small"]), 0, []
    for number, leaf in enumerate(like):
        if leaf.nbytes >= SMALL:
            out.append(read[_name(number)])
            continue
        out.append(small[place : place + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
        place += leaf.nbytes
    return out


def template(arrays: list[Any]) -> dict[str, Any]:
    """What `packed` would return, for reading: those in parts as they are, others without memory."""
    return packed([leaf if in_parts(leaf) else blank(leaf) for leaf in arrays])


def blank(leaf: Any) -> np.ndarray:
    """An array of that shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """A checksum of each array, all of which this process holds."""
    return {name: zlib.crc32(_bytes(np.asarray(array)).data) for name, array in arrays.items()}


def in_parts(leaf: Any) -> bool:
    """Whether several processes hold parts of an array that is large enough to be written in parts."""
    whole = leaf.nbytes < SMALL or leaf.is_fully_addressable or leaf.is_fully_replicated
    return not whole


def placed(array: Any, like: jax.Array) -> jax.Array:
    """An array that was read, placed like another one."""
    single = len(like.sharding.device_set) == 1
    return jnp.asarray(array) if single else processes.put(array, like.sharding)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _name(number: int) -> str:
    return f"array_{number:04d}"
