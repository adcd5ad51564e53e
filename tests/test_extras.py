"""A missing optional package ends commands and public functions with one line: the cure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HIDING = """
import os, sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split(","):
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
_TORCH = "pip install 'unisono[torch]'"
_EVERYTHING = "torch,sklearn,matplotlib,networkx,mpi4py,scipy,pynvml,cuda"


def _run(tmp_path: Path, code: str, hidden: str = _EVERYTHING) -> subprocess.CompletedProcess[str]:
    """Runs a program from which packages are hidden, also from the processes that it starts."""
    (tmp_path / "sitecustomize.py").write_text(_HIDING)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HIDDEN": hidden}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def _command(words: str) -> str:
    start = "import sys; from unisono.commands.main import main"
    return f"{start}; sys.argv[1:] = {words.split()}; main()"


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        ("import unisono; unisono.parallel.data_parallel", _TORCH),
        ("from unisono.parallel import parallelize", _TORCH),
        ("import unisono.torch_backend", _TORCH),
        ("from unisono.controller import ProcessGroupTransfer as T; T()", _TORCH),
        (
            "from unisono import topology as t; t.to_networkx(t.star(3))",
            "pip install 'unisono[graph]'",
        ),
    ],
)
def test_a_function_names_the_extra_that_it_needs(tmp_path: Path, code: str, cure: str) -> None:
    last = _run(tmp_path, code).stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ") and last.endswith(cure), last


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("train text -n 2", _TORCH),
        ("train moe -n 2", _TORCH),
        ("train digits -n 2", "pip install 'unisono[train]'"),
    ],
)
def test_a_command_ends_in_one_line(tmp_path: Path, words: str, cure: str) -> None:
    done = _run(tmp_path, _command(words))
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert lines[0].endswith(cure)


def test_an_unforeseen_missing_package_is_one_line_too(tmp_path: Path) -> None:
    code = (
        "import importlib; m = importlib.import_module('unisono.commands.main')\n"
        "def app(**_): import networkx\n"
        "m.app = app\n"
        "m.main()"
    )
    lines = _run(tmp_path, code).stderr.strip().splitlines()
    cure = "pip install 'unisono[graph]'"
    assert lines == [f"unisono: this command needs networkx, not installed here: {cure}"]


@pytest.mark.torch
def test_the_text_task_needs_only_torch(tmp_path: Path) -> None:
    words = "train text -n 1 --steps 1 --backends unisono --batch 2"
    done = _run(tmp_path, _command(words), "sklearn,scipy,matplotlib,mpi4py")
    assert done.returncode == 0, done.stderr
