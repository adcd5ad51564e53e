"""Our calls are visible in torch's profiler and flight recorder."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from unisono import Communicator
from unisono.errors import CollectiveTimeoutError
from unisono.torch_backend import all_gather_single, flight_recorder, reduce_scatter_single
from unisono.torch_backend.history import History
from worlds.torch_version import needs_torch

pytestmark = pytest.mark.torch
RANKS = 2

# The variable must be set before this module's groups are made. pytest's own process makes no
# groups.
if multiprocessing.parent_process() is not None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "40"


def test_visible(outcome):
    outcome.require_success()


def spans_of(call):
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    return [event for event in profile.events() if "unisono" in event.name]


def uneven_all_to_all(rank, group=None):
    """Sends 1 element to rank 0 and 2 elements to rank 1."""
    sizes = [1, 2]
    dist.all_to_all_single(
        torch.empty(2 * sizes[rank]), torch.ones(3), [sizes[rank]] * 2, sizes, group=group
    )


def own_spans_of_blocking_calls(world):
    def call():
        uneven_all_to_all(world.rank)
        dist.all_reduce(torch.ones(3, 4))
        all_gather_single(torch.empty(6), torch.ones(3))
        dist.barrier()

    spans = spans_of(call)
    assert [s.name for s in spans] == [
        f"unisono:{n}" for n in ("all_to_all", "all_reduce", "all_gather", "barrier")
    ]
    assert spans[0].kwinputs == {"bytes": 12, "dtype": "float32"}
    assert spans[1].input_shapes == [[3, 4]]
    assert spans[1].kwinputs == {"bytes": 48, "dtype": "float32"}
    assert spans_of(lambda: None) == []
    assert isinstance(dist.group.WORLD._comm.comm, Communicator)


def own_spans_of_a_work_and_of_ddp(world):
    def call():
        dist.all_reduce(torch.ones(3), async_op=True).wait()

    assert [s.name for s in spans_of(call)] == ["unisono:all_reduce", "unisono:wait"]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    names = [s.name for s in spans_of(lambda: model(torch.ones(2, 4)).sum().backward())]
    assert "unisono:all_reduce" in names


def own_spans_named_by_the_program(world):
    needs_torch("2.13", "it has no dist.record_comm")
    with torch.profiler.profile() as profile, dist.record_comm("gradients"):
        dist.all_reduce(torch.ones(3))
    assert "gradients" in [event.name for event in profile.events()]


def own_spans_of_coalesced_calls(world):
    def call():
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(3), 0)

    assert {s.name for s in spans_of(call)} >= {"unisono:all_reduce", "unisono:broadcast"}


def entries_of(group):
    return group.history.entries()


def own_history_of_calls(world):
    group = dist.new_group()
    dist.all_reduce(torch.ones(2, 3), group=group)
    if world.rank == 0:
        dist.send(torch.ones(5), 1, group=group)
        work = dist.all_reduce(torch.ones(7), group=group, async_op=True)
        assert not entries_of(group)[-1].is_completed
        dist.send(torch.ones(1), 1, group=group)
    else:
        dist.recv(torch.ones(5), 0, group=group)
        dist.recv(torch.ones(1), 0, group=group)
        work = dist.all_reduce(torch.ones(7), group=group, async_op=True)
    work.wait()
    entries = entries_of(group)
    assert [e.order for e in entries if e.peer is None] == [1, 2]
    assert [e.order for e in entries if e.peer is not None] == [1, 2]
    assert entries[0].inputs == [([2, 3], torch.float32)]
    assert all(entry.is_completed for entry in entries)
    for _ in range(50):
        dist.barrier(group)
    assert len(entries_of(group)) == 40


def analysed(folder):
    """Returns the report of torch's flight recorder tool on the dumps in a folder."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder]
    result = subprocess.run(
        [*map(str, command), "--prefix", "rank_"], capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr


def dumped(world, name, calls):
    """Returns the tool's report on the dump of `calls(group)`. Ranks other than 0 return ""."""
    folder = world.folder / name
    group = dist.new_group(timeout=timedelta(seconds=20))
    calls(group)
    flight_recorder.dump(folder / f"rank_{world.rank}")
    dist.barrier()
    report = analysed(folder) if world.rank == 0 else ""
    dist.barrier()
    return report


def own_dump_is_readable_by_torchs_tool(world):
    needs_torch("2.13", "its tool is elsewhere")

    def calls(group):
        dist.all_reduce(torch.ones(2, 3), group=group)
        dist.all_gather([torch.empty(4) for _ in range(2)], torch.ones(4), group=group)
        reduce_scatter_single(torch.empty(2), torch.ones(4), group=group)
        dist.gather(torch.ones(3), [torch.empty(3)] * 2 if world.rank == 0 else None, group=group)
        uneven_all_to_all(world.rank, group)
        dist.barrier(group)

    report = dumped(world, "agreeing", calls)
    assert "Traceback" not in report, report
    assert "error" not in report.lower(), report
    dump = pickle.loads((world.folder / "agreeing" / f"rank_{world.rank}").read_bytes())
    names = [entry["profiling_name"] for entry in dump["entries"]]
    assert "gloo:reduce_scatter" in names
    last = next(e for e in reversed(dump["entries"]) if e["profiling_name"] == "gloo:all_gather")
    assert last["output_sizes"] == [[2, 4]]
    assert any(frame["name"] == "calls" for frame in last["frames"])


def own_dump_names_the_missing_rank(world):
    needs_torch("2.13", "its tool is elsewhere")

    def calls(group):
        dist.barrier(group)
        if world.rank == 0:
            group.set_timeout(timedelta(seconds=0.3))
            with pytest.raises(CollectiveTimeoutError):
                dist.all_reduce(torch.ones(2, 3), group=group)
        dist.barrier()

    report = dumped(world, "missing", calls)
    if world.rank == 0:
        assert "all_reduce" in report and "missing" in report.lower(), report


LEFT_BEHIND = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
import unisono.torch_backend
rank = int(sys.argv[1])
dist.init_process_group("unisono", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2,
                        timeout=timedelta(seconds=20))
dist.barrier()
dist.all_reduce(torch.ones(3 + rank))
"""


def test_a_program_that_fails_leaves_a_dump(tmp_path):
    environment = {
        **os.environ,
        "TORCH_FR_BUFFER_SIZE": "10",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dumps" / "rank_"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", LEFT_BEHIND]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=110)[1] for process in processes]
    for rank, text in enumerate(texts):
        assert "MismatchError" in text
        dump = pickle.loads((tmp_path / "dumps" / f"rank_{rank}").read_bytes())
        assert [entry["state"] for entry in dump["entries"]] == ["completed", "scheduled"]
        assert dump["entries"][1]["input_sizes"] == [[3 + rank]]


def test_history_holds_no_tensor():
    history = History(4)
    tensor = torch.ones(3)
    before = sys.getrefcount(tensor)
    history.begin("all_reduce", [tensor], [tensor], None).end_with(None)
    assert sys.getrefcount(tensor) == before
    assert not history.is_pending
    history.begin("barrier", [], [], None)
    assert history.is_pending
    assert [entry.time_ns <= time.time_ns() for entry in history.entries()] == [True, True]


def test_dump_without_a_recording_says_so():
    with pytest.raises(ValueError, match="TORCH_FR_BUFFER_SIZE"):
        flight_recorder.dump()
