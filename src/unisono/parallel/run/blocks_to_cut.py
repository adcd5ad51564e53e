"""The choice of the blocks between which a pipeline cuts a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.parallel.meta_weights import meta_names
from unisono.parallel.run.all_stages import first_microbatch
from unisono.parallel.run.block_stages import block_stages, check_stages
from unisono.parallel.run.model_call import ModelCall
from unisono.parallel.run.model_stages import is_sequence, stage_count
from unisono.parallel.run.repeated_blocks import RepeatedBlocks
from unisono.parallel.tensor_plan import ModelPlan


def blocks_to_cut(
    planned: ModelPlan, call: ModelCall, example: Any, *, microbatches: int, is_local: bool
) -> RepeatedBlocks | None:
    """Returns the blocks of a model that a graph cannot serve; None for other models.

    A graph has no modules, which `tp` and `ep` by a plan and ZeRO 2 and 3 need. Call before the
    model is divided. Raises `ValueError` if the model's blocks cannot be stages.
    """
    model, layout = planned.model, planned.layout
    needs_modules = planned.is_divided or planned.experts or layout.zero >= 2
    if layout.pp == 1 or is_sequence(model) or example is None or not needs_modules:
        return None
    names = meta_names(model)
    if names:
        raise ValueError(
            f"{names[0]}: is on the device meta, but pp = {layout.pp} with {_why(planned)} runs "
            "the model once to find its blocks; a model on the CPU works, and so does pp without "
            f"{_why(planned)}"
        )
    first = first_microbatch(example, layout, microbatches=microbatches, is_local=is_local)

    def run(module: nn.Module) -> Any:
        return call.on_example(module, first.value)

    try:
        with _in_eval_mode(model):
            found = RepeatedBlocks.of(model, run)
            stages = stage_count(layout)
            if len(found.blocks) < stages:
                raise ValueError(f"has {len(found.blocks)} blocks for {stages} stages")
            check_stages(model, block_stages(model, found, stages), run)
    except ValueError as error:
        why = _why(planned)
        raise ValueError(
            f"pp = {layout.pp} with {why} cuts a model between its repeated blocks, but "
            f"{type(model).__name__} {error}; pp = {layout.pp} without {why}, or pp = 1, works"
        ) from None
    return found


def _why(planned: ModelPlan) -> str:
    """Returns what needs modules, in the words of a layout."""
    layout = planned.layout
    if planned.is_divided:
        return f"tp = {layout.tp}"
    return f"ep = {layout.ep}" if planned.experts else f"zero = {layout.zero}"


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
