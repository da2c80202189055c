"""Random numbers and permutations that cost a few integer operations each.

A stream is a key of two words; its n-th number is n hashed with them. It fuses into the program that uses the
numbers. A cryptographic generator would take as long as the rest of a small step.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._util.checks import is_traced
from bilevax._util.hurried import HurriedJit

_GOLDEN = 0x9E3779B9
_ROUNDS = 8  # of a permutation
_FEW = 64  # up to here a permutation sorts random words: eight rounds do not mix a small grid


class Stream(eqx.Module):
    """A stream of random numbers, which can be split any number of times.

    Attributes:
      first: a 32-bit word.
      second: another.

    What is known while a program is traced is hashed on the host: words of NumPy, and numbers of streams that
    split off. Half of the operations of a small step would be hashes otherwise.
    """

    first: Array | np.uint32
    second: Array | np.uint32

    @staticmethod
    def start(key: Array) -> Stream:
        """A stream from a key made by `jax.random.key`."""
        words = _known_words(key)
        return Stream(*(_words(key) if words is None else words))

    def at(self, number: Array | np.ndarray | int) -> Stream:
        """The stream with this number among those that split off from this one."""
        first, second = _hashes(np.asarray(number)) if _is_known(number) else _traced_hashes(number)
        return Stream(mix(self.first ^ first), mix(self.second + second))

    def bits(self, shape: tuple[int, ...]) -> Array:
        """Uniform 32-bit words."""
        count = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        return mix(mix(count * np.uint32(_GOLDEN) + self.first) ^ self.second)

    def integers(self, shape: tuple[int, ...], bound: int | Array) -> Array:
        """Uniform integers below a bound, which may be an array.

        The bias of the remainder is bound / 2³²: far below sampling noise for any data that fit.
        """
        bound = jnp.broadcast_to(jnp.asarray(bound).astype(jnp.uint32), shape)
        return jax.lax.rem(self.bits(shape), bound).astype(jnp.int32)

    def key(self) -> Array:
        """A key for the functions of `jax.random`."""
        return jax.random.wrap_key_data(jnp.stack([self.first, self.second]), impl="threefry2x32")


@HurriedJit
def _words(key: Array) -> tuple[Array, Array]:
    words = jax.random.bits(key, (2,), jnp.uint32)
    return words[0], words[1]


def _known_words(key: Array) -> tuple[Array, Array] | None:
    """`_words` from the host, which compiles nothing; None where only JAX knows them."""
    partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    typed = not is_traced(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not partitionable or not typed or key.shape or str(jax.random.key_impl(key)) != "threefry2x32":
        return None
    if not key.is_fully_addressable:
        return None
    first, second = threefry(np.asarray(jax.random.key_data(key)), np.arange(2, dtype=np.uint32))
    words = first ^ second
    return jax.device_put(words[0]), jax.device_put(words[1])


def threefry(key: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32, 20 rounds, of counters whose high words are zero (Salmon et al., 2011)."""
    keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    turns = (13, 15, 26, 6), (17, 29, 16, 24)
    with np.errstate(over="ignore"):
        one, other = np.zeros_like(low) + keys[0], low + keys[1]
        for number in range(5):
            for turn in turns[number % 2]:
                one = one + other
                other = (other << np.uint32(turn) | other >> np.uint32(32 - turn)) ^ one
            one = one + keys[(number + 1) % 3]
            other = other + keys[(number + 2) % 3] + np.uint32(number + 1)
    return one, other


def mix(word: Any) -> Any:
    """A bijection of 32-bit words that flips every output bit with even odds; on the host if it can be."""
    if not isinstance(word, (np.ndarray, np.generic)):
        return _traced_mix(word)
    with np.errstate(over="ignore"):
        return _mixed(word)


def _mixed(word: Any) -> Any:
    word = (word ^ (word >> 16)) * np.uint32(0x21F0AAAD)
    word = (word ^ (word >> 15)) * np.uint32(0xD35A2D97)
    return word ^ (word >> 15)


# Compiled, as it occurs some fifty times in a step: its operations need not be traced each time.
_traced_mix = jax.jit(_mixed)


def _hashes(number: Any) -> tuple[Any, Any]:
    """What the words of a stream are mixed with for the stream of this number."""
    count, golden = number.astype(np.uint32), np.uint32(_GOLDEN)
    with np.errstate(over="ignore"):
        return mix(count + golden), mix(count ^ golden)


@jax.jit
def _traced_hashes(number: Array) -> tuple[Array, Array]:
    return _hashes(jnp.asarray(number))


def _is_known(number: Any) -> bool:
    return isinstance(number, (int, np.ndarray, np.generic))


def permuted(random: Stream, places: Any, size: int) -> Any:
    """The values at `places` of a random permutation of 0..size−1, in O(len(places)).

    A Feistel network over a grid of rows · columns ≥ size points; a value beyond `size` is mapped again
    until it falls inside, which keeps the map a permutation. (Hashes are cut to 24 bits so that no sum
    overflows.)
    """
    if size <= _FEW:
        return jnp.argsort(random.bits((size,)))[places].astype(jnp.int32)
    rows, columns = _grid(size)
    keys = mix(random.first ^ _hashes(np.arange(_ROUNDS))[0])  # the first words of streams that split off
    value = places.astype(np.uint32)

    def scramble(value: Any) -> Any:
        row, column = value // np.uint32(columns), _remainder(value, columns)
        for turn in range(0, _ROUNDS, 2):
            row = _remainder(row + (mix(column ^ keys[turn]) >> 8), rows)
            column = _remainder(column + (mix(row ^ keys[turn + 1]) >> 8), columns)
        return row * np.uint32(columns) + column

    # The first time is a turn of the loop as well: a program has the network once.
    def walk(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        value, outside = carry
        value = jnp.where(outside, scramble(value), value)
        return value, value >= size

    if _is_known(places) and _is_known(keys):
        value = scramble(value)
        while (value >= size).any():
            value = np.where(value >= size, scramble(value), value)
        return value.astype(np.int32)
    if rows * columns == size:
        return scramble(value).astype(jnp.int32)
    if jax.default_backend() == "cpu":
        everywhere = jnp.ones(value.shape, bool)
        value, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), walk, (jnp.asarray(value), everywhere))
    else:  # a loop of unknown length would ask the host in every step
        value = scramble(value)
        for _ in range(_walks(size, rows * columns)):
            value = jnp.where(value >= size, scramble(value), value)
    return value.astype(jnp.int32)


def _remainder(value: Any, bound: int) -> Any:
    """Of words without a sign, for which it is one operation."""
    return value % np.uint32(bound) if _is_known(value) else jax.lax.rem(value, jnp.full_like(value, bound))


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
