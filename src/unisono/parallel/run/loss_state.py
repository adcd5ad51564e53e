"""The buffers of a loss: those that its calls have written belong to a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from unisono.parallel.checkpoint import TensorBlock
from unisono.parallel.run.loss_modules import loss_modules
from unisono.parallel.run.written_buffers import buffer_state, is_written

_PREFIX = "(loss)."
"""Begins the names of the buffers in a checkpoint; no parameter of a model has such a name."""


class LossState:
    """The persistent buffers of a loss.

    A buffer that no call has written, such as the weights of classes, is not saved: a program may
    go on with other weights.
    """

    def __init__(self, loss: object, stages: Sequence[nn.Module]) -> None:
        """`stages`: those of the model, whose buffers a loss may use."""
        self.modules = loss_modules(loss)
        """The modules that the loss calls, with names."""
        self._others = [each for stage in stages for each in stage.buffers()]
        self._first = {block.name: buffer_state(block.values) for block in self._blocks()}

    def written(self) -> list[TensorBlock]:
        """Returns the buffers that calls of the loss, or a checkpoint, have written."""
        return [
            each
            for each in self._blocks()
            if each.name not in self._first or is_written(each.values, self._first[each.name])
        ]

    def saved(self, names: Collection[str]) -> list[TensorBlock]:
        """Returns the buffers that a checkpoint with these names has."""
        return [each for each in self._blocks() if each.name in names]

    def _blocks(self) -> list[TensorBlock]:
        others = {id(each) for each in self._others}
        found = [block for name, module in self.modules for block in _blocks_of(name, module)]
        return [each for each in found if id(each.values) not in others]


def _blocks_of(start: str, module: nn.Module) -> list[TensorBlock]:
    persistent = module.state_dict(keep_vars=True)
    return [
        TensorBlock(
            name=_PREFIX + (f"{start}.{name}" if start else name),
            shape=tuple(each.shape),
            start=(0,) * each.dim(),
            values=each,
        )
        for name, each in module.named_buffers()
        if name in persistent
    ]
