"""The check that a loss of (sum, weight) treats each position of a sequence alone.

The ranks of `cp` hold different positions, in zigzag order. A loss that shifts targets or combines
positions would combine positions that are not neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OF_ELEMENTS = frozenset(
    ("neg", "abs", "exp", "log", "sqrt", "square", "pow", "clamp", "where", "masked_fill", "div",
     "relu", "tanh", "sigmoid", "logsigmoid", "softplus", "logical_not", "logical_and",
     "logical_or", "isnan", "float", "double", "half", "bfloat16", "int", "long", "bool", "to",
     "type", "type_as", "contiguous", "clone", "detach", "zeros_like", "ones_like", "new_zeros",
     "flatten", "view", "view_as", "reshape", "reshape_as", "squeeze", "unsqueeze", "transpose",
     "permute", "sum", "count_nonzero", "masked_select", "item", "numel", "size", "dim", "shape",
     "ndim", "dtype", "device", "requires_grad", "is_floating_point", "__len__", "__invert__",
     "__neg__", "__abs__", "__rsub__", "__rpow__", "cross_entropy", "nll_loss", "mse_loss",
     "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "mul", "add", "sub",
     "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "soft_margin_loss",
     *(f"{kind}{name}__" for name in _OPERATORS for kind in ("__", "__r", "__i")),
     *(f"__{name}__" for name in _COMPARISONS), *_COMPARISONS)
)  # fmt: skip
_ALONG_LAST = frozenset(("log_softmax", "softmax", "logsumexp", "gather"))


class PositionCalls(TorchFunctionMode):
    """Notes the first function of torch that may combine different positions."""

    def __init__(self) -> None:
        super().__init__()
        self.combining: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if self.combining is None and not _keeps_positions(name, args, kwargs):
            self.combining = name
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """Returns the name of a function of torch, or of the attribute that a function reads."""
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name == "__get__" else name


def _keeps_positions(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "__getitem__":  # by a mask
        return isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
    if name in _ALONG_LAST:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return isinstance(dim, int) and dim % args[0].dim() == args[0].dim() - 1
    return name in _OF_ELEMENTS
