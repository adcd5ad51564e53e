"""Compares training steps of `parallelize` with torch's own strategies, on Gloo and on unisono.

Each strategy has three contestants that train the same model on the same batches: `parallelize`,
torch's own strategy on the backend unisono, and torch's own strategy on Gloo. The contestants
alternate, and their losses must agree. The model *text* is a transformer on bytes. The model
*layers* is a chain of linear layers, which torch's tensor-parallel styles can divide.

    python benchmarks/parallel_steps.py                  # 4 ranks, about 3 minutes
    python benchmarks/parallel_steps.py --rounds 5
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from step_rows import PARALLELIZE, Row, Step, measured_row, render
from timing import on_every, write
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel import CrossEntropy, Layout, TransformerModel, draw_weights, parallelize
from unisono.planner import Transformer

TEXT = Transformer(layers=4, hidden=64, heads=4, vocab=256, positions=128, tied=False)
WIDTH, LAYERS, CLASSES = 256, 8, 10
RATE = 1e-3
ON_UNISONO, ON_GLOO = "torch on unisono", "torch on gloo"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, a batch for all ranks together, and a loss that is an average over the batch."""

    name: str
    model: nn.Sequential
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def text_task() -> Task:
    tokens = torch.randint(0, TEXT.vocab, (16, TEXT.positions + 1))
    return Task(
        name="text",
        model=TransformerModel(TEXT, seed=0),
        inputs=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        loss=_token_loss,
    )


def layers_task() -> Task:
    modules: list[nn.Module] = []
    for _ in range(LAYERS):
        modules += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*modules, nn.Linear(WIDTH, CLASSES))
    draw_weights(model, 0)
    rows = 512
    targets = torch.randint(0, CLASSES, (rows,))
    return Task(
        name="layers",
        model=model,
        inputs=torch.randn(rows, WIDTH),
        targets=targets,
        loss=nn.functional.cross_entropy,
    )


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE)


# ---- contestants on each rank


def ours(task: Task, layout: Layout, microbatches: int = 1) -> Step:
    """Returns a step of `parallelize`."""
    loss = CrossEntropy(TEXT.vocab) if task.name == "text" else task.loss
    run = parallelize(
        copy.deepcopy(task.model), layout, loss=loss, optimizer=_adam, microbatches=microbatches
    )
    return lambda: float(run.step(task.inputs, task.targets))


def torch_ddp(task: Task, group: dist.ProcessGroup) -> Step:
    """Returns a step of DistributedDataParallel."""
    model = DistributedDataParallel(copy.deepcopy(task.model), process_group=group)
    return _data_step(task, model, group)


def torch_fsdp(task: Task, group: dist.ProcessGroup) -> Step:
    """Returns a step of `fully_shard`, applied to each layer separately."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = copy.deepcopy(task.model)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _data_step(task, model, group)


def torch_tensor(task: Task, group: dist.ProcessGroup) -> Step:
    """Returns a step of torch's tensor parallelism, with pairs of column- and row-parallel linear
    layers.
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    model = copy.deepcopy(task.model)
    linears = [name for name, each in model.named_children() if isinstance(each, nn.Linear)]
    styles = (ColwiseParallel, RowwiseParallel)
    plan = {name: styles[i % 2]() for i, name in enumerate(linears[:-1])}
    parallelize_module(model, mesh, plan)
    optimizer = _adam(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = task.loss(model(task.inputs), task.targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def torch_pipeline(task: Task, group: dist.ProcessGroup, microbatches: int, kind: Any) -> Step:
    """Returns a step of torch's pipeline, with the same number of modules in each stage."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    modules = list(copy.deepcopy(task.model))
    cuts = [round(i * len(modules) / size) for i in range(size + 1)]
    part = nn.Sequential(*modules[cuts[rank] : cuts[rank + 1]])
    stage = PipelineStage(part, rank, size, torch.device("cpu"), group=group)
    schedule = kind(stage, microbatches, loss_fn=task.loss)
    optimizer = _adam(part.parameters())

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(task.inputs)
        elif rank == size - 1:
            schedule.step(target=task.targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        total = torch.tensor(sum(float(each) for each in losses) / microbatches)
        dist.all_reduce(total, group=group)
        return float(total)

    return step


def _data_step(task: Task, model: nn.Module, group: dist.ProcessGroup) -> Step:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    inputs, targets = task.inputs.chunk(size)[rank], task.targets.chunk(size)[rank]
    optimizer = _adam(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total, group=group)
        return float(total)

    return step


def contestants(task: Task, ranks: int) -> Iterator[tuple[str, Step, Callable[[Any], Step]]]:
    """Yields each strategy's name, our step, and a function that makes torch's step on a group."""
    yield "data (DDP)", ours(task, Layout(dp=ranks)), lambda group: torch_ddp(task, group)
    for zero in (2, 3):
        layout = Layout(dp=ranks, zero=zero)
        yield f"zero-{zero} (FSDP)", ours(task, layout), lambda group: torch_fsdp(task, group)
    if task.name == "layers":
        yield "tensor", ours(task, Layout(tp=ranks)), lambda group: torch_tensor(task, group)
    for schedule, kind in (("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)):
        layout, parts = Layout(pp=ranks, schedule=schedule), 2 * ranks
        yield (
            f"pipeline, {schedule}",
            ours(task, layout, parts),
            lambda group, kind=kind, parts=parts: torch_pipeline(task, group, parts, kind),
        )


# ---- code that runs on each rank


def measure(rounds: int, steps: int) -> list[Row]:
    """Measures all strategies. Runs on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("unisono")
    try:
        world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
        rows = []
        for task in (layers_task(), text_task()):
            for name, step, torchs in contestants(task, dist.get_world_size()):
                found = {PARALLELIZE: step, ON_UNISONO: torchs(world), ON_GLOO: torchs(gloo)}
                rows.append(measured_row(name, task.name, found, rounds, steps))
        return rows
    finally:
        dist.destroy_process_group()


# ---- the main program


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "4",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each contestant.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round.")] = 8,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "parallel-steps.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (rounds, steps))
    Console(width=160).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)
