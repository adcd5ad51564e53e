"""Ranks of `unisono.run` share the host's cores: torch has one thread for each core of a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch
CORES = len(os.sched_getaffinity(0))

PROGRAM = """
import json, os
{at_the_top}
import unisono

def threads():
    import torch
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

if __name__ == "__main__":
    print(json.dumps(unisono.run(threads, ranks=2)))
"""


def run(folder: Path, at_the_top: str, **environment: str) -> list[list[int | str]]:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(at_the_top=at_the_top))
    others = {name: each for name, each in os.environ.items() if name != "OMP_NUM_THREADS"}
    output = subprocess.run(
        [sys.executable, str(program)],
        env=others | environment, capture_output=True, text=True, check=True, timeout=100,
    ).stdout  # fmt: skip
    found: list[list[int | str]] = json.loads(output)
    return found


@pytest.mark.parametrize("at_the_top", ["import torch", ""], ids=["torch first", "torch later"])
def test_ranks_share_the_cores(at_the_top: str, tmp_path: Path) -> None:
    part = max(1, CORES // 2)
    assert run(tmp_path, at_the_top) == [[part, str(part)]] * 2


def test_a_programs_own_number_stays(tmp_path: Path) -> None:
    found = run(tmp_path, "import torch", OMP_NUM_THREADS=str(CORES))
    assert found == [[CORES, str(CORES)]] * 2
