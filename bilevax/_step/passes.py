"""Passes over all blocks, some of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

MOST = 128  # blocks looked at together


def over_all_blocks(
    count: int, look: Callable[[Any, Array, Any], Any], carry: Any, together: int = MOST
) -> Any:
    """Looks at all blocks, `together` at a time: carry ← look(number of the turn, blocks, carry)."""
    size = max(1, min(count, together))
    turns, rest = divmod(count, size)
    if turns == 1:
        carry = look(0, jnp.arange(size), carry)
    else:
        carry = jax.lax.fori_loop(
            0, turns, lambda turn, carry: look(turn, turn * size + jnp.arange(size), carry), carry
        )
    return look(turns, jnp.arange(count - rest, count), carry) if rest else carry
