"""The sum and the weight of a function whose result is that of one loss of torch.

A function such as `lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten())`
returns a mean over the samples that it was given. Its sum and weight are known if it passes all its
samples to the loss, keeps them apart, and returns the result of the loss unchanged. Torch tells a
`TorchFunctionMode` each call of its functions, so this is seen, not guessed.

The ranks of `cp` hold different positions, in zigzag order. A loss that shifts targets or combines
positions would combine positions that are not neighbours, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unisono.parallel.run.batch.batch_tree import tensors_in
from unisono.parallel.run.loss.known_losses import known_call

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


_READS = ("dim", "size", "ndim", "shape", "dtype", "device", "requires_grad", "is_floating_point")
_ELEMENTWISE = ("float", "double", "half", "bfloat16", "int", "long", "to", "type", "type_as",
                "cpu", "contiguous", "clone", "sigmoid", "tanh")  # fmt: skip
_RESHAPES = ("flatten", "view", "view_as", "reshape", "reshape_as", "squeeze", "unsqueeze")
_SWAPS = ("transpose", "permute")
_ALONG_CLASSES = ("log_softmax", "softmax")


def called_loss(
    loss: Callable[[Any, Any], Any],
    output: Any,
    targets: Any,
    *,
    cut: int,
    share: float,
    rows: int,
) -> Any:
    """Calls a loss on a part of a batch.

    Returns (sum, weight) if the result is that of one loss of torch, applied to the samples of
    output and targets; else the result. Raises `ValueError` for other losses that may combine
    positions which `cp` divides. `targets`: a tensor, or the part of a batch of any nesting.
    `cut`: the number of dimensions of the targets that are cut into parts. `share`: the number of
    these targets over that of the whole batch. `rows`: the number of samples.
    """
    with _LossCalls(output, targets, cut, share, rows) as calls:
        found = loss(output, targets)
    if calls.has_returned(found):
        return found, calls.weight
    if calls.combining is not None:
        raise ValueError(
            f"loss: cp divides the positions of a sequence, but the loss calls "
            f"{calls.combining}, which may combine different positions; shift or select "
            "targets before step, with -100 for positions without a target; cp = 1 works"
        )
    return found


class _LossCalls(TorchFunctionMode):
    """Replaces the mean of the first loss of torch by the sum, and notes its weight.

    `has_returned` is True if nothing else happened that could mix samples. `combining` is the first
    function that may combine positions which `cp` divides.
    """

    def __init__(self, output: Any, targets: Any, cut: int, share: float, rows: int) -> None:
        super().__init__()
        self._cut, self._share = cut, share
        given = list(tensors_in(targets))
        self._kept = [*given, *tensors_in(output)]
        """All tensors of the part; kept, so that no other tensor gets the identity of one."""
        of_rows = [each for each in self._kept if each.dim() and len(each) == rows]
        self._sources = dict.fromkeys(map(id, of_rows), "output")
        self._sources |= dict.fromkeys(map(id, given), "targets")
        """Those made of all samples, in order: their rows are samples, or positions of these."""
        self._samples = {*self._sources}
        """Those whose first dimension is that of the samples."""
        self._part = {id(each) for each in self._kept}
        self._total: Any = None
        self._is_known = True
        self.weight = 0.0
        self.combining: str | None = None

    def has_returned(self, found: Any) -> bool:
        return self._is_known and self._total is not None and found is self._total

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if self._cut > 1 and self.combining is None and not _keeps_positions(name, args, kwargs):
            self.combining = name
        if not self._is_known or name in _READS or not self._has_samples((args, kwargs)):
            return func(*args, **kwargs)
        total = self._sum(func, args, kwargs)
        if total is not None:
            return total
        found = func(*args, **kwargs)
        self._is_known = self._keeps_samples(name, found, args, kwargs)
        return found

    def _has_samples(self, value: Any) -> bool:
        """Returns True if the sum, or a tensor of the part, is among nested arguments."""
        if isinstance(value, dict):
            return any(map(self._has_samples, value.values()))
        if isinstance(value, (tuple, list)):
            return any(map(self._has_samples, value))
        return id(value) in self._part or (value is not None and value is self._total)

    def _sum(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Returns the sum of a loss of torch's functions; None for other functions."""
        sources = [self._sources.get(id(each)) for each in args]
        if kwargs.get("reduction") == "none" or sources != ["output", "targets"]:
            return None
        known = known_call(func, kwargs)
        if known is None or self._total is not None:
            return None
        known.check(*args, cut=self._cut)
        # the loss of a batch that is a sum is divided by 1, of which this is the share of a part
        self.weight = self._share if known.is_sum else float(known.weight(args[1]))
        self._total = total = known.sum_of(*args)
        return total

    def _keeps_samples(self, name: str, found: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Returns True if the result of a function has the samples of its argument, in order."""
        source: Any = args[0] if args else None
        if (
            id(source) not in self._sources
            or not isinstance(found, torch.Tensor)
            or not found.dim()
        ):
            return False
        has_samples = id(source) in self._samples
        if name in _RESHAPES:
            has_samples = has_samples and len(found) == len(source)
            keeps = has_samples or _merges(source.shape, found.shape)
        elif name == "__getitem__":
            keeps = has_samples and self._cut == 1 and _is_of_each_sample(args[1], source.dim())
        elif name in _SWAPS:
            keeps = not kwargs and _first_stays(name, args[1:], source.dim())
        elif name in _ALONG_CLASSES:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            keeps = dim is not None and dim % source.dim() > 0
        else:
            keeps = name in _ELEMENTWISE
        if keeps:
            self._sources[id(found)] = self._sources[id(source)]
            self._part.add(id(found))
            self._kept.append(found)
            self._samples |= {id(found)} if has_samples else set()
        return keeps


def _merges(before: torch.Size, after: torch.Size) -> bool:
    """Returns True if the rows after a reshape are those of several first dimensions before it."""
    rows = 1
    for size in before:
        rows *= size
        if rows == after[0]:
            return True
    return False


def _is_of_each_sample(index: Any, dims: int) -> bool:
    """Returns True for an index that takes the same positions of each sample.

    >>> [_is_of_each_sample(each, 2) for each in ((slice(None), 1), (..., 1), (..., 1, 1), 1)]
    [True, True, False, False]
    """
    if not isinstance(index, tuple) or not index:
        return False
    first, *others = index
    if not all(each is None or isinstance(each, (int, slice)) for each in others):
        return False
    if first is Ellipsis:
        return sum(each is not None for each in others) < dims
    return isinstance(first, slice) and first == slice(None)


def _first_stays(name: str, dims: Any, count: int) -> bool:
    """Returns True if a permutation of dimensions keeps the first one."""
    flat = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if not all(isinstance(each, int) for each in flat):
        return False
    places = [each % count for each in flat]
    return 0 not in places if name == "transpose" else places[:1] == [0]
