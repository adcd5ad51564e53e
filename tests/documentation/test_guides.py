"""Runs each how-to guide from top to bottom in a folder of its own: a Python block becomes the file
that its first line names, a block of commands runs, and each line of a block of text is printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap_stores import free_port

GUIDES = sorted((Path(__file__).parents[2] / "docs/guides").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MOST_LINES = 60
PORT = "29500"
"""The port of the guides' commands. A test takes a free port instead."""


def run(commands: str, folder: Path) -> str:
    """Runs commands in a folder, with this environment's programs. Returns what they print."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_printed(expected: str, printed: str) -> None:
    """Requires each line, in any order. `...` stands for any part of a line."""
    for line in expected.splitlines():
        parts = [r"\s+".join(map(re.escape, part.split())) for part in line.split("...")]
        assert re.search(".*".join(parts), printed), (line, printed)


def test_the_planner_page_begins_with_the_output_of_its_first_command(tmp_path: Path) -> None:
    page = (GUIDES[0].parents[1] / "planner.md").read_text()
    blocks = BLOCK.findall(page)
    (command, words), (output, text) = blocks[:2]
    assert (command, output) == ("sh", "text")
    assert_printed(text, run(words, tmp_path))
    mean = re.search(
        r"^\| mean of the (\d+) sources \| (\d+) \| [^|]+ \| ([^|]+) \| [^|]+ \| ([^|]+) \|",
        page,
        re.M,
    )
    assert mean is not None
    for figure in mean.groups():
        assert figure in page.partition("| option")[0].replace(",", ""), mean[0]


def guides() -> list[Any]:
    """Returns the guides, marked with what they need: this package from pip, or openssl."""
    return [pytest.param(path, id=path.stem, marks=list(marks_of(path))) for path in GUIDES]


def marks_of(guide: Path) -> Iterator[Any]:
    text = guide.read_text()
    if "pip install" in text:
        yield pytest.mark.optional
    if "openssl " in text:
        yield pytest.mark.program("openssl")


@pytest.mark.parametrize("guide", guides())
def test_guide_runs_from_top_to_bottom(guide: Path, tmp_path: Path) -> None:
    text = guide.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    printed, port = "", str(free_port())
    for kind, block in BLOCK.findall(text):
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name is not None, "expected the name of the file in the first line"
            (tmp_path / name[1]).write_text(block.replace(PORT, port))
        elif kind == "sh" and block.startswith("pip install "):
            for package in block.split()[2:]:
                pytest.importorskip(package)
        elif kind == "sh":
            printed = run(block.replace(PORT, port), tmp_path)
        else:
            assert_printed(block, printed)
    assert printed
