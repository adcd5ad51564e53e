"""Buffers that forward passes write, and modules that an evaluation leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from unisono.parallel.run.parameters.gathered_module import GatheredModule
from unisono.torch_backend import hooks_before, is_spectral_norm, own_buffers, version_of

_Buffers = dict[str, torch.Tensor | None]
BufferState = tuple[torch.Tensor | None, int]
"""A buffer and its version."""
_Vector = tuple[torch.Tensor | None, BufferState]
"""A copy of a spectral norm's vector, and the state of the vector when it was copied."""


class WrittenBuffers:
    """Finds the buffers that the forward passes of a step have written.

    A buffer such as a running mean depends on the samples that a rank and a microbatch have seen.
    One process would see all samples at once, so no rule makes the buffers of the ranks equal to
    its buffers. Vectors of spectral norms depend on weights alone: each microbatch starts from the
    same vectors, so that a step updates them once, as in one process.
    """

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], *, is_pipeline: bool) -> None:
        """`roots`: the modules that passes call, each after the prefix of the names inside it.
        `is_pipeline`: the passes of several microbatches overlap."""
        self._slots: list[tuple[str, _Buffers, str]] = []
        self._norms: list[tuple[_Buffers, str]] = []
        for start, root in roots:
            for name, module in root.named_modules(prefix=start):
                norms = set() if is_pipeline else _norm_buffers(module)
                for key in own_buffers(module):
                    if key in norms:
                        self._norms.append((own_buffers(module), key))
                    else:
                        found = f"{name}.{key}" if name else key
                        self._slots.append((found, own_buffers(module), key))
        self.has_norms = bool(self._norms)
        """True if each pass changes vectors of spectral norms."""
        self._before: list[BufferState] = []
        self._vectors: list[_Vector] = []

    def begin(self) -> None:
        """Notes the state of the buffers before the first forward pass of a step."""
        self._before = [buffer_state(buffers.get(key)) for _, buffers, key in self._slots]
        self._vectors = self._copies()

    def begin_pass(self) -> None:
        """Gives spectral norms the vectors of `begin`, before another forward pass."""
        if self.has_norms:
            self._write(self._vectors)

    @contextmanager
    def passing_again(self) -> Iterator[None]:
        """Gives spectral norms the vectors of `begin` for a forward pass that runs again."""
        found = self._copies()
        self.begin_pass()
        yield
        self._write(found)

    def _copies(self) -> list[_Vector]:
        found = [buffers.get(key) for buffers, key in self._norms]
        return [(None if x is None else x.clone(), buffer_state(x)) for x in found]

    @torch.no_grad()
    def _write(self, vectors: Sequence[_Vector]) -> None:
        """Copies vectors back that a pass has written. Others are not touched, since in eval mode
        the backward pass needs the vectors themselves."""
        for (buffers, key), (copy, before) in zip(self._norms, vectors, strict=True):
            found = buffers.get(key)
            if found is not None and copy is not None and is_written(found, before):
                found.copy_(copy)

    def error(self, *, parts: int, stages: int) -> ValueError | None:
        """Returns an error that names the first buffer written since `begin`; None without one, and
        if a batch has one part and the model one stage.

        `parts`: the number of parts of a batch that are computed apart.
        """
        if parts * stages == 1:
            return None
        division = f"batch into {parts} parts" if parts > 1 else f"model into {stages} stages"
        for (name, buffers, key), before in zip(self._slots, self._before, strict=False):
            if is_written(buffers.get(key), before):
                return ValueError(
                    f"{name}: the forward pass writes this buffer, which would depend on the "
                    f"division of the {division}; write it between steps, under "
                    "torch.no_grad, or put the module in eval mode if it then keeps its buffers"
                )
        return None


def _norm_buffers(module: nn.Module) -> set[str]:
    """Returns the names of a module's buffers that belong to a spectral norm."""
    if is_spectral_norm(module):
        return set(own_buffers(module))
    hooks = [each for each in hooks_before(module) if isinstance(each, SpectralNorm)]
    return {f"{hook.name}_{vector}" for hook in hooks for vector in ("u", "v")}


def is_written(buffer: torch.Tensor | None, before: BufferState) -> bool:
    """Returns True if a program has written a buffer, or has replaced it."""
    tensor, version = buffer_state(buffer)
    return tensor is not before[0] or version != before[1]


def buffer_state(tensor: torch.Tensor | None) -> BufferState:
    """Returns what `is_written` compares."""
    return tensor, 0 if tensor is None else version_of(tensor)


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
        self._module, self._attributes = module, dict(vars(module))
        self._buffers = dict(own_buffers(module))
        present = [each for each in self._buffers.values() if each is not None]
        self._values = [(each, each.clone(), buffer_state(each)) for each in present]

    @torch.no_grad()
    def restore(self) -> None:
        attributes = vars(self._module)
        attributes.clear()
        attributes.update(self._attributes)
        own_buffers(self._module).update(self._buffers)
        for buffer, copy, before in self._values:
            if is_written(buffer, before):
                buffer.copy_(copy)
