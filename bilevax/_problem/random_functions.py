"""Functions that draw random numbers of their own: dropout, augmentation."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from bilevax._problem.stream import Stream

PyTree = Any

_FIXED = 0x5EED, 0xD1CE  # the words of its stream


class Keyed(eqx.Module):
    """The rows of a batch, with the random stream of its block."""

    rows: PyTree
    random: Stream


@dataclasses.dataclass(frozen=True)
class Random:
    """A function f, g or c that receives a random key as its last argument.

    Attributes:
      function: the function.
      place: its number among the functions of the problem: each has keys of its own.
    """

    function: Callable[..., Any]
    place: int

    def __call__(self, *arguments: PyTree) -> Any:
        *rest, batch = arguments
        if isinstance(batch, Keyed):
            rows, random = batch.rows, batch.random
        else:  # outside of samples
            rows, random = batch, fixed_stream()
        return self.function(*rest, rows, random.at(self.place).key())


def fixed_stream() -> Stream:
    """The random stream where a step draws none."""
    return Stream(*(jnp.uint32(word) for word in _FIXED))


def check_key(name: str, function: Callable[..., Any], arguments: str, random: bool) -> None:
    """Raises if a function does not take a key that is drawn, or takes one that is not."""
    count = len(arguments.split(", "))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return
    if _takes(signature, count + random):
        return
    if random:
        raise TypeError(
            f"{name} must take a key where random=True: function({arguments}, key), got {signature}"
        )
    needed = [one for one in signature.parameters.values() if one.default is one.empty]
    by_name = any(one.kind is one.KEYWORD_ONLY and _is_key(one.name) for one in needed)
    if by_name or (_takes(signature, count + 1) and _is_key(list(signature.parameters)[count])):
        raise TypeError(
            f"{name} takes a key, but none is drawn: give Problem(…, random=True), or function({arguments}), "
            f"got {signature}"
        )


def _is_key(name: str) -> bool:
    """Whether people call a random key so: key, rng, dropout_key, …"""
    return not {"key", "keys", "rng", "rngs", "prng"}.isdisjoint(name.lower().split("_"))


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
