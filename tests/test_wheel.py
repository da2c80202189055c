"""The scripts behind `make wheel` see what is wrong with a wheel, and find the README's quick start."""

from pathlib import Path

import pytest

from scripts import compare_wheel, try_wheel

METADATA = "bilevax-0.1.0.dist-info"
TRACKED = ["bilevax/__init__.py", "bilevax/py.typed", "bilevax/experiments/configs/noise.json"]
PACKED = [*TRACKED, *(f"{METADATA}/{name}" for name in compare_wheel.METADATA)]


def test_a_wheel_with_the_tracked_files_has_no_differences():
    assert compare_wheel.differences(PACKED, TRACKED, METADATA) == []


@pytest.mark.parametrize("name", [*TRACKED, f"{METADATA}/licenses/LICENSE"])
def test_a_file_missing_from_the_wheel_is_named(name):
    packed = [other for other in PACKED if other != name]
    assert compare_wheel.differences(packed, TRACKED, METADATA) == [f"{name} is missing from the wheel"]


@pytest.mark.parametrize("name", ["tests/test_wheel.py", "bilevax/scratch.py"])
def test_an_untracked_file_in_the_wheel_is_named(name):
    (difference,) = compare_wheel.differences([*PACKED, name], TRACKED, METADATA)
    assert difference == f"{name} is in the wheel, but not tracked by git"


def test_the_quick_start_is_the_first_example_that_imports_bilevax():
    examples = ("import jax\n", "import jax, bilevax as bx\n", "import bilevax\n")
    readme = "".join(f"```python\n{example}```\n" for example in examples)
    assert try_wheel.quick_start(readme) == examples[1]
    with pytest.raises(ValueError, match="no Python example that imports bilevax"):
        try_wheel.quick_start("```python\nimport jax\n```\n")


def test_the_readme_has_a_quick_start_that_solves_a_problem():
    readme = Path(__file__).parent.parent / "README.md"
    assert "bx.minimize(" in try_wheel.quick_start(readme.read_text(encoding="utf-8"))
