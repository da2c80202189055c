"""Passes over all blocks, several at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

MOST = 128  # blocks at a time


def over_all_blocks(
    count: int, look: Callable[[Any, Array, Any], Any], carry: Any, together: int = MOST
) -> Any:
    """Visits all blocks, `together` at a time: carry ← look(turn, blocks, carry)."""
    size = max(1, min(count, together))
    turns, rest = divmod(count, size)
    if turns == 1:
        carry = look(0, jnp.arange(size), carry)
    else:
        carry = jax.lax.fori_loop(
            0, turns, lambda turn, carry: look(turn, turn * size + jnp.arange(size), carry), carry
        )
    return look(turns, jnp.arange(count - rest, count), carry) if rest else carry
