r"""Risks over blocks: what is minimised in place of the mean of the f_i.

.. math:: F(x) = \rho(f_1, …, f_m), \qquad \nabla F = \frac1m \sum_i w_i \nabla F_i, \qquad
          w_i = m\, \partial\rho / \partial f_i

All of them are monotone, so that lower levels and multipliers are those of the mean: a risk changes how the
blocks are weighed, and nothing else. The weights have a mean of one. The weight of a block depends on its own
value and on a few shared numbers, which are a function of all values. A step changes few values, and O(I)
operations bring what is shared up to date; what they cannot is found anew from time to time.
"""

from __future__ import annotations

import abc
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.smooth_risk import SmoothRisk, SmoothTail, SmoothWorst
from bilevax._util import checks


class Alone:
    """One device with all blocks. A `Sampler` does the same for devices that share them."""

    def total(self, value: Any) -> Any:
        """The sum over the devices."""
        return value

    def largest(self, value: Any) -> Any:
        """The largest of all devices."""
        return value

    def everything(self, values: Any) -> Any:
        """The values of all blocks of all devices."""
        return values


class Risk(eqx.Module):
    """How the values f_i of all blocks become the objective. Made by `bilevax.cvar` and others.

    Attributes:
      alpha: the weight of a visit's f in the tracked value of its block; None chooses it.
    """

    alpha: float | None = eqx.field(static=True)

    def check(self, blocks: int) -> None:
        """Raises if the risk does not fit a problem of that many blocks."""

    @abc.abstractmethod
    def shared(self, values: Array, blocks: Array | None, over: Any) -> Any:
        """What all blocks share, from the values of all blocks, or of some (`blocks` are their numbers)."""

    @abc.abstractmethod
    def refreshed(self, shared: Any, blocks: Array, old: Array, new: Array, over: Any) -> Any:
        """What all blocks share, after the values of some have changed."""

    @abc.abstractmethod
    def weights(self, shared: Any, values: Array, blocks: Array | None) -> Array:
        """w_i of blocks with these values."""

    @abc.abstractmethod
    def estimate(self, shared: Any) -> Array:
        """The risk itself."""

    def smoothed(self, width: float) -> SmoothRisk | None:
        """A risk near this one that is smooth over differences of f of some width; None if this one is."""
        return None

    def of(self, values: Array, blocks: Array | None = None) -> Array:
        """The risk of the values of all blocks, or of some as if there were no others."""
        return self.estimate(self.shared(values, blocks, Alone()))

    def weights_of(self, values: Array, blocks: Array | None = None) -> Array:
        """m ∂ρ/∂f_i, at the values of all blocks or of some; at a kink, blocks that tie share alike."""
        return self.weights(self.shared(values, blocks, Alone()), values, blocks)


class Tail(NamedTuple):
    """What blocks share under a CVaR.

    Attributes:
      threshold: c.
      tied: the part of their full weight that blocks with the value c itself have.
      excess: the mean of max(f_i − c, 0).
      count: m.
    """

    threshold: Array
    tied: Array
    excess: Array
    count: Array


class Cvar(Risk):
    """The mean of the largest values. Made by `bilevax.cvar`."""

    share: float = eqx.field(static=True)

    def shared(self, values: Array, blocks: Array | None, over: Any) -> Tail:
        everything = over.everything(values)
        count, dtype = everything.shape[0], everything.dtype
        most = self.share * count  # how many blocks are in the tail; the last one may be so in part
        last = max(math.ceil(most - 1e-9 * count), 1)
        full = last if abs(most - last) <= 1e-9 * count else last - 1
        falling = -jnp.sort(-everything)
        beyond = 2 * falling[-1:] - falling[:1]  # below all of them, for the tail of all blocks
        falling = jnp.concatenate([falling, beyond])
        # Every c between the last value within and the first one without is optimal.
        threshold = (falling[last - 1] + falling[full]) / 2
        above, equal = jnp.sum(everything > threshold), jnp.sum(everything == threshold)
        tied = jnp.clip((most - above) / jnp.maximum(equal, 1), 0, 1).astype(dtype)
        excess = jnp.mean(jnp.maximum(everything - threshold, 0))
        return Tail(threshold, tied, excess, jnp.asarray(count, dtype))

    def refreshed(self, shared: Tail, blocks: Array, old: Array, new: Array, over: Any) -> Tail:
        c = shared.threshold
        change = jnp.sum(jnp.maximum(new - c, 0) - jnp.maximum(old - c, 0))
        return shared._replace(excess=shared.excess + over.total(change) / shared.count)

    def weights(self, shared: Tail, values: Array, blocks: Array | None) -> Array:
        inside = jnp.where(values == shared.threshold, shared.tied, 0)
        return jnp.where(values > shared.threshold, 1, inside) / self.share

    def estimate(self, shared: Tail) -> Array:
        return shared.threshold + shared.excess / self.share

    def smoothed(self, width: float) -> SmoothRisk | None:
        return SmoothTail(jnp.asarray(width, float), self.share) if self.share < 1 else None


class LogMean(NamedTuple):
    """What blocks share under a soft maximum.

    Attributes:
      level: u, the logarithm of the mean of exp(f_i / T).
      size: log m.
    """

    level: Array
    size: Array


class SoftMaximum(Risk):
    """T log mean exp(f/T). Made by `bilevax.soft_maximum`."""

    temperature: float = eqx.field(static=True)

    def shared(self, values: Array, blocks: Array | None, over: Any) -> LogMean:
        scaled = values / self.temperature
        most = over.largest(jnp.max(scaled))
        size = jnp.log(over.total(jnp.asarray(values.shape[0], values.dtype)))
        return LogMean(most + jnp.log(over.total(jnp.sum(jnp.exp(scaled - most)))) - size, size)

    def refreshed(self, shared: LogMean, blocks: Array, old: Array, new: Array, over: Any) -> LogMean:
        old, new = old / self.temperature, new / self.temperature
        before = shared.level + shared.size
        most = jnp.maximum(before, over.largest(jnp.max(new)))
        added, dropped = over.total((jnp.sum(jnp.exp(new - most)), jnp.sum(jnp.exp(old - most))))
        kept = jnp.exp(before - most)
        # Where the largest value drops, what is left may be below rounding. Then weights are too small rather
        # than too large, until all values are looked at again.
        least = jnp.maximum(added, kept * jnp.finfo(kept.dtype).eps)
        whole = jnp.maximum(kept - dropped + added, least)
        return LogMean(most + jnp.log(whole) - shared.size, shared.size)

    def weights(self, shared: LogMean, values: Array, blocks: Array | None) -> Array:
        return jnp.exp(values / self.temperature - shared.level)

    def estimate(self, shared: LogMean) -> Array:
        return self.temperature * shared.level

    def smoothed(self, width: float) -> SmoothRisk | None:
        return SmoothWorst(jnp.asarray(width, float)) if width > self.temperature else None


class GroupMeans(NamedTuple):
    """What blocks share under the worst group.

    Attributes:
      means: of f, by group; −∞ for a group without blocks.
      counts: how many blocks a group has.
    """

    means: Array
    counts: Array


class WorstGroup(Risk):
    """The largest mean of a group. Made by `bilevax.worst_group`."""

    groups: Array
    count: int = eqx.field(static=True)
    temperature: float | None = eqx.field(static=True)

    def check(self, blocks: int) -> None:
        if self.groups.shape[0] != blocks:
            raise ValueError(
                f"groups of worst_group must have one entry per block, {blocks}, got {self.groups.shape[0]}"
            )

    def shared(self, values: Array, blocks: Array | None, over: Any) -> GroupMeans:
        ours = self._of(blocks)
        sums = jnp.zeros(self.count, values.dtype).at[ours].add(values)
        counts = jnp.zeros(self.count, values.dtype).at[ours].add(1)
        sums, counts = over.total((sums, counts))
        return GroupMeans(jnp.where(counts > 0, sums / jnp.maximum(counts, 1), -jnp.inf), counts)

    def refreshed(self, shared: GroupMeans, blocks: Array, old: Array, new: Array, over: Any) -> GroupMeans:
        change = over.total(jnp.zeros(self.count, new.dtype).at[self._of(blocks)].add(new - old))
        return shared._replace(means=shared.means + change / jnp.maximum(shared.counts, 1))

    def weights(self, shared: GroupMeans, values: Array, blocks: Array | None) -> Array:
        counts = jnp.maximum(shared.counts, 1)
        by_group = self._parts(shared.means, shared.counts) * jnp.sum(shared.counts) / counts
        return by_group.at[self._of(blocks)].get(mode="promise_in_bounds")

    def estimate(self, shared: GroupMeans) -> Array:
        most = jnp.max(shared.means)
        if self.temperature is None:
            return most
        present = jnp.maximum(jnp.sum(shared.counts > 0), 1)
        whole = jnp.sum(jnp.exp((shared.means - most) / self.temperature))
        return most + self.temperature * jnp.log(whole / present)

    def smoothed(self, width: float) -> SmoothRisk | None:
        smooth = self.temperature is not None and self.temperature >= width
        return None if smooth else SmoothWorst(jnp.asarray(width, float), self.groups, self.count)

    def _parts(self, means: Array, counts: Array) -> Array:
        """The weights of the groups, which sum to one."""
        most = jnp.max(means)
        if self.temperature is None:
            parts = ((means == most) & (counts > 0)).astype(means.dtype)
        else:
            parts = jnp.exp((means - most) / self.temperature)
        return parts / jnp.sum(parts)

    def _of(self, blocks: Array | None) -> Array:
        return self.groups if blocks is None else self.groups.at[blocks].get(mode="promise_in_bounds")


def cvar(share: float, *, alpha: float | None = None) -> Cvar:
    r"""The conditional value at risk: the mean of f over the worst blocks, such as the worst tenth.

    .. math:: F(x) = \min_c\; c + \frac{1}{\text{share}\; m} \sum_i \max(f_i(x, y_i(x)) - c, 0)

    Args:
      share: the part of the blocks that counts, in (0, 1]; 1 is the mean of all.
      alpha: as for all risks, the weight in (0, 1] of a visit's f in the tracked value of its block. A small
        one averages the noise of the batches out; 1 trusts the latest batch. Left out, min(0.3, 3/√visits),
        or 1 if a step sees all rows.

    Returns:
      The risk, for `Problem(risk=…)`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(10.0)[:, None],
      ...     risk=bx.cvar(0.2),
      ... )
      >>> float(bx.objective(problem, jnp.zeros(1)))  # the mean of 8² and 9²
      72.5
    """
    return Cvar(share=_fixed("share", share, high=1.0), alpha=_weight(alpha))


def soft_maximum(temperature: float, *, alpha: float | None = None) -> SoftMaximum:
    r"""A smooth maximum of f over the blocks, between their mean (large T) and their maximum (small T).

    .. math:: F(x) = T \log \frac1m \sum_i \exp(f_i(x, y_i(x)) / T)

    Args:
      temperature: T, in the units of f: differences of f that are much smaller hardly count.
      alpha: as in `cvar`.

    Returns:
      The risk, for `Problem(risk=…)`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(10.0)[:, None],
      ...     risk=bx.soft_maximum(1.0),
      ... )
      >>> round(float(bx.objective(problem, jnp.zeros(1))), 3)  # 9² − log 10
      78.697
    """
    return SoftMaximum(temperature=_fixed("temperature", temperature), alpha=_weight(alpha))


def worst_group(groups: Any, *, temperature: float | None = None, alpha: float | None = None) -> WorstGroup:
    r"""The largest mean of f over groups of blocks, as in group DRO.

    .. math:: F(x) = \max_k \frac{1}{|G_k|} \sum_{i \in G_k} f_i(x, y_i(x))

    Args:
      groups: the group of every block, integers 0, 1, …; every group needs a block.
      temperature: T of a soft maximum over the group means; left out, the maximum itself.
      alpha: as in `cvar`.

    Returns:
      The risk, for `Problem(risk=…)`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(4.0)[:, None],
      ...     risk=bx.worst_group([0, 0, 1, 1]),
      ... )
      >>> float(bx.objective(problem, jnp.zeros(1)))  # the mean of 2² and 3²
      6.5
    """
    try:
        numbers = np.asarray(groups)
    except ValueError as error:  # a ragged list
        raise TypeError("groups must be a vector of integers, one per block, got a ragged list") from error
    if numbers.ndim != 1 or numbers.size == 0 or not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(
            "groups must be a vector of integers, one per block, got "
            f"shape {numbers.shape} of dtype {numbers.dtype}"
        )
    if numbers.min() < 0:
        raise ValueError(f"groups must be 0 or larger, got {numbers.min()}")
    count = int(numbers.max()) + 1
    if count > numbers.size:
        raise ValueError(
            f"groups must be numbered 0, 1, … without gaps, got {count - 1} among {numbers.size}"
        )
    empty = np.flatnonzero(np.bincount(numbers, minlength=count) == 0)
    if empty.size:
        raise ValueError(f"every group needs a block, got none for group {empty[0]} of 0 to {count - 1}")
    temperature = None if temperature is None else _fixed("temperature", temperature)
    known = jnp.asarray(numbers, jnp.int32)
    return WorstGroup(groups=known, count=count, temperature=temperature, alpha=_weight(alpha))


def _weight(alpha: Any) -> float | None:
    return None if alpha is None else _fixed("alpha", alpha, high=1.0)


def _fixed(name: str, value: Any, high: float | None = None) -> float:
    """A number above zero that is part of a program."""
    checks.number(name, value, 0.0, zero=False, high=high)
    return float(checks.real_array(name, value))


def overall(risk: Risk | None, values: Any, blocks: Any = None) -> Any:
    """The objective, from the values of all blocks, or of some as if there were no others."""
    return values.mean() if risk is None else risk.of(values, blocks)


def weights_of(risk: Risk | None, values: Any, blocks: Any = None) -> Array | None:
    """The weights of the blocks in the gradient of the objective; None if it is a mean."""
    return None if risk is None else risk.weights_of(values, blocks)
