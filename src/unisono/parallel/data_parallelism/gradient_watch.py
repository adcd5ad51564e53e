"""Tells when a backward pass has added to a gradient for the last time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn


class GradientWatch:
    """Counts how often a backward pass adds to the gradient of each parameter.

    Autograd adds to a gradient once in most passes, and once in each part of a pass with reentrant
    checkpoints. A gradient counts as complete after as many additions as in the last pass that used
    the parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], added: Callable[[int], None]) -> None:
        """`added` gets the number of a parameter after each addition to its gradient."""
        self._parameters, self._added = parameters, added
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self.counts = [0] * len(parameters)
        """Number of additions in this pass that `count` has counted."""
        self.expected = [0] * len(parameters)
        """Number of additions in the last pass that used the parameter; 0 before the first one."""
        self.update()

    def update(self) -> None:
        """Adds missing hooks to trainable parameters, and removes hooks from frozen parameters."""
        for number, parameter in enumerate(self._parameters):
            hooked = number in self._hooks
            if parameter.requires_grad and not hooked:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[number] = register(self._hook(number))
            elif hooked and not parameter.requires_grad:
                self._hooks.pop(number).remove()

    def count(self, number: int) -> bool:
        """Counts an addition. Returns True if it is the last one, judging by earlier passes."""
        self.counts[number] += 1
        return self.counts[number] == self.expected[number]

    def end_pass(self) -> None:
        """Learns from the pass that ends here."""
        for number, count in enumerate(self.counts):
            if count:
                self.expected[number], self.counts[number] = count, 0

    def forget_pass(self) -> None:
        """Forgets a pass that has failed."""
        self.counts = [0] * len(self._parameters)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def added(_: torch.Tensor) -> None:
            self._added(number)

        disable: Any = torch.compiler.disable
        return cast(Callable[[torch.Tensor], None], disable(added))
