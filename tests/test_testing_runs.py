"""Solvers make progress on every family, and the examples in docs/testing.md run."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import bilevax as bx
from bilevax.testing import FAMILIES

DOCS = Path(__file__).parent.parent / "docs" / "testing.md"
STEPS = {"quadratic": 0.05, "ridge": 0.2, "logistic": 0.5, "mean": 0.02, "mixture": 0.03, "pl": 0.01}
STEPS |= {"curved": 0.1}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_short_run_approaches_the_minimum(name):
    family = FAMILIES[name](m=12, d_x=3, d_y=4, rows=30, noise=0.5)
    method = bx.MSVR if name == "mean" else bx.BSVRBv2
    result = bx.minimize(
        family.problem,
        family.x0,
        family.y0,
        solver=method(upper_step=STEPS[name]),
        steps=1000,
        blocks_per_step=4,
        batch_size=8,
        key=jax.random.key(0),
        progress=None,
    )
    start, end = family.value(family.x0), family.value(result.x)
    assert end < start
    assert np.linalg.norm(family.gradient(result.x)) < 0.15 * np.linalg.norm(family.gradient(family.x0))
    if family.least is not None:
        assert end - family.least < 0.02 * (start - family.least)


def test_the_examples_in_the_docs_run():
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    names = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"docs/testing.md, example {number}", "exec"), names)


def test_docs_name_every_family():
    text = DOCS.read_text(encoding="utf-8")
    for name in FAMILIES:
        assert f"`{name}`" in text
