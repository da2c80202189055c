"""Where the seconds of compilation go: tracing, lowering, compiling, and what the compiler makes.

`python -m benchmarks.compiling` takes the programs of a run of K-SONG on MovieLens 1M (tuned form) and of
BSVRB v2 on a8a: the start, single steps and, on an accelerator, turns of 32. First it makes all of them as a
run does, in several threads; then it compiles each by itself with several compiler options, and counts the
kernels of the compiled programs by kind.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import bilevax as bx
from benchmarks import hyperopt
from bilevax._run.chunks import (
    _legs,  # pyright: ignore[reportPrivateUsage]
    _numbers,  # pyright: ignore[reportPrivateUsage]
    chunk_program,
    compiled_chunk,
    compiled_start,
    numbers_as_arrays,
    prepare,
    start_program,
)
from bilevax.experiments.report import Report, command_line

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no autotuning": {"xla_gpu_autotune_level": 0},
    "no autotuning, again": {"xla_gpu_autotune_level": 0},
    "in parallel": {"xla_gpu_autotune_level": 0, "xla_gpu_force_compilation_parallelism": 16},
    "no expensive passes": {"xla_gpu_autotune_level": 0, "xla_llvm_disable_expensive_passes": True},
    "optimisation 0": {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 0},
    "no Triton": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
    "no multi-output fusion": {"xla_gpu_autotune_level": 0, "xla_disable_hlo_passes": "multi_output_fusion"},
}


def ranking(quick: bool) -> tuple[Any, bx.Problem, Any, Any, Any]:
    """K-SONG on MovieLens 1M: solver, problem, x0, y0, sampler."""
    from bilevax.applications.ranking import NeuMF, TrainingSettings, make_method
    from bilevax.applications.ranking.methods import steps_per_epoch
    from bilevax.applications.ranking.presets import tuned
    from bilevax.experiments.ndcg_parts import load_parts

    parts = load_parts("ml-1m", 1, 300 if quick else None)
    model = NeuMF(parts.train.users, parts.train.item_count, 64)
    training = TrainingSettings().replace(**tuned("ml-1m", "k-song")).replace(users_per_step=256)
    per_epoch = steps_per_epoch(parts.train.users, training)
    problem, solver = make_method("k-song", parts.train, model, training, per_epoch * 100)
    y0 = {name: None if name == "nothing" else jnp.ones(problem.slots_of(name)) for name in problem.levels}
    sampling = bx.Sampling(256, training.negatives, initial_batch_size=0)
    return solver, problem, model.start(jax.random.key(0)), y0, sampling.sampler(problem, jax.random.key(1))


def a8a(quick: bool) -> tuple[Any, bx.Problem, Any, Any, Any]:
    """BSVRB v2 on a8a."""
    problem, x0, y0 = hyperopt.problem(hyperopt.load("a8a"))
    return bx.BSVRBv2(), problem, x0, y0, bx.Sampling(10, 32).sampler(problem, jax.random.key(0))


CASES = {"k-song": ranking, "a8a": a8a}


def kinds(text: str) -> dict[str, int]:
    """How many operations of each kind, outside fusions, a compiled program has."""
    found: collections.Counter[str] = collections.Counter()
    fused = False
    for line in text.splitlines():
        if line and not line[0].isspace():
            fused = line.startswith(("%fused", "fused", "%region", "%wrapped", "wrapped"))
        match = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = \S.*? (\w[\w\-]*)\(", line)
        if match and not fused:
            found[match.group(1)] += 1
    return {k: n for k, n in found.most_common() if k not in ("parameter", "get-tuple-element", "constant")}


def programs(case: tuple[Any, bx.Problem, Any, Any, Any]) -> dict[str, tuple[Any, Any]]:
    """The functions that are compiled, with their arguments."""
    solver, problem, x0, y0, sampler = case
    given = numbers_as_arrays(solver), problem, x0, y0, sampler, None
    state = eqx.filter_eval_shape(start_program, *given)
    steps, total = _numbers(100, (0.0, 0.0))
    found: dict[str, tuple[Any, Any]] = {"start": (start_program, given)}
    for turn, _ in _legs(0, 0):
        name = "single steps" if turn == 1 else f"turns of {turn}"
        found[name] = chunk_program, (given[:2], state, steps, total, None, turn)
    return found


def together(case: tuple[Any, bx.Problem, Any, Any, Any]) -> float:
    """Seconds until all programs of a run are there, and the first pass is taken."""
    solver, problem, x0, y0, sampler = case
    began = time.perf_counter()
    prepare(solver, problem, x0, y0, sampler, 10**9)
    state = compiled_start(solver, problem, x0, y0, sampler)
    jax.block_until_ready(compiled_chunk((numbers_as_arrays(solver), problem), state, 0))
    return time.perf_counter() - began


def is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def measure(name: str, function: Any, given: Any, options: list[str], row: dict[str, Any]) -> None:
    """Fills a row with the seconds of tracing, lowering and compiling."""
    arrays, rest = eqx.partition(given, is_array)

    def pure(arrays: Any) -> Any:
        return eqx.filter(function(*eqx.combine(arrays, rest)), eqx.is_array)

    tick = time.perf_counter()
    traced = jax.jit(pure).trace(arrays)
    row["trace"] = time.perf_counter() - tick
    row["equations"] = str(traced.jaxpr).count(" = ")
    tick = time.perf_counter()
    lowered = traced.lower()
    row["lower"] = time.perf_counter() - tick
    for option in options:
        tick = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=OPTIONS[option])
            row[option] = time.perf_counter() - tick
            if option == options[0]:
                text = compiled.as_text() or ""
                row["operations"] = kinds(text)
                row["text"] = text
        except Exception as failure:
            row[option] = f"{type(failure).__name__}: {failure}"[:120]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options), quick=options.quick)
    rows = []
    for case in options.cases:
        try:
            given = CASES[case](options.quick)
            rows.append({"case": case, "program": "all", "default": together(given)})
            print(json.dumps(rows[-1]), flush=True)
            made = programs(given)
        except Exception as failure:
            print(case, repr(failure))
            continue
        for name, (function, given) in made.items():
            row: dict[str, Any] = {"case": case, "program": name}
            try:
                measure(name, function, given, options.options, row)
            except Exception as failure:
                row["failed"] = repr(failure)[:300]
            (options.out / f"{case}_{name.replace(' ', '_')}.hlo.txt").write_text(row.pop("text", ""))
            rows.append(row)
            print(json.dumps(row), flush=True)
            (options.out / "compiling.json").write_text(json.dumps(rows, indent=2))
            report.csv("compiling", [csv_row(one) for one in rows])
    report.finish()


def csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the table: seconds, and the number of equations."""
    shown = {name: one for name, one in row.items() if name != "operations"}
    return {name: f"{one:.2f}" if isinstance(one, float) else one for name, one in shown.items()}


if __name__ == "__main__":
    main()
