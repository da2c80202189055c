"""The plan of the house: which folder may import which, what is public, and signatures as documented."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import bilevax as bx
import bilevax.solvers.toolkit

ROOT = Path(bx.__file__).parent
# A file may import from its own place in this list and from what comes before it.
ORDER = [
    "version",
    "_util",
    "_problem",
    "_step",
    "theory",
    "solvers",
    "_truth",
    "_run",
    "diagnostics",
    "root",
]
OUTSIDE = ["testing", "data", "applications", "experiments"]  # on the public names only
PUBLIC = {
    "bilevax": set(bx.__all__),
    "bilevax.solvers": set(bilevax.solvers.__all__),
    "bilevax.solvers.toolkit": set(bilevax.solvers.toolkit.__all__),
    "bilevax.theory": set(bx.theory.__all__),
}
# The command line is nobody's library.
COMMAND = {"cli.py", "__main__.py"}


def files():
    return [path for path in sorted(ROOT.rglob("*.py")) if path.name not in COMMAND]


def folder_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "root" if parts == ("__init__",) else parts[0]


def imports(path):
    """(module, name) of everything of bilevax that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if (node.module or "").split(".")[0] == "bilevax":
                yield from ((node.module, one.name) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.name, None) for one in node.names if one.name.split(".")[0] == "bilevax")


def imported_folder(module, name):
    parts = module.split(".")
    if len(parts) == 1:
        return name if name in ORDER or name in OUTSIDE else "root"
    return parts[1]


def test_imports_between_folders_point_one_way():
    wrong = []
    for path in files():
        here = folder_of(path)
        if here in OUTSIDE:
            continue
        for module, name in imports(path):
            there = imported_folder(module, name)
            if there not in ORDER or ORDER.index(there) > ORDER.index(here):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}.{name}")
    assert wrong == []


def test_applications_testing_data_and_experiments_use_public_names_only():
    wrong = []
    for path in files():
        here = folder_of(path)
        if here not in OUTSIDE:
            continue
        for module, name in imports(path):
            place = module.split(".")
            if name is None:
                name = place[1] if len(place) > 1 else "bilevax"
                private = any(part.startswith("_") for part in place)
            elif len(place) > 1 and place[1] in OUTSIDE:
                # Folders may use each other by public names, and their own modules as they like.
                private = place[1] != here and any(part.startswith("_") for part in [*place, name])
            else:
                known = PUBLIC.get(module, set()) | (
                    {*OUTSIDE, "diagnostics"} if module == "bilevax" else set()
                )
                private = name not in known
            if private:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}.{name}")
    assert wrong == []


def test_dir_shows_the_public_names_only():
    assert dir(bx) == sorted(bx.__all__)
    assert not [name for name in dir(bx) if name.startswith("_") and name != "__version__"]


def test_no_submodule_hides_behind_another_thing_of_its_name():
    for info in pkgutil.walk_packages([str(ROOT)], "bilevax."):
        if info.name in ("bilevax.__main__", "bilevax.cli"):
            continue
        parent, _, name = info.name.rpartition(".")
        module = importlib.import_module(info.name)
        assert getattr(importlib.import_module(parent), name) is module


def test_private_folders_export_nothing_by_themselves():
    for folder in ROOT.glob("_*"):
        if folder.is_dir() and folder.name != "__pycache__":
            assert (folder / "__init__.py").read_text() == ""


# --- signatures ------------------------------------------------------------------

METHODS = [
    getattr(bx, name)
    for name in bx.solvers.__all__
    if issubclass(getattr(bx, name), bx.AbstractSolver) and name not in ("AbstractSolver", "Recipe")
]


def documented(thing):
    """The arguments that a docstring lists, in order."""
    text = inspect.getdoc(thing).split("Args:\n")[1]
    text = re.split(r"\n(?=\S)", text)[0]
    return [name for line in re.findall(r"^  (\w[\w, ]*):", text, re.M) for name in line.split(", ")]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_method_takes_its_documented_arguments_by_name(method):
    parameters = inspect.signature(method).parameters
    assert documented(method) == list(parameters)
    first, *others = parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {one.kind for one in others} <= {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "name",
    ["minimize", "sweep", "memory_estimate", "Sampling", "Stop", "Checkpoint", "Problem", "argmin", "mean"],
)
def test_a_function_takes_its_documented_arguments(name):
    assert documented(getattr(bx, name)) == list(inspect.signature(getattr(bx, name)).parameters)


def test_minimize_has_at_most_sixteen_parameters():
    assert len(inspect.signature(bx.minimize).parameters) <= 16


def test_a_recipe_without_its_choices_cannot_be_made():
    with pytest.raises(TypeError):
        bx.Recipe(upper_step=0.1, alpha=0.1, beta=0.1)
    with pytest.raises(TypeError):
        bx.AbstractSolver()
