"""Checks of the autograd graph of a run's first step: what it trains, and what depends on parts.

The modules of a model do not show everything: a forward pass or a loss can use parameters that are
in no module, and call functions such as `embedding` with options that refer to a whole batch.

A plan of `tp` divides the outputs of some modules, and other modules sum over the ranks. What is
computed in between is a part of one process's result. A gradient that a whole parameter gets there
is a part too, so the ranks must sum it. What is computed elsewhere is equal on all ranks of `tp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono.parallel.divisible.exchanges import exchange_of
from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.run.batch.batch_tree import tensors_in
from unisono.parallel.run.model_checks import SCALED_BY_COUNTS, sparse_gradients
from unisono.parallel.run.parameters.parameter_sets import HeldParameter
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
    for node in graph_nodes(functions_of(results), functions_of(inputs)):
        if hasattr(node, "variable"):
            allowed = allowed or known() | {id(each) for each in all_tensors(inputs)}
            if id(node.variable) not in allowed:
                return _foreign(node.variable)
        elif parts > 1 and saved_by(node, "scale_grad_by_freq", False):
            return f"a lookup {SCALED_BY_COUNTS}"
        elif zero >= 2 and saved_by(node, "sparse", False):
            return f"a lookup {sparse_gradients(zero)}"
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


def graph_nodes(begin: Sequence[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yields the nodes of an autograd graph that lead from some nodes to others, each once."""
    seen, waiting = {None, *ends}, [*begin]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions]


def functions_of(value: object) -> list[Any]:
    """Returns the nodes that have computed the tensors in a value of any nesting."""
    return [each.grad_fn for each in all_tensors(value) if each.grad_fn is not None]


def all_tensors(value: object) -> list[torch.Tensor]:
    """Returns the tensors in a value of any nesting; some may be there twice."""
    found: list[torch.Tensor] = []

    def note(each: torch.Tensor) -> torch.Tensor:
        found.append(each)
        return each

    map_tensors(note, value)
    return [*found, *tensors_in(value)]


_INTO_PART = frozenset({"sum_of_all", "gather_copies"})  # seen from the result
_INTO_WHOLE = frozenset({"copy_to_all", "keep_part"})


def region_fault(
    results: object, inputs: object, blocks: Mapping[int, HeldParameter]
) -> str | None:
    """Returns the message of the first fault in the graph from `inputs` to `results`, else None.

    `blocks`: the parameters that may get gradients, by their ids.
    """
    seen: set[tuple[Any, bool]] = set()
    reached: set[int] = set()
    ends = set(functions_of(inputs))
    waiting = [(each, False) for each in functions_of(results)]
    recomputes = False
    while waiting:
        node, is_part = waiting.pop()
        if node in ends or (node, is_part) in seen:
            continue
        seen.add((node, is_part))
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
            found = _fault(blocks.get(id(node.variable)), is_part)
            if found is not None:
                return found
        recomputes |= type(node).__name__ == "CheckpointFunctionBackward"
        kind = exchange_of(node)
        inside = kind in _INTO_PART or (is_part and kind not in _INTO_WHOLE)
        waiting += [(each, inside) for each, _ in node.next_functions if each is not None]
    hidden = [each for key, each in blocks.items() if _is_cut(each) and key not in reached]
    if recomputes and hidden:
        return (
            f"{hidden[0].name}: is divided, but a checkpoint with use_reentrant=True hides how the "
            "model uses it; use_reentrant=False or tp = 1 works"
        )
    return None


def _is_cut(held: HeldParameter) -> bool:
    """Returns True if ranks of `tp` hold different parts of a parameter."""
    return "tp_row" not in GROUPS[held.block.held_by]


def _fault(found: HeldParameter | None, is_part: bool) -> str | None:
    """Returns a message if a parameter is not where its block belongs. `is_part`: it is used
    between modules that divide and modules that sum."""
    if found is None or found.block.summed_over in ("own", "expert_tokens"):
        return None
    module = found.name.rpartition(".")[0] or found.name
    is_summed = "tp_row" in GROUPS[found.block.summed_over]  # over the ranks of `tp`
    if _is_cut(found) and not is_part:
        return (
            f"{found.name}: the ranks of tp divide it, but no module sums over the ranks after it, "
            f"so each rank would use a part of the result; expected 'rowwise' for a module after "
            f"{module}, or 'colwise_gather_output' for it"
        )
    if is_part and not _is_cut(found) and not is_summed:
        return (
            f"{found.name}: each rank of tp uses it for its part of the activations, so the ranks "
            "must sum its gradient; expected the style 'replicated_with_grad_allreduce' for "
            f"{module}, which must be a module that is used for divided activations only"
        )
    if is_summed and not is_part:
        return (
            f"{found.name}: every rank of tp uses it for whole activations, so the sum of its "
            f"gradient over the ranks would be too large; expected the style 'replicate' for "
            f"{module}"
        )
    return None
