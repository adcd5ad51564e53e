"""Pipeline stages of a model that is no sequence of modules: its traced graph, cut in parts.

Each stage receives from the stage before it all values that its own or later operations need. So a
value for a later stage passes through all stages in between. torch's own `pipelining.pipeline()`
sends such a value directly to the later stage, which torch's schedules with several stages per rank
refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from unisono.parallel.precision import Precision, traced_weights
from unisono.parallel.run.batch.batch_tree import BatchTree, tensors_in
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.pipeline.graph_cuts import (
    GraphOperations,
    choose_cuts,
    memory_of,
    written_by,
)
from unisono.parallel.run.pipeline.model_stages import PipelineStage
from unisono.parallel.run.pipeline.traced_graph import TracedCall, trace
from unisono.parallel.run.rank_agreement import of_rank_0
from unisono.torch_backend import own_buffers, own_parameters

_aten = torch.ops.aten
_ARGUMENTS = {
    **dict.fromkeys(
        (
            _aten.dropout.default,
            _aten.dropout_.default,
            _aten.native_dropout.default,
            _aten.alpha_dropout.default,
            _aten.alpha_dropout_.default,
            _aten.feature_dropout.default,
            _aten.feature_dropout_.default,
            _aten.feature_alpha_dropout.default,
            _aten.feature_alpha_dropout_.default,
        ),
        ("train", 2, False),
    ),
    _aten.scaled_dot_product_attention.default: ("dropout_p", 4, 0.0),
}
"""By operation: the name and the place of the argument that turns dropout off, and its value."""


def leave_out_dropout(node: fx.Node) -> None:
    """Makes an operation of a graph compute what it computes in eval mode.

    Raises `ValueError` for other operations that draw random numbers.
    """
    if node.op != "call_function":
        return
    if node.target in _ARGUMENTS:
        name, place, value = _ARGUMENTS[node.target]
        if len(node.args) > place:
            node.update_arg(place, value)
        elif name in node.kwargs or name == "train":
            node.update_kwarg(name, value)
    elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise ValueError(
            f"evaluate: the traced model draws random numbers with {node.target}, and a graph does "
            "not know whether it draws them in eval mode; expected nn.Dropout or functional."
            "dropout; pp = 1 works"
        )


class TracedStage(PipelineStage, fx.GraphModule):
    """A part of a model's graph, with its parameters under their names in the model."""

    traced: TracedCall
    """The call of the whole model that was traced."""

    def check(self, inputs: Any) -> None:
        """Raises `ValueError` for other names, shapes, types or plain values than the example's."""
        found, example = BatchTree.of(inputs), self.traced.example
        if found.text != example.text:
            raise ValueError(
                f"the model was traced for batches with {example.text}, got {found.text}; pass "
                "batches with the names and values of `example`"
            )
        for name, each, expected in zip(found.names, found.tensors, example.tensors, strict=True):
            of = f" of {name}" if name else ""
            if each.shape != expected.shape:
                raise ValueError(
                    f"the model was traced for microbatches{of} of shape {tuple(expected.shape)}, "
                    f"got {tuple(each.shape)}; pass batches of the shape of `example`"
                )
            if each.dtype != expected.dtype:
                raise ValueError(
                    f"the model was traced for inputs{of} of {expected.dtype}, got {each.dtype}; "
                    "pass batches of the type of `example`"
                )

    def begin(self, _: ModelCall, batch: Any) -> Any:
        return self(*tensors_in(batch))

    def resume(self, _: ModelCall, arrived: Any, __: Any) -> Any:
        return self(*arrived) if isinstance(arrived, tuple) else self(arrived)

    def model_output(self, results: Any) -> Any:
        return self.traced.output_of(results)

    def in_eval_mode(self) -> TracedStage:
        """Returns this stage without dropout, as it is in eval mode.

        Raises `ValueError` for operations that draw random numbers in both modes.
        """
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        for node in graph.nodes:
            leave_out_dropout(node)
        found = TracedStage(self, graph)
        found.traced = self.traced
        return found


def traced_stages(
    model: nn.Module, call: TracedCall, stages: int, precision: Precision
) -> list[TracedStage]:
    """Cuts a model into stages with similar numbers of FLOPs. No weight is copied.
    Collective.

    The stages take microbatches like the example of `call` only. Parameters that the forward pass
    does not use belong to the first stage. Raises `ValueError` for a model that cannot be traced or
    cut.
    """
    model = call.module(model)
    with traced_weights(model, precision) as weights:
        traced = trace(model, *call.example.tensors)
    for module in traced.module.modules():
        for own in (own_parameters(module), own_buffers(module)):
            own.update({key: weights.get(each, each) for key, each in own.items()})
    operations = GraphOperations.of(traced)
    costs, crossing = operations.costs(), operations.crossing_bytes()
    firsts = of_rank_0(lambda: choose_cuts(costs, crossing, stages))
    found = []
    for first, end in zip(firsts, [*firsts[1:], len(operations.nodes)], strict=True):
        found.append(_stage(operations, first, end))
        found[-1].traced = call
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
        if saved_as != name:
            _register(stage, name, buffer, persistent=False)
            if saved_as is not None:
                _register(stage, saved_as, buffer)


def _keep_unused(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Gives the parameters and persistent buffers that no stage has to the first stage, so that a
    checkpoint has them."""
    used = {id(each) for stage in stages for each in stage.parameters()}
    unused: list[tuple[str, torch.Tensor]] = [
        pair for pair in model.named_parameters() if id(pair[1]) not in used
    ]
    state = model.state_dict(keep_vars=True)
    saved = {name for stage in stages for name in stage.state_dict(keep_vars=True)}
    unused += [pair for pair in model.named_buffers() if pair[0] in state.keys() - saved]
    for name, each in unused:
        _register(stages[0], name, each)


def _register(root: nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    """Gives a tensor to a module under a name in it. Adds modules."""
    path, _, attribute = name.rpartition(".")
    owner = root
    for part in path.split(".") if path else ():
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(attribute, tensor)
    else:
        owner.register_buffer(attribute, tensor, persistent=persistent)


def _stage(operations: GraphOperations, first: int, end: int) -> TracedStage:
    """Returns the operations from `first` up to `end` as a module."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    traced, is_last = operations.traced, end == len(operations.nodes)
    before = operations.live(first) if first else operations.inputs()
    after = operations.results() if is_last else operations.live(end)
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
    results = [copy_of(node) for node in after]
    if not is_last:
        # torch detaches the results of a stage in place, which views and inputs do not allow.
        clone = torch.ops.aten.clone.default
        results = [graph.call_function(clone, (each,)) for each in results]
    graph.output(tuple(results) if len(results) > 1 else results[0])
    return TracedStage(traced.module, graph)
