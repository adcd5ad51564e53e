"""Modules that a forward pass leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.parallel.run.gathered_module import GatheredModule
from unisono.parallel.run.written_buffers import buffer_state, is_written


@contextmanager
def unchanged(roots: Sequence[nn.Module], gathered: Sequence[GatheredModule]) -> Iterator[None]:
    """Puts modules into eval mode for the passes inside, and restores them afterwards.

    Restores their modes, their buffers, what their passes have assigned to their attributes, and
    torch's generator. Parameters that `fully_shard` splits are split again. `gathered`: the modules
    that gather parameters.
    """
    modules = {id(each): each for root in roots for each in root.modules()}.values()
    kept = [_Kept(each) for each in modules]
    counts = [dict(vars(each)) for each in gathered]
    generator = torch.get_rng_state()
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        torch.set_rng_state(generator)
        for each in kept:
            each.restore()
        for module, before in zip(gathered, counts, strict=True):
            vars(module).update(before)
            module.release()


class _Kept:
    """The attributes and the buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes: dict[str, Any] = dict(vars(module))
        self._buffers = dict(module._buffers)
        self._values = {
            key: (each.clone(), buffer_state(each))
            for key, each in self._buffers.items()
            if each is not None
        }

    @torch.no_grad()
    def restore(self) -> None:
        attributes = vars(self._module)
        for key in [*attributes]:
            if key not in self._attributes:
                del attributes[key]
        attributes.update(self._attributes)
        self._module._buffers.update(self._buffers)
        for key, (copy, before) in self._values.items():
            buffer = self._buffers[key]
            assert buffer is not None
            if is_written(buffer, before):
                buffer.copy_(copy)
