"""Random numbers that cost a few integer operations each.

A stream is a key of two words; its n-th number is n hashed with them. It fuses into the program that uses the
numbers. A cryptographic generator would take as long as the rest of a small step.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

_GOLDEN = 0x9E3779B9


class Stream(eqx.Module):
    """A stream of random numbers, which can be split any number of times.

    Attributes:
      first: a 32-bit word.
      second: another.
    """

    first: Array
    second: Array

    @staticmethod
    def start(key: Array) -> Stream:
        """A stream from a key made by `jax.random.key`."""
        words = jax.random.bits(key, (2,), jnp.uint32)
        return Stream(words[0], words[1])

    def at(self, number: Array | int) -> Stream:
        """The stream with this number among those that split off from this one."""
        count = jnp.asarray(number).astype(jnp.uint32)
        return Stream(
            mix(self.first ^ mix(count + jnp.uint32(_GOLDEN))),
            mix(self.second + mix(count ^ jnp.uint32(_GOLDEN))),
        )

    def bits(self, shape: tuple[int, ...]) -> Array:
        """Uniform 32-bit words."""
        count = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        return mix(mix(count * jnp.uint32(_GOLDEN) + self.first) ^ self.second)

    def integers(self, shape: tuple[int, ...], bound: int | Array) -> Array:
        """Uniform integers below a bound, which may be an array.

        The bias of the remainder is bound / 2³²: far below sampling noise for any data that fit.
        """
        return (self.bits(shape) % jnp.asarray(bound).astype(jnp.uint32)).astype(jnp.int32)

    def key(self) -> Array:
        """A key for the functions of `jax.random`."""
        return jax.random.wrap_key_data(jnp.stack([self.first, self.second]), impl="threefry2x32")


def mix(word: Array) -> Array:
    """A bijection of 32-bit words that flips every output bit with even odds."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x21F0AAAD)
    word = (word ^ (word >> 15)) * jnp.uint32(0xD35A2D97)
    return word ^ (word >> 15)
