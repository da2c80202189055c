"""Processes that take their processor for several devices."""

from __future__ import annotations

import os


def several_devices(count):
    """The environment for a process that is to have so many devices; what XLA is told otherwise stays."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
