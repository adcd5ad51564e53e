"""Views, versions and memory of a tensor, and nested values of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree


def is_view(tensor: torch.Tensor) -> bool:
    """Returns True if autograd sees the tensor as a view of another tensor."""
    return bool(tensor._is_view())


def without_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same memory that autograd sees as a computed tensor, no view."""
    found: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return found


def version_of(tensor: torch.Tensor) -> int:
    """Returns a number that each operation that writes the tensor in place increases."""
    return 0 if tensor.is_inference() else tensor._version


def storage_number(tensor: torch.Tensor) -> int:
    """Returns a number that changes when a program assigns to the tensor's `data`, also if the
    tensor is a `DTensor`, whose storage has no memory.
    """
    found: int = tensor.untyped_storage()._cdata
    return found


def storage_uses(tensor: torch.Tensor) -> int:
    """Returns how many tensors and storages use a tensor's memory; 2 for the tensor alone."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns a copy of nested tuples, lists and dicts, with the results of a function in place of
    tensors.
    """
    return _pytree.tree_map_only(torch.Tensor, function, value)


def flatten(value: object) -> tuple[list[Any], object]:
    """Returns the leaves of nested tuples, lists and dicts, and their structure."""
    leaves, structure = _pytree.tree_flatten(value)
    return leaves, structure


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """Returns the value that `flatten` has taken apart."""
    return _pytree.tree_unflatten(leaves, structure)
