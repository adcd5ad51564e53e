"""Failures in torch programs: every rank gets a precise error quickly."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from connection_managers import wait_until
from time_limits import limit_s
from unisono.controller import Job, ProcessGroupTransfer
from unisono.errors import AbortedError, CollectiveTimeoutError, MismatchError, PeerLostError
from unisono.parallel import Layout, TrainingMesh
from worlds.forked import kill_last, start_ranks

pytestmark = pytest.mark.torch
RANKS = 2
DETECTION_S = 1.0


def test_failures(outcome):
    outcome.require_success()


def require_mismatch(call):
    """Asserts that `call(group)` raises MismatchError within a second on a new group, and that
    later calls also raise it.
    """
    group = dist.new_group()
    dist.barrier(group)
    started = time.monotonic()
    with pytest.raises(MismatchError):
        call(group)
    assert time.monotonic() - started < limit_s(DETECTION_S)
    with pytest.raises(MismatchError):
        dist.barrier(group)


def own_mismatch_of_length(world):
    require_mismatch(lambda group: dist.all_reduce(torch.ones(4 + world.rank), group=group))


def own_mismatch_of_type(world):
    dtype = (torch.float32, torch.float64)[world.rank]
    require_mismatch(lambda group: dist.all_reduce(torch.ones(4, dtype=dtype), group=group))


def own_mismatch_of_reduction(world):
    op = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[world.rank]
    require_mismatch(lambda group: dist.all_reduce(torch.ones(4), op, group))


def own_mismatch_of_root(world):
    require_mismatch(lambda group: dist.broadcast(torch.ones(4), world.rank, group))


def own_mismatch_of_operation(world):
    def call(group):
        if world.rank == 0:
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.barrier(group)

    require_mismatch(call)


def own_mismatch_in_an_async_call(world):
    def call(group):
        dist.all_reduce(torch.ones(4 + world.rank), group=group, async_op=True).wait()

    require_mismatch(call)


def own_mismatch_through_a_functional_collective(world):
    functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))

    def call(group):
        functional.wait_tensor(functional.all_reduce(torch.ones(4 + world.rank), "sum", group))

    require_mismatch(call)


def own_mismatch_through_a_future(world):
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(4 + world.rank), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="MismatchError"):
        work.get_future().wait()


def own_mismatch_through_ddp(world):
    group = dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if world.rank == 0:
        with pytest.raises((MismatchError, RuntimeError), match="broadcast"):
            model(torch.ones(2, 4)).sum().backward()
    else:
        with pytest.raises(MismatchError, match="all_reduce"):
            dist.broadcast(torch.ones(20), 0, group)


def own_late_rank_is_named(world):
    group = dist.new_group()
    dist.barrier(group)
    if world.rank == 0:
        group.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(
            CollectiveTimeoutError, match=r"timeout after 0\.5 s on rank 0: rank 1 "
        ):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


def own_late_sender_is_named(world):
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    dist.barrier(group)
    if world.rank == 0:
        late = r"recv from rank 1 .*timeout after 0\.5 s on rank 0: .*rank 1"
        with pytest.raises(CollectiveTimeoutError, match=late):
            dist.recv(torch.ones(4), 1, group)
    dist.barrier()


def own_axes_have_the_timeout_of_the_default_group(world):
    """Tests that a late rank is named on the group of an axis after the default group's timeout,
    not after torch's default of 30 minutes.
    """
    usual = timedelta(seconds=dist.group.WORLD.communicator.timeout_s)
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    mesh = TrainingMesh(Layout(dp=2))
    transfer = ProcessGroupTransfer()
    dist.group.WORLD.set_timeout(usual)
    dist.barrier()
    if world.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"timeout after 3 s on rank 0: rank 1 "):
            dist.all_reduce(torch.ones(4), group=mesh.group("dp"))
        with pytest.raises(CollectiveTimeoutError, match=r"timeout after 3 s on rank 0: rank 1 "):
            transfer.begin(Job(operation="all_reduce", arrays=(torch.ones(4),))).wait(20)
    dist.barrier()  # rank 1 is late until here
    mesh.close()
    transfer.close()


def own_timeout_of_one_barrier(world):
    group = dist.new_group()
    if world.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"rank\D*1"):
            group.monitored_barrier(timedelta(seconds=0.5))
    dist.barrier()


def own_wait_may_time_out_before_the_work(world):
    if world.rank == 1:
        time.sleep(0.5)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if world.rank == 0:
        with pytest.raises(TimeoutError):
            work.wait(timedelta(seconds=0.05))
    work.wait()


def own_abort_ends_pending_calls(world):
    group = dist.new_group()
    dist.barrier(group)
    if world.rank == 0:
        time.sleep(0.2)
        dist.distributed_c10d._abort_process_group(group)
    else:
        with pytest.raises(AbortedError, match="rank 0"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


def own_failed_group_can_be_destroyed_and_replaced(world):
    group = dist.new_group()
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(4 + world.rank), group=group)
    dist.destroy_process_group(group)
    dist.barrier(dist.new_group())


def own_leaving_ends_pending_futures(world):
    group = dist.new_group()
    dist.barrier(group)
    if world.rank == 0:
        threads = set(threading.enumerate())
        future = dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future()
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="AbortedError"):
            future.wait()
        assert not set(threading.enumerate()) - threads
    dist.barrier()


def report(rank, folder, calls):
    """Writes the outcome and the time of each call to a file."""
    said = []
    for call in calls:
        try:
            call()
            said.append([None, "", time.time()])
        except Exception as error:
            said.append([type(error).__name__, str(error), time.time()])
    (folder / f"{rank}.json").write_text(json.dumps(said))


def be_killed(folder):
    (folder / "ready").touch()
    time.sleep(60)


def join(rank, size, folder):
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def kill_last_rank(function: str, ranks: int, folder: Path) -> tuple[float, dict[int, list]]:
    """Runs `function` on all ranks, and kills the last rank when it is ready. Returns the time of
    the kill and the reports.
    """
    processes = start_ranks(__file__, function, ranks, ranks, folder=folder)
    wait_until((folder / "ready").exists, 60)
    killed = kill_last(processes, alive_s=0.5)
    paths = {rank: folder / f"{rank}.json" for rank in range(ranks)}
    return killed, {r: json.loads(path.read_text()) for r, path in paths.items() if path.exists()}


def survive_in_three_calls(rank, size, folder):
    join(rank, size, folder)
    groups = [dist.new_group() for _ in range(3)]
    dist.barrier()
    if rank == 2:
        be_killed(folder)
    reducing = dist.all_reduce(torch.ones(4), group=groups[0], async_op=True)
    receiving = dist.irecv(torch.ones(4), 2, group=groups[1])
    calls = [lambda: dist.all_reduce(torch.ones(4)), reducing.wait, receiving.wait]
    report(rank, folder, calls)


def test_killed_rank_is_named_by_every_survivor(tmp_path):
    killed, said = kill_last_rank("survive_in_three_calls", 3, tmp_path)
    assert set(said) == {0, 1}
    for entries in said.values():
        for kind, text, ended in entries:
            assert kind == PeerLostError.__name__
            assert "rank 2" in text
            assert ended - killed < limit_s(DETECTION_S)


def survive_in_ddp(rank, size, folder):
    join(rank, size, folder)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    if rank == 1:
        be_killed(folder)
    report(rank, folder, [lambda: model(torch.ones(2, 4)).sum().backward()])


def test_killed_rank_is_named_through_ddp(tmp_path):
    killed, said = kill_last_rank("survive_in_ddp", 2, tmp_path)
    ((kind, text, ended),) = said[0]
    assert "PeerLostError: rank 1" in f"{kind}: {text}"
    assert ended - killed < limit_s(DETECTION_S)
