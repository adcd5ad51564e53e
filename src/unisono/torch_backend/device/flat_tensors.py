"""Tensors and lists of tensors as one contiguous tensor of several pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Flat(NamedTuple):
    """One contiguous tensor, the bytes of its pieces, and the copy back to the caller's tensors."""

    tensor: torch.Tensor | None = None
    sizes: tuple[int, ...] = ()
    finish: Callable[[], None] | None = None


def flat_source(source: Any, pieces: int) -> Flat:
    """Returns a tensor of `pieces` equal pieces, or a list with a tensor for each piece.

    Raises `ValueError` for a tensor that has no equal pieces.
    """
    if isinstance(source, torch.Tensor):
        tensor = source.detach().contiguous().view(-1)
        return Flat(tensor, _equal_sizes(tensor, pieces))
    if len(source) == 1 and pieces > 1:
        return flat_source(source[0], pieces)
    parts = [each.detach().reshape(-1) for each in source]
    return Flat(torch.cat(parts), tuple(each.nbytes for each in parts))


def flat_target(target: Any, *, pieces: int = 1, keeps_values: bool = False) -> Flat:
    """Returns memory for a tensor of `pieces` equal pieces, or for a list of tensors.

    `keeps_values`: the memory begins with the target's values. Raises `ValueError` for a tensor
    that has no equal pieces.
    """
    if isinstance(target, torch.Tensor):
        tensor = target.detach()
        if tensor.is_contiguous():
            return Flat(tensor.view(-1), _equal_sizes(tensor, pieces))
        flat = (
            tensor.contiguous()
            if keeps_values
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )
        return Flat(flat.view(-1), _equal_sizes(flat, pieces), _copy_back([tensor], flat))
    tensors = [each.detach() for each in target]
    joined = _joined(tensors)
    sizes = tuple(each.nbytes for each in tensors)
    if joined is not None:
        return Flat(joined, sizes)
    flat = tensors[0].new_empty(sum(each.numel() for each in tensors))
    return Flat(flat, sizes, _copy_back(tensors, flat))


def overlap(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Returns True if two contiguous tensors have common memory."""
    if a is None or b is None or not (a.numel() and b.numel()):
        return False
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns one tensor over all tensors if each begins where the one before ends."""
    place = tensors[0].storage_offset()
    for each in tensors:
        is_next = each.storage_offset() == place and each.is_contiguous()
        if (
            not is_next
            or each.untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr()
        ):
            return None
        place += each.numel()
    return tensors[0].as_strided((place - tensors[0].storage_offset(),), (1,))


def _equal_sizes(tensor: torch.Tensor, pieces: int) -> tuple[int, ...]:
    if pieces == 1:
        return (tensor.nbytes,)
    if tensor.numel() % pieces:
        raise ValueError(
            f"expected a multiple of {pieces} elements, one share for each rank, not "
            f"{tensor.numel()}"
        )
    return (tensor.nbytes // pieces,) * pieces


def _copy_back(targets: Sequence[torch.Tensor], flat: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        parts = torch.split(flat.view(-1), [each.numel() for each in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))

    return copy
