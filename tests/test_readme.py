"""The README is true and short: its example runs as it stands, and gives no step size."""

import re
from pathlib import Path

import jax.numpy as jnp

from scripts.try_wheel import quick_start

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_is_read_in_a_minute():
    assert README.count("\n") <= 120
    assert len(EXAMPLES) == 1
    lines = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(lines) <= 15
    assert (ROOT / "docs" / "drawings" / "penalties.png").stat().st_size < 150_000


def test_the_example_runs_as_it_stands_without_a_step_size():
    code = quick_start(README)
    assert "step=" not in code
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    ratio = jnp.exp(names["result"].x) * names["spread"] ** 2 / 0.1
    assert jnp.all((ratio > 0.7) & (ratio < 1.4))
    assert names["result"].verification.message == ""


def test_every_figure_has_its_command():
    table = README.split("## Five figures")[1].split("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 5
    for row in rows:
        command = re.search(r"`([^`]+)` \|$", row)[1]
        assert re.match(r"make |python -m benchmarks|bilevax reproduce", command)
        if module := re.match(r"python -m (\S+)", command):
            assert (ROOT / f"{module[1].replace('.', '/')}.py").exists()
