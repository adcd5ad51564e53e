"""All pipeline stages of a model: of a sequence of modules, of blocks, or of a traced graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from unisono.parallel.divisible.interfaces import Balanced, Divisible
from unisono.parallel.layers import LayoutDropout
from unisono.parallel.meta_weights import meta_names
from unisono.parallel.precision import Precision
from unisono.parallel.run.block_stages import block_stages
from unisono.parallel.run.blocks_to_cut import find_blocks
from unisono.parallel.run.first_microbatch import first_microbatch
from unisono.parallel.run.model_call import ModelCall
from unisono.parallel.run.model_stages import ModelStage, is_sequence, stage_count, stage_names
from unisono.parallel.run.rank_agreement import of_rank_0
from unisono.parallel.run.repeated_blocks import RepeatedBlocks
from unisono.parallel.run.traced_call import TracedCall
from unisono.parallel.run.traced_stages import traced_stages
from unisono.planner import Layout


def all_stages(
    model: nn.Module,
    layout: Layout,
    *,
    example: Any,
    microbatches: int,
    call: ModelCall,
    needs_loss: bool,
    precision: Precision,
    is_local: bool = False,
    blocks: RepeatedBlocks | None = None,
) -> list[nn.Module]:
    """Returns the stages of a layout's pipeline; the model itself without a pipeline.

    Collective. The stages share the model's parameters. `example`: inputs of a batch, or a batch of
    any nesting, for a model that is not an `nn.Sequential`. `call`: how the model is called.
    `needs_loss`: the model's own loss is its only output that is needed. `is_local`: the example is
    the batch of one rank of `dp`. `blocks`: where the model is cut in place of a graph; a model
    without a graph is also cut between its repeated blocks. Raises `ValueError` if the model cannot
    be cut.
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
    if blocks is not None:
        return list(block_stages(model, blocks, stage_count(layout)))
    first = first_microbatch(example, layout, microbatches=microbatches, is_local=is_local)
    traced = TracedCall(model, call, first, needs_loss=needs_loss)
    try:
        return list(traced_stages(traced, stage_count(layout), precision))
    except ValueError:
        found = _blocks_without_graph(model, layout, call, first.value)
        if found is None:
            raise
    return list(block_stages(model, found, stage_count(layout)))


def _blocks_without_graph(
    model: nn.Module, layout: Layout, call: ModelCall, value: Any
) -> RepeatedBlocks | None:
    """Returns the repeated blocks of a model that has no graph; None if they cannot be stages."""
    if meta_names(model):
        return None
    try:
        found = find_blocks(model, layout, call, value)
    except Exception:  # of the model, which the error about its graph tells
        return None
    return None if isinstance(found, str) else found
