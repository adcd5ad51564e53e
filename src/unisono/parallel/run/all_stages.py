"""All pipeline stages of a model: of a sequence of modules, or of a traced graph."""

from __future__ import annotations

import torch
from torch import nn

from unisono.parallel.divisible import Balanced, Divisible
from unisono.parallel.layers import LayoutDropout
from unisono.parallel.run.model_stages import ModelStage, is_sequence, stage_count, stage_names
from unisono.parallel.run.rank_agreement import of_rank_0
from unisono.parallel.run.traced_stages import traced_stages
from unisono.planner import Layout


def all_stages(
    model: nn.Module, layout: Layout, *, example: torch.Tensor | None, microbatches: int
) -> list[nn.Module]:
    """Returns the stages of a layout's pipeline; the model itself without a pipeline.

    Collective. The stages share the model's parameters. `example`: inputs of a batch, for a model
    that is not an `nn.Sequential`. Raises `ValueError` if the model cannot be cut.
    """
    if layout.pp == 1:
        return [model]
    if is_sequence(model) or example is None:
        every = of_rank_0(lambda: stage_names(model, layout))
        return [ModelStage(model, names) for names in every]
    for module in model.modules():
        if isinstance(module, Divisible | Balanced | LayoutDropout):
            raise ValueError(
                f"pp traces {type(model).__name__}, but a graph cannot contain "
                f"{type(module).__name__}, which knows the layout; an nn.Sequential or pp = 1 works"
            )
    if layout.zero >= 2:
        raise ValueError(
            f"zero = {layout.zero} gathers the weights of one module at a time, but a traced graph "
            f"has no modules; with pp = {layout.pp}, zero = 1 works"
        )
    parts = microbatches * layout.dp
    if len(example) == 0 or len(example) % parts:
        raise ValueError(
            f"example: expected a multiple of microbatches x dp = {microbatches} x {layout.dp} = "
            f"{parts} samples, got {len(example)}"
        )
    part = example[: len(example) // parts]
    return list(traced_stages(model, part, stage_count(layout)))
