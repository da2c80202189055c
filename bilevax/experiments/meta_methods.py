r"""Five ways to learn from many tasks how to learn a new one; the first three are written for this.

===========  =============================================================================================
joint        one network for all rows of all tasks, which is then trained further on a new task's rows
MAML         the start from which five steps on a task's rows do best on its others; the steps are unrolled
ANIL         the same, but only the last layer takes the steps
networks     a prior θ: a task's network φ minimises its loss + λ/2 ‖φ − θ‖², stored as an offset from θ
heads        layers under a last one per task, which is a ridge regression: its prior and λ are learnt, too
===========  =============================================================================================

All move what they learn by Adam, along gradients of norm at most one. A method takes chunks of steps in one
compiled program; its step sizes are arguments of it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import bilevax as bx
from bilevax.experiments.meta_solver import SolvedBlocks
from bilevax.experiments.meta_tasks import Family, Params, Tasks, predict

Setting = dict[str, float]
STEPS = 60  # of a chunk
INNER = 5  # unrolled steps of MAML and ANIL
UPPER = (1e-3, 3e-3, 1e-2)
LOWER = {"sines": (0.003, 0.01, 0.03), "digits": (0.03, 0.1, 0.3)}
STRENGTHS = {"sines": (3.0, 10.0, 30.0), "digits": (0.03, 0.1, 0.3)}
SHORTER = 0.1  # times the steps of the training: what MAML and ANIL may take on new tasks, too
FIXED = {"sines": 0.003, "digits": 0.6}  # the lower step of a network per task
VISITS = {"sines": 3, "digits": 5}  # of a network per task, in a row
HEAD_STRENGTHS = {"sines": (0.01, 0.1, 1.0), "digits": (1.0, 10.0, 100.0)}  # where λ of heads begins


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How a learnt network is fitted to a new task: by gradient steps of its loss, or as a ridge regression.

    Attributes:
      params: where to begin.
      rate: of the steps; None where the last layer is a ridge regression.
      strength: λ of the pull back to the start.
      last_only: whether only the last layer moves.
      scale: of the outputs of a ridge regression.
    """

    params: Params
    rate: float | None
    strength: float = 0.0
    last_only: bool = False
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A method on a family of tasks.

    Attributes:
      family: the tasks' family.
      tasks: those to learn from.
      per_step: the tasks of a step.

    Class attributes:
      solves: whether a new task is solved for, and takes no steps.
    """

    solves: ClassVar[bool] = False
    family: Family
    tasks: Tasks
    per_step: int

    @classmethod
    def settings(cls, family: str) -> list[Setting]:
        """What is tried for a family of tasks: nine settings."""
        return [{"upper": upper, "lower": lower} for upper in UPPER for lower in LOWER[family]]

    @abc.abstractmethod
    def begin(self, setting: Setting, seed: int) -> Any:
        """The state before the first step."""

    @abc.abstractmethod
    def advance(self, state: Any, setting: Setting, chunk: int) -> Any:
        """The state `STEPS` steps later, in place of the given one; `chunk` counts the calls."""

    @abc.abstractmethod
    def adapters(self, state: Any, setting: Setting) -> tuple[Adapter, ...]:
        """What may be applied to new tasks; validation tasks choose."""


class Gradient(Method):
    """A method that descends along gradients of one function of the network with Adam."""

    def begin(self, setting: Setting, seed: int) -> Any:
        params = self.family.start(jax.random.key(seed))
        return params, adam(1.0).init(params), jax.random.key(seed)

    def advance(self, state: Any, setting: Setting, chunk: int) -> Any:
        program = _program(type(self), self.family, self.per_step)
        return program(state, _arrays(setting), chunk, (self.tasks.support, self.tasks.query))

    @classmethod
    @abc.abstractmethod
    def value(cls, family: Family, params: Params, support: Any, query: Any, setting: Any) -> Array:
        """What is minimised, on the rows of some tasks."""

    def adapters(self, state: Any, setting: Setting) -> tuple[Adapter, ...]:
        return (Adapter(state[0], setting["lower"]),)


class Joint(Gradient):
    """One network for all rows of all tasks."""

    @classmethod
    def value(cls, family: Family, params: Params, support: Any, query: Any, setting: Any) -> Array:
        losses = [jax.vmap(family.mean_loss, (None, 0))(params, rows) for rows in (support, query)]
        return jnp.mean(jnp.stack(losses))


class MAML(Gradient):
    """The start from which a few unrolled steps do best."""

    last_only: ClassVar[bool] = False

    @classmethod
    def value(cls, family: Family, params: Params, support: Any, query: Any, setting: Any) -> Array:
        def one(support: Any, query: Any) -> Array:
            adapted = params
            for _ in range(INNER):
                slope = jax.grad(family.mean_loss)(adapted, support)
                adapted = moved(adapted, slope, setting["lower"], cls.last_only)
            return family.mean_loss(adapted, query)

        return jnp.mean(jax.vmap(one)(support, query))

    def adapters(self, state: Any, setting: Setting) -> tuple[Adapter, ...]:
        """With the steps that it was trained with, and with shorter ones: five long ones may do no harm
        where hundreds of them blow up."""
        rates = setting["lower"], SHORTER * setting["lower"]
        return tuple(Adapter(state[0], rate, last_only=self.last_only) for rate in rates)


class ANIL(MAML):
    """The same, for the last layer alone."""

    last_only = True


class InARow(bx.SOBA):
    """SOBA that visits the same tasks several times in a row.

    Of a thousand tasks a step sees 25. After forty steps, the network of a task and its v belong to another
    prior: the first visits bring them back, and the next ones use them.
    """

    times: int = eqx.field(static=True, default=1)

    def draw(self, problem: bx.Problem, state: bx.State) -> Any:
        """The tasks and rows of a step: those of the step before, or new ones."""
        return state.sampler.draw(problem, state.step // self.times)


class Bilevel(Method):
    """A method of bilevax: the tasks are blocks."""

    @abc.abstractmethod
    def start(self, setting: Setting, seed: int) -> tuple[Any, Any]:
        """x, and the y that every task starts from."""

    @classmethod
    @abc.abstractmethod
    def solver(cls, family: Family, setting: Any) -> bx.AbstractSolver:
        """What moves them."""

    @classmethod
    @abc.abstractmethod
    def levels(cls, family: Family) -> tuple[Any, Any]:
        """f and g of (x, y, λ, rows)."""

    def begin(self, setting: Setting, seed: int) -> Any:
        x, y = self.start(setting, seed)
        y0 = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(self.tasks), *a.shape)), y)
        plan = bx.Sampling(self.per_step, batch_size="all", initial_batch_size=0)
        init, _ = _bilevel_programs(type(self), self.family)
        return init(self.problem(setting), _arrays(setting), x, y0, jax.random.key(seed), plan)

    def advance(self, state: Any, setting: Setting, chunk: int) -> Any:
        given = self.problem(setting), _arrays(setting)
        return _bilevel_programs(type(self), self.family)[1](given, state)

    def problem(self, setting: Setting) -> bx.Problem:
        """The tasks as blocks, each with λ as its constant."""
        strengths = jnp.full(len(self.tasks), setting["strength"])
        return eqx.tree_at(lambda problem: problem.blocks, self._problem, strengths)

    @functools.cached_property
    def _problem(self) -> bx.Problem:
        def rows(part: tuple[np.ndarray, np.ndarray]) -> bx.PerBlock:
            flat = tuple(a.reshape(-1, *a.shape[2:]) for a in part)
            return bx.PerBlock(flat, np.arange(len(part[0]) + 1) * part[0].shape[1])

        blocks, levels = jnp.zeros(len(self.tasks)), _levels(type(self), self.family)
        return bx.Problem(*levels, blocks, rows(self.tasks.query), rows(self.tasks.support))


class Networks(Bilevel):
    """A prior, by `bilevax.SOBA` on offsets from it: a network per task."""

    @classmethod
    def settings(cls, family: str) -> list[Setting]:
        """Its lower step is not tried: λ is."""
        pulls = STRENGTHS[family]
        return [{"upper": one, "lower": FIXED[family], "strength": pull} for one in UPPER for pull in pulls]

    def start(self, setting: Setting, seed: int) -> tuple[Any, Any]:
        params = self.family.start(jax.random.key(seed))
        return params, params

    @classmethod
    def solver(cls, family: Family, setting: Any) -> bx.AbstractSolver:
        return InARow(adam(setting["upper"]), lower_step=setting["lower"], times=VISITS[family.name])

    @classmethod
    def levels(cls, family: Family) -> tuple[Any, Any]:
        def upper(x: Params, y: Params, block: Array, batch: Any) -> Array:
            return family.mean_loss(y, batch)

        def lower(x: Params, y: Params, block: Array, batch: Any) -> Array:
            return family.mean_loss(y, batch) + pull(y, x, block)

        return upper, bx.argmin(lower, around=lambda x: x)

    def adapters(self, state: Any, setting: Setting) -> tuple[Adapter, ...]:
        """With the pull that the prior was learnt with, and without: steps that are few stay near it, too."""
        return tuple(Adapter(state.x, setting["lower"], pull) for pull in (setting["strength"], 0.0))


class Heads(Bilevel):
    """Shared layers under a ridge regression per task, whose prior, λ and scale are learnt with them.

    A task's last layer fits the task's targets by least squares: g is quadratic in it, and solved at every
    visit. x is judged by the loss of the family, of outputs times a scale.
    """

    solves = True

    @classmethod
    def settings(cls, family: str) -> list[Setting]:
        """λ is learnt: the settings say where it begins."""
        return [{"upper": one, "strength": pull} for one in UPPER for pull in HEAD_STRENGTHS[family]]

    def start(self, setting: Setting, seed: int) -> tuple[Any, Any]:
        params = self.family.start(jax.random.key(seed))
        others = {"log_strength": jnp.log(jnp.float32(setting["strength"])), "log_scale": jnp.zeros(())}
        return {"layers": params, **others}, params[-1]

    @classmethod
    def solver(cls, family: Family, setting: Any) -> bx.AbstractSolver:
        return SolvedBlocks(adam(setting["upper"]))

    @classmethod
    def levels(cls, family: Family) -> tuple[Any, Any]:
        def upper(x: Any, y: Any, block: Array, batch: Any) -> Array:
            out = predict([*x["layers"][:-1], y], batch[0])
            return jnp.mean(family.loss(jnp.exp(x["log_scale"]) * out, batch[1]))

        def lower(x: Any, y: Any, block: Array, batch: Any) -> Array:
            out = predict([*x["layers"][:-1], y], batch[0])
            fit = jnp.mean(family.squares(out, batch[1]))
            return fit + pull(y, x["layers"][-1], jnp.exp(x["log_strength"]))

        return upper, bx.argmin(lower, around=lambda x: x["layers"][-1])

    def adapters(self, state: Any, setting: Setting) -> tuple[Adapter, ...]:
        strength, scale = (float(jnp.exp(state.x[name])) for name in ("log_strength", "log_scale"))
        return (Adapter(state.x["layers"], None, strength, last_only=True, scale=scale),)


def adam(rate: Any) -> optax.GradientTransformation:
    """What all methods move their network by."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


@functools.lru_cache
def _levels(kind: type[Bilevel], family: Family) -> tuple[Any, Any]:
    """The same functions for all tasks, so that they are compiled once."""
    return kind.levels(family)


@functools.lru_cache
def _bilevel_programs(kind: type[Bilevel], family: Family) -> tuple[Any, Any]:
    """The start and a chunk of steps, compiled once for all tasks and settings."""

    @eqx.filter_jit
    def init(problem: bx.Problem, setting: Any, x: Any, y0: Any, key: Array, plan: bx.Sampling) -> bx.State:
        return kind.solver(family, setting).init(problem, x, y0, key=key, sampling=plan)

    @eqx.filter_jit(donate="all-except-first")  # what is stored of all tasks is not copied
    def advance(given: tuple[bx.Problem, Any], state: bx.State) -> bx.State:
        problem, setting = given
        return bx.advance(problem, kind.solver(family, setting), state, STEPS)

    return init, advance


@functools.lru_cache
def _program(kind: type[Gradient], family: Family, per_step: int) -> Any:
    """Steps of a method along the gradient of its value, compiled once for all tasks and settings."""

    def advance(state: Any, setting: Any, chunk: Array, rows: Any) -> Any:
        count = rows[0][0].shape[0]

        def step(number: Array, state: Any) -> Any:
            params, optimizer, key = state
            some = jax.random.fold_in(key, chunk * STEPS + number)
            chosen = jax.random.randint(some, (per_step,), 0, count)
            support, query = jax.tree.map(lambda a: jnp.asarray(a)[chosen], rows)
            slope = jax.grad(lambda params: kind.value(family, params, support, query, setting))(params)
            moves, optimizer = adam(setting["upper"]).update(slope, optimizer)
            return optax.apply_updates(params, moves), optimizer, key

        return jax.lax.fori_loop(0, STEPS, step, state)

    return jax.jit(advance)


def _arrays(setting: Setting) -> dict[str, Array]:
    """Numbers that are no constants of a program."""
    return {name: jnp.asarray(one) for name, one in setting.items()}


def pull(y: Params, prior: Params, strength: Array) -> Array:
    """λ/2 ‖y − θ‖²."""
    squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), y, prior)
    return 0.5 * strength * sum(jax.tree.leaves(squares))


def moved(params: Params, slope: Params, rate: Any, last_only: bool) -> Params:
    """The network after a step, of all layers or of the last one."""
    first = params[:-1] if last_only else jax.tree.map(lambda a, b: a - rate * b, params[:-1], slope[:-1])
    return [*first, jax.tree.map(lambda a, b: a - rate * b, params[-1], slope[-1])]


METHODS: dict[str, type[Method]] = {
    "joint": Joint,
    "MAML": MAML,
    "ANIL": ANIL,
    "bilevax, networks": Networks,
    "bilevax, heads": Heads,
}
