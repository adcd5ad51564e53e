"""Checks of the autograd graph of a run's first step: what it trains, and what depends on parts.

The modules of a model do not show everything: a forward pass or a loss can use parameters that are
in no module, and call functions such as `embedding` with options that refer to a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from unisono.parallel.run.unused_output import tensors_in
from unisono.torch_backend import map_tensors, saved_by

_INSTANCE_NORM = frozenset({"ViewBackward0", "RepeatBackward0"})
"""The operations before the batch norm of an instance norm: of its inputs, and of its weights."""


def graph_fault(
    results: object, inputs: object, known: Callable[[], set[int]], *, parts: int, zero: int
) -> str | None:
    """Returns the message of the first fault in the graph from `inputs` to `results`, else None.

    `known`: returns the ids of the tensors that may get gradients. `parts`: the number of parts of
    a batch. Operations that change their results with the part are those of lookups with
    `scale_grad_by_freq` and of batch norms in training mode.
    """
    allowed: set[int] | None = None
    for node in _nodes(results, inputs):
        if hasattr(node, "variable"):
            allowed = allowed or known() | {id(each) for each in all_tensors(inputs)}
            if id(node.variable) not in allowed:
                return _foreign(node.variable)
        elif parts > 1 and saved_by(node, "scale_grad_by_freq", False):
            return (
                "a lookup with scale_grad_by_freq divides gradients by the counts of rows in one "
                "rank's microbatch, so training would depend on the layout; expected "
                "scale_grad_by_freq = False; one rank with one microbatch works"
            )
        elif zero >= 2 and saved_by(node, "sparse", False):
            return (
                f"a lookup with sparse = True has gradients that zero = {zero} cannot divide; "
                "expected sparse = False; zero = 1 works"
            )
        elif parts > 1 and _averages_over_samples(node):
            return (
                "a batch norm in training mode averages over the samples of one rank and one "
                "microbatch, so training would depend on the layout; expected a group or layer norm"
            )
    return None


def _averages_over_samples(node: Any) -> bool:
    """Returns True for a batch norm in training mode.

    Torch computes an instance norm as a batch norm of one sample, whose channels are those of all
    samples; it is not refused.
    """
    if "BatchNorm" not in node.name() or not saved_by(node, "training", False):
        return False
    before = {each.name() for each, _ in node.next_functions if each is not None}
    is_instance_norm = len(saved_by(node, "input")) == 1 and bool(before & _INSTANCE_NORM)
    return not is_instance_norm


def _foreign(tensor: torch.Tensor) -> str:
    return (
        f"the model or the loss trains a tensor of shape {tuple(tensor.shape)} that is not one of "
        "the model's parameters, or was one before parallelize replaced it, so its gradient would "
        "not be summed over the ranks; register it as a parameter of the model, read it from its "
        "module in each forward pass, and give a trained loss as a part of the model"
    )


def _nodes(results: object, inputs: object) -> Iterator[Any]:
    """Yields the nodes of the graph, without those that computed the inputs."""
    seen = {each.grad_fn for each in all_tensors(inputs) if each.grad_fn is not None}
    waiting = [each.grad_fn for each in all_tensors(results)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [each for each, _ in node.next_functions]


def all_tensors(value: object) -> list[torch.Tensor]:
    """Returns the tensors in a value of any nesting; some may be there twice."""
    found: list[torch.Tensor] = []

    def note(each: torch.Tensor) -> torch.Tensor:
        found.append(each)
        return each

    map_tensors(note, value)
    return [*found, *tensors_in(value)]
