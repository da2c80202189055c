"""Checksums of arrays that do not depend on which devices and processes hold them."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.stream import mix
from bilevax._util import processes

SMALL = 2**16  # bytes; smaller arrays are copied to the host, which is faster than a compiled program


def checksum(array: Any) -> int:
    """A checksum of an array's values and their places."""
    if array.nbytes < SMALL:
        return zlib.crc32(np.ascontiguousarray(processes.on_host(array)).tobytes())
    return int(_digest(array))


@jax.jit
def _digest(array: Array) -> Array:
    """The sum of a hash of every value with its place: devices add up their parts in any order."""
    words = _words(array)
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(mix(words ^ mix(place + jnp.uint32(1))), dtype=jnp.uint32)


def _words(array: Array) -> Array:
    """The array's bits as words; an element of eight bytes is two of them."""
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
