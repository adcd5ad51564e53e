"""Pipeline stages of a model that is no sequence of modules: its traced graph, cut in parts.

Each stage receives from the stage before it all values that its own or later operations need. So a
value for a later stage passes through all stages in between. torch's own `pipelining.pipeline()`
sends such a value directly to the later stage, which torch's schedules with several stages per rank
refuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from unisono.parallel.run.graph_cuts import choose_cuts
from unisono.parallel.run.graph_operations import GraphOperations, memory_of, written_by
from unisono.parallel.run.rank_agreement import of_rank_0
from unisono.parallel.run.traced_graph import trace


class TracedStage(fx.GraphModule):
    """A part of a model's graph, with its parameters under their names in the model."""

    input_shape: tuple[int, ...]
    """Shape of the inputs of the whole model for which the graph was traced."""
    input_type: torch.dtype
    """Type of these inputs."""

    def check(self, inputs: torch.Tensor) -> None:
        """Raises `ValueError` if the inputs of a microbatch have another shape or type than the
        example."""
        if tuple(inputs.shape) != self.input_shape:
            raise ValueError(
                f"the model was traced for microbatches of shape {self.input_shape}, got "
                f"{tuple(inputs.shape)}; pass batches of the shape of `example`"
            )
        if inputs.dtype != self.input_type:
            raise ValueError(
                f"the model was traced for inputs of {self.input_type}, got {inputs.dtype}; pass "
                "batches of the type of `example`"
            )


def traced_stages(model: nn.Module, example: torch.Tensor, stages: int) -> list[TracedStage]:
    """Cuts a model into stages with similar numbers of FLOPs. No weight is copied.
    Collective.

    `example`: the inputs of a microbatch. The stages take inputs of this shape only. Parameters
    that the forward pass does not use belong to the first stage. Raises `ValueError` for a model
    that cannot be traced or cut.
    """
    traced = trace(model, example)
    operations = GraphOperations.of(traced)
    costs, crossing = operations.costs(), operations.crossing_bytes()
    firsts = of_rank_0(lambda: choose_cuts(costs, crossing, stages))
    found = []
    for first, end in zip(firsts, [*firsts[1:], len(operations.nodes)], strict=True):
        found.append(_stage(operations, first, end))
        found[-1].input_shape, found[-1].input_type = tuple(example.shape), example.dtype
    for stage in found:
        _forget_constants(model, stage)
    _keep_unused(model, found)
    return found


def _forget_constants(model: nn.Module, stage: nn.Module) -> None:
    """Keeps tensors that are not part of the model's state out of checkpoints.

    A graph has all tensors as buffers, also constants and buffers that are not persistent. A buffer
    with several names is saved under its first persistent name.
    """
    state = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in state:
            names.setdefault(id(buffer), name)
    for name, buffer in list(stage.named_buffers()):
        saved_as = names.get(id(buffer))
        if saved_as == name:
            continue
        owner, attribute = _place(stage, name)
        delattr(owner, attribute)
        owner.register_buffer(attribute, buffer, persistent=False)
        if saved_as is not None:
            owner, attribute = _place(stage, saved_as)
            owner.register_buffer(attribute, buffer)


def _keep_unused(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Gives the parameters and persistent buffers that no stage has to the first stage, so that a
    checkpoint has them."""
    used = {id(each) for stage in stages for each in stage.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            owner, attribute = _place(stages[0], name)
            owner.register_parameter(attribute, parameter)
    state = model.state_dict(keep_vars=True)
    saved = {name for stage in stages for name in stage.state_dict(keep_vars=True)}
    for name, buffer in model.named_buffers():
        if name in state and name not in saved:
            owner, attribute = _place(stages[0], name)
            owner.register_buffer(attribute, buffer)


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that holds a tensor of this name, and the name there. Adds modules."""
    path, _, attribute = name.rpartition(".")
    owner = root
    for part in path.split(".") if path else ():
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner, attribute


def _stage(operations: GraphOperations, first: int, end: int) -> TracedStage:
    """Returns the operations from `first` up to `end` as a module."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    traced, before, after = operations.traced, operations.live(first), operations.live(end)
    own = operations.nodes[first:end]
    for node in before:
        copies[node] = graph.placeholder(node.name)
    changed = {memory_of(each, traced) for node in own for each in written_by(node)}
    for node in before:
        # An input is a leaf of the stage's autograd graph, which torch does not let change.
        if memory_of(node, traced) in changed:
            copies[node] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node in operations.repeated, node  # all other values cross the cut
            copies[node] = graph.node_copy(node, copy_of)
        return copies[node]

    for node in own:
        copies[node] = graph.node_copy(node, copy_of)
    results = [copies[node] for node in after]
    if end < len(operations.nodes):
        # torch detaches the results of a stage in place, which views and inputs do not allow.
        clone = torch.ops.aten.clone.default
        results = [graph.call_function(clone, (each,)) for each in results]
    graph.output(tuple(results) if len(results) > 1 else results[0])
    return TracedStage(traced.module, graph)
