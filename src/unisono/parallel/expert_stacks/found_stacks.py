"""The stacks of experts of a model, and why other experts stay whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from unisono.division import nearest_divisor
from unisono.parallel.divisible.interfaces import Divisible
from unisono.parallel.expert_stacks.expert_stack import (
    ExpertStack,
    attributes_that_count,
)
from unisono.parallel.expert_stacks.stack_check import checked_stack
from unisono.planner import Layout
from unisono.torch_backend import has_hooks, own_parameters

_MATRICES = 3
"""The dimensions of a stack of matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundStacks:
    """The modules of a model with stacked experts, which the ranks of `ep` divide."""

    stacks: tuple[ExpertStack, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    """Words about why they stay whole, by the names of other modules with experts."""

    def require(self, model: nn.Module, layout: Layout) -> None:
        """Raises `ValueError` if the ranks of `ep` cannot divide the experts of the model."""
        if not self.stacks:
            named = [each for each in self.whole if "expert" in each] or [*self.whole]
            reason = f"; {named[0] or 'the model'}: {self.whole[named[0]]}" if named else ""
            raise ValueError(
                f"ep = {layout.ep} found no experts to divide in {type(model).__name__}{reason}; "
                "expected a module with parameters (experts, ..., ...) that is called with rows, "
                "and the numbers and weights of their experts, as in models of transformers, or "
                "modules with a method divide(mesh); ep = 1 works"
            )
        ranks = layout.dp // layout.dp_replicate * layout.cp * layout.tp  # ep divides it too
        for each in self.stacks:
            if each.experts % layout.ep:
                near = nearest_divisor(math.gcd(each.experts, ranks), layout.ep)
                raise ValueError(
                    f"{each.name}: ep must divide the experts: {layout.ep} does not divide "
                    f"{each.experts}; {near} does"
                )


def find_stacks(model: nn.Module, left_out: Collection[str] = ()) -> FoundStacks:
    """Returns the stacks of experts of a model. Changes nothing.

    `left_out`: the names of modules that stay whole. Modules with `divide(mesh)` divide their own.
    """
    found: list[ExpertStack] = []
    whole: dict[str, str] = {}
    known: dict[object, ExpertStack | str] = {}
    owners = [each for each in model.modules() if isinstance(each, Divisible)]
    inside = {part for each in owners for part in each.modules()}
    for name, module in model.named_modules():
        if module in inside or name in left_out:
            continue
        stack = _stack_of(name, module)
        checked = _other_experts(name, module) if stack is None else _checked(stack, known)
        if isinstance(checked, ExpertStack):
            found.append(checked)
        elif checked is not None:
            whole[name] = checked
    return FoundStacks(stacks=tuple(found), whole=whole)


def _stack_of(name: str, module: nn.Module) -> ExpertStack | None:
    """Returns the stack of a module: its own parameters of three dimensions, whose first dimension
    counts the experts, and its other parameters with this first dimension."""
    own = {key: each for key, each in own_parameters(module).items() if each is not None}
    matrices = [each for each in own.values() if each.dim() == _MATRICES]
    counts = {each.shape[0] for each in matrices}
    is_of_torch = type(module).__module__.startswith("torch.")
    if is_of_torch or len(counts) != 1 or not all(each.is_floating_point() for each in matrices):
        return None
    (experts,) = counts
    sizes = {size for each in matrices for size in each.shape[1:]}
    parts = [
        key
        for key, each in own.items()
        if each.dim() and each.shape[0] == experts and (each.dim() > 1 or experts not in sizes)
    ]
    if experts < 2:
        return None
    return ExpertStack(name=name, module=module, experts=experts, parameters=tuple(parts))


def _checked(stack: ExpertStack, known: dict[object, ExpertStack | str]) -> ExpertStack | str:
    """Returns a checked stack, or words about why it cannot be divided.

    `known`: the results for modules of one class and one shape.
    """
    module = stack.module
    kind = type(module).__name__
    if "forward" in vars(module):
        return f"{kind} has a forward of its own"
    if any(has_hooks(each) for each in module.modules() if each is not module):
        return f"{kind} has hooks inside, which would see tokens of other ranks"
    shapes = [(key, each.shape, each.dtype) for key, each in module.named_parameters()]
    counts = tuple(attributes_that_count(module, stack.experts))
    key = (type(module), counts, *shapes)
    if key not in known:
        known[key] = checked_stack(stack)
    found = known[key]
    if isinstance(found, ExpertStack):
        return replace(found, name=stack.name, module=module)
    return f"{kind}: {found}"


def _other_experts(name: str, module: nn.Module) -> str | None:
    """Returns words about experts in other forms than stacks; None for other modules."""
    kind = type(module).__name__
    if "expert" not in f"{name.rpartition('.')[2]}.{kind}".lower():
        return None
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1:
        return f"{kind} has its experts as {len(module)} modules, not as stacked parameters"
    shapes = [tuple(each.shape) for each in module.parameters(recurse=False)]
    if any(len(each) == _MATRICES for each in shapes):
        return f"{kind} has stacks of different numbers of experts: {shapes}"
    return None
