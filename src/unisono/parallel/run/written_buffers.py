"""Buffers that a forward pass writes, which then depend on the division of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.torch_backend import version_of


class WrittenBuffers:
    """Finds the buffers that the forward passes of a step have written.

    A buffer such as a running mean depends on the samples that a rank and a microbatch have seen.
    One process would see all samples at once, so no rule makes the buffers of the ranks equal to
    its buffers.
    """

    def __init__(self, stages: Sequence[tuple[int, nn.Module]]) -> None:
        self._slots = [
            (f"{name}.{key}" if name else key, module._buffers, key)
            for _, stage in stages
            for name, module in stage.named_modules()
            for key, _ in module.named_buffers(recurse=False)
        ]
        self._before: list[tuple[torch.Tensor | None, int]] = []

    def begin(self) -> None:
        """Notes the state of the buffers before the first forward pass of a step."""
        self._before = [_state(buffers.get(key)) for _, buffers, key in self._slots]

    def error(self, parts: int) -> ValueError | None:
        """Returns an error that names the first buffer written since `begin`; None without one.

        `parts`: the number of parts of a batch that are computed apart.
        """
        for (name, buffers, key), (before, version) in zip(self._slots, self._before, strict=False):
            now, its_version = _state(buffers.get(key))
            if now is not before or its_version != version:
                return ValueError(
                    f"{name}: the forward pass writes this buffer, which would depend on the "
                    f"division of the batch into {parts} parts; write it between steps, under "
                    "torch.no_grad, or put the module in eval mode if it then keeps its buffers"
                )
        return None


def _state(tensor: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    return tensor, 0 if tensor is None else version_of(tensor)
