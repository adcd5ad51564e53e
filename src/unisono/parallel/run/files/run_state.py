"""The state of a training run as blocks of named tensors, for checkpoints in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.division import part_of
from unisono.parallel.checkpoint import TensorBlock, flat_range_blocks
from unisono.parallel.data_parallelism.flat_parameters import FlatSpan
from unisono.parallel.divisible.parameter_block import ParameterBlock
from unisono.parallel.run.parameters.fully_sharded_set import split_dim
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import HeldParameter, ParameterSet, shard_name
from unisono.parallel.training_mesh import TrainingMesh

_STATES = "optimizer."


def weight_blocks(trained: Sequence[HeldParameter], mesh: TrainingMesh) -> list[TensorBlock]:
    """Returns this rank's blocks of trained parameters, as views, not copies."""
    return [block for each in trained for block in _held_blocks(each, mesh)]


def model_blocks(
    trained: Sequence[HeldParameter],
    frozen: Sequence[HeldParameter],
    modules: Sequence[nn.Module],
    mesh: TrainingMesh,
) -> list[TensorBlock]:
    """Returns this rank's blocks of all parameters, and of persistent buffers, as views."""
    return weight_blocks(trained, mesh) + _untrained_blocks(frozen, modules, mesh)


def state_blocks(
    sets: Sequence[ParameterSet], optimizers: Optimizers, mesh: TrainingMesh
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
                found += _span_states(held, span, place, optimizers)
        else:
            found += _whole_states(each, optimizers, mesh)
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
    found = [block for each in frozen for block in _held_blocks(each, mesh)]
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
def begin_states(optimizers: Optimizers) -> list[nn.Parameter]:
    """Creates the states, as zeros, of parameters that no step has used. Returns these parameters.

    A step with gradients of zero and a learning rate of zero creates the states, and does not
    change the weights. An optimizer without a learning rate may change them, so they are restored.
    """
    groups = optimizers.groups
    rates = [group.get("lr") for group in groups]
    every = [group["params"] for group in groups]
    begun = [each for params in every for each in params if not optimizers.states(each)]
    if not begun:
        return begun
    gradients = [each.grad for each in begun]
    for each in begun:
        each.grad = torch.zeros_like(each)
    kept = [each.clone() for each in begun] if None in rates else []
    for group, rate in zip(groups, rates, strict=True):
        group["params"] = [each for each in group["params"] if not optimizers.states(each)]
        group.update({} if rate is None else {"lr": 0.0})
    optimizers.step()
    for group, params, rate in zip(groups, every, rates, strict=True):
        group["params"] = params
        group.update({} if rate is None else {"lr": rate})
    for each, values in zip(begun, kept, strict=False):
        each.copy_(values)
    for each, gradient in zip(begun, gradients, strict=True):
        each.grad = gradient
    for each in begun:
        for _, state in states_of(optimizers, each):
            state.zero_()
    return begun


def states_of(
    optimizers: Optimizers, parameter: nn.Parameter
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors among the optimizers' states of a parameter, with their names."""
    for name, state in optimizers.states(parameter).items():
        if isinstance(state, torch.Tensor):
            yield name, state


def _whole_states(
    parameters: ParameterSet, optimizers: Optimizers, mesh: TrainingMesh
) -> Iterator[TensorBlock]:
    """Yields the states of parameters that are not part of a flat array."""
    for each, trained in zip(parameters.held, parameters.trained, strict=True):
        start, sizes = _start(each, mesh), _local(each.values.detach()).shape
        for name, state in states_of(optimizers, trained):
            full_name = state_name(each.name, name)
            yield from _state_blocks(full_name, each.block, _local(state), start, sizes)


def _span_states(
    held: HeldParameter, span: FlatSpan, place: int, optimizers: Optimizers
) -> Iterator[TensorBlock]:
    """Yields the states of a parameter's elements in a span of a flat array."""
    low = max(place, span.first)
    high = min(place + held.values.numel(), span.end)
    sizes = held.values.shape
    origin = (0,) * len(sizes)
    for name, state in states_of(optimizers, span.weights):
        full_name = state_name(held.name, name)
        if state.dim() == 0:
            yield from _state_blocks(full_name, held.block, state, origin, sizes)
            continue
        values = state[low - span.first : high - span.first]
        for each in flat_range_blocks(full_name, sizes, origin, sizes, low - place, values):
            yield from _in_whole(full_name, held.block, each.values, each.start)


def _state_blocks(
    name: str,
    block: ParameterBlock,
    state: torch.Tensor,
    start: tuple[int, ...],
    sizes: torch.Size,
) -> Iterator[TensorBlock]:
    """Yields the blocks of a state of the elements from `start` on of a parameter's block, which
    have these sizes.

    Raises `ValueError` for a state with other sizes, if this rank has a part of the parameter.
    """
    if state.shape == sizes and state.dim():
        yield from _in_whole(name, block, state, start)
        return
    if state.dim() and tuple(sizes) != block.shape:
        raise ValueError(
            f"{name.removeprefix(_STATES)}: has the shape {tuple(state.shape)} on a rank that has a"
            f" part {tuple(sizes)} of a parameter {block.shape}, so no other layout could load it; "
            "zero = 0 without tp works"
        )
    start = (0,) * state.dim()
    yield TensorBlock(name=name, shape=tuple(state.shape), start=start, values=state)


def _held_blocks(held: HeldParameter, mesh: TrainingMesh) -> Iterator[TensorBlock]:
    """Yields the blocks of a parameter's elements on this rank."""
    values = _local(held.values.detach())
    yield from _in_whole(held.name, held.block, values, _start(held, mesh))


def _in_whole(
    name: str, block: ParameterBlock, values: torch.Tensor, start: tuple[int, ...]
) -> Iterator[TensorBlock]:
    """Yields values as blocks of the whole parameter. They begin at `start` in the block of the
    rank, which may join several ranges of the whole parameter."""
    if not block.spans:
        place = tuple(a + b for a, b in zip(block.start, start, strict=True))
        yield TensorBlock(name=name, shape=block.shape, start=place, values=values)
        return
    dim, begin = block.dim, 0
    low, high = start[dim], start[dim] + values.shape[dim]
    for first, count in block.spans:
        inner, end = max(low, begin), min(high, begin + count)
        if inner < end:
            place = (*start[:dim], first + inner - begin, *start[dim + 1 :])
            part = values.narrow(dim, inner - low, end - inner)
            yield TensorBlock(name=name, shape=block.shape, start=place, values=part)
        begin += count


def _start(held: HeldParameter, mesh: TrainingMesh) -> tuple[int, ...]:
    """Returns the index, in the block of this rank, of the first element that `fully_shard` keeps
    here."""
    start = [0] * held.values.dim()
    if isinstance(held.values, DTensor):
        ranks, dim = mesh.ranks(shard_name(held.block)), split_dim(held.values)
        start[dim], _ = part_of(held.values.shape[dim], ranks.index(mesh.rank), len(ranks))
    return tuple(start)


def _local(values: torch.Tensor) -> torch.Tensor:
    return values.to_local() if isinstance(values, DTensor) else values
