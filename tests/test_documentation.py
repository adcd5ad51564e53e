"""Runs the documentation: the README's code and commands, docstrings, and examples."""

from __future__ import annotations

import difflib
import doctest
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bootstrap_stores import free_port
from worlds.forked_program import run_program, torchrun

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

_TIMEOUT_S = 110
COMPARED = ("train_alone.py", "train_divided.py")
"""Examples that a test of their own runs."""

# These commands set up whole environments. CI runs them separately.
_WHOLE_RUNS = ("make demo", "make test")


def blocks(language: str, text: str = README) -> list[str]:
    """Returns the fenced code blocks of a page in one language. The default page is the README."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(command: list[str], **environment: str) -> str:
    """Runs a command in the checkout, with this interpreter's programs first on the path. Returns
    the command's output.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_readme_code_runs(number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("python")[number])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run([sys.executable, str(program)], RANK="0", WORLD_SIZE="1", **address)


def page_blocks() -> list[Any]:
    """Returns the Python code blocks of the other pages, by page and number."""
    docs = ROOT / "docs"
    pages = sorted([*docs.glob("*.md"), *docs.glob("parallel/*.md")])
    return [
        pytest.param(
            str(p.relative_to(docs)), i, marks=[pytest.mark.optional] if p.stem == "lab" else []
        )
        for p in pages
        for i in range(len(blocks("python", p.read_text())))
    ]


@pytest.mark.parametrize(("page", "number"), page_blocks())
def test_page_code_runs(page: str, number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("python", (ROOT / "docs" / page).read_text())[number])
    run_program(program, folder=ROOT, log=tmp_path / "log", timeout_s=_TIMEOUT_S)


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).splitlines()
    plain = [line.split("#")[0].strip() for line in lines]
    return [line for line in plain if line and line not in _WHOLE_RUNS]


def marked_commands() -> list[Any]:
    """Returns the commands. A command with `--hosts` is skipped where a lab is not available."""
    return [
        pytest.param(command, marks=[pytest.mark.lab] if "--hosts" in command else [])
        for command in commands()
    ]


@pytest.mark.parametrize("command", marked_commands())
def test_readme_command_runs(command: str) -> None:
    program, *arguments = command.split()
    assert program.startswith(".venv/bin/"), "README commands run in the checkout's environment"
    run([str(Path(sys.executable).parent / Path(program).name), *arguments])


def test_readme_names_only_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_architecture_names_only_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in re.findall(r"`((?:csrc/|[a-z_]+/)[a-z_]+\.(?:py|h|cc))`", text):
        assert (ROOT / name).exists() or (ROOT / "src/unisono" / name).exists(), name


def modules_with_examples() -> list[str]:
    """Returns modules whose docstrings have examples, by name. With a file's path, `python -m
    doctest` would import a second copy of the module.
    """
    source = ROOT / "src"
    found = (path for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text())
    parts = (path.relative_to(source).with_suffix("").parts for path in found)
    return [".".join(part for part in names if part != "__init__") for names in parts]


STARTS_RANKS = {f"unisono.parallel.divisible.{name}" for name in ("exchanges", "parameter_block")}
"""Modules whose examples start ranks that use torch."""
DOCTEST = """
import doctest, importlib
if __name__ == "__main__":
    result = doctest.testmod(importlib.import_module("{name}"))
    assert result.attempted > 0 and result.failed == 0
"""


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_run(name: str, tmp_path: Path) -> None:
    if name.split(".")[1:2] in (["torch_backend"], ["train"]):
        pytest.importorskip("torch")
    if name in STARTS_RANKS:
        program = tmp_path / "program.py"
        program.write_text(DOCTEST.format(name=name))
        run_program(program, folder=ROOT, log=tmp_path / "log", timeout_s=_TIMEOUT_S)
        return
    result = doctest.testmod(importlib.import_module(name), report=False)
    assert result.attempted > 0
    assert result.failed == 0


def examples() -> list[Any]:
    """Returns the example programs that the README's commands do not run."""
    named = " ".join(commands())
    paths = sorted((ROOT / "examples").glob("*.py"))
    return [
        pytest.param(path.name, marks=[pytest.mark.optional] if needed_by(path) else [])
        for path in paths
        if f"examples/{path.name}" not in named and path.name not in COMPARED
    ]


def needed_by(example: Path) -> str | None:
    """Returns the package that an example needs besides those of the development environment."""
    found = re.search(r"^Needs: (\w+)$", example.read_text().split('"""')[1], re.MULTILINE)
    return found and found[1]


@pytest.mark.parametrize("example", examples())
def test_example_runs(example: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / example
    if needed := needed_by(path):
        pytest.importorskip(needed)
    run_example(path, tmp_path)


def run_example(path: Path, folder: Path) -> str:
    """Runs an example as its description says, and returns its output."""
    description = path.read_text().split('"""')[1]
    given: dict[str, Any] = {"folder": ROOT, "log": folder / path.name, "timeout_s": _TIMEOUT_S}
    if "torchrun" not in description:
        return run_program(path, **given)
    ranks = re.search(r"--nproc-per-node (\d)", description)
    assert ranks is not None, "expected the number of ranks in the description's command"
    restarts = 1 if "--max-restarts" in description else 0
    return torchrun(path, ranks=int(ranks[1]), restarts=restarts, **given)


def test_few_lines_change_from_one_process_to_three_kinds_of_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    alone, divided = (ROOT / "examples" / name for name in COMPARED)
    programs = [each.read_text().split('"""')[2].splitlines() for each in (alone, divided)]
    changes = [line for line in difflib.ndiff(*programs) if line[0] == "+" and line[1:].strip()]
    assert len(changes) <= 6, changes
    texts = (run_example(each, tmp_path) for each in (alone, divided))
    losses, printed = (Counter(re.findall(r"\d\.\d{9}", text)) for text in texts)
    assert len(losses) == 8 and printed == dict.fromkeys(losses, 8)
