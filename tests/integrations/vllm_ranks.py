"""One rank of vLLM's groups, which makes all calls of its device communicators.

    python vllm_ranks.py RANK RANKS PORT TENSOR_PARALLEL PIPELINE

Prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.plugins import load_general_plugins


def values(rank, *shape, dtype=torch.float32):
    """Returns small whole numbers that depend on the rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + rank).reshape(shape).to(dtype)


def collectives(group):
    """Returns the results of the collectives of a group."""
    rank, size = group.rank_in_group, group.world_size
    found = {
        name: group.all_reduce(values(rank, 3, 4, dtype=dtype)).tolist()
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    found["strided"] = group.all_reduce(values(rank, 4, 6)[:, ::2]).tolist()
    for dim in (0, -1):
        found[f"all_gather {dim}"] = group.all_gather(values(rank, 2, 3), dim).tolist()
        gathered = group.gather(values(rank, 2, 3), size - 1, dim)
        found[f"gather {dim}"] = None if gathered is None else gathered.tolist()
        found[f"reduce_scatter {dim}"] = group.reduce_scatter(
            values(rank, size, 2 * size), dim
        ).tolist()
    narrow = values(rank, 2, 3).to(torch.float8_e4m3fn)
    found["narrow"] = group.all_gather(narrow, 0).float().tolist()
    sizes = [each + 1 for each in range(size)]
    uneven = [values(rank, sizes[rank], 2), values(rank, sizes[rank], 1, dtype=torch.int64)]
    found["all_gatherv"] = [each.tolist() for each in group.all_gatherv(uneven, 0, sizes)]
    found["reduce_scatterv"] = group.reduce_scatterv(values(rank, sum(sizes), 2), 0, sizes).tolist()
    return found


def compiled(group):
    """Returns the result of compiled code, with an all_reduce and an all_gather in one graph."""

    @torch.compile(fullgraph=True)
    def layer(x):
        y = group.all_reduce(x * 2)
        return y + 1, group.all_gather(y, 0)

    with torch.no_grad():
        return [each.tolist() for each in layer(values(group.rank_in_group, 2, 3))]


def passed_on(group):
    """Returns what a rank of a pipeline gets from the one before it."""
    mine = {"hidden": values(group.rank, 2, 3), "empty": torch.empty(0, 4), "step": 7}
    mine["narrow"] = values(group.rank, 5).to(torch.bfloat16)
    if group.rank_in_group == 0:
        group.send_tensor_dict(mine)
        return None
    found = group.recv_tensor_dict()
    return {
        name: each.tolist() if isinstance(each, torch.Tensor) else each
        for name, each in found.items()
    }


def main(rank, ranks, port, tensor, pipeline):
    """Makes the groups, and all calls."""
    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = str(port)  # as vLLM's worker sets it
    load_general_plugins()
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig())):
        parallel_state.init_distributed_environment(
            ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(tensor, pipeline)
        group = parallel_state.get_tp_group()
        found = {
            "type": type(group.device_communicator).__name__,
            "ranks": group.ranks,
            "hosts": len(group.device_communicator.comm.hosts),
            "calls": collectives(group),
            "compiled": compiled(group),
            "passed on": passed_on(parallel_state.get_pp_group()) if pipeline > 1 else None,
        }
        print("RESULT " + json.dumps(found), flush=True)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
