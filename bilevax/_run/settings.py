"""What a run was given, what was chosen for it, and how to ask for the same again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampling
from bilevax._run.chunks import numbers_as_arrays
from bilevax._step.coefficients import evaluate
from bilevax._step.state import State
from bilevax._util.per_entry import PerEntry
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.offsets import PartOf

_LONGEST = 40  # characters of the name of a schedule
GIVEN, DEFAULT, AUTOMATIC = "given", "default", "automatic"


class Setting(NamedTuple):
    """A line of `Settings`.

    Attributes:
      name: what was set.
      value: in words.
      chosen: "given", "default" (it has the value that it has if it is left out) or "automatic" (computed for
        this run).
    """

    name: str
    value: str
    chosen: str


@dataclasses.dataclass(frozen=True, repr=False)
class Settings:
    """All choices of a run, given and automatic; `print` shows them as a table.

    A coefficient that is estimated anew during a run has the value of the end: a run that is given it back
    keeps it. An upper step that was left out stays so.

    Attributes:
      solver: the solver, with every coefficient that was left out filled in.
      sampling: how blocks and rows were drawn, with the numbers that were used.
      key: the random key.
      steps: the steps that were asked for; if they were left out, the steps that were taken.
      lines: the table.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> x0, y0 = jnp.zeros(2), jnp.zeros((4, 2))
      >>> result = bx.minimize(problem, x0, y0, solver=bx.SOBA(0.1), steps=100, progress=None)
      >>> print(result.settings)
      solver              SOBA                           given
      upper_step          0.1                            given
      lower_step          0.6667 · scales of 0.5 to 0.5  automatic
      inverse_step        left out                       default
      radius              left out                       default
      around              x                              automatic
      curvature           2                              automatic
      blocks_per_step     4 of 4                         automatic
      batch_size          all                            automatic
      shuffle             True                           default
      initial_batch_size  left out                       default
      strata              1                              automatic
      key                 [0, 0]                         automatic
      steps               100                            given
      >>> again = bx.minimize(problem, x0, y0, **result.settings.arguments(), progress=None)
      >>> bool(jnp.allclose(again.x, result.x))
      True
    """

    solver: AbstractSolver
    sampling: Sampling
    key: Array
    steps: int
    lines: tuple[Setting, ...]

    def arguments(self) -> dict[str, Any]:
        """The arguments of `minimize` that ask for the same choices again.

        Mesh, metrics, stop, checkpoint and log are not among them.
        """
        return {"solver": self.solver, "steps": self.steps, "key": self.key, "sampling": self.sampling}

    def __str__(self) -> str:
        name, value = (max(len(line[column]) for line in self.lines) for column in (0, 1))
        return "\n".join(f"{line.name:<{name}}  {line.value:<{value}}  {line.chosen}" for line in self.lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a user gave for a run: None where nothing.

    Attributes:
      solver: the solver.
      steps: the number of steps.
      key: the random key.
      sampling: the sampling.
    """

    solver: AbstractSolver | None
    steps: int | None
    key: Array | None
    sampling: Sampling

    def settings(self, solver: AbstractSolver, problem: Problem, state: State, key: Array) -> Settings:
        """The settings of a run that has come to a state.

        Args:
          solver: the solver that was used, as it was given or chosen.
          problem: the whole problem.
          state: where the run is.
          key: the random key that was used.
        """
        few = ("step", "smoothness", "floors", "restraint")
        now = dataclasses.replace(state, **jax.device_get({name: getattr(state, name) for name in few}))
        sampler = state.sampler
        everything = sampler.per_step == sampler.blocks
        sampling = Sampling(
            blocks_per_step="all" if everything else sampler.per_step,
            batch_size="all" if sampler.batch_size is None else sampler.batch_size,
            shuffle=self.sampling.shuffle,
            initial_batch_size=self.sampling.initial_batch_size,
            strata=sampler.strata,
        )
        steps = int(now.step) if self.steps is None else self.steps
        used = _filled(solver, problem, now)
        curvatures = {name: np.asarray(one.bound) for name, one in now.smoothness.items() if one.renewed}
        lines = [
            Setting("solver", _name(solver), _chosen(self.solver)),
            *_lines_of(solver, used, problem, now),
            *[
                Setting(f"around[{name}]" if problem.named else "around", _part(centre), AUTOMATIC)
                for name, centre in state.centres
                if isinstance(centre, PartOf)
            ],
            *_lines("curvature", problem.view(curvatures) if curvatures else {}, AUTOMATIC),
            Setting(
                "blocks_per_step",
                f"{sampler.per_step} of {sampler.blocks}",
                _chosen(self.sampling.blocks_per_step),
            ),
            Setting("batch_size", _word(sampling.batch_size), _chosen(self.sampling.batch_size)),
            Setting("shuffle", _word(sampling.shuffle), DEFAULT if sampling.shuffle else GIVEN),
            Setting(
                "initial_batch_size",
                _word(sampling.initial_batch_size),
                DEFAULT if sampling.initial_batch_size is None else GIVEN,
            ),
            Setting("strata", _word(sampler.strata or 1), _chosen(self.sampling.strata)),
            Setting("key", _word_of_key(key), _chosen(self.key)),
            Setting("steps", _word(steps), _chosen(self.steps)),
        ]
        return Settings(used, sampling, key, steps, tuple(lines))


def _filled(solver: AbstractSolver, problem: Problem, state: State) -> AbstractSolver:
    """The solver with every coefficient that was left out as it is at a state."""
    changes: dict[str, Any] = {}
    for name, value in solver.coefficients().items():
        if isinstance(value, AbstractSolver):
            changes[name] = _filled(value, problem, state)
    # With numbers as arrays, as in a compiled step: Python's own would be rounded elsewhere. On the host, as
    # each operation on a device would be compiled for itself.
    numbers = jax.device_get(numbers_as_arrays(solver))
    for name, found in numbers.coefficients_at(problem, state).items():
        value = _completed(getattr(solver, name), found, problem.named)
        if value is not None:
            changes[name] = value
    if not changes:
        return solver
    return eqx.tree_at(
        lambda solver: tuple(getattr(solver, name) for name in changes),
        solver,
        tuple(changes.values()),
        is_leaf=lambda value: value is None,
    )


def _completed(given: Any, found: Any, named: bool) -> Any:
    """A coefficient with what was left out of it; None if nothing can be filled in."""
    if not isinstance(found, Mapping):
        return _usable(found) if given is None else None
    usable = {level: one for level, value in found.items() if (one := _usable(value)) is not None}
    if given is None and usable:
        return usable if named else next(iter(usable.values()))
    if isinstance(given, Mapping):
        return usable | {level: value for level, value in given.items() if value is not None}
    return None


def _usable(value: Any) -> Any:
    """A number or a schedule that a solver takes; None for others, such as those of a diverged run."""
    if value is None or callable(value):
        return value
    if isinstance(value, PerEntry):
        arrays = jax.tree.map(np.asarray, value)
        finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays))
        return PerEntry(float(arrays.step), arrays.scales) if finite else None
    return float(value) if np.ndim(value) == 0 and np.isfinite(value) else None


def _lines_of(
    given: AbstractSolver, used: AbstractSolver, problem: Problem, state: State, within: str = ""
) -> list[Setting]:
    """The hyper-parameters of a solver, and of the solvers that it wraps."""
    lines = []
    for field in dataclasses.fields(given):
        name, before, value = within + field.name, getattr(given, field.name), getattr(used, field.name)
        if _is_idle(field.name, value, problem):
            continue
        if isinstance(before, AbstractSolver):
            lines += _lines_of(before, value, problem, state, f"{name}.")
        elif field.name == "upper_step" and before is None:
            scale = getattr(state.optimizer, "scale", None)
            known = "" if scale is None else f", r = {_word(jax.device_get(scale))}"
            lines.append(Setting(name, f"automatic_step(){known}", AUTOMATIC))
        elif isinstance(value, Mapping):
            for level in value:
                own = before.get(level) if isinstance(before, Mapping) else before
                chosen = AUTOMATIC if own is None else GIVEN
                lines += _lines(name, {level: evaluate(value, state.step, level)}, chosen)
        else:
            automatic = before is None and value is not None
            default = AUTOMATIC if automatic else _of_field(field, before)
            lines.append(Setting(name, _word_at(value, jax.device_get(state.step)), default))
    return lines


def _is_idle(name: str, value: Any, problem: Problem) -> bool:
    """Whether a hyper-parameter that was left out is of no use here: no level takes steps."""
    steps = any(not level.is_value for level in problem.levels.values())
    return name == "lower_step" and value is None and not steps


def _name(solver: AbstractSolver) -> str:
    """The class of a solver, with those of the solvers that it wraps."""
    inside = [_name(value) for value in solver.coefficients().values() if isinstance(value, AbstractSolver)]
    return f"{type(solver).__name__}({', '.join(inside)})" if inside else type(solver).__name__


def _lines(name: str, value: Any, chosen: str) -> list[Setting]:
    """One line, or one for each level."""
    if isinstance(value, Mapping):
        return [Setting(f"{name}[{level}]", _word(one), chosen) for level, one in value.items()]
    return [Setting(name, _word(value), chosen)]


def _of_field(field: Any, value: Any) -> str:
    return DEFAULT if field.default is value or (_is_number(value) and value == field.default) else GIVEN


def _chosen(given: Any) -> str:
    return AUTOMATIC if given is None else GIVEN


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _word_at(value: Any, step: Any) -> str:
    """A hyper-parameter in words; a schedule with its present value."""
    if not callable(value):
        return _word(value)
    name = getattr(value, "__name__", None) or repr(value)
    name = name if len(name) <= _LONGEST else type(value).__name__
    try:
        return f"{name}, now {_word(value(step))}"
    except Exception:  # a function of something else, in a solver of the user's own
        return name


def _word(value: Any) -> str:
    """A value in a few characters."""
    if value is None:
        return "left out"
    if isinstance(value, optax.GradientTransformation):
        return "optax transformation"
    if isinstance(value, (str, bool, int)):
        return str(value)
    if hasattr(value, "shape") and value.shape != ():
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, PerEntry):
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value.scales)]
        low, high = min(leaf.min() for leaf in leaves), max(leaf.max() for leaf in leaves)
        return f"{float(value.step):.4g} · scales of {low:.3g} to {high:.3g}"
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return type(value).__name__


def _part(centre: PartOf) -> str:
    return "x" if centre.key is None else f"x[{centre.key!r}]"


def _word_of_key(key: Array) -> str:
    return str(np.asarray(jax.random.key_data(key)).tolist())
