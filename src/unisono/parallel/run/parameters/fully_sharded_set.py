"""ZeRO-2 and ZeRO-3 by torch's `fully_shard`, with sums instead of averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from unisono.parallel.divisible.parameter_block import block_of
from unisono.parallel.precision import Precision
from unisono.parallel.rank_grid import GROUPS
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.parameters.flat_sets import ShardedSet, WholeSet, sum_names, sums_overlap
from unisono.parallel.run.parameters.gathered_module import (
    CallOrder,
    GatheredModule,
    UnitOutputs,
    copy_views,
)
from unisono.parallel.run.parameters.gathered_units import gathered_units, kept_units
from unisono.parallel.run.parameters.optimizers import Optimizers
from unisono.parallel.run.parameters.parameter_sets import (
    Groups,
    HeldParameter,
    ParameterSet,
    replicas,
    shard_name,
    sum_of_squares,
    sum_over,
    sum_traffic,
)
from unisono.parallel.training_mesh import TrainingMesh, sum_elements


def shard_modules(
    root: nn.Module,
    mesh: TrainingMesh,
    order: CallOrder,
    precision: Precision,
    kept: Collection[nn.Parameter] = (),
) -> list[GatheredModule]:
    """Splits the parameters of a stage across their groups, separately for each gathered unit.

    Dense parameters are split across the group `shard`, and the experts of `ep` across
    `expert_shard`. Parameters stay whole if their group has one rank, if they have no dimensions or
    elements, if their type is not that of most elements of their module, if they are `kept`, and in
    modules of experts if they are no experts, or if another module has them too.
    Gradients of the others are summed while backward runs. ZeRO-2 keeps the whole weights between
    forward and backward, and ZeRO-3 gathers them again, except those that backward passes need at
    once or that blocks are inside of (`kept_units`). In a pipeline, both keep the whole weights
    and gradients of a stage during the step: the passes of a schedule that splits the backward pass
    need the gathered parameters before they begin. Parameters are gathered in the type of
    computation.

    Returns the modules whose parameters are split; `order` notes their calls.
    """
    names = {each: shard_name(block_of(each)) for each in root.parameters()}
    whole = {
        each
        for each, name in names.items()
        if mesh.group(name) is None or each.dim() == 0 or each.numel() == 0 or each in kept
    }
    owners = Counter(each for module in root.modules() for each in module.parameters(recurse=False))
    for module in filter(_has_experts, root.modules()):  # torch splits them in one group
        for each in module.parameters():
            if names[each] != "expert_shard" or owners[each] > 1:
                whole.add(each)
    if len(whole) == len(names):
        return []
    for each in names:
        each.data = each.data.contiguous()  # torch splits contiguous parameters only
    units = gathered_units(root)  # before `fully_shard` changes the types of modules
    is_again = mesh.layout.zero == 3 and mesh.layout.pp == 1
    kept_whole = {root, *kept_units(units)} if is_again else set(root.modules())
    parts = [(each, "expert_shard") for each in root.modules() if _has_experts(each)]
    if mesh.group("shard") is None:  # the root holds experts only
        parts.append((root, "expert_shard"))
    else:
        parts += [(each, "shard") for each in [*units, root]]
    marks = {name: vars(each) for name, each in root.named_parameters()}
    found = [
        _shard(module, name, mesh, whole, order, precision, is_kept=module in kept_whole)
        for module, name in parts
        if module is root or any(each not in whole for each in _unsplit(module))
    ]
    for name, each in root.named_parameters():
        vars(each).update(marks[name])  # a program may have marked the parameter
    return [each for each in found if each is not None]


def _unsplit(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if not isinstance(each, DTensor)]


def _has_experts(module: nn.Module) -> bool:
    own = module.parameters(recurse=False)
    return any(shard_name(block_of(each)) == "expert_shard" for each in own)


def _shard(
    module: nn.Module,
    name: str,
    mesh: TrainingMesh,
    whole: set[nn.Parameter],
    order: CallOrder,
    precision: Precision,
    *,
    is_kept: bool,
) -> GatheredModule | None:
    """Splits the parameters of a module that are not split yet across a group, except `whole`.

    `is_kept`: the gathered parameters stay until the backward pass. Adds to `whole` the parameters
    that torch cannot split together with the others.
    """
    if mesh.group(name) is None or not any(True for _ in module.parameters()):
        return None
    whole |= _of_other_types([each for each in _unsplit(module) if each not in whole])
    ranks = len(mesh.ranks(name))
    outputs = UnitOutputs(module)
    module.register_forward_hook(outputs.take_apart)
    module.register_forward_hook(copy_views)
    sharded = fully_shard(
        module,
        mesh=mesh.device_mesh(*(["dp_replicate"] if mesh.group("dp_replicate") else []), name),
        reshard_after_forward=not is_kept,
        shard_placement_fn=lambda each: Shard(_dim_to_split(each, ranks)),
        ignored_params=whole,
        mp_policy=_policy([each for each in _unsplit(module) if each not in whole], precision),
    )
    module.register_forward_hook(outputs.put_together)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    return GatheredModule(sharded, order, is_kept=is_kept, is_pipelined=mesh.layout.pp > 1)


def _policy(parameters: Sequence[nn.Parameter], precision: Precision) -> MixedPrecisionPolicy:
    """Returns torch's words for the precision of parameters, of which those that are trained have
    one type. The modules convert their inputs themselves."""
    if precision.computation_type is None and precision.reduction is None:
        return MixedPrecisionPolicy()
    kept = next((each.dtype for each in parameters if each.requires_grad), torch.float32)
    return MixedPrecisionPolicy(
        param_dtype=precision.computation_type,
        reduce_dtype=precision.reduced(kept),
        cast_forward_inputs=False,
    )


def _of_other_types(parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """Returns the trained parameters of other types than most elements have."""
    elements: Counter[torch.dtype] = Counter()
    trained = [each for each in parameters if each.requires_grad]
    for each in trained:
        elements[each.dtype] += each.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=None)
    return {each for each in trained if each.dtype != most}


def _dim_to_split(parameter: nn.Parameter, ranks: int) -> int:
    """Returns the dimension along which a parameter is split over the ranks.

    This is the first dimension, whose parts may be uneven. A parameter that is shorter than the
    number of ranks, such as that of a few experts, is split along the first dimension that has
    equal parts, if there is one.
    """
    shape = parameter.shape
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


class FullyShardedSet(ParameterSet):
    """Parameters that `fully_shard` has split; each rank updates its own shards."""

    def __init__(
        self,
        held: Sequence[HeldParameter],
        mesh: TrainingMesh,
        modules: Sequence[GatheredModule],
        precision: Precision,
    ) -> None:
        """Requires split parameters (`DTensor`) with equal groups (`summed_over`, `held_by`) and
        equal ties. `modules`: those that gather the parameters."""
        super().__init__(held)
        block = held[0].block
        self._mesh, self._precision = mesh, precision
        owners = {each: module for module in modules for each in module.parameters}
        self._modules = [owners[each.values] for each in held]
        """The module that gathers each parameter."""
        self._used: Sequence[bool] = ()
        self._shard = shard_name(block)
        done = {*GROUPS[self._shard], "dp_replicate"}
        others = [axis for axis in GROUPS[block.summed_over] if axis not in done]
        self._others = [("pp", held[0].tie)] + [(name, mesh.group(name)) for name in others]
        self._replicas = replicas(held[0], mesh) / len(mesh.ranks(self._shard))

    def merge(self, groups: Groups) -> Sequence[tuple[nn.Parameter, int | None]]:
        """Returns a plain array for the shard of each parameter on this rank."""
        self.trained = [nn.Parameter(_local(each.values)) for each in self.held]
        pairs = zip(self.trained, self.held, strict=True)
        return [(array, groups.get(held.values)) for array, held in pairs]

    def _reduced(self, held: HeldParameter) -> torch.dtype:
        """Returns the type in which the gradient of a parameter is summed."""
        return self._precision.reduced(held.values.dtype)

    def _gradients(self) -> list[torch.Tensor]:
        return [_local(each.values.grad) for each in self.held if each.values.grad is not None]

    def zero_gradients(self) -> None:
        for module in dict.fromkeys(self._modules):
            module.restart()
        for held, trained in zip(self.held, self.trained, strict=True):
            held.values.grad = trained.grad = None

    def reduce(self) -> None:
        self.collect()
        for held in self.held:
            if not held.values.requires_grad:
                held.values.grad = None
        groups = [group for _, group in self._others if group is not None]
        for held in self.held if groups else ():
            if held.values.grad is None:  # other ranks of the group may have one
                held.values.grad = torch.zeros_like(held.values)
            sum_over(groups, _local(held.values.grad), self._reduced(held))
        for held, trained in zip(self.held, self.trained, strict=True):
            if held.values is not trained:
                trained.data = _local(held.values)  # torch moves shards at the first forward pass
                trained.grad = None if held.values.grad is None else _local(held.values.grad)

    def collect(self) -> None:
        self._used = [
            each.values in module.used and each.values.requires_grad
            for each, module in zip(self.held, self._modules, strict=True)
        ]

    def used(self) -> Sequence[bool]:
        return self._used

    def skip(self, unused: Sequence[bool], optimizers: Optimizers) -> None:
        super().skip(unused, optimizers)
        for array, is_unused in zip(self.trained, unused, strict=True):
            if is_unused:
                array.grad = None

    def squares(self) -> float:
        return sum(map(sum_of_squares, self._gradients()), 0.0) / self._replicas

    def scale(self, factor: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    def traffic(self, microbatches: int) -> dict[str, float]:
        """Returns the bytes that a rank sends in a step, by group.

        In each microbatch, ranks gather weights (with ZeRO-3 most of them twice) and sum gradients.
        In a pipeline, they do both once in a step. Parts are padded to equal sizes. The parameters
        of modules that the last step did not call are not moved, and frozen ones are not summed.
        """
        ranks, replicas = (self._mesh.ranks(name) for name in (self._shard, "dp_replicate"))
        layout = self._mesh.layout
        rounds = microbatches if layout.pp == 1 else 1
        scattered = 0
        summed: Counter[tuple[GatheredModule, int]] = Counter()
        for each, module in zip(self.held, self._modules, strict=True):
            part, item = _part_elements(each.values, len(ranks)), self._reduced(each).itemsize
            gathered = self._precision.computed(each.values.dtype).itemsize
            both = (2 - module.is_kept) * gathered + each.values.requires_grad * item
            scattered += min(rounds, module.calls) * part * both
            summed[module, item] += part * each.values.requires_grad
        place = replicas.index(self._mesh.rank)
        between_replicas = sum(
            min(rounds, module.calls) * item * sum_elements(part, ranks=len(replicas), rank=place)
            for (module, item), part in summed.items()
        )
        return {
            self._shard: (len(ranks) - 1) * scattered,
            "dp_replicate": between_replicas,
        } | sum_traffic(
            self._others, [(_local(each.values), self._reduced(each)) for each in self.held]
        )


def gather_traffic(stage: nn.Module, mesh: TrainingMesh, precision: Precision) -> dict[str, float]:
    """Returns the bytes that a rank sends to gather the weights of a stage once, by group."""
    found: Counter[str] = Counter()
    for each in stage.parameters():
        if isinstance(each, DTensor):
            name = (each.device_mesh.mesh_dim_names or ("shard",))[-1]
            ranks = len(mesh.ranks(name))
            found[name] += _gather_bytes(each, ranks, precision)
    return dict(found)


def frozen_traffic(model: DividedModel, microbatches: int) -> dict[str, float]:
    """Returns the bytes that a rank sends in a step to gather frozen parameters, by group."""
    owners = {each: module for module in model.gathered for each in module.parameters}
    found: Counter[str] = Counter()
    mesh = model.mesh
    for held in model.frozen:
        if isinstance(held.values, DTensor):
            module, name = owners[held.values], shard_name(held.block)
            again = module.is_gathered_again
            times = min(microbatches if mesh.layout.pp == 1 else 1, module.calls)
            sent = _gather_bytes(held.values, len(mesh.ranks(name)), model.precision)
            found[name] += times * (1 + again) * sent
    return dict(found)


def split_dim(parameter: DTensor) -> int:
    """Returns the dimension along which `fully_shard` has split a parameter."""
    return next(each.dim for each in parameter.placements if isinstance(each, Shard))


@torch.no_grad()  # otherwise torch records the conversion for a backward pass
def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _gather_bytes(parameter: nn.Parameter, ranks: int, precision: Precision) -> int:
    """Returns the bytes that a rank sends to gather a parameter that is split over the ranks."""
    item = precision.computed(parameter.dtype).itemsize
    return (ranks - 1) * _part_elements(parameter, ranks) * item


def _part_elements(parameter: nn.Parameter, ranks: int) -> int:
    """Returns the elements of the longest part if a parameter is split over the ranks."""
    assert isinstance(parameter, DTensor)
    length = parameter.shape[split_dim(parameter)]
    longest = -(-length // ranks)
    return longest * (parameter.numel() // max(length, 1))


def make_sets(
    trained: Sequence[HeldParameter],
    mesh: TrainingMesh,
    modules: Sequence[GatheredModule],
    precision: Precision,
    unmerged: Collection[nn.Parameter],
) -> list[ParameterSet]:
    """Returns the sets of parameters that divide gradients and states as ZeRO does. Collective.

    Parameters that `shard_modules` has left whole are summed and updated on every rank. `unmerged`:
    parameters of which no arrays are made, which are in sets of their own.
    """
    overlapped = [each for each in trained if sums_overlap(each, mesh)]
    mesh.make_sum_groups({name for each in overlapped for name in sum_names(each, mesh)})
    split: dict[tuple[object, ...], list[HeldParameter]] = {}
    whole: dict[tuple[object, ...], list[HeldParameter]] = {}
    for each in trained:
        block, values = each.block, each.values
        key = (block.summed_over, block.held_by, each.tie, values in unmerged)
        if isinstance(values, DTensor):
            split.setdefault(key, []).append(each)
        else:
            whole.setdefault((*key, values.dtype), []).append(each)
    flat: type[ShardedSet | WholeSet] = ShardedSet if mesh.layout.zero == 1 else WholeSet
    return [
        *(FullyShardedSet(members, mesh, modules, precision) for members in split.values()),
        *(flat(members, mesh, precision) for members in whole.values()),
    ]
