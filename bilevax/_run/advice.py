"""Which hyper-parameter made a run diverge: what might have helped is tried, and named if it did.

First x rests. If the lower variables diverge by themselves, at x0 or where x had got to, then one of their
steps is too long, or the lower problems have no minimum. Otherwise the fault is in how x moves. Then changes
are tried, the most suspect first: values of the user's beyond the automatic ones, then shorter steps. A
message names a change that has kept the same steps finite.
"""

from __future__ import annotations

from bilevax._problem.problem import Problem
from bilevax._run.ill_posed import curvature_fault, unbounded_below
from bilevax._run.knobs import AT_REST, Change, Knobs, shown, used
from bilevax._run.replay import Replays, TooLongError, Trial
from bilevax._step.lower_transformation import has_transformation
from bilevax._step.state import State
from bilevax.solvers.base import AbstractSolver

_BEYOND = 1.5  # times the automatic value, from where a given one is suspect
_FACTORS = (0.1, 0.01, 0.001)
_ESTIMATED = ("lower_step", "inverse_step", "alpha", "gamma", "gamma_bar", "floor")
_SUSPECTS = ("gamma", "gamma_bar", "lower_step", "inverse_step", "alpha", "alpha_bar")
_EFFECT = "the same steps stay finite"
_Changes = tuple[Change, ...]


def advise(solver: AbstractSolver, problem: Problem, replays: Replays) -> str:
    """What to change so that a run does not diverge; nothing if that could not be found out."""
    try:
        return _Advice(solver, problem, replays).sentence()
    except Exception:  # advice that cannot be had (no time, no memory) must not hide the divergence
        return ""


class _Advice:
    """What is known of a run that diverged, and how to find out more."""

    def __init__(self, solver: AbstractSolver, problem: Problem, replays: Replays):
        self.knobs, self.problem, self.replays = Knobs(solver), problem, replays
        self.start: State = replays.begin(solver)
        self.used = used(solver, problem, self.start)
        self.automatic = self._automatic()
        self.trials: dict[tuple[str, ...], Trial] = {}
        self.learnt = ""

    def sentence(self) -> str:
        """What to change, and why; what was learnt until then, if that would take too long."""
        try:
            return self._sentence()
        except TooLongError:
            return self.learnt

    def _sentence(self) -> str:
        rest = self.knobs.at_rest()
        if not self._try((rest,)).stable:
            why = "the lower variables diverge even while x rests"
            self.learnt = f"{why}: {self._smaller(('lower_step', 'inverse_step', 'alpha', 'gamma'))}"
            return self._lower(why)
        self.learnt = f"the lower variables are stable at x0 while x rests: {self._smaller(('upper_step',))}"
        healthy = self.replays.last_healthy(self.knobs.solver)
        if int(healthy.step) and not self._try((rest,), healthy).stable:
            found = self._first(self._suspects() + self._shorter_lower(_FACTORS))
            if found:
                return self._say(
                    found, f"where x was at step {int(healthy.step)}, the lower steps are too long"
                )
        return self._upper("the lower variables are stable while x rests")

    def _lower(self, why: str) -> str:
        """What helps the lower variables while x rests, and if that is not enough, what helps x then."""
        rest, suspects, shorter = self.knobs.at_rest(), self._suspects(), self._shorter_lower(_FACTORS)
        fault = curvature_fault(self.problem, self.start.x, self.start.y)
        # Where g is not convex, shorter steps diverge more slowly: that would be no proof.
        candidates = suspects if fault else suspects + shorter
        found = next((one for one in candidates if self._try((*one, rest)).stable), ())
        if not found:
            return fault or self._helpless(candidates, why)
        both = found if self._try(found).stable else ()
        both = both or self._first([found + change for change in self._shorter_upper()])
        endless = self._endless(self._try(both)) if both else ""
        if endless:
            return endless
        effect = _EFFECT if both else "y and v stay finite while x rests"
        return self._say(both or found, why, effect) + (f"; besides, {fault}" if fault else "")

    def _upper(self, why: str) -> str:
        """What helps x."""
        shorter = self._shorter_upper()
        likely, others = self._upper_suspects() + shorter, self._suspects() + self._shorter_lower(_FACTORS)
        found = self._first(likely)
        if found in shorter[:-1]:
            found = self._better(found, shorter[shorter.index(found) + 1])
        endless = self._endless(self._try(found or shorter[0]))
        if endless:
            return endless
        fault = curvature_fault(self.problem, self.start.x, self.start.y)
        found = found or (() if fault else self._first(others))
        if not found:
            return fault or self._helpless(likely + others, why)
        return self._say(found, why) + (f"; besides, {fault}" if fault else "")

    def _endless(self, trial: Trial) -> str:
        """Whether f falls without end along the way of x in a replay."""
        return unbounded_below(self.problem, self.start.x, trial.x, self.start.y) if trial.falls else ""

    def _better(self, found: _Changes, further: _Changes) -> _Changes:
        """The one of two changes with which f is less, if both are stable."""
        one, other = self._try(found), self._try(further)
        return further if other.stable and other.objective < one.objective else found

    def _try(self, changes: _Changes, start: State | None = None) -> Trial:
        texts = tuple(change.text for change in changes)
        if start is None and texts in self.trials:
            return self.trials[texts]
        solver = self.knobs.replaced({change.name: change.value for change in changes})
        trial = self.replays.run(solver, start, at_rest=AT_REST in texts)
        if start is None:
            self.trials[texts] = trial
        return trial

    def _first(self, candidates: list[_Changes]) -> _Changes:
        """The first changes under which a replay is stable; empty if none are."""
        return next((one for one in candidates if self._try(one).stable), ())

    def _suspects(self) -> list[_Changes]:
        """What the user gave beyond the automatic values, each replaced by that; then all of them."""
        names = [name for name in _SUSPECTS if self._is_beyond(name)]
        changes = tuple(self.knobs.set_to(name, self.automatic[name]) for name in names)
        return [(change,) for change in changes] + ([changes] if len(changes) > 1 else [])

    def _upper_suspects(self) -> list[_Changes]:
        """What the user gave that makes z large or noisy."""
        known = self.knobs.is_given("floor") and "floor" in self.used and "floor" in self.automatic
        names = ["floor"] if known and _BEYOND * self.used["floor"] < self.automatic["floor"] else []
        names += [name for name in ("gamma", "gamma_bar", "alpha", "alpha_bar") if self._is_beyond(name)]
        return [(self.knobs.set_to(name, self.automatic[name]),) for name in names]

    def _is_beyond(self, name: str) -> bool:
        known = self.knobs.is_given(name) and name in self.used and name in self.automatic
        known = known and not has_transformation(self.knobs.values[name])  # its factor is not a step
        return known and self.used[name] > _BEYOND * self.automatic[name]

    def _shorter_lower(self, factors: tuple[float, ...]) -> list[_Changes]:
        """Shorter lower steps; a smaller weight of new batches if the method has no such steps."""
        names = [name for name in ("lower_step", "inverse_step") if name in self.knobs and name in self.used]
        # An inverse step that is left out is the lower step.
        names = [name for name in names if name == "lower_step" or self.knobs.values[name] is not None]
        names = names or [name for name in ("alpha",) if name in self.knobs and name in self.used]
        return [(self.knobs.scaled(name, factor, self.used),) for factor in factors for name in names]

    def _shorter_upper(self) -> list[_Changes]:
        shorter = [(self.knobs.scaled("upper_step", factor, self.used),) for factor in _FACTORS]
        given = self.knobs.values["upper_step"] is not None
        return shorter + ([(self.knobs.left_out("upper_step"),)] if given else [])

    def _automatic(self) -> dict[str, float]:
        """The values that a run uses if they are left out."""
        given = [name for name in _ESTIMATED if self.knobs.is_given(name)]
        estimated = [name for name in given if self.knobs.default(name) is None]
        found = self.used
        if estimated:
            solver = self.knobs.replaced(dict.fromkeys(estimated))
            found = used(solver, self.problem, self.replays.begin(solver))
        alpha = self.knobs.default("alpha") if "alpha" in self.knobs else None
        return found if alpha is None else found | {"alpha": alpha, "alpha_bar": alpha}

    def _say(self, changes: _Changes, why: str, effect: str = _EFFECT) -> str:
        names = [change.name for change in changes]
        text = f"look at {' and '.join(names)}"
        if all(self.knobs.values[name] is not None for name in names):
            text += f", or leave {'it' if len(names) == 1 else 'them'} out"
            text += " (bx.automatic_step() then moves x)" if "upper_step" in names else ""
        text += f": {why}; with {', '.join(map(self._instead, changes))} {effect}"
        sampler = self.start.sampler
        if {"gamma", "gamma_bar"} & set(names) and sampler.per_step < sampler.blocks:
            more = min(sampler.blocks, 4 * sampler.per_step)
            text += f"; more blocks per step help, too: blocks_per_step={more} instead of {sampler.per_step}"
        return text

    def _smaller(self, names: tuple[str, ...]) -> str:
        """Which of some hyper-parameters to look at: those that the solver has."""
        given = [name for name in names if name in self.knobs and self.knobs.values[name] is not None]
        found = given or [name for name in names if name in self.knobs][:1]
        return f"try a tenth of {' or '.join(f'{name} ({self._known(name)})' for name in found)}"

    def _known(self, name: str) -> str:
        """A value that was given, or the automatic one."""
        given, automatic = self.knobs.values[name], self.used.get(name)
        if given is not None:
            return shown(given)
        return "the automatic one" if automatic is None else f"the automatic {automatic:.3g}"

    def _instead(self, change: Change) -> str:
        return f"{change.text} instead of {self._known(change.name)}"

    def _helpless(self, candidates: list[_Changes], why: str) -> str:
        """What was tried in vain, and what cannot be tried from here."""
        tried = dict.fromkeys(change.text for changes in candidates for change in changes)
        sampler, more = self.start.sampler, []
        if sampler.per_step < sampler.blocks:
            more.append(f"blocks_per_step={min(sampler.blocks, 4 * sampler.per_step)}")
        if sampler.batch_size is not None:
            more.append(f"batch_size={4 * sampler.batch_size}")
        others = f"; try less noise: {' or '.join(more)}" if more else "; look at x0, y0, f and g"
        return f"{why}; the run diverges with each of {', '.join(tried)}, too{others}"
