"""Modules without memory for their weights, which still compute results of the right shape."""

from __future__ import annotations

from torch import nn

from unisono.torch_backend import empty_tensors, forget_hooks, own_children, shell


def hollow(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose parameters are NaN and need no memory.

    Its results are NaN where they depend on a parameter. The copy has no hooks, and neither
    parameters nor buffers for `named_parameters` and `named_buffers`.

    >>> import torch
    >>> x = hollow(nn.Linear(2, 3))(torch.ones(4, 2))
    >>> x.shape, bool(x.isnan().all())
    (torch.Size([4, 3]), True)
    """
    found: nn.Module = shell(module)
    children = own_children(found)
    for name, each in children.items():
        children[name] = None if each is None else hollow(each)
    empty_tensors(found)
    forget_hooks(found)
    return found
