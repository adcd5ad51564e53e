"""The example that continues from its newest checkpoint after torchrun has started ranks again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootstrap_stores import free_port
from worlds.forked_program import torchrun

pytestmark = pytest.mark.torch
EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_training.py"
AGENT = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"]


def start(log: Path, *words: str, **environment: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [*AGENT, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def end_node(agent: subprocess.Popen[bytes]) -> None:
    """Kills an agent and its ranks, which are in sessions of their own."""
    if agent.poll() is None:
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, ranks)):
            os.kill(pid, signal.SIGKILL)
    agent.wait(10)


def steps_in(text: str) -> list[tuple[int, int]]:
    """Returns the number of ranks of each step that the program has printed, and the step."""
    found = re.findall(r"(\d+) ranks, step (\d+):", text)
    return [(int(ranks), int(step)) for ranks, step in found]


def test_a_killed_rank_and_another_number_of_ranks(tmp_path: Path) -> None:
    program = [EXAMPLE, "--folder", str(tmp_path / "checkpoints")]
    given = {"restarts": 1, "folder": tmp_path, "timeout_s": 50}
    text = torchrun(*program, ranks=2, log=tmp_path / "2", **given)
    assert "exitcode: -9" in text
    assert steps_in(text) == [(2, step) for step in range(4, 8)]  # saved after steps 2 and 4
    more = ["--steps", "11", "--lost-in-step", "9"]
    text = torchrun(*program, *more, ranks=1, log=tmp_path / "1", **given)
    assert steps_in(text) == [(1, 8), (1, 9), (1, 10)]


@pytest.mark.slow
def test_a_lost_node(tmp_path: Path) -> None:
    """Two nodes of two ranks lose one of them, and go on with two ranks."""
    folder = tmp_path / "checkpoints"
    elastic = [
        *("--nnodes", "1:2", "--max-restarts", "3", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--rdzv-id", "lost", "--rdzv-conf"),
        "last_call_timeout=5,join_timeout=90,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]
    nodes = []
    for number in range(2):
        nodes.append(
            start(
                tmp_path / f"{number}", *elastic, "--nproc-per-node", "2", str(EXAMPLE),
                "--folder", str(folder), "--steps", "300", "--lost-in-step", "-1",
                UNISONO_HOST_ID=f"node{number}", UNISONO_INTERFACE="=lo",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
        )  # fmt: skip
    deadline = time.monotonic() + 90
    while not (folder / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    end_node(nodes[1])
    try:
        assert nodes[0].wait(110) == 0, (tmp_path / "0").read_text()
    finally:
        end_node(nodes[0])
    found = steps_in((tmp_path / "0").read_text())
    assert found[0][0] == 2 and found[0][1] >= 2 and found[-1] == (2, 299), found
