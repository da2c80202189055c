"""Several processes that run one program: placing arrays, and agreeing on clocks and signals."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def put(leaf: Any, sharding: Sharding) -> Any:
    """An array placed by a sharding. If other processes hold parts of it, each passes the whole array.

    An array that is already in place is returned as it is: data too large for one host are made in parts
    (`jax.make_array_from_process_local_data`). A shape gets the sharding of its array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])


def on_host(leaf: Any) -> np.ndarray:
    """The whole array in this process. If others hold parts of it, all processes must make this call."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        assert isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.jit(lambda array: array, out_shardings=everywhere)(leaf)
    return np.asarray(leaf)


def agreed(numbers: list[float]) -> list[float]:
    """The largest of every number over all processes: clocks and signals differ between them."""
    from jax.experimental import multihost_utils

    return np.max(multihost_utils.process_allgather(np.asarray(numbers, np.float32)), axis=0).tolist()
