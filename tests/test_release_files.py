"""The release workflow and the conda recipe: files that only other machines run."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import unisono

yaml = pytest.importorskip("yaml")
jinja2 = pytest.importorskip("jinja2")

_ROOT = Path(__file__).parents[1]
_PYPROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())
_WORKFLOWS = sorted((_ROOT / ".github" / "workflows").glob("*.yml"))
_PROGRAMS = {"pip", "unisono"}
"""What `actions/setup-python` and the installed wheel put on the PATH."""


def _steps(workflow: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns each step of a workflow, with the name of its job."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [(name, step) for name, job in jobs.items() for step in job["steps"]]


def _commands(workflow: Path) -> list[list[str]]:
    """Returns the words of each command that a workflow runs."""
    found = []
    for _, step in _steps(workflow):
        for line in re.split(r"&&|\n", step.get("run", "")):
            words = shlex.split(line, comments=True)
            if words:
                found.append(words)
    return found


def _make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("workflow", _WORKFLOWS, ids=lambda path: path.stem)
def test_each_command_of_a_workflow_exists(workflow: Path) -> None:
    commands = _commands(workflow)
    installed = {words[-1] for words in commands if words[1:4] == ["-m", "pip", "install"]}
    for program, *arguments in commands:
        if program == "make":
            assert set(arguments) <= _make_targets(), arguments
        elif program.startswith(".venv/bin/"):
            assert ["make", "wheels"] in commands, "only a make target makes .venv"
            assert program.removeprefix(".venv/bin/") in installed | {"python"}
        else:
            assert program in _PROGRAMS, program
        files = [word for word in arguments if "/" in word and "*" not in word]
        for word in files:
            assert word.startswith(("dist/", "fits/")) or (_ROOT / word).exists(), word


@pytest.mark.parametrize("workflow", _WORKFLOWS, ids=lambda path: path.stem)
def test_each_job_uses_what_it_has(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    jobs = content["jobs"]
    uploaded = {
        step["with"]["name"]: job
        for job, step in _steps(workflow)
        if step.get("uses", "").startswith("actions/upload-artifact@")
    }
    for name, job in jobs.items():
        needed = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        assert set(needed) <= set(jobs), name
        steps = [step.get("uses", "").partition("@")[0] for step in job["steps"]]
        runs_project = any("make " in step.get("run", "") for step in job["steps"])
        assert ("actions/checkout" in steps) >= runs_project, name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"]), step["uses"]
            if step.get("uses", "").startswith("actions/download-artifact@"):
                assert step["with"]["name"] in uploaded, step
                assert _is_before(uploaded[step["with"]["name"]], name, jobs), name


def _is_before(earlier: str, job: str, jobs: dict[str, Any]) -> bool:
    """Returns True if a job starts only after `earlier` has ended."""
    needed = jobs[job].get("needs", [])
    names = [needed] if isinstance(needed, str) else needed
    return earlier in names or any(_is_before(earlier, name, jobs) for name in names)


def test_the_release_tests_each_python_that_a_wheel_serves() -> None:
    release = yaml.safe_load((_ROOT / ".github" / "workflows" / "release.yml").read_text())
    tested = release["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    stated = [each for each in _PYPROJECT["project"]["classifiers"] if each.startswith(prefix)]
    assert [f"{prefix}{version.removeprefix('3.')}" for version in tested] == stated
    built = next(
        step["with"]["python-version"].split()
        for step in release["jobs"]["build"]["steps"]
        if step.get("uses", "").startswith("actions/setup-python@")
    )
    assert sorted(built) == ["3.11", "3.12"]  # those of wheels/build.py


def _recipe() -> dict[str, Any]:
    """Returns the recipe as it is for a machine with these compilers."""
    text = (_ROOT / "recipe" / "recipe.yaml").read_text()
    context = yaml.safe_load(text)["context"]
    environment = jinja2.Environment(
        variable_start_string="${{", variable_end_string="}}", undefined=jinja2.StrictUndefined
    )
    rendered = environment.from_string(text).render(
        **context, PYTHON="python", compiler=lambda name: name, stdlib=lambda name: name
    )
    found: dict[str, Any] = yaml.safe_load(rendered)
    return found


def _requirements(listed: list[str]) -> set[str]:
    return {re.sub(r"\s", "", requirement) for requirement in listed}


def test_the_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe, project = _recipe(), _PYPROJECT["project"]
    assert recipe["package"] == {"name": "unisono", "version": unisono.__version__}
    run = _requirements(recipe["requirements"]["run"])
    assert run == _requirements(project["dependencies"]) | {"python"}
    build = _requirements(recipe["requirements"]["host"]) - {"python", "pip"}
    assert build == _requirements(_PYPROJECT["build-system"]["requires"])
    tools = _requirements(recipe["requirements"]["build"])
    assert f"cmake{_PYPROJECT['tool']['scikit-build']['cmake']['version']}" in tools
    assert {"cxx", "c", "ninja"} < tools


def test_the_recipe_names_files_and_modules_that_exist() -> None:
    recipe = _recipe()
    assert (_ROOT / "recipe" / recipe["source"]["path"]).resolve() == _ROOT
    assert recipe["about"]["license"] == _PYPROJECT["project"]["license"]
    assert recipe["about"]["license_file"] == _PYPROJECT["project"]["license-files"]
    for name in recipe["about"]["license_file"]:
        assert (_ROOT / name).is_file()
    (imports, script) = recipe["tests"]
    assert imports["python"]["imports"] == ["unisono", "unisono._native"]
    assert shlex.split(script["script"])[0] in _PYPROJECT["project"]["scripts"]
    assert "-m pip install ." in recipe["build"]["script"]
