"""The error of a build without a C++ compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PROJECT = Path(__file__).parents[1]
_BIN = Path(sys.executable).parent


@pytest.mark.skipif(not (_BIN / "cmake").exists(), reason="cmake is not in this environment")
def test_the_error_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    command = [_BIN / "cmake", "-S", _PROJECT, "-B", tmp_path, "-G", "Ninja"]
    command.append(f"-DCMAKE_MAKE_PROGRAM={_BIN / 'ninja'}")
    environment = {**os.environ, "CXX": "/nowhere/g++"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    for part in ("no C++ compiler was found (CXX is '/nowhere/g++')", "apt install g++"):
        assert part in said


def test_includes_keep_the_order_of_the_folders() -> None:
    rooms = [
        *("core", "kernels", "memory", "transport", "p2p", "execution", "one_sided"),
        *("capi", "bind"),
    ]
    sources = [p for room in rooms for p in (_PROJECT / "csrc" / room).iterdir()]
    for source in (p for p in sources if p.suffix in (".h", ".cc")):
        room = rooms.index(source.parent.name)
        included = re.findall(r'#include "(\w+)/', source.read_text())
        above = [name for name in included if name in rooms[room + 1 :]]
        assert not above, f"{source.relative_to(_PROJECT)} includes files of {above}, above it"
