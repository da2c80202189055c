"""Seconds until the first result, in fresh processes, and where they go.

`python -m benchmarks.first_result` runs `minimize` of 400 steps on the problem of docs/quickstart.md, for
each method in a process of its own: cold, and again with a warm cache of compiled programs
(`bx.program_cache`). It reports import, the first call, and a second call with the same shapes, in seconds of
the clock and of the processor (the latter are steadier on a machine that others use), and how many seconds of
the first call are tracing, lowering and compiling (of the clock; reading the cache counts as compiling).
`--programs` lists every program.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METHODS = ("default", "BSVRBv2", "BSVRBv1")
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


class Timer:
    """Seconds of the clock and of the processor since it was made, and in earlier `laps`."""

    def __init__(self) -> None:
        self.clock, self.processor = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        """Since the timer was made."""
        return {
            "clock": time.perf_counter() - self.clock,
            "processor": time.process_time() - self.processor,
        }


def in_this_process(method: str, steps: int) -> dict[str, Any]:
    """Imports, solves twice, and says what that took."""
    timer = Timer()
    import jax
    import jax.numpy as jnp

    import bilevax as bx

    found: dict[str, Any] = {"import": timer.seconds()}
    programs: dict[str, dict[str, float]] = collections.defaultdict(
        lambda: dict.fromkeys(PHASES.values(), 0.0)
    )

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in PHASES:
            name = str(kwargs.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
            programs[name][PHASES[event]] += duration_secs

    problem, x0, y0 = quick_start(bx, jax, jnp)
    jax.block_until_ready((x0, y0))
    jax.monitoring.register_event_duration_secs_listener(note)
    solver = None if method == "default" else getattr(bx, method)()
    folder = os.environ.get("FIRST_RESULT_CACHE", "")
    os.environ["BILEVAX_PROGRAMS"] = folder or "off"
    with bx.program_cache():
        for call in ("first", "second"):
            timer = Timer()
            bx.minimize(
                problem, x0, y0, solver=solver, steps=steps, blocks_per_step=10, batch_size=32, progress=None
            )
            found[call] = timer.seconds()
            if call == "first":
                found["programs"] = {name: dict(phases) for name, phases in programs.items()}
    return found


def quick_start(bx: Any, jax: Any, jnp: Any) -> tuple[Any, Any, Any]:
    """The problem of docs/quickstart.md, x0 and y0."""
    n, clean, d, m = 1000, 50, 20, 100
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (n + clean, d))
    labels = jnp.sign(rows @ jax.random.normal(keys[1], (d,)))
    flipped = jax.random.bernoulli(keys[2], 0.4, (n,))
    noisy = jnp.where(flipped, -labels[:n], labels[:n])
    temperatures = jnp.linspace(1.0, 11.0, m, endpoint=False)

    def upper(x: Any, y: Any, block: Any, batch: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block["temperature"]))

    def lower(x: Any, y: Any, block: Any, batch: Any) -> Any:
        loss = jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block["temperature"])
        return jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * loss) + 0.5e-2 * y @ y

    problem = bx.Problem(
        upper=upper,
        lower=lower,
        blocks={"temperature": temperatures},
        upper_data=bx.Shared({"row": rows[n:], "label": labels[n:]}),
        lower_data=bx.Shared({"row": rows[:n], "label": noisy, "index": jnp.arange(n)}),
    )
    return problem, jnp.zeros(n), jnp.zeros((m, d))


def in_a_process(method: str, steps: int, cache: str) -> dict[str, Any]:
    """What `in_this_process` finds in a fresh one."""
    command = [sys.executable, "-m", "benchmarks.first_result", "--child", method, "--steps", str(steps)]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"FIRST_RESULT_CACHE": cache}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines: list[str] = (done.stdout or "").splitlines()
    return json.loads(lines[-1])


def row(method: str, kind: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: medians over the rounds, and the least and the most of the first call."""
    line: dict[str, Any] = {"method": method, "cache": kind}
    for call in ("import", "first", "second"):
        for clock in ("clock", "processor"):
            line[f"{call}, {clock}"] = f"{statistics.median(found[call][clock] for found in rounds):.2f}"
    firsts = [found["first"]["clock"] for found in rounds]
    line |= {"least": f"{min(firsts):.2f}", "most": f"{max(firsts):.2f}"}
    for phase in PHASES.values():
        sums = [sum(one[phase] for one in found["programs"].values()) for found in rounds]
        line[phase] = f"{statistics.median(sums):.2f}"
    return line | {"programs": len(rounds[0]["programs"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1, help="of which the medians are shown")
    parser.add_argument("--programs", action="store_true", help="list the programs of each first call")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(in_this_process(options.child, options.steps)))
        return
    from bilevax.experiments.report import Report, command_line

    report, lines = Report(options.out, command_line(options)), []
    times: dict[str, dict[str, dict[str, float]]] = {}
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            in_a_process(method, options.steps, folder)
            for kind, cache in (("cold", ""), ("warm", folder)):
                rounds = [in_a_process(method, options.steps, cache) for _ in range(options.rounds)]
                lines.append(row(method, kind, rounds))
                times[f"{method}, {kind}"] = {
                    call: {"microseconds": 1e6 * min(found[call]["clock"] for found in rounds)}
                    for call in ("import", "first", "second")
                }
                report.table("first_result", lines, "Seconds until the first result")  # as far as it has come
                for name, phases in sorted(rounds[0]["programs"].items()) if options.programs else ():
                    print(f"    {name}: " + ", ".join(f"{phase} {s:.3f}" for phase, s in phases.items()))
    (options.out / "first_result.json").write_text(json.dumps(times, indent=2))
    report.finish()


if __name__ == "__main__":
    main()
