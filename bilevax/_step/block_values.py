r"""What a risk over blocks needs to know of them, and how it is tracked.

h_i tracks the value f_i(x, y_i) of every block, as the means of mean levels are tracked: by MSVR in a
corrected method, and by a moving average else. A batch's own f would not do: the weight of a block would
depend on the noise of the batch, and the mean of max(f − c, 0) over batches is not that of f itself.

A step weighs its blocks by the h and the shared numbers from before its refresh, at t and at t−1 alike: z
then averages what is noise in the weights. With the weights of t−1 at t−1, STORM would follow every change.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from bilevax._problem.risk import Risk
from bilevax._problem.sampling import Sample, Sampler
from bilevax._step.estimators import moving_average, msvr, msvr_gamma
from bilevax._step.ordering import after
from bilevax._step.slots import gather, scatter
from bilevax._util.trees import PyTree

_MOST_GAMMA = 1.0  # while y settles, a multiple of what f changes by in a step would overshoot
_FIRST, _DECAY = 0.3, 3.0  # the weight of a visit: at most the first, then the second over √visits


class BlockValues(eqx.Module):
    """The tracked values of all blocks, and what their weights share.

    Attributes:
      values: h by block.
      shared: see `Risk.shared`.
      found: the step before which it was last found from all values.
    """

    values: Array
    shared: PyTree
    found: Array

    def weigh(self, risk: Risk, sample: Sample) -> Array:
        """The weights of the sampled blocks."""
        return risk.weights(self.shared, gather(self.values, sample.blocks), sample.blocks)

    def refresh(
        self,
        risk: Risk,
        sample: Sample,
        seen: list[Array],
        weights: Array,
        step: Array,
        stage: Array | int,
        sampler: Sampler,
    ) -> tuple[BlockValues, Array]:
        """After a step that saw f of its blocks at one point or at both; and its estimate of the risk.

        The estimate is that of the tracked values, corrected to first order by the f that were just seen.
        """
        old = gather(self.values, sample.blocks)
        fresh = [one.astype(old.dtype) for one in seen]
        upper = sample.upper
        noisy = (sampler.batch_size is not None and upper.rows is not None) or upper.random is not None
        alpha = _weight(risk.alpha, noisy, step, sampler) * 0.5**stage  # a restart halves it
        new = _tracked(old, fresh, alpha, sampler)
        objective = risk.estimate(self.shared) + jnp.mean(weights * (fresh[0] - old))
        places = after(sample.blocks, sampler.blocks, (new, objective))
        values = scatter(self.values, places, new)
        if sampler.per_step == sampler.blocks:  # all values are new
            shared = risk.shared(values, None, sampler)
        else:
            shared = risk.refreshed(self.shared, sample.blocks, old, new, sampler)
        return BlockValues(values, shared, self.found), objective

    def due(self, step: Array, sampler: Sampler) -> Array | None:
        """Whether what is shared must be found from all values before a step: after as many visits."""
        if sampler.per_step == sampler.blocks:
            return None
        return step - self.found >= -(-sampler.blocks // sampler.per_step)

    def renewed(self, risk: Risk, step: Array, sampler: Sampler) -> tuple[PyTree, Array]:
        """`shared` and `found`, from all values."""
        return risk.shared(self.values, None, sampler), jnp.asarray(step, self.found.dtype)


def first_values(risk: Risk, values: Array, sampler: Sampler) -> BlockValues:
    """What is known of the blocks at the start, from the f of their first batches."""
    return BlockValues(values, risk.shared(values, None, sampler), jnp.zeros((), jnp.int32))


def _weight(given: float | None, noisy: bool, step: Array, sampler: Sampler) -> Any:
    """The weight of a visit's f in h: it falls, to average the noise of the batches out."""
    if given is not None or not noisy:
        return 1.0 if given is None else given
    return jnp.minimum(_FIRST, _DECAY / jnp.sqrt(1.0 + step * (sampler.per_step / sampler.blocks)))


def _tracked(old: Array, seen: list[Array], alpha: Any, sampler: Sampler) -> Array:
    """h after a visit."""
    if len(seen) == 1:
        return moving_average(old, seen[0], alpha)
    chance, remembers = sampler.per_step / sampler.blocks, jnp.asarray(alpha, old.dtype) < 1
    gamma = jnp.minimum(msvr_gamma(jnp.where(remembers, alpha, 0.5), chance), _MOST_GAMMA)
    # What is not remembered needs no correction.
    return msvr(old, seen[0], seen[1], alpha, jnp.where(remembers, gamma, 0))
