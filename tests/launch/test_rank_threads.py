"""Ranks of `unisono.run` share the host's cores: torch has one thread for each core of a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.launch.rank_threads import part_of

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

def cores():
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]

if __name__ == "__main__":
    print(json.dumps(unisono.run({call}, ranks=2)))
"""


def run(folder: Path, at_the_top: str, call: str = "threads", **environment: str) -> Any:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(at_the_top=at_the_top, call=call))
    others = {name: each for name, each in os.environ.items() if name != "OMP_NUM_THREADS"}
    output = subprocess.run(
        [sys.executable, str(program)],
        env=others | environment, capture_output=True, text=True, check=True, timeout=100,
    ).stdout  # fmt: skip
    return json.loads(output)


@pytest.mark.parametrize("at_the_top", ["import torch", ""], ids=["torch first", "torch later"])
def test_ranks_share_the_cores(at_the_top: str, tmp_path: Path) -> None:
    part = max(1, CORES // 2)
    assert run(tmp_path, at_the_top) == [[part, str(part)]] * 2


def test_a_programs_own_number_stays(tmp_path: Path) -> None:
    found = run(tmp_path, "import torch", OMP_NUM_THREADS=str(CORES))
    assert found == [[CORES, str(CORES)]] * 2


def test_bound_ranks_stay_on_their_cores(tmp_path: Path) -> None:
    found = run(tmp_path, "import torch", "cores, bind=True")
    usable = sorted(os.sched_getaffinity(0))
    for rank, threads in enumerate(found):
        assert threads and threads == [sorted(part_of(usable, rank, 2))] * len(threads)


@pytest.mark.parametrize("cores", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_are_equal_and_disjoint_if_each_rank_has_a_core(cores: int, ranks: int) -> None:
    numbers = list(range(10, 10 + cores))
    parts = [part_of(numbers, rank, ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {max(1, cores // ranks)}
    used = [core for part in parts for core in part]
    most = -(-ranks // cores) if ranks > cores else 1
    assert set(used) <= set(numbers) and max(map(used.count, used)) == most


def test_an_executor_binds_its_own_workers() -> None:
    with ThreadPoolExecutor() as executor, pytest.raises(ValueError, match="bind its workers"):
        unisono.run(max, ranks=2, args=(1, 2), executor=executor, bind=True)
