"""How much memory the device has."""

from __future__ import annotations

import os

import jax


def available_bytes() -> int:
    """The memory of the default device, or of the host."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
