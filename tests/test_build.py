"""What the build says where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROJECT = Path(__file__).parents[1]
_BIN = Path(sys.executable).parent


@pytest.mark.skipif(not (_BIN / "cmake").exists(), reason="cmake is not in this environment")
def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    command = [_BIN / "cmake", "-S", _PROJECT, "-B", tmp_path, "-G", "Ninja"]
    command.append(f"-DCMAKE_MAKE_PROGRAM={_BIN / 'ninja'}")
    environment = {**os.environ, "CXX": "/nowhere/g++"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    for part in ("no C++ compiler was found (CXX is '/nowhere/g++')", "apt install g++"):
        assert part in said
