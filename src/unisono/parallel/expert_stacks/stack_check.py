"""The check that a module computes each row by its experts, and adds up their weighted results.

The arguments and shapes of a module do not show this: it may normalise the weights over the choices
of a row, or mix rows. So copies with few experts compute random rows, together and divided.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from unisono.parallel.expert_stacks.call_forms import FORMS, CallForm, Choices
from unisono.parallel.expert_stacks.expert_stack import ExpertStack, attributes_that_count
from unisono.torch_backend import drop_probability

_EXPERTS, _PARTS, _ROWS = 8, 2, 6
_TYPE = torch.float32
"""The type in which all copies compute: grouped products have no float64."""
_BOUND = 1e-4
"""The largest difference, in parts of the largest result."""
_SHIFT = 16
"""The elements between the values of one expert and those of the next."""
_MOST_COPIED = 2**24
"""The elements of stacks of which each expert gets memory of its own."""
_OTHER_ARGUMENTS = "it is not called with the experts of each row"
_NO_SUM = "its result for a row is not the sum of weight x result over the experts of this row"


def checked_stack(stack: ExpertStack) -> ExpertStack | str:
    """Returns a stack with its counts and forms; else words about why its experts cannot be
    divided. Changes nothing."""
    problem, small = _OTHER_ARGUMENTS, _small_stacks(stack)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for counts in attributes_that_count(stack.module, stack.experts):
            counted = replace(stack, counts=counts)
            found = {form: _has_form(counted, form, small) for form in FORMS}
            forms = tuple(form for form, is_right in found.items() if is_right)
            if forms:
                return replace(counted, forms=forms)
            if False in found.values():
                problem = _NO_SUM
    return problem


def _has_form(stack: ExpertStack, form: CallForm, small: Mapping[str, torch.Tensor]) -> bool | None:
    """Returns True if copies of the module compute the same together and divided, False if not;
    None if it does not take such arguments. `small`: the stacks of the copies."""
    shapes = [getattr(stack.module, name).shape[1:] for name in stack.parameters]
    for width in sorted({size for shape in shapes for size in shape}):
        try:
            return _is_weighted_sum(stack, form, small, width)
        except Exception:  # the rows have another width, or the module other arguments
            continue
    return None


def _is_weighted_sum(
    stack: ExpertStack, form: CallForm, small: Mapping[str, torch.Tensor], width: int
) -> bool:
    """Returns True if copies of the module compute the same together and divided.

    Raises an exception of torch if the module does not take such arguments.
    """
    experts = len(next(iter(small.values())))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(_ROWS, width, generator=generator, dtype=_TYPE)
    # all rows choose one of the experts, so that a limit of rows for an expert shows
    numbers = torch.tensor([[0, 1 + row % (experts - 1)] for row in range(_ROWS)])
    values = form.sample(rows, numbers, experts)
    choices = form.read(values, experts)
    assert choices is not None
    whole = stack.forward(_copy(stack, small), *values, experts=experts)
    if whole.shape[:-1] != choices.shape or not whole.isfinite().all() or not whole.any():
        return False
    whole = whole.flatten(0, -2)
    length, found = experts // _PARTS, torch.zeros_like(whole)
    for first in range(0, experts, length):
        own = {name: each[first : first + length] for name, each in small.items()}
        source, results = _results(stack, form, own, choices, first)
        if results is None:
            return False
        found.index_add_(0, source, results)
    return _are_close(found, whole)


def _results(
    stack: ExpertStack,
    form: CallForm,
    values: Mapping[str, torch.Tensor],
    choices: Choices,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the rows of the experts from `first` on, and their weighted results; None if the
    results of a row depend on other rows."""
    experts = len(next(iter(values.values())))
    own = (choices.numbers >= first) & (choices.numbers < first + experts)
    source, choice = own.nonzero().unbind(1)
    order = choices.numbers[source, choice].argsort(stable=True)
    source, choice = source[order], choice[order]
    numbers, rows = choices.numbers[source, choice] - first, choices.rows[source]
    module = _copy(stack, values)

    def computed(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return form.compute(
            lambda *given: stack.forward(module, *given, experts=experts), rows, counts, choices
        )

    together = computed(rows, numbers.bincount(minlength=experts).tolist())
    alone = torch.cat([
        computed(rows[[place]], [int(each == number) for each in range(experts)])
        for place, number in enumerate(numbers.tolist())
    ])  # fmt: skip
    if not _are_close(alone, together):
        return source, None
    if choices.weights is None:
        return source, together
    return source, together * choices.weights[source, choice].unsqueeze(1)


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= _BOUND * float(expected.abs().max())


def _small_stacks(stack: ExpertStack) -> dict[str, torch.Tensor]:
    """Returns stacks of a few experts with random values.

    Those of one expert are those of another, shifted, so that large ones need the memory of one.
    """
    experts = min(stack.experts, _EXPERTS) // _PARTS * _PARTS
    generator, found = torch.Generator().manual_seed(0), {}
    for name in stack.parameters:
        shape = getattr(stack.module, name).shape[1:]
        count = shape.numel() + _SHIFT * (experts - 1)
        drawn = torch.randn(count, generator=generator, dtype=_TYPE) * shape[-1:].numel() ** -0.5
        strides = torch.empty(shape, device="meta").stride()
        values = drawn.as_strided((experts, *shape), (_SHIFT, *strides))
        found[name] = values if values.numel() > _MOST_COPIED else values.contiguous()
    return found


def _copy(stack: ExpertStack, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Returns a copy of the module in training mode, without dropout, that has other stacks."""
    memo = {
        id(each): nn.Parameter(torch.ones(each.shape), requires_grad=False)
        for each in stack.module.parameters()
        if each.is_meta
    } | {
        id(getattr(stack.module, name)): nn.Parameter(each, requires_grad=False)
        for name, each in values.items()
    }
    made = copy.deepcopy(stack.module, memo).to(_TYPE).train()
    for each in made.modules():
        if drop_probability(each) > 0:
            each.eval()
    return made
