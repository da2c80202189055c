"""Several processes that run one program: what they must agree on, and which of them speaks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def put(leaf: Any, sharding: Sharding) -> Any:
    """An array where a sharding has it; if other processes have parts, each has brought the whole array.

    An array that is there already is left alone: so data that no host can hold are brought in parts
    (`jax.make_array_from_process_local_data`). A shape is told where its array would be.
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
    """The whole array in this process, also where it has but a part of it; then all processes must ask."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        assert isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.jit(lambda array: array, out_shardings=everywhere)(leaf)
    return np.asarray(leaf)


def agreed(numbers: list[float]) -> list[float]:
    """The largest of every number over all processes: clocks and signals differ between them."""
    from jax.experimental import multihost_utils

    return np.max(multihost_utils.process_allgather(np.asarray(numbers, np.float32)), axis=0).tolist()
