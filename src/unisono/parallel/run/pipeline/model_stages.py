"""The stages of a pipeline: the modules of each stage, and the stages of each rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from unisono.parallel.layers import TokenEmbedding
from unisono.planner import Layout
from unisono.torch_backend import has_hooks, own_children

if TYPE_CHECKING:
    from unisono.parallel.run.batch.model_call import ModelCall

Floats = NDArray[np.float64]


def cut_stages(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the first module of each stage, for stages whose largest cost is minimal.

    >>> cut_stages([0, 4, 4, 4, 4, 2], 2)
    [0, 3]
    """
    return best_parts(np.cumsum([0.0, *costs]), np.zeros(len(costs)), stages)[0]


def best_parts(
    sums: Floats, sizes: Floats, parts: int, limit: float = math.inf
) -> tuple[list[int], float]:
    """Returns the first place of each part of a chain, and the largest cost of a part.

    `sums`: the cost before each place, and the whole cost. `sizes`: the bytes that cross a cut
    before each place. The sum of these bytes is minimal, and then the largest cost, among parts of
    at most the cost `limit`.
    """
    count = len(sizes)
    costs = sums[None, :] - sums[:-1, None]  # of the part from one place up to another
    is_empty = np.arange(count)[:, None] >= np.arange(count + 1)[None, :]
    allowed = ~is_empty & (costs <= limit * (1 + 1e-12))
    fewest, largest = np.full(count, math.inf), np.full(count, math.inf)
    fewest[0] = largest[0] = 0.0
    choices = []
    for _ in range(parts):
        total = np.where(allowed, (fewest + sizes)[:, None], math.inf)
        least = total.min(axis=0)
        worst = np.where(total == least, np.maximum(largest[:, None], costs), math.inf)
        choices.append(worst.argmin(axis=0))
        fewest, largest, whole = least[:-1], worst.min(axis=0)[:-1], worst[:, -1].min()
    firsts, end = [], count
    for choice in reversed(choices):
        end = int(choice[end])
        firsts.append(end)
    return firsts[::-1], float(whole)


def stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """Returns the numbers of the stages that a rank of the pipeline holds, in order.

    >>> stages_of_rank(Layout(pp=2, vpp=2), 0)
    [0, 2]
    >>> stages_of_rank(Layout(pp=2, vpp=2, schedule="zbv"), 0)
    [0, 3]
    """
    if layout.rules.is_v and layout.pp > 1:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + chunk * layout.pp for chunk in range(layout.chunks)]


def stage_count(layout: Layout) -> int:
    """Returns the number of stages of a layout's pipeline."""
    if layout.pp == 1:
        return 1
    return layout.pp * (2 if layout.rules.is_v else layout.chunks)


def is_sequence(model: nn.Module) -> bool:
    """Returns True for a model whose children, called in turn, compute its result."""
    own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
    is_plain = type(model).forward is nn.Sequential.forward and "forward" not in vars(model)
    return isinstance(model, nn.Sequential) and is_plain and not own and not has_hooks(model)


def stage_names(model: nn.Module, layout: Layout) -> list[list[str]]:
    """Returns the names of the modules of each stage.

    The cost of a module is the number of elements of its matrices, a measure of its work per token.
    The cost of an embedding is 0. Raises `ValueError` if the model cannot be cut.
    """
    stages = stage_count(layout)
    if not is_sequence(model):
        plain = " without own forward, hooks, parameters or buffers"
        expected = "an nn.Sequential" + plain * isinstance(model, nn.Sequential)
        raise ValueError(
            f"a pipeline cuts {expected}, not {type(model).__name__}; parallelize(..., "
            "example=inputs) traces and cuts it, and pp = 1 works"
        )
    # a module that the sequence calls several times has several names
    children = {name: module for name, module in own_children(model).items() if module is not None}
    names = list(children)
    if len(names) < stages:
        raise ValueError(
            f"pp x vpp = {stages} stages need as many modules, but the model has {len(names)}; "
            f"{_fewer_stages(layout, len(names))} works"
        )
    firsts = cut_stages([cost_of(child) for child in children.values()], stages)
    return [names[a:b] for a, b in zip(firsts, [*firsts[1:], len(names)], strict=True)]


def _fewer_stages(layout: Layout, modules: int) -> str:
    """Returns the change of a layout that keeps its ranks and has at most `modules` stages."""
    chunks = stage_count(layout) // layout.pp
    for pp in range(modules // chunks, 1, -1):
        if layout.pp % pp == 0:
            return f"pp = {pp}, dp = {layout.dp * layout.pp // pp}"
    return f"dp = {layout.dp * layout.pp} without pp, vpp and schedule"


def cost_of(module: nn.Module) -> float:
    if isinstance(module, nn.Embedding | TokenEmbedding):
        return 0.0
    return float(sum(each.numel() for each in module.parameters() if each.dim() > 1))


class PipelineStage(nn.Module, ABC):
    """A stage of a pipeline, with the methods that each kind of stage has."""

    arrived: Any = None
    """The result of the stage before, during a call of a stage that calls the model."""

    def check(self, inputs: Any) -> None:
        """Raises `ValueError` for a microbatch that the stage does not take."""

    def begin(self, call: ModelCall, batch: Any) -> Any:
        """Returns the result of the first stage for a microbatch."""
        return call(self, batch)

    @abstractmethod
    def resume(self, call: ModelCall, arrived: Any, batch: Any) -> Any:
        """Returns the result of a later stage from that of the stage before."""

    def in_eval_mode(self) -> PipelineStage:
        """Returns this stage in eval mode, in which its modules are already."""
        return self

    def model_output(self, results: Any) -> Any:
        """Returns the output of the model from the results of the last stage."""
        return results


class ModelStage(PipelineStage, nn.Sequential):
    """The modules of one stage, under their names in the model."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(OrderedDict((name, model.get_submodule(name)) for name in names))

    def resume(self, call: ModelCall, arrived: Any, batch: Any) -> Any:
        return call.resume(self, arrived, batch)


def arrived_at(stage: nn.Module) -> Any:
    """Returns what a stage has received from the stage before, besides its arguments."""
    return stage.arrived if isinstance(stage, PipelineStage) else None
