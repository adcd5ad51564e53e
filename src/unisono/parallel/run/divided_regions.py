"""The check that the ranks of `tp` sum what they divide: a walk through the graph of a first pass.

A plan divides the outputs of some modules, and other modules sum over the ranks. What is computed
in between is a part of one process's result. A gradient that a whole parameter gets there is a part
too, so the ranks must sum it. What is computed elsewhere is equal on all ranks of `tp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.parallel.divisible.exchanges import exchange_of
from unisono.parallel.divisible.parameter_block import ParameterBlock
from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.run.graph_checks import all_tensors

_INTO_PART = frozenset({"sum_of_all", "gather_copies"})  # seen from the result
_INTO_WHOLE = frozenset({"copy_to_all", "keep_part"})


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedBlock:
    """A parameter's name and block."""

    name: str
    parameter: nn.Parameter
    block: ParameterBlock

    @property
    def is_cut(self) -> bool:
        """True if ranks of `tp` hold different parts."""
        return "tp_row" not in GROUPS[self.block.held_by]

    @property
    def is_summed(self) -> bool:
        """True if the ranks of `tp` sum the gradient of a whole parameter."""
        return "tp_row" in GROUPS[self.block.summed_over]


def region_fault(results: object, inputs: object, blocks: Mapping[int, NamedBlock]) -> str | None:
    """Returns the message of the first fault in the graph from `inputs` to `results`, else None.

    `blocks`: the parameters that may get gradients, by their ids.
    """
    seen: set[tuple[Any, bool]] = set()
    reached: set[int] = set()
    ends = {each.grad_fn for each in all_tensors(inputs) if each.grad_fn is not None}
    waiting = [(each.grad_fn, False) for each in all_tensors(results) if each.grad_fn is not None]
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
    hidden = [each for key, each in blocks.items() if each.is_cut and key not in reached]
    if recomputes and hidden:
        return (
            f"{hidden[0].name}: is divided, but a checkpoint with use_reentrant=True hides how the "
            "model uses it; use_reentrant=False or tp = 1 works"
        )
    return None


def _fault(found: NamedBlock | None, is_part: bool) -> str | None:
    """Returns a message if a parameter is not where its block belongs. `is_part`: it is used
    between modules that divide and modules that sum."""
    if found is None or found.block.summed_over in ("own", "expert_tokens"):
        return None
    module = found.name.rpartition(".")[0] or found.name
    if found.is_cut and not is_part:
        return (
            f"{found.name}: the ranks of tp divide it, but no module sums over the ranks after it, "
            f"so each rank would use a part of the result; expected 'rowwise' for a module after "
            f"{module}, or 'colwise_gather_output' for it"
        )
    if is_part and not found.is_cut and not found.is_summed:
        return (
            f"{found.name}: each rank of tp uses it for its part of the activations, so the ranks "
            "must sum its gradient; expected the style 'replicated_with_grad_allreduce' for "
            f"{module}, which must be a module that is used for divided activations only"
        )
    if found.is_summed and not is_part:
        return (
            f"{found.name}: every rank of tp uses it for whole activations, so the sum of its "
            f"gradient over the ranks would be too large; expected the style 'replicate' for "
            f"{module}"
        )
    return None
