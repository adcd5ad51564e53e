"""The state of a training run as blocks of named tensors, for checkpoints in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.parallel.checkpoint import TensorBlock, flat_range_blocks
from unisono.parallel.data_parallelism.flat_parameters import FlatSpan
from unisono.parallel.data_parallelism.parameter_block import ParameterBlock
from unisono.parallel.run.fully_sharded_set import split_dim
from unisono.parallel.run.parameter_sets import (
    HeldParameter,
    ParameterSet,
    shard_name,
)
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import part_of


def state_blocks(
    sets: Sequence[ParameterSet], optimizer: torch.optim.Optimizer, mesh: TrainingMesh
) -> list[TensorBlock]:
    """Returns this rank's blocks of weights and optimizer states, as views, not copies.

    A state of parameter `name` is called "optimizer.`name`.`state`". A scalar state, such as Adam's
    step, has one tensor for each parameter.
    """
    begin_states(optimizer)
    found: list[TensorBlock] = []
    for each in sets:
        if each.spans:
            found += [_block(held.name, held.block, held.values.detach()) for held in each.held]
            for span in each.spans:
                found += _span_states(span, each.held, optimizer)
        else:
            found += _whole_blocks(each, optimizer, mesh)
    return found


def untrained_blocks(
    frozen: Sequence[HeldParameter], modules: Sequence[nn.Module], mesh: TrainingMesh
) -> list[TensorBlock]:
    """Returns this rank's blocks of parameters that are not trained, and of persistent buffers."""
    found = [
        _block(each.name, _own_block(each, mesh), _local(each.values.detach())) for each in frozen
    ]
    for module in modules:
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                start = (0,) * buffer.dim()
                shape = tuple(buffer.shape)
                found.append(TensorBlock(name=name, shape=shape, start=start, values=buffer))
    return found


@torch.no_grad()
def begin_states(optimizer: torch.optim.Optimizer) -> None:
    """Creates the states, as zeros, of an optimizer that has not taken a step yet.

    A step with gradients of zero and a learning rate of zero creates the states, and does not
    change the weights.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = torch.zeros_like(each)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
        for state in optimizer.state[each].values():
            if isinstance(state, torch.Tensor):
                state.zero_()


def _states(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, state in optimizer.state[parameter].items():
        if isinstance(state, torch.Tensor):
            yield name, state


def _whole_blocks(
    parameters: ParameterSet, optimizer: torch.optim.Optimizer, mesh: TrainingMesh
) -> Iterator[TensorBlock]:
    """Yields the blocks and states of parameters that are not part of a flat array."""
    for each, trained in zip(parameters.held, parameters.trained, strict=True):
        block = _own_block(each, mesh)
        yield _block(each.name, block, _local(each.values.detach()))
        for name, state in _states(optimizer, trained):
            yield _state_block(f"optimizer.{each.name}.{name}", block, _local(state))


def _span_states(
    span: FlatSpan, parameters: Sequence[HeldParameter], optimizer: torch.optim.Optimizer
) -> Iterator[TensorBlock]:
    """Yields the optimizer states of a span of a flat array, by parameter."""
    begin, end = span.first, span.first + span.weights.numel()
    place = 0
    for held in parameters:
        size = held.values.numel()
        low, high = max(place, begin), min(place + size, end)
        if low < high:
            for name, state in _states(optimizer, span.weights):
                full_name = f"optimizer.{held.name}.{name}"
                if state.dim() == 0:
                    yield _state_block(full_name, held.block, state)
                    continue
                yield from flat_range_blocks(
                    full_name,
                    held.block.shape,
                    held.block.start,
                    tuple(held.values.shape),
                    low - place,
                    state[low - begin : high - begin],
                )
        place += size


def _state_block(name: str, block: ParameterBlock, state: torch.Tensor) -> TensorBlock:
    if state.dim() == 0:
        return TensorBlock(name=name, shape=(), start=(), values=state)
    return _block(name, block, state)


def _block(name: str, block: ParameterBlock, values: torch.Tensor) -> TensorBlock:
    return TensorBlock(name=name, shape=block.shape, start=block.start, values=values)


def _own_block(held: HeldParameter, mesh: TrainingMesh) -> ParameterBlock:
    """Returns the block of a parameter that `fully_shard` keeps on this rank."""
    if not isinstance(held.values, DTensor):
        return held.block
    ranks, dim = mesh.ranks(shard_name(held.block)), split_dim(held.values)
    first, _ = part_of(held.values.shape[dim], ranks.index(mesh.rank), len(ranks))
    start = list(held.block.start)
    start[dim] += first
    return ParameterBlock(shape=held.block.shape, start=tuple(start))


def _local(values: torch.Tensor) -> torch.Tensor:
    return values.to_local() if isinstance(values, DTensor) else values
