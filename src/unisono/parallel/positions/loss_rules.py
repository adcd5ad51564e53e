"""Losses that a model computes of outputs which are divided by positions."""

from __future__ import annotations

from typing import Any

from unisono.parallel.positions.function_call import FunctionCall
from unisono.parallel.positions.sequence_part import placement_of

_BY_CLASS = ("cross_entropy", "nll_loss")
_OF_ELEMENTS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
                "poisson_nll_loss")  # fmt: skip
LOSSES = (*_BY_CLASS, *_OF_ELEMENTS)
"""The names of losses with a rule."""


def part_of_loss(call: FunctionCall) -> Any:
    """Computes the loss of this rank's positions, whose weight the run finds.

    So the loss must be that of the run, which sums the losses and the weights of all ranks.
    """
    if len(call.args) != 2:
        call.refuse("is not known with these arguments")
    output, targets = call.args
    placement, dim = placement_of(output), output.dim()
    if placement is None:
        call.refuse("has whole outputs, but targets that are divided by positions")
    if call.name in _BY_CLASS and not targets.is_floating_point():
        if placement.dim == 1 or dim == 1:
            call.refuse("has classes where the positions are")
        aligned = placement.at(placement.dim - (placement.dim > 1))
        targets = call.aligned(targets, aligned, dim - 1)
        found = aligned
    else:
        if call.name in _BY_CLASS and placement.dim == 1:
            call.refuse("has classes where the positions are")
        if output.dim() != targets.dim():
            call.refuse("would broadcast targets over positions")
        targets = call.aligned(targets, placement, dim)
        found = placement.at(0) if call.name in _BY_CLASS else placement
    options = {
        name: each if (name == "weight" and call.name in _BY_CLASS) or each is None
        else _factor(call, each, dim)
        for name, each in call.options.items()
    }  # fmt: skip
    result = call.function(output, targets, **options)
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return call.placed(result, found)
    if reduction not in ("mean", "sum"):
        call.refuse(f"with reduction = {reduction!r} divides by the samples of each rank")
    if not call.owns_loss:
        call.refuse(
            "computes the loss of a part of the positions, which is not the loss of the run",
            "loss=model_loss without weight=, or a call without labels, works",
        )
    return result


def _factor(call: FunctionCall, option: Any, dims: int) -> Any:
    """Returns an option; refuses factors of positions, which the weight of a mean would need."""
    placement = placement_of(call.args[0])
    assert placement is not None
    if hasattr(option, "dim") and placement.dim - dims + option.dim() >= 0:
        call.refuse("has factors of positions")
    return option
