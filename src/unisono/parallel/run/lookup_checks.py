"""Refusal of embedding tables whose training depends on the rows that one pass looks up."""

from __future__ import annotations

from torch import nn


def check_lookups(model: nn.Module, *, parts: int, zero: int) -> None:
    """Raises `ValueError` for tables whose lookups of `parts` parts of a batch differ from one
    lookup of the whole batch.

    `max_norm` changes the rows that a pass looks up, and `scale_grad_by_freq` divides gradients by
    the number of times that a row occurs in a pass. Sparse gradients have the rows of one pass;
    without ZeRO-2 and ZeRO-3 they are added to whole gradients.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        what = f"{name}: {type(module).__name__}" if name else type(module).__name__
        if module.max_norm is not None and (parts > 1 or zero >= 2):
            raise ValueError(
                f"{what} with max_norm = {module.max_norm} changes the rows that one rank and one "
                "microbatch look up, so training would depend on the layout; expected max_norm = "
                "None, and rows that the program clips between steps; one rank with one microbatch "
                "works"
            )
        if module.scale_grad_by_freq and parts > 1:
            raise ValueError(
                f"{what} with scale_grad_by_freq divides gradients by the counts of rows in one "
                "rank's microbatch, so training would depend on the layout; expected "
                "scale_grad_by_freq = False; one rank with one microbatch works"
            )
        if module.sparse and zero >= 2:
            raise ValueError(
                f"{what} with sparse = True has gradients that zero = {zero} cannot divide; "
                "expected sparse = False; zero = 1 works"
            )
