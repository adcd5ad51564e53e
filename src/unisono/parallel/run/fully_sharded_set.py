"""ZeRO-2 and ZeRO-3 by torch's `fully_shard`, with sums instead of averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.run.parameter_sets import (
    Group,
    HeldParameter,
    replicas,
    shard_name,
    sum_of_squares,
    sum_traffic,
)
from unisono.parallel.training_mesh import TrainingMesh


def shard_modules(root: nn.Module, mesh: TrainingMesh) -> None:
    """Splits the parameters of a stage across the group `shard`, separately for each child.

    Gradients are summed while backward runs. ZeRO-2 keeps the whole weights between forward and
    backward, ZeRO-3 gathers them again.
    """
    names = [name for name in ("dp_replicate", "shard") if mesh.group(name) is not None]
    if not names:
        return
    plane = mesh.device_mesh(*names)
    again = mesh.layout.zero == 3
    uses = Counter(each for child in root.children() for each in child.parameters())
    # A parameter that several children use belongs to the stage: one group must gather it.
    alone = [child for child in root.children() if all(uses[p] == 1 for p in child.parameters())]
    for module in [*alone, root]:
        if not any(True for _ in module.parameters()):
            continue
        sharded = fully_shard(module, mesh=plane, reshard_after_forward=again)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


class FullyShardedSet:
    """Parameters that `fully_shard` has split; each rank updates its own shards."""

    def __init__(self, held: Sequence[HeldParameter], mesh: TrainingMesh) -> None:
        """All parameters must have the same groups (`summed_over`, `held_by`) and tie."""
        block = held[0].block
        self._mesh = mesh
        self.held = held
        self.trained = [each.values for each in held]
        done = {*GROUPS["shard"], "dp_replicate"}
        others = [axis for axis in GROUPS[block.summed_over] if axis not in done]
        self._others = [(name, mesh.group(name)) for name in others]
        groups: list[Group] = [held[0].tie, *(group for _, group in self._others)]
        self._groups = [group for group in groups if group is not None]
        self._replicas = replicas(held[0], mesh) / len(mesh.ranks(shard_name(block)))

    def _gradients(self) -> list[torch.Tensor]:
        found = [each.grad for each in self.trained if each.grad is not None]
        return [each.to_local() if isinstance(each, DTensor) else each for each in found]

    def zero_gradients(self) -> None:
        for each in self.trained:
            each.grad = None

    def reduce(self) -> None:
        for group in self._groups:
            for gradient in self._gradients():
                dist.all_reduce(gradient, group=group)

    def squares(self) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64)
        return sum((sum_of_squares(each) for each in self._gradients()), zero) / (self._replicas)

    def scale(self, factor: torch.Tensor) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    def gather(self) -> None:
        """Does nothing, since `fully_shard` gathers the weights before each use."""

    def traffic(self, microbatches: int) -> dict[str, float]:
        """Returns the bytes that a rank sends in a step, by group.

        In each microbatch, ranks gather weights (with ZeRO-3 twice) and sum gradients. Rows
        are padded to equal parts.
        """
        ranks = len(self._mesh.ranks("shard"))
        replicas = len(self._mesh.ranks("dp_replicate"))
        passes = self._mesh.layout.zero  # exchanges: gather (ZeRO-3: twice) and sum
        part = sum(_part_bytes(each, ranks) for each in self.trained)
        return {
            "shard": microbatches * passes * (ranks - 1) * part,
            "dp_replicate": microbatches * 2 * (replicas - 1) / replicas * part,
        } | sum_traffic(self._others, [_local(each) for each in self.trained])


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part_bytes(parameter: nn.Parameter, ranks: int) -> int:
    """Returns the bytes of the longest part if a parameter is split by rows over the ranks."""
    rows = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1)) * parameter.element_size()


def make_fully_sharded_sets(
    held: Sequence[HeldParameter], mesh: TrainingMesh
) -> list[FullyShardedSet]:
    """Returns the sets of parameters of a layout with ZeRO stage 2 or 3."""
    found: dict[tuple[object, ...], list[HeldParameter]] = {}
    for each in held:
        key = (each.block.summed_over, each.block.held_by, each.tie)
        found.setdefault(key, []).append(each)
    return [FullyShardedSet(members, mesh) for members in found.values()]
