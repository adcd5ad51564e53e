"""All pipeline stages of a model: of a sequence of modules, of blocks, or of a traced graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.parallel.divisible.interfaces import Balanced, Divisible
from unisono.parallel.layers import LayoutDropout
from unisono.parallel.meta_weights import meta_names
from unisono.parallel.precision import Precision
from unisono.parallel.run.batch.batch_tree import BatchTree
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.pipeline.block_stages import RepeatedBlocks, block_stages, check_stages
from unisono.parallel.run.pipeline.model_stages import (
    ModelStage,
    is_sequence,
    stage_count,
    stage_names,
)
from unisono.parallel.run.pipeline.traced_graph import TracedCall
from unisono.parallel.run.pipeline.traced_stages import traced_stages
from unisono.parallel.run.rank_agreement import of_rank_0
from unisono.parallel.tensor_plan import ModelPlan
from unisono.planner import Layout


def first_microbatch(
    model: nn.Module, layout: Layout, example: Any, *, microbatches: int, is_local: bool
) -> BatchTree | None:
    """Returns the first microbatch of an example; None if the model is cut without one.

    `example`: inputs of a batch, or a batch of any nesting. `is_local`: it is that of one rank of
    `dp`. Raises `ValueError` if it cannot be divided.
    """
    if layout.pp == 1 or is_sequence(model) or example is None:
        return None
    batch, dp = BatchTree.of(example), 1 if is_local else layout.dp
    parts = microbatches * dp
    if batch.samples == 0 or batch.samples % parts:
        raise ValueError(
            f"example: expected a multiple of microbatches x dp = {microbatches} x {dp} = {parts} "
            f"samples, got {batch.samples}"
        )
    first = batch.with_tensors([each[: batch.samples // parts] for each in batch.tensors])
    return BatchTree.of(first)


def blocks_to_cut(
    planned: ModelPlan, call: ModelCall, first: BatchTree | None
) -> RepeatedBlocks | None:
    """Returns the blocks of a model that a graph cannot serve; None for other models.

    A graph has no modules, which `tp` and `ep` by a plan and ZeRO 2 and 3 need, and has the shapes
    of whole sequences, which `cp` divides. Call before the model is divided. `first`: that of
    `first_microbatch`. Raises `ValueError` if the model's blocks cannot be stages.
    """
    model, layout, why = planned.model, planned.layout, _why(planned, call)
    if first is None or not why:
        return None
    names = meta_names(model)
    if names:
        raise ValueError(
            f"{names[0]}: is on the device meta, but pp = {layout.pp} with {why} runs the model "
            "once to find its blocks; a model on the CPU works, and so does pp without "
            f"{why}"
        )
    found = find_blocks(model, layout, call, first.value)
    if isinstance(found, str):
        raise ValueError(
            f"pp = {layout.pp} with {why} cuts a model between its repeated blocks, but "
            f"{type(model).__name__} {found}; pp = {layout.pp} without {why}, or pp = 1, works"
        )
    return found


def find_blocks(
    model: nn.Module, layout: Layout, call: ModelCall, value: Any
) -> RepeatedBlocks | str:
    """Returns the blocks of a model that can be the stages of a pipeline, or words about why they
    cannot.

    `value`: an example, with which the model and its stages are called. Raises what they raise.
    """

    def run(module: nn.Module) -> Any:
        return call.on_example(module, value)

    with _in_eval_mode(model):
        expected = run(model)
        try:
            found = RepeatedBlocks.of(model, run)
            for name in found.before:
                call.prepare(found.hollows[name])
            stages = stage_count(layout)
            if len(found.blocks) < stages:
                raise ValueError(f"has {len(found.blocks)} blocks for {stages} stages")
            check_stages(expected, block_stages(model, found, stages), run)
        except ValueError as error:
            return str(error)
    return found


def _why(planned: ModelPlan, call: ModelCall) -> str:
    """Returns what a graph cannot serve, in the words of a layout; "" if it can serve all."""
    layout = planned.layout
    needs = {
        "tp": planned.is_divided,
        "ep": bool(planned.experts),
        "cp": call.keeps_sequences,
        "zero": layout.zero >= 2,
    }
    return " and ".join(f"{axis} = {getattr(layout, axis)}" for axis in needs if needs[axis])


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Returns a context without dropout and gradients, which keeps the random state."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def all_stages(
    model: nn.Module,
    layout: Layout,
    first: BatchTree | None,
    *,
    call: ModelCall,
    needs_loss: bool,
    precision: Precision,
    blocks: RepeatedBlocks | None = None,
) -> list[nn.Module]:
    """Returns the stages of a layout's pipeline; the model itself without a pipeline.

    Collective. The stages share the model's parameters. `first`: that of `first_microbatch`.
    `call`: how the model is called. `needs_loss`: the model's own loss is its only output that is
    needed. `blocks`: where the model is cut in place of a graph; a model without a graph is also
    cut between its repeated blocks. Raises `ValueError` if the model cannot be cut.
    """
    if layout.pp == 1:
        return [model]
    if first is None:
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
    traced = TracedCall(call, first, needs_loss=needs_loss)
    try:
        return list(traced_stages(model, traced, stage_count(layout), precision))
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
