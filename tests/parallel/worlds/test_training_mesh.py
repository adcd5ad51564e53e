"""The process groups of a layout on eight ranks, and the number of bytes sent on each."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from unisono.parallel import Layout, TrainingMesh

pytestmark = pytest.mark.torch
RANKS = 8
BACKENDS = ("unisono",)


def test_training_mesh(outcome):
    outcome.require_success()


def own_sums_over_each_axis(world):
    mesh = TrainingMesh(Layout(dp=2, tp=2, pp=2))
    for name in ("tp", "dp", "pp", "tokens"):
        x = torch.tensor([float(world.rank)])
        dist.all_reduce(x, group=mesh.group(name))
        assert x.item() == sum(mesh.ranks(name)), name
    mesh.close()


def own_bytes_by_axis(world):
    mesh = TrainingMesh(Layout(dp=2, tp=4, zero=1))
    before = mesh.bytes_sent()
    # with a torch for CUDA, the ranks of a new group tell each other whether they have a GPU
    assert before == {"tp": 0, "dp": 0, "world": 0} or torch.version.cuda
    dist.all_reduce(torch.ones(400), group=mesh.group("tp"))  # a rank sends 2 (n-1)/n N elements
    dist.reduce_scatter_tensor(torch.ones(50), torch.ones(100), group=mesh.group("shard"))
    sent = {name: count - before[name] for name, count in mesh.bytes_sent().items()}
    assert sent == {"tp": 2 * 3 * 100 * 4, "dp": 50 * 4, "world": 0}
    mesh.close()


def own_groups_of_one_rank_are_none(world):
    mesh = TrainingMesh(Layout(dp=8, dp_replicate=2, ep=4))
    assert mesh.group("tp") is None and mesh.group("pp") is None
    assert len(mesh.ranks("ep")) == 4 and len(mesh.ranks("dp_replicate")) == 2
    assert mesh.group("tokens") is mesh.group("dp")
    with pytest.raises(ValueError, match="'tp' has one rank in dp8 ep4 replicas2"):
        mesh.device_mesh("dp", "tp")
    mesh.close()


def own_meshes_of_torch(world):
    mesh = TrainingMesh(Layout(dp=2, tp=4))
    found = mesh.device_mesh("dp", "tp")
    assert found.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    whole, before = torch.arange(8.0), mesh.bytes_sent()
    shared = DTensor.from_local(
        whole[found.get_local_rank("tp") * 2 :][:2], found, [Replicate(), Shard(0)]
    )
    assert torch.equal(shared.full_tensor(), whole)
    assert mesh.bytes_sent()["tp"] > before["tp"] and mesh.bytes_sent()["dp"] == before["dp"]
    mesh.close()


def own_other_sizes_are_refused(world):
    with pytest.raises(ValueError, match=r"expected 8 ranks.*= 2 x 2 x 1 x 1 = 4"):
        TrainingMesh(Layout(dp=2, tp=2))
