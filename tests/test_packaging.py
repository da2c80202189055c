"""What a release says about itself agrees with itself: version, changelog, floors, workflows, citation."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import check_release

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-03-01

### Added

- Something.

## [0.1.0] - 2026-01-31

- The first release.
"""


def test_a_tag_that_agrees_with_version_and_changelog_is_released():
    assert check_release.problems("v0.2.0", "0.2.0", CHANGELOG) == []


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "expected"),
    [
        ("v0.2.1", "0.2.0", CHANGELOG, "expected the tag v0.2.0"),
        ("0.2.0", "0.2.0", CHANGELOG, "expected the tag v0.2.0"),
        ("v0.3.0", "0.3.0", CHANGELOG, r"no section '## \[0.3.0\]"),
        ("v0.1.0", "0.1.0", CHANGELOG, "the newest release is 0.2.0, expected 0.1.0"),
        ("v0.2.0", "0.2.0", CHANGELOG.replace(" - 2026-03-01", ""), "YYYY-MM-DD', got"),
        ("v0.2.0", "0.2.0", CHANGELOG.replace("2026-03-01", "2026-03-32"), "YYYY-MM-DD', got"),
        (
            "v0.2.0",
            "0.2.0",
            CHANGELOG.replace("### Added\n\n- Something.\n", ""),
            "section of 0.2.0 is empty",
        ),
        ("v0.2.0", "0.2.0", CHANGELOG.replace("ed]\n", "ed]\n\n- More.\n"), "still lists changes"),
    ],
)
def test_a_tag_that_disagrees_is_rejected_with_the_reason(tag, version, changelog, expected):
    (problem,) = check_release.problems(tag, version, changelog)
    assert re.search(expected, problem)


def test_the_command_reads_version_and_changelog_of_this_checkout(capsys):
    assert check_release.main(["v999.0"]) == 1
    assert "expected the tag v" in capsys.readouterr().err
    assert check_release.main([]) == 2


def floors(requirements):
    """The least version of each requirement, by name; bilevax's own extras apart."""
    parsed = map(Requirement, requirements)
    return {
        need.name.lower(): Version(bound.version)
        for need in parsed
        if need.name != "bilevax"
        for bound in need.specifier
        if bound.operator == ">="
    }


def test_make_test_oldest_installs_the_floors_of_pyproject():
    lines = (ROOT / "scripts" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    on_oldest_python = {"python_version": PROJECT["requires-python"].removeprefix(">=")}
    oldest = {
        pin.name.lower(): Version(str(pin.specifier).removeprefix("=="))
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(on_oldest_python)
    }
    extras = PROJECT["optional-dependencies"]
    used = ("diagnostics", "experiments", "checkpoints", "flax", "tensorboard", "data", "cli")
    expected = floors(PROJECT["dependencies"]) | floors(need for extra in used for need in extras[extra])
    assert {name: oldest.get(name) for name in expected} == expected


def test_every_supported_python_is_classified_and_tested():
    listed = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == listed
    assert PROJECT["requires-python"] == f">={listed[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_call_commands_that_exist(path):
    text = path.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in jobs.values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(jobs)
        if "steps" not in job:
            assert (ROOT / job["uses"]).exists()
            continue
        for step in job["steps"]:
            assert re.search(r"@(release/)?v\d+$", step.get("uses", "@v1"))
            command = step.get("run", "")
            targets = job.get("strategy", {}).get("matrix", {}).get("command", [])
            called = targets if "matrix.command" in command else re.findall(r"^make (\S+)", command)
            for target in called:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for script in re.findall(r"python (scripts/\S+)", command):
                assert (ROOT / script).exists()


def test_the_citation_names_the_paper_as_the_readme_does():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    paper = citation["preferred-citation"]
    authors = ", ".join(f"{who['given-names']} {who['family-names']}" for who in paper["authors"])
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace(">", "").split())
    assert f"{authors}. *{paper['title']}.* {paper['conference']['name']}, {paper['year']}" in readme
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]
