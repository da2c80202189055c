"""Runs of `benchmarks.single_block`: our solvers and the methods of others, timed by one clock."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx
from benchmarks.single_block_cases import Case
from benchmarks.single_block_peers import PEERS, Data, Peer, peer_advance, peer_start
from bilevax._run.chunks import compiled_chunk, compiled_start, numbers_as_arrays
from bilevax._step.oracles import count_rows
from bilevax.solvers.block_page import default_chance

BATCH = 64
OURS: dict[str, Callable[..., Any]] = {
    "BlockSAGA": bx.BlockSAGA,
    "BlockPAGE": bx.BlockPAGE,
    "BSVRBv2": bx.BSVRBv2,
    "MMBO": bx.MMBO,
    "our SOBA": bx.SOBA,
    "BSVRBv1": bx.BSVRBv1,
    "KSONG": bx.KSONG,
    "RSVRB": bx.RSVRB,
}
METHODS = (*OURS, *PEERS)
DEFAULT = ("BlockSAGA", "BlockPAGE", "BSVRBv2", "MMBO", "our SOBA", *PEERS)
TRACKS_MATRICES = {"BSVRBv1", "KSONG", "RSVRB"}
PASSES = {"BlockPAGE", "SRBA"}  # look at all rows now and then
MOST_MATRIX = 500  # the largest d_y for methods that track d_y × d_y matrices
MARKS = (0.05, 1 / 6, 0.5, 1.0)  # the shares of the time at which x is recorded
KINDS = ("plain", "adam")


def _decay(step: Any) -> Any:
    """A schedule for Adam, whose steps do not shrink with the gradient."""
    return (1 + step / 20_000) ** -0.5


def _inside(lowest: Any, highest: Any) -> optax.GradientTransformation:
    """`bx.bounded` with bounds that may be traced, as hyper-parameters in the state are."""
    return optax.stateless(
        lambda updates, x: jax.tree.map(lambda u, x: jnp.clip(x + u, lowest, highest) - x, updates, x)
    )


def _plain(learning_rate: Any, lowest: Any, highest: Any) -> optax.GradientTransformation:
    return optax.chain(optax.sgd(learning_rate), _inside(lowest, highest))


def _adam(learning_rate: Any, lowest: Any, highest: Any) -> optax.GradientTransformation:
    scheduled = optax.chain(optax.adam(learning_rate), optax.scale_by_schedule(_decay))
    return optax.chain(scheduled, _inside(lowest, highest))


# Their hyper-parameters are in the state, so that all steps of a kind share one compiled program.
UPPER = {
    name: optax.inject_hyperparams(kind)(learning_rate=1.0, lowest=0.0, highest=0.0)
    for name, kind in zip(KINDS, (_plain, _adam), strict=True)
}


@dataclasses.dataclass
class Run:
    """x and y of a run at some times."""

    seconds: list[float]
    steps: list[int]
    passes: list[float]
    x: list[Any]
    y: list[Any]


class OurRun:
    """A run of one of our solvers."""

    def __init__(self, case: Case, method: str, setting: dict[str, Any], seed: int):
        options: dict[str, Any] = {"beta": 0.01} if method == "RSVRB" else {}
        sampler = bx.Sampling(batch_size=BATCH).sampler(case.problem, jax.random.key(seed))
        if method == "BlockPAGE":
            chance = default_chance(case.problem, sampler) / setting["rarity"]
            options["refresh_chance"] = min(1.0, max(chance, 1e-9))
        step = setting["lower_step"]
        self.case = case
        self.solver = OURS[method](UPPER[setting["kind"]], lower_step=step, **options)
        self.state = compiled_start(self.solver, case.problem, case.x0, case.y0, sampler)
        self.state.optimizer.hyperparams.update(_hyperparameters(case, setting))
        self.inputs = (numbers_as_arrays(self.solver), case.problem)
        self.advance(0)

    def advance(self, steps: int) -> bool:
        """Takes some steps; whether all is finite."""
        self.state, total = compiled_chunk(self.inputs, self.state, steps)
        self.state = jax.block_until_ready(self.state)
        return bool(np.isfinite(float(total.high)))

    def note(self, run: Run) -> None:
        """Records where the run is."""
        run.steps.append(int(self.state.step))
        run.passes.append(passes(self.case, self.solver, self.state))
        run.x.append(jax.tree.map(np.array, self.state.x))
        run.y.append(jax.tree.map(np.array, self.state.y))


class PeerRun:
    """A run of a method of others."""

    def __init__(self, case: Case, method: str, setting: dict[str, Any], seed: int):
        self.data = dense(case)
        (level,) = case.problem.levels.values()
        whole = sum(len(jax.tree.leaves(rows)[0]) for rows in self.data)
        period = max(1, round(min(setting["rarity"], 1e4) * whole / (4 * BATCH)))
        self.peer = Peer(
            method,
            _Of(case.problem.upper),
            _Of(level.function),
            UPPER[setting["kind"]],
            BATCH,
            period,
            case.upper_sees_x,
        )
        self.seed = jnp.uint32(seed)
        self.step = jnp.float32(setting["lower_step"])
        now = peer_start(self.peer, self.data, case.x0, jax.tree.map(lambda a: a[0], case.y0))
        now.optimizer.hyperparams.update(_hyperparameters(case, setting))
        self.now = now
        self.advance(0)

    def advance(self, steps: int) -> bool:
        """Takes some steps; whether all is finite."""
        now = peer_advance(self.peer, self.data, self.seed, self.step, self.now, steps)
        self.now = jax.block_until_ready(now)
        return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves((now.x, now.y)))

    def note(self, run: Run) -> None:
        """Records where the run is."""
        steps, whole = int(self.now.step), sum(len(jax.tree.leaves(rows)[0]) for rows in self.data)
        run.steps.append(steps)
        run.passes.append(self.peer.rows(self.data, steps) / whole)
        run.x.append(jax.tree.map(np.array, self.now.x))
        run.y.append(jax.tree.map(lambda a: np.array(a)[None], self.now.y))


@dataclasses.dataclass(frozen=True)
class _Of:
    """A function of (x, y, rows) that is compared by the one it calls, so that runs share a program."""

    function: Callable[..., Any]

    def __call__(self, x: Any, y: Any, rows: Any) -> Any:
        return self.function(x, y, 0, rows)


@functools.cache
def dense(case: Case) -> Data:
    """The rows as dense arrays."""
    problem = case.problem
    return Data(*(jax.tree.map(jnp.asarray, one.rows) for one in (problem.upper_data, problem.lower_data[0])))


def _hyperparameters(case: Case, setting: dict[str, Any]) -> dict[str, Any]:
    lowest, highest = case.box(setting["lower_step"])
    found = {"learning_rate": setting["upper_step"], "lowest": lowest, "highest": highest}
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def skipped(method: str, case: Case) -> str | None:
    """Why a method is skipped; None if it is run."""
    d_y = sum(leaf[0].size for leaf in jax.tree.leaves(case.y0))
    if method in TRACKS_MATRICES and d_y > MOST_MATRIX:
        return f"tracks a {d_y} × {d_y} matrix"
    return None


def run(
    case: Case, method: str, setting: dict[str, Any], seconds: float, seed: int, clock: Callable[[], float]
) -> Run:
    """Runs for some time, without compilation and initialisation; passes include those of initialisation."""
    running = (PeerRun if method in PEERS else OurRun)(case, method, setting, seed)
    out, spent, chunk = Run([], [], [], [], []), 0.0, 8
    for mark in MARKS:
        while spent < mark * seconds:
            tick = clock()
            finite = running.advance(chunk)
            spent += (took := max(clock() - tick, 1e-6))
            chunk = int(max(1, min(4 * chunk, 0.02 * seconds * chunk / took)))
            if not finite:
                return out
        out.seconds.append(spent)
        running.note(out)
    return out


def passes(case: Case, solver: bx.AbstractSolver, state: bx.State) -> float:
    """Passes over all rows: rows drawn, times the points at which they are evaluated."""
    steps = int(state.step)
    drawn = solver.count_oracles(case.problem, state.sampler, steps)
    one_point = isinstance(solver, bx.Recipe) and not solver.corrected
    twice = 0 if one_point else 2 * BATCH * steps
    return (drawn.rows + twice) / count_rows(case.problem, None, 1).rows
