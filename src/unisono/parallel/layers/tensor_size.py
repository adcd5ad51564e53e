"""The size of a tensor on this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function


class TensorSize(NamedTuple):
    """The size of a tensor."""

    elements: int
    item_bytes: int
    """Bytes of an element."""


def size_on_rank(x: torch.Tensor, is_sent: bool = True) -> TensorSize:
    """Returns the size of a tensor that a rank sends; no elements if it is not sent.

    It is a function of torch, so a mode that reports the shapes of whole sequences leaves it out.
    """
    if has_torch_function((x,)):
        found: TensorSize = handle_torch_function(size_on_rank, (x,), x, is_sent)
        return found
    return TensorSize(x.numel() * is_sent, x.element_size())
