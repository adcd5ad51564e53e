"""Unisono as a stand-in for Gloo: what programs see that ask torch for gloo by name.

The checks of test_groups.py and test_parallel.py also run with the stand-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from bootstrap_stores import free_port
from unisono.errors import CollectiveTimeoutError, UnsupportedError
from unisono.torch_backend import communicator_of, stand_in, stand_in_for
from unisono.torch_backend.private import replacement
from unisono.torch_backend.stand_in import _made_by_unisono
from worlds.forked import join_all, start
from worlds.world_rank import STAND_IN

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = (STAND_IN,)
CPU = torch.device("cpu")


def test_stand_in(outcome):
    outcome.require_success()


def require_sum(group, ranks):
    tensor = torch.arange(5.0) + dist.get_rank()
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [sum(place + rank for rank in ranks) for place in range(5)]


def require_ours(group):
    assert communicator_of(group) is not None
    assert isinstance(group, dist.ProcessGroupGloo) and isinstance(group, dist.ProcessGroup)
    assert group._get_backend_name() == group.name() == "gloo"
    assert isinstance(group._get_backend(CPU), dist.ProcessGroupGloo)


def check_default_group_is_gloo_by_name_and_type(world):
    require_ours(dist.group.WORLD)
    assert dist.get_backend() == "gloo" and dist.get_backend() is dist.Backend.GLOO
    assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"
    require_sum(None, range(4))


def check_new_groups_are_ours(world):
    for group in (dist.new_group(), dist.new_group(backend="gloo"), dist.new_group(backend="GLOO")):
        require_ours(group)
        require_sum(group, range(4))
    halves = dist.new_subgroups(2)[0]
    require_ours(halves)
    require_sum(halves, (0, 1) if world.rank < 2 else (2, 3))
    by_name = dist.new_group(backend="cpu:gloo,cuda:gloo")
    require_ours(by_name)
    assert dist.get_backend_config(by_name) == "cpu:gloo,cuda:gloo"
    assert by_name._get_backend(torch.device("cuda")).name() == "gloo"
    assert communicator_of(by_name._get_backend(torch.device("cuda"))) is None
    require_sum(by_name, range(4))


def check_another_name_is_left_alone(world):
    group = dist.new_group(backend="unisono")
    assert group.name() == "unisono" and dist.get_backend(group) == "unisono"
    assert not isinstance(group, dist.ProcessGroupGloo) and not hasattr(group, "options")
    require_sum(group, range(4))


def check_explicit_constructor_makes_gloo(world):
    store = dist.PrefixStore("explicit", dist.group.WORLD.get_group_store())
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=20)
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    group = dist.ProcessGroupGloo(store, world.rank, world.size, options)
    assert communicator_of(group) is None and type(group) is dist.ProcessGroupGloo
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [4.0] * 3


def check_monitored_barrier_names_the_missing_rank(world):
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    group = dist.new_group()
    if world.rank != 3:
        with pytest.raises(CollectiveTimeoutError, match=r"rank 3"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.3))
    dist.barrier()


def check_split_group_of_torch(world):
    part = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    require_ours(part)
    assert dist.get_backend(part) == "gloo"
    require_sum(part, (0, 2) if world.rank % 2 == 0 else (1, 3))
    dist.split_group(part, [[0, 1]], backend="gloo")
    for options in ({"backend": "nccl"}, {"pg_options": object()}):
        with pytest.raises(UnsupportedError, match="leave"):
            dist.split_group(split_ranks=[[0, 1, 2, 3]], **options)
    with pytest.raises(ValueError, match="split_ranks"):
        dist.split_group()


def check_timeouts_are_set_through_torch(world):
    group = dist.new_group(timeout=timedelta(seconds=21))
    assert group._get_backend(CPU).options._timeout == timedelta(seconds=21)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=22), group)
    assert group.options._timeout == timedelta(seconds=22)
    assert communicator_of(group).timeout_s == 22


def check_options_of_gloo_are_ignored_as_torch_does(world):
    group = dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    require_ours(group)


def check_objects_samplers_and_training(world):
    found = [None] * 4
    dist.all_gather_object(found, {"rank": world.rank})
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    data = [(torch.ones(3) * value, torch.ones(1)) for value in range(8)]
    sampler = DistributedSampler(data, shuffle=False)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    inputs, _ = next(iter(DataLoader(data, batch_size=2, sampler=sampler)))
    model(inputs).sum().backward()
    assert model.module.weight.grad.tolist() == [[7.0] * 3]  # 2 rows a rank, of mean 3.5
    norm = torch.nn.SyncBatchNorm(1)
    with pytest.raises(ValueError, match="GPU"):
        norm(torch.ones(2, 1))


def spans_of_gloo(call):
    """Returns the spans of a call whose names begin with gloo, sorted."""
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    found = [e for e in profile.events() if e.name.startswith("gloo:")]
    return sorted((e.name, e.is_async, e.input_shapes, e.count) for e in found)


def pair(value=0.0):
    return [torch.full((3, 2), value) for _ in range(4)]


SPANNED = {
    "all_reduce": lambda group, rank: group.allreduce([torch.ones(3, 2)]),
    "several tensors": lambda group, rank: group.allreduce_coalesced(
        [torch.ones(3), torch.ones(4)], dist.AllreduceCoalescedOptions()
    ),
    "sparse": lambda group, rank: group.allreduce(
        [torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,))]
    ),
    "broadcast": lambda group, rank: group.broadcast([torch.ones(5)], dist.BroadcastOptions()),
    "reduce": lambda group, rank: group.reduce([torch.ones(5)], dist.ReduceOptions()),
    "all_gather": lambda group, rank: group.allgather([pair()], [torch.ones(3, 2)]),
    "all_gather of several": lambda group, rank: group.allgather_coalesced(
        [[torch.empty(2), torch.empty(3)] for _ in range(4)], [torch.ones(2), torch.ones(3)]
    ),
    "gather": lambda group, rank: group.gather(
        [pair()] if rank == 0 else [], [torch.ones(3, 2)], dist.GatherOptions()
    ),
    "scatter": lambda group, rank: group.scatter(
        [torch.ones(3, 2)], [pair()] if rank == 0 else [], dist.ScatterOptions()
    ),
    "all_to_all": lambda group, rank: group.alltoall_base(
        torch.empty(4, 3), torch.ones(4, 3), [], [], dist.AllToAllOptions()
    ),
    "all_to_all with sizes": lambda group, rank: group.alltoall_base(
        torch.empty(4, 3), torch.ones(4, 3), [1] * 4, [1] * 4, dist.AllToAllOptions()
    ),
    "barrier": lambda group, rank: group.barrier(dist.BarrierOptions()),
    "send and recv": lambda group, rank: (
        group.recv([torch.ones(6)], rank - 1, 0)
        if rank % 2
        else group.send([torch.ones(6)], rank + 1, 0)
    ),
    "recv of any rank": lambda group, rank: (
        group.recv_anysource([torch.ones(6)], rank // 2)
        if rank % 2
        else group.send([torch.ones(6)], rank + 1, rank // 2)
    ),
}  # fmt: skip


def check_spans_of_a_profile_are_those_of_gloo(world):
    store = dist.PrefixStore("spans", dist.group.WORLD.get_group_store())
    gloo = dist.ProcessGroupGloo(store, world.rank, world.size, timedelta(seconds=20))
    for name, call in SPANNED.items():
        found = []
        for group in (gloo, dist.group.WORLD):
            dist.barrier()
            found.append(
                spans_of_gloo(lambda group=group, call=call: call(group, world.rank).wait())
            )
        assert found[0] == found[1], name


def check_first_calls_of_a_profile_may_be_coalesced(world):
    group = dist.new_group()

    def call():
        with dist.distributed_c10d._coalescing_manager(group, device=CPU):
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_reduce(torch.ones(4), group=group)

    assert [shapes for _, _, shapes, _ in spans_of_gloo(call)] == [[[3]], [[4]]]


def check_data_of_ddp_name_gloo(world):
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    data = model._get_ddp_logging_data()
    assert data["backend_name"] == "gloo" and data["gloo_num_threads"] == 2
    assert data["gloo_socket_ifname"] == os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
    ours = dist.new_group(backend="unisono")
    model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=ours)
    assert model._get_ddp_logging_data()["backend_name"] == "unisono"


def check_meshes_and_failures_keep_the_name(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    require_ours(mesh.get_group("a"))
    require_sum(mesh.get_group("b"), (0, 1) if world.rank < 2 else (2, 3))
    require_ours(dist.group.WORLD.shrink_group())


# ---- without a world


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"expected 'gloo', .* not 'nccl'"):
        stand_in_for("nccl")


def test_a_torch_that_makes_groups_otherwise_is_refused(monkeypatch):
    def make(group_size, group_rank, backend):
        """A function that makes groups of another torch."""

    with pytest.raises(UnsupportedError, match=r'backend_options.*write init_process_group\("uni'):
        _made_by_unisono(make, watch=False)
    monkeypatch.setattr(replacement, "_torch_groups", types.SimpleNamespace())
    with pytest.raises(UnsupportedError, match=r"_new_process_group_helper.*instead of"):
        stand_in.stand_in("gloo", watch=False)


def test_a_torch_without_gloo_is_refused(monkeypatch):
    monkeypatch.setattr(stand_in, "gloo_class", lambda: None)
    with pytest.raises(UnsupportedError, match="built without Gloo"):
        stand_in_for("gloo")


def told_by_environment(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**environment}, capture_output=True, text=True,
        timeout=110, check=False,
    )  # fmt: skip


def test_unknown_value_is_one_line_and_torch_works():
    result = told_by_environment(
        "import torch; print(torch.ones(1).item())", UNISONO_REPLACE="glou"
    )
    assert result.stdout == "1.0\n" and result.returncode == 0
    assert result.stderr.count("\n") == 1
    assert "expected 'gloo'" in result.stderr and "not 'glou'" in result.stderr


def test_import_of_torch_with_the_variable_starts_nothing():
    code = """
import sys, threading, torch
import unisono.torch_backend
for name in ("process_group", "reserved", "group_creation"):
    assert f"unisono.torch_backend.{name}" not in sys.modules
assert "unisono._native" not in sys.modules and threading.active_count() == 1
import torch.distributed as dist
for _ in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
"""
    result = told_by_environment(code, UNISONO_REPLACE="gloo")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("unisono serves the CPU tensors of groups that ask torch") == 1


# ---- ranks with and without the variable


def rank_of_a_mixed_job(rank, replaced, port, folder):
    if replaced:
        stand_in.stand_in("gloo", watch=True)
    answer = {}
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3,
            timeout=timedelta(seconds=60 if replaced else 4),
        )  # fmt: skip
    except Exception as error:
        answer = {"kind": type(error).__name__, "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    if rank == 0:  # the store of this process must outlive the other ranks
        for other in (1, 2):
            while not (folder / f"{other}.json").exists():
                time.sleep(0.01)


@pytest.mark.parametrize("gloo_rank", [0, 2])
def test_ranks_without_the_variable_are_named(tmp_path, gloo_rank):
    port = free_port()
    ranks = [
        start(
            __file__, "rank_of_a_mixed_job", rank, rank != gloo_rank, port, tmp_path,
            log=tmp_path / f"{rank}.log",
        )
        for rank in range(3)
    ]  # fmt: skip
    join_all(ranks)
    logs = "".join((tmp_path / f"{rank}.log").read_text() for rank in range(3))
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank in {0, 1, 2} - {gloo_rank}:
        assert answers[rank]["kind"] == "RendezvousError", logs
        assert f"ranks [{gloo_rank}] make this group with torch's own Gloo" in answers[rank]["text"]
        assert "UNISONO_REPLACE=gloo on all ranks" in answers[rank]["text"]
