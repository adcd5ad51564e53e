"""The loss that a model computes itself, and its weight.

The loss of a batch follows from the losses of its parts only if their weights are known: the number
of labels over which the model has averaged. Models shift, mask and flatten their labels first. So
the weight comes from the call of torch's loss inside the model's forward pass, which a
`TorchFunctionMode` sees, with the labels that the model has passed to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unisono.parallel.run.loss.known_losses import KnownLoss, known_call
from unisono.parallel.run.loss.loss_calls import name_of

_SCALES = ("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide")
_COPIES = ("to", "float", "double", "clone", "contiguous", "squeeze", "mean", "sum")
"""Functions that do not change the value of one number."""


def model_loss(output: Any, batch: Any) -> torch.Tensor:
    """Returns the loss that a model has computed itself: `output.loss`, as models of transformers
    do.

    As the loss of `parallelize`, the loss of the whole batch is the mean over all its valid labels.

    >>> from types import SimpleNamespace
    >>> model_loss(SimpleNamespace(loss=torch.tensor(0.5), logits=None), {})
    tensor(0.5000)

    Also accepts an output with the key "loss", one that is a tuple that begins with the loss, and
    one that is the loss. Raises `ValueError` for other outputs.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
        return found.reshape(()) if found.dim() else found
    raise ValueError(
        f"model_loss: expected an output with the loss of the model, got {type(output).__name__} "
        "without a loss of one number; pass the labels in the batch, under the name that the model "
        "expects"
    )


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """The own loss of a model whose forward pass is a traced graph, and its weight."""

    loss: torch.Tensor
    weight: torch.Tensor | None
    """None if the loss is a sum, which nothing divides, and if the weight is not known."""
    problem: str | None
    """Why the weight is not known."""


class LossWatch:
    """Watches forward passes for the losses of torch that they call.

    To watch every function costs a tenth of a small model's pass. So the first pass finds the
    module that ends last before the loss, and later passes are watched from the end of this module.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        """`modules`: those whose passes may be watched from the end of a module inside."""
        self._modules = modules
        self._calls = _Calls()
        self._last: nn.Module | None = None
        """The module at whose end the watch of later passes begins."""
        self._waiting: ExitStack | None = None
        """The context of a pass that is not watched yet."""
        self._is_missed = False
        """The last pass did not come to that module."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Watches the forward pass inside."""
        self._calls = _Calls()
        with ExitStack() as context:
            if self._last is None:
                self._begin_whole(context)
            else:
                self._waiting = context
                context.callback(self._last.register_forward_hook(self._begin).remove)
            try:
                yield
            finally:
                self._is_missed, self._waiting = self._waiting is not None, None
        if self._last is None:
            self._last = self._calls.last_before

    def _begin_whole(self, context: ExitStack) -> None:
        """Watches a pass from its beginning, and the ends of all modules."""
        for module in {each for root in self._modules for each in root.modules()}:
            hook = module.register_forward_hook(self._calls.end_module)
            context.callback(hook.remove)
        context.enter_context(self._calls)

    def _begin(self, *_: object) -> None:
        if self._waiting is not None:
            self._waiting.enter_context(self._calls)
            self._waiting = None

    def known(self, loss: torch.Tensor) -> tuple[KnownLoss, torch.Tensor]:
        """Returns what is known about a loss of the last pass, and the targets of its call.

        Raises `ValueError` if it is not the result of one loss of torch, unchanged but for a
        constant factor.
        """
        found = self._calls.losses.get(id(loss))
        if found is None:
            what = "is not the result of one loss of torch.nn.functional"
            if self._is_missed:
                which = type(self._last).__name__
                what += f", or came before the end of a {which}, which it followed in earlier steps"
            if self._calls.losses:
                what = "is not the result of one loss of torch alone, but combined with others"
            raise ValueError(
                f"model_loss: a batch is computed in several parts, and the model's own loss {what}"
                ", so the weight of a part is not known; pass weight=f, where f(batch) is what the "
                "loss of a part was divided by, such as (batch['labels'] != -100).sum(), or a loss "
                "function of (output, batch) that returns (sum, weight)"
            )
        known, (output, targets) = found
        known.check(output, targets, cut=1)
        return known, targets


class _Calls(TorchFunctionMode):
    """Keeps the results of torch's losses, and their products with constants."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, tuple[KnownLoss, tuple[Any, Any]]] = {}
        self._kept: list[Any] = []
        """The results, so that no other tensor gets the identity of one."""
        self.last_before: nn.Module | None = None
        """The module that ended last before the first loss."""
        self._ended: nn.Module | None = None

    def end_module(self, module: nn.Module, *_: object) -> None:
        """Notes the end of a module's forward pass."""
        self._ended = module

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name.endswith("loss") or name in _LOSSES:
            self._note(func, args, kwargs or {}, found)
        elif self.losses and args and id(args[0]) in self.losses:
            self._follow(name_of(func), args, kwargs or {}, found)
        return found

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        """Notes the result of a loss of torch."""
        try:
            known = known_call(func, kwargs)
        except ValueError:  # neither a mean nor a sum
            return
        if known is not None and len(args) == 2:
            if not self.losses:
                self.last_before = self._ended
            self._keep(found, (known, args))

    def _follow(self, name: str, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        """Notes a product of a loss with a constant, and forgets a loss that changes in place."""
        known = self.losses[id(args[0])]
        constants = all(type(each) in (int, float) for each in args[1:]) and not kwargs
        if found is args[0] and name not in _COPIES:
            del self.losses[id(found)]
        elif name in _COPIES or (name in _SCALES and constants):
            self._keep(found, known)

    def _keep(self, found: Any, known: tuple[KnownLoss, tuple[Any, Any]]) -> None:
        self._kept.append(found)
        self.losses[id(found)] = known


_LOSSES = (
    "cross_entropy",
    "kl_div",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""The names of losses that do not end with "loss"."""
