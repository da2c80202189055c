"""Random numbers and permutations that cost a few integer operations each.

A stream is a key of two words; its n-th number is n hashed with them. It fuses into the program that uses the
numbers. A cryptographic generator would take as long as the rest of a small step.
"""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._util.hurried import HurriedJit

_GOLDEN = 0x9E3779B9
_ROUNDS = 8  # of a permutation
_FEW = 64  # up to here a permutation sorts random words: eight rounds do not mix a small grid


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
        return Stream(*_words(key))

    def at(self, number: Array | int) -> Stream:
        """The stream with this number among those that split off from this one."""
        return Stream(*_split_off(self.first, self.second, number))

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


@HurriedJit
def _words(key: Array) -> tuple[Array, Array]:
    words = jax.random.bits(key, (2,), jnp.uint32)
    return words[0], words[1]


# Compiled, as it occurs some hundred times in a step: its operations need not be traced each time.
@jax.jit
def mix(word: Array) -> Array:
    """A bijection of 32-bit words that flips every output bit with even odds."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x21F0AAAD)
    word = (word ^ (word >> 15)) * jnp.uint32(0xD35A2D97)
    return word ^ (word >> 15)


@jax.jit
def _split_off(first: Array, second: Array, number: Array | int) -> tuple[Array, Array]:
    count = jnp.asarray(number).astype(jnp.uint32)
    golden = jnp.uint32(_GOLDEN)
    return mix(first ^ mix(count + golden)), mix(second + mix(count ^ golden))


def permuted(random: Stream, places: Array, size: int) -> Array:
    """The values at `places` of a random permutation of 0..size−1, in O(len(places)).

    A Feistel network over a grid of rows · columns ≥ size points; a value beyond `size` is mapped again
    until it falls inside, which keeps the map a permutation. (Hashes are cut to 24 bits so that no sum
    overflows.)
    """
    if size <= _FEW:
        return jnp.argsort(random.bits((size,)))[places].astype(jnp.int32)
    rows, columns = _grid(size)
    keys = random.at(jnp.arange(_ROUNDS)).first

    def scramble(value: Array) -> Array:
        row, column = value // columns, value % columns
        for turn in range(0, _ROUNDS, 2):
            row = (row + (mix(column ^ keys[turn]) >> 8)) % jnp.uint32(rows)
            column = (column + (mix(row ^ keys[turn + 1]) >> 8)) % jnp.uint32(columns)
        return row * jnp.uint32(columns) + column

    value = scramble(places.astype(jnp.uint32))

    def walk(value: Array) -> Array:
        return jnp.where(value >= size, scramble(value), value)

    if rows * columns == size:
        return value.astype(jnp.int32)
    if jax.default_backend() == "cpu":
        value = jax.lax.while_loop(lambda value: jnp.any(value >= size), walk, value)
    else:  # a loop of unknown length would ask the host in every step
        for _ in range(_walks(size, rows * columns)):
            value = walk(value)
    return value.astype(jnp.int32)


@functools.lru_cache
def _grid(size: int) -> tuple[int, int]:
    """The grid with the fewest points beyond size, at most about four times as many rows as columns.

    Example:
      >>> _grid(1000), _grid(101)
      ((40, 25), (17, 6))
    """
    root = math.isqrt(size - 1) + 1
    sides = range(max(2, root // 2), root + 1)
    columns = min(reversed(sides), key=lambda side: -size % side)
    return -(-size // columns), columns


def _walks(size: int, points: int) -> int:
    """How often a value may have to be mapped again; more often only with a chance below 1e-18."""
    return 0 if size == points else math.ceil(18 / -math.log10(1 - size / points))
