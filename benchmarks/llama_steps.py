"""Compares training steps of a small Llama of transformers: `parallelize`, torch's own strategies
on the same backend and on Gloo, transformers' own division, and Accelerate.

The contestants alternate, and their losses must agree. Needs transformers and accelerate.

    python benchmarks/llama_steps.py                     # 4 ranks
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from step_rows import PARALLELIZE, Row, Step, measured_row, render
from timing import on_every, write
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel import Layout, model_loss, parallelize

ROWS, LENGTH, RATE = 16, 64, 1e-3
ON_UNISONO, ON_GLOO, ALONE = "torch on unisono", "torch on gloo", "no communication"
CUT = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel)
CUT |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel)


def llama() -> nn.Module:
    """Returns a small Llama with random weights, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    """Returns the tokens of all ranks."""
    ids = torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE)


def ours(layout: Layout, microbatches: int = 1) -> Step:
    """Returns a step of `parallelize`."""
    run = parallelize(
        llama(), layout, loss=model_loss, optimizer=adam, microbatches=microbatches,
        example=batch(),
    )  # fmt: skip
    data = batch()
    return lambda: float(run.step(data))


def step_of(
    model: Any, optimizer: Any, group: dist.ProcessGroup | None, *, sums_loss: bool = True
) -> Step:
    """Returns a step of a model; `group`: the ranks that share the batch."""
    data = batch()
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        data = {name: each.chunk(size)[rank] for name, each in data.items()}

    def step() -> float:
        optimizer.zero_grad()
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        total = loss.detach()
        if group is not None and sums_loss:
            total = total / size
            dist.all_reduce(total, group=group)
        return float(total)

    return step


def torch_data(group: dist.ProcessGroup) -> Step:
    model = DistributedDataParallel(llama(), process_group=group)
    return step_of(model, adam(model.parameters()), group)


def alone() -> Step:
    """A step of this rank's part of the batch without communication: the limit of the cores."""
    model = llama()
    return step_of(model, adam(model.parameters()), dist.group.WORLD, sums_loss=False)


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def torch_sharded(group: dist.ProcessGroup) -> Step:
    model = sharded(llama(), DeviceMesh.from_group(group, "cpu"))
    return step_of(model, adam(model.parameters()), group)


def divided(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        plan = {
            name: CUT[name.rpartition(".")[2]]()
            for name, each in layer.named_modules()
            if isinstance(each, nn.Linear)
        }
        parallelize_module(layer, mesh, plan)
    return model


def torch_tensor(group: dist.ProcessGroup) -> Step:
    model = divided(llama(), DeviceMesh.from_group(group, "cpu"))
    return step_of(model, adam(model.parameters()), None)


def torch_both(group: dist.ProcessGroup) -> Step:
    """FSDP2 over pairs, and tensor parallelism within pairs."""
    del group  # the mesh makes groups of the default backend
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(divided(llama(), mesh["tp"]), mesh["dp"])
    return step_of(model, adam(model.parameters()), mesh["dp"].get_group())


def transformers_tensor() -> Step:
    """transformers' own division, `tp_plan="auto"`."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        llama().save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=config)
    model.train()
    return step_of(model, adam(model.parameters()), None)


def accelerate_data() -> Step:
    """Accelerate, which runs torch's DDP on CPUs, also with its plug-in for FSDP."""
    from accelerate import Accelerator

    model = llama()
    model, optimizer = Accelerator(cpu=True).prepare(model, adam(model.parameters()))
    return step_of(model, optimizer, dist.group.WORLD)


def contestants(
    ranks: int,
) -> Iterator[tuple[str, Step, Callable[[Any], Step], dict[str, Callable[[], Step]]]]:
    """Yields each layout's name, our step, torch's on a group, and other libraries' steps."""
    yield "dp (DDP)", ours(Layout(dp=ranks)), torch_data, {"Accelerate": accelerate_data}
    for zero in (2, 3):
        yield f"zero-{zero} (FSDP2)", ours(Layout(dp=ranks, zero=zero)), torch_sharded, {}
    yield "tp", ours(Layout(tp=ranks)), torch_tensor, {"transformers": transformers_tensor}
    yield "dp x tp, zero-3", ours(Layout(dp=2, tp=2, zero=3)), torch_both, {}


def measure(rounds: int, steps: int, only: str) -> list[Row]:
    """Measures all layouts. Runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    rows = []
    gloo = dist.new_group(backend="gloo")
    for name, step, torchs, others in contestants(dist.get_world_size()):
        if only not in name:
            continue
        found = {PARALLELIZE: step, ON_UNISONO: torchs(dist.group.WORLD)}
        found |= {who: make() for who, make in others.items()}
        if torchs is not torch_both:
            found[ON_GLOO] = torchs(gloo)
        limits = {ALONE: alone()} if torchs is torch_data else {}
        rows.append(measured_row(name, "Llama", found, rounds, steps, limits))
    return rows


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Number of ranks.")] = "4",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each contestant.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round.")] = 8,
    only: Annotated[str, typer.Option(help="Measure layouts with this text.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="File for all results.")] = None,
) -> None:
    rows, probes_s = on_every(ranks, measure, (rounds, steps, only))
    Console(width=170).print(render(rows))
    if json_path:
        write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)
