"""Memory for the parameters and buffers that a rank keeps of a model on the device meta."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.torch_backend import own_buffers, own_parameters, use_present_weights


def meta_names(model: nn.Module) -> list[str]:
    """Returns the names of the parameters and buffers without values.

    >>> meta_names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    ['1.weight', '1.bias']
    """
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [name for name, each in tensors if each.is_meta]


def give_memory(modules: Iterable[nn.Module]) -> None:
    """Gives the parameters and buffers of modules on the device meta memory on the CPU.

    The memory has no values yet. A split parameter (DTensor) gets that of its part, and keeps its
    identity, since `fully_shard` refers to it.
    """
    found: dict[torch.Tensor, torch.Tensor] = {}
    for module in dict.fromkeys(each for root in modules for each in root.modules()):
        for table in (own_parameters(module), own_buffers(module)):
            for key, value in table.items():
                if value is not None and value.is_meta:
                    if value not in found:
                        found[value] = _with_memory(value)
                    table[key] = found[value]
        use_present_weights(module)


def _with_memory(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(value.detach(), device="cpu")
    if not isinstance(value, nn.Parameter):
        return made
    parameter = nn.Parameter(made, requires_grad=value.requires_grad)
    vars(parameter).update(vars(value))  # blocks, and what a program has marked
    if not isinstance(value, DTensor):
        return parameter
    torch.utils.swap_tensors(value, parameter)  # type: ignore[no-untyped-call]
    return value
