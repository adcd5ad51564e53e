"""The state of a training run as blocks of named tensors, for checkpoints in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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

_STATES = "optimizer."


def weight_blocks(sets: Sequence[ParameterSet], mesh: TrainingMesh) -> list[TensorBlock]:
    """Returns this rank's blocks of trained parameters, as views, not copies."""
    return [
        _block(held.name, _own_block(held, mesh), _local(held.values.detach()))
        for each in sets
        for held in each.held
    ]


def model_blocks(
    sets: Sequence[ParameterSet],
    frozen: Sequence[HeldParameter],
    modules: Sequence[nn.Module],
    mesh: TrainingMesh,
) -> list[TensorBlock]:
    """Returns this rank's blocks of all parameters, and of persistent buffers, as views."""
    return weight_blocks(sets, mesh) + _untrained_blocks(frozen, modules, mesh)


def state_blocks(
    sets: Sequence[ParameterSet], optimizer: torch.optim.Optimizer, mesh: TrainingMesh
) -> list[TensorBlock]:
    """Returns this rank's blocks of optimizer states, as views, not copies.

    A state of parameter `name` is called "optimizer.`name`.`state`". A scalar state, such as Adam's
    step, has one tensor for each parameter. A parameter that no step has used has no states. Raises
    `ValueError` for states that are not divided as their parameter is.
    """
    found: list[TensorBlock] = []
    for each in sets:
        if _is_flat(each):
            for held, span, place in _places(each):
                found += _span_states(held, span, place, optimizer)
        else:
            found += _whole_states(each, optimizer, mesh)
    return found


def arrays_of(parameters: ParameterSet) -> list[tuple[HeldParameter, nn.Parameter]]:
    """Returns each parameter of a set with each array of the optimizer that has its elements."""
    if _is_flat(parameters):
        return [(held, span.weights) for held, span, _ in _places(parameters)]
    return list(zip(parameters.held, parameters.trained, strict=True))


def _is_flat(parameters: ParameterSet) -> bool:
    """Returns True if the optimizer has spans of a flat array, of which a set without elements has
    none."""
    return bool(parameters.spans) or not parameters.trained


def _places(parameters: ParameterSet) -> Iterator[tuple[HeldParameter, FlatSpan, int]]:
    """Yields each parameter with each span that has its elements, and the index of the parameter's
    first element in the flat array.
    """
    for span in parameters.spans:
        place = 0
        for held in parameters.held:
            end = place + held.values.numel()
            if max(place, span.first) < min(end, span.end):
                yield held, span, place
            place = end


def state_name(parameter: str, state: str) -> str:
    """Returns the name of a state of a parameter in a checkpoint."""
    return f"{_STATES}{parameter}.{state}"


def saved_states(names: Iterable[str]) -> dict[str, set[str]]:
    """Returns the names of the states of each parameter in a checkpoint with tensors `names`.

    >>> saved_states(["weight", "optimizer.weight.step", "optimizer.weight.exp_avg"]) == {
    ...     "weight": {"step", "exp_avg"}
    ... }
    True
    """
    known = set(names)
    found: dict[str, set[str]] = {}
    for name in known:
        parameter, _, state = name.removeprefix(_STATES).rpartition(".")
        if name.startswith(_STATES) and parameter in known:
            found.setdefault(parameter, set()).add(state)
    return found


def _untrained_blocks(
    frozen: Sequence[HeldParameter], modules: Sequence[nn.Module], mesh: TrainingMesh
) -> list[TensorBlock]:
    """Returns this rank's blocks of parameters that are not trained, and of persistent buffers."""
    found = [
        _block(each.name, _own_block(each, mesh), _local(each.values.detach())) for each in frozen
    ]
    for module in modules:
        persistent, done = module.state_dict(keep_vars=True), set[int]()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name in persistent and id(buffer) not in done:
                done.add(id(buffer))
                start = (0,) * buffer.dim()
                shape = tuple(buffer.shape)
                found.append(TensorBlock(name=name, shape=shape, start=start, values=buffer))
    return found


@torch.no_grad()
def begin_states(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Creates the states, as zeros, of parameters that no step has used. Returns these parameters.

    A step with gradients of zero and a learning rate of zero creates the states, and does not
    change the weights. An optimizer without a learning rate may change them, so they are restored.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    begun = [each for each in parameters if not optimizer.state.get(each)]
    if not begun:
        return begun
    for each in parameters:
        each.grad = None
    for each in begun:
        each.grad = torch.zeros_like(each)
    kept = [each.clone() for each in begun] if None in rates else []
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update({} if rate is None else {"lr": 0.0})
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.update({} if rate is None else {"lr": rate})
    for each, values in zip(begun, kept, strict=False):
        each.copy_(values)
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
    for each in begun:
        for _, state in states_of(optimizer, each):
            state.zero_()
    return begun


def states_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors among an optimizer's states of a parameter, with their names."""
    for name, state in optimizer.state.get(parameter, {}).items():
        if isinstance(state, torch.Tensor):
            yield name, state


def _whole_states(
    parameters: ParameterSet, optimizer: torch.optim.Optimizer, mesh: TrainingMesh
) -> Iterator[TensorBlock]:
    """Yields the states of parameters that are not part of a flat array."""
    for each, trained in zip(parameters.held, parameters.trained, strict=True):
        block, sizes = _own_block(each, mesh), _local(each.values.detach()).shape
        for name, state in states_of(optimizer, trained):
            yield _state_block(state_name(each.name, name), block, _local(state), sizes)


def _span_states(
    held: HeldParameter, span: FlatSpan, place: int, optimizer: torch.optim.Optimizer
) -> Iterator[TensorBlock]:
    """Yields the states of a parameter's elements in a span of a flat array."""
    low = max(place, span.first)
    high = min(place + held.values.numel(), span.end)
    for name, state in states_of(optimizer, span.weights):
        full_name = state_name(held.name, name)
        if state.dim() == 0:
            yield _state_block(full_name, held.block, state, held.values.shape)
            continue
        yield from flat_range_blocks(
            full_name,
            held.block.shape,
            held.block.start,
            tuple(held.values.shape),
            low - place,
            state[low - span.first : high - span.first],
        )


def _state_block(
    name: str, block: ParameterBlock, state: torch.Tensor, sizes: torch.Size
) -> TensorBlock:
    """Returns the block of a state of a parameter's block, which has these sizes on this rank.

    Raises `ValueError` for a state with other sizes, if this rank has a part of the parameter.
    """
    if state.shape == sizes and state.dim():
        return _block(name, block, state)
    if state.dim() and tuple(sizes) != block.shape:
        raise ValueError(
            f"{name.removeprefix(_STATES)}: has the shape {tuple(state.shape)} on a rank that has a"
            f" part {tuple(sizes)} of a parameter {block.shape}, so no other layout could load it; "
            "zero = 0 without tp works"
        )
    start = (0,) * state.dim()
    return TensorBlock(name=name, shape=tuple(state.shape), start=start, values=state)


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
