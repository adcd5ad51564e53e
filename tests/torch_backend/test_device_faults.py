"""Ranks that are killed while streams of other ranks wait for their devices."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from connection_managers import wait_until
from torch_backend.process_memory import ProcessMemory
from unisono.errors import PeerLostError
from unisono.torch_backend.device.device_group import over_peer_memory
from unisono.types import ReduceOp
from worlds.forked import join_all, start_ranks

pytestmark = pytest.mark.torch
RANKS, SURVIVOR, KILLED = 2, 0, 1


@pytest.mark.parametrize("kind", ["collective", "message", "answer"])
def test_stream_goes_on_after_a_rank_was_killed(kind, tmp_path):
    processes = start_ranks(__file__, "run", RANKS, kind, folder=tmp_path)
    try:
        wait_until((tmp_path / "waits").exists, in_s=60)
        processes[KILLED].kill()
    finally:
        join_all(processes)
    log = (tmp_path / f"{SURVIVOR}.log").read_text()
    assert (tmp_path / "went on").exists(), log


def run(rank, kind, folder):
    dist.init_process_group(
        "unisono",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    host = dist.group.WORLD.communicator.group(list(range(RANKS)))
    device = ProcessMemory(host, [SURVIVOR] * RANKS)
    comm = over_peer_memory(host, device)
    x = torch.full((100,), 1.0 + rank)
    comm.all_reduce(x, ReduceOp.SUM)
    device.synchronize(device.mark())
    assert x.tolist() == [3.0] * 100
    time.sleep(0.5)  # the watch has ended its work
    if rank == KILLED:
        device.enqueue(lambda: time.sleep(300))  # the device never gets to the flag
    calls = {
        "collective": lambda: comm.all_reduce(x, ReduceOp.SUM),
        "message": lambda: comm.send(x, SURVIVOR) if rank == KILLED else comm.recv(x, KILLED),
        "answer": lambda: comm.recv(x, SURVIVOR) if rank == KILLED else comm.send(x, KILLED),
    }
    calls[kind]()
    if rank == KILLED:
        time.sleep(300)
    mark = device.mark()
    assert not mark.wait(1)  # the stream waits for the other rank's device
    (folder / "waits").touch()
    device.synchronize(mark)
    with pytest.raises(PeerLostError):
        comm.all_reduce(x, ReduceOp.SUM)
    (folder / "went on").touch()
