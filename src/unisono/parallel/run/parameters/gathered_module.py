"""A module whose parameters `fully_shard` splits: its outputs, and what a step used of it.

`fully_shard` gathers weights for the backward pass when a gradient reaches a tensor of a module's
output. It finds those in tuples, lists, dicts and registered types, but not in dataclasses and
other mappings, as which models return a loss and logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointFunction

from unisono.parallel.run.batch.batch_tree import Frame, tensors_in
from unisono.torch_backend import (
    even_out_gradients,
    flatten,
    forget_forward_passes,
    is_called_by,
    is_in_backward,
    is_view,
    map_tensors,
    split_groups,
    whole_parameter,
    without_view,
)

_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)


class UnitOutputs:
    """Gives `fully_shard` a list of the tensors in place of a module's output.

    `take_apart` is a forward hook to be registered before `fully_shard`, `put_together` one to be
    registered after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._outputs: list[Frame | None] = []
        """For each forward pass in progress, the output without tensors; None if it is whole."""

    def take_apart(self, _: nn.Module, __: object, results: Any) -> Any:
        """Raises `ValueError` for an object without a tensor that can be found."""
        if all(isinstance(each, _PLAIN) for each in flatten(results)[0]):
            self._outputs.append(None)
            return None
        output, found = Frame.of(results)
        if not found and any(each.requires_grad for each in tensors_in(results)):
            raise ValueError(
                f"zero gathers weights when a gradient reaches the result of a module, but "
                f"{self._name} returns {type(results).__name__}; return tensors in "
                "mappings, dataclasses, tuples or lists; zero = 1 works"
            )
        self._outputs.append(output)
        return found

    def put_together(self, _: nn.Module, __: object, results: Any) -> Any:
        """Returns the output of the module."""
        output = self._outputs.pop()
        return None if output is None else output.filled(results)


class CallOrder:
    """The order in which a step calls the modules of this rank that gather parameters.

    Modules of the same order on all ranks gather their parameters together.
    """

    def __init__(self) -> None:
        self._modules = 0
        self._calls = bytearray()
        self._left: GatheredModule | None = None

    def add_module(self) -> int:
        """Returns the number of a new module."""
        self._modules += 1
        return self._modules

    def call(self, number: int) -> None:
        """Notes the call of a module."""
        self._calls += number.to_bytes(4, "little")

    def leave(self, module: GatheredModule) -> None:
        """Notes the end of a forward pass."""
        if self._left is not None:
            self._left.next = module
        self._left = module

    def restart(self) -> None:
        """Begins a step."""
        self._calls.clear()
        self._left = None

    def checksum(self) -> int:
        """Returns a number below 2^20 that two different orders rarely share."""
        return zlib.crc32(self._calls) % 2**20


class GatheredModule:
    """Counts the calls of a module in a step, and finds the parameters that got a gradient.

    A called module sums the gradients of all its parameters. The gradient of a parameter that this
    rank did not use counts as zero, because other ranks may have used the parameter.
    """

    def __init__(
        self, module: FSDPModule, order: CallOrder, *, is_kept: bool, is_pipelined: bool
    ) -> None:
        """`module`: the result of `fully_shard`. `is_kept`: gathered parameters stay until the
        backward pass. `is_pipelined`: several microbatches may be under way at once, and their
        gradients are summed after the last one."""
        self._module, self._is_alone = module, not is_pipelined
        self._order, self._number = order, order.add_module()
        self.is_kept = is_kept
        self.calls = 0
        """Number of forward passes through the module since `restart`."""
        self.used: set[nn.Parameter] = set()
        """The split parameters that got a gradient on this rank since `restart`."""
        self.next: GatheredModule | None = None
        """The module whose last forward pass ended after that of this one."""
        self._uses, self._was_in_backward = 0, False
        """Number of forward passes since the last backward pass."""
        # torch has no public hook between the backward passes and the sum of the gradients
        self._groups: list[Any] = split_groups(module)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._is_frozen = not any(each.requires_grad for each in self.parameters)
        self._has_gradient = not self._is_frozen
        cast(nn.Module, module).register_forward_pre_hook(self._enter)
        cast(nn.Module, module).register_forward_hook(self._exit)
        for group in self._groups:
            group.post_backward = partial(self._leave, group, group.post_backward)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are split for this module alone."""
        return [each.sharded_param for group in self._groups for each in group.fsdp_params]

    @property
    def is_gathered_again(self) -> bool:
        """True if the last backward pass gathered the parameters.

        With ZeRO-3, torch gathers those of each module that a gradient reaches, and in advance
        those of the module before it, unless they are kept.
        """
        if self.is_kept:
            return False
        return self._has_gradient or (self.next is not None and self.next._has_gradient)

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each split parameter with the gathered one, which the model uses while it runs. Torch
        makes gathered parameters in the first step."""
        if not self._pairs:
            entries = [each for group in self._groups for each in group.fsdp_params]
            found = [(each.sharded_param, whole_parameter(each)) for each in entries]
            self._pairs = [(split, whole) for split, whole in found if whole is not None]
        return self._pairs

    def restart(self) -> None:
        """Begins a step."""
        self._order.restart()
        self.calls = 0
        self.used.clear()
        self._module.set_reduce_scatter_unused_params(False, recurse=False)

    def release(self) -> None:
        """Splits the parameters again, and forgets forward passes that no backward pass follows."""
        self._module.reshard()
        for group in self._groups:
            forget_forward_passes(group)

    def _enter(self, *_: object) -> None:
        self.calls += 1
        self._order.call(self._number)
        self._refuse_shared_recomputation()
        self._module.set_reduce_scatter_unused_params(True, recurse=False)

    def _exit(self, _: object, __: object, results: object) -> None:
        self._order.leave(self)
        if self._is_frozen:
            self._has_gradient = any(each.requires_grad for each in tensors_in(results))

    def _refuse_shared_recomputation(self) -> None:
        """Raises `ValueError` if a reentrant checkpoint runs a module again that was called twice:
        torch then sums the gradients of one of the calls only.
        """
        if not is_in_backward():
            self._uses = 1 if self._was_in_backward else self._uses + 1
            self._was_in_backward = False
            return
        self._was_in_backward = True
        is_reentrant = is_called_by(CheckpointFunction.backward)  # it runs a forward pass again
        if self._is_alone and self._uses > 1 and is_reentrant:
            raise ValueError(
                "zero = 2 and zero = 3 lose gradients of a module that a forward pass calls "
                "several times, once of them in torch.utils.checkpoint(use_reentrant=True); "
                "use_reentrant=False or zero = 1 works"
            )

    def _leave(self, group: Any, leave: Callable[..., None], *arguments: Any) -> None:
        for each in group.fsdp_params:
            whole = whole_parameter(each)
            if whole is not None and whole.grad is not None:
                self.used.add(each.sharded_param)
        if not self._is_alone:
            even_out_gradients(group)
        leave(*arguments)


def copy_views(module: nn.Module, _: object, results: Any) -> Any:
    """Returns the results of a module, with copies of those that are views. A forward hook.

    `fully_shard` gathers weights for the backward pass when a gradient reaches a result. An
    operation that later changes a view in place would remove the result from the graph. Call before
    `fully_shard`, which then sees the copies. A linear layer shares its result with nobody, so its
    view, which it makes for inputs of three dimensions, needs no copy.
    """

    def copied(result: torch.Tensor) -> torch.Tensor:
        if not (result.requires_grad and is_view(result)):
            return result
        if type(module).forward is nn.Linear.forward:
            return without_view(result)
        return result.clone()

    return copied(results) if isinstance(results, torch.Tensor) else map_tensors(copied, results)
