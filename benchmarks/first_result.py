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


def row(method: str, kind: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    pairs = [
        f"{found[call]['clock']:.2f} / {found[call]['processor']:.2f}"
        for call in ("import", "first", "second")
    ]
    phases = [f"{sum(one[phase] for one in found['programs'].values()):.2f}" for phase in PHASES.values()]
    return f"| {method} | {kind} | {' | '.join(pairs)} | {' | '.join(phases)} | {len(found['programs'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1, help="the round of the least processor time counts")
    parser.add_argument("--programs", action="store_true", help="list the programs of each first call")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(in_this_process(options.child, options.steps)))
        return
    print("seconds of the clock / of the processor, then of the clock")
    print("| method | cache | import | first call | second call | trace | lower | compile | programs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            in_a_process(method, options.steps, folder)
            for kind, cache in (("cold", ""), ("warm", folder)):
                rounds = [in_a_process(method, options.steps, cache) for _ in range(options.rounds)]
                best = min(rounds, key=lambda found: found["first"]["processor"])
                print(row(method, kind, best), flush=True)
                for name, phases in sorted(best["programs"].items()) if options.programs else ():
                    print(f"    {name}: " + ", ".join(f"{phase} {s:.3f}" for phase, s in phases.items()))


if __name__ == "__main__":
    main()
