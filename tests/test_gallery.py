"""Every program of the gallery runs in its quick mode and ends in a picture; notebooks are made from them."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

for needed in ("sklearn", "matplotlib"):
    pytest.importorskip(needed, reason="the gallery needs the experiments extra")
import matplotlib as mpl  # noqa: E402

from scripts import notebooks  # noqa: E402

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"network_flax": "flax", "long_run": "orbax.checkpoint"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::bilevax.AccuracyWarning", "ignore::bilevax.RecoveryWarning")
def test_a_program_of_the_gallery_draws_its_picture_in_quick_mode(program, tmp_path, monkeypatch):
    if program.stem in NEEDS:
        pytest.importorskip(NEEDS[program.stem])
    picture = tmp_path / "picture.png"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "--quick", "--picture", str(picture)])
    with mpl.rc_context():
        runpy.run_path(str(program), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]  # and leaves nothing else behind


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_of_the_gallery_is_short_and_says_what_it_solves(program):
    source = program.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    title, blank, *text = ast.get_docstring(ast.parse(source)).splitlines()
    assert title.endswith((".", "?"))
    assert blank == ""
    assert "picture" in " ".join(text)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_kept_picture_of_a_program_is_small(program):
    assert (ROOT / "docs" / "gallery" / f"{program.stem}.png").stat().st_size < 120_000


def test_there_is_no_picture_without_a_program():
    pictures = {path.stem for path in (ROOT / "docs" / "gallery").glob("*.png")}
    assert pictures == {path.stem for path in PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_are_the_program(program):
    cells = notebooks.notebook(program)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        compile(cell, program.name, "exec")  # no cell begins or ends within a statement
    whole = ast.parse(program.read_text(encoding="utf-8"))
    assert ast.dump(ast.parse("\n".join(code[1:-1]))) == ast.dump(ast.Module(whole.body[1:], []))
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(re.fullmatch(r"[a-z0-9-]{1,64}", cell["id"]) for cell in cells)
