"""Adam, of which the rows of tables take part when they are looked up."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._step.adam_rows import AdamRows
from bilevax._step.averaging import averaged, share_of
from bilevax._step.coefficients import evaluate
from bilevax._util import checks
from bilevax._util.trees import PyTree


class LazyAdam(eqx.Module):
    """The hyper-parameters of `lazy_adam`; without tables it is Adam."""

    learning_rate: Any
    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    window: Any = None

    def _of_all(self) -> optax.GradientTransformation:
        numbers = {"b1": self.b1, "b2": self.b2, "eps": self.eps, "weight_decay": self.weight_decay}
        inner = optax.adamw(self.learning_rate, **numbers)
        return inner if self.window is None else averaged(inner, self.window)

    def init(self, params: PyTree) -> PyTree:
        """The state of what is not a table."""
        return self._of_all().init(params)

    def update(self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> Any:
        """The move of what is not a table."""
        if not jax.tree.leaves(updates):  # all of x is a table
            return updates, state
        return self._of_all().update(updates, state, params)

    @property
    def rule(self) -> AdamRows:
        """How rows of tables move."""
        return AdamRows(averages=self.window is not None)

    def pace(self, step: Array, factor: Any, dtype: Any) -> Array:
        """The pace of a step of rows, for `AdamRows`; all moves of x are multiplied by a factor."""
        count = (step + 1).astype(dtype)
        b1, b2 = jnp.asarray(self.b1, dtype), jnp.asarray(self.b2, dtype)
        rate = evaluate(self.learning_rate, step) * jnp.asarray(factor, dtype)
        root = jnp.sqrt(1 - b2**count)
        numbers = [rate * root / (1 - b1**count), 1 - rate * self.weight_decay, self.eps * root, b1, b2]
        if self.window is not None:
            numbers.append(share_of(step, self.window))
        return jnp.stack([jnp.asarray(one, dtype) for one in numbers])


class LazyStep(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also move rows of tables by themselves."""

    @property
    def adam(self) -> LazyAdam:
        """Its hyper-parameters."""
        return self.init.__self__  # pyright: ignore[reportAttributeAccessIssue]

    def averaged(self, window: Any) -> LazyStep:
        """The same step, with an average of x."""
        old = self.adam
        return as_step(LazyAdam(old.learning_rate, old.b1, old.b2, old.eps, old.weight_decay, window))


def as_step(adam: LazyAdam) -> LazyStep:
    """The transformation."""
    return LazyStep(adam.init, adam.update)


def lazy_adam(
    learning_rate: Any,
    *,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
) -> optax.GradientTransformation:
    r"""Adam as an upper step that touches the rows of tables only when they are looked up.

    It is **another method than Adam**, made to be close to it. What is not a table (`Problem(tables=…)`)
    moves by Adam itself. A row of a table that a step looks up does too:

    .. math::
        m_{t+1} &= b_1 m_t + (1 - b_1) z_{t+1}, \qquad v_{t+1} = b_2 v_t + (1 - b_2) z_{t+1}^2 \\
        x_{t+1} &= (1 - \eta \omega) x_t
            - \eta'_t \frac{m_{t+1}}{\sqrt{v_{t+1}} + \epsilon'_t}, \qquad
        \eta'_t = \eta \frac{\sqrt{1 - b_2^{t+1}}}{1 - b_1^{t+1}}, \quad
        \epsilon'_t = \epsilon \sqrt{1 - b_2^{t+1}}

    with weight decay ω. A row that was last touched at step s and is looked up again at step t is caught up
    first, in closed form. In between its z decays, :math:`z_{k+1} = (1 - \beta_k) z_k`, and both moments
    follow it by the equations above, exactly, by as many steps as were missed. So does x, weight decay
    included, but for one thing: all moves from s to t have the same divisor,

    .. math:: D = \sqrt{v_s + (1 - b_2) \sum_{k=s}^{t-1} z_{k+1}^2} + \epsilon'_{t-1}

    where Adam has :math:`\sqrt{v_{k+1}} + \epsilon'_k`: what the decaying z adds to v counts from the
    beginning, and v does not decay. While b₂ is close to 1 a row thus moves a little less than it does under
    Adam, or as far. If every step looks up every row, this is Adam.

    Every step also catches up a few rows that it did not look up, in turn, so that none is older than what
    is remembered of steps; that counts as a touch.

    Args:
      learning_rate: η, a number or a schedule.
      b1: the decay of the first moment, from 0 to below 1.
      b2: the decay of the second moment, from 0 to below 1.
      eps: ε, greater than 0.
      weight_decay: ω, decoupled: x shrinks by η ω in every step, whether it is looked up or not.

    Returns:
      A transformation, for the `upper_step` of any solver. `averaged` of it keeps the averages of rows too.
      Where a method moves all rows in every step (see `Problem`), or inside of another transformation
      (`optax.chain`, `bounded`), it is Adam.

    Raises:
      TypeError, ValueError: an argument is no number, or out of range.

    Example:
      >>> import bilevax as bx
      >>> solver = bx.KSONG(upper_step=bx.lazy_adam(1e-3, weight_decay=0.1))

    Reference:
      Kingma & Ba, *Adam: A Method for Stochastic Optimization*, ICLR 2015. Lazy forms in other libraries
      leave x and the moments where they are between two touches; this one does not.
    """
    checks.coefficient("learning_rate", learning_rate, zero=True, optional=False)
    checks.number("eps", eps, 0.0, zero=False)
    checks.number("weight_decay", weight_decay, 0.0)
    for name, value in (("b1", b1), ("b2", b2)):
        checks.number(name, value, 0.0)
        if not checks.is_traced(value) and float(value) >= 1:
            raise ValueError(f"{name} must be less than 1, got {value}")
    return as_step(LazyAdam(learning_rate, b1, b2, eps, weight_decay))
