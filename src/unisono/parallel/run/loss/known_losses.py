"""Losses of torch as sums: how the losses of the parts of a batch make the loss of the batch.

A mean of torch is a sum divided by a weight, such as the number of valid targets. Both are sums
over the samples, so parts of a batch can be computed apart: the loss of the batch is the sum of the
sums, divided by the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.layers import IGNORED, CrossEntropy
from unisono.torch_backend import has_hooks

Function = Callable[..., torch.Tensor]

_ELEMENTWISE = (
    (nn.MSELoss, functional.mse_loss, ()),
    (nn.L1Loss, functional.l1_loss, ()),
    (nn.HuberLoss, functional.huber_loss, ("delta",)),
    (nn.SmoothL1Loss, functional.smooth_l1_loss, ("beta",)),
    (nn.SoftMarginLoss, functional.soft_margin_loss, ()),
    (nn.HingeEmbeddingLoss, functional.hinge_embedding_loss, ("margin",)),
    (nn.PoissonNLLLoss, functional.poisson_nll_loss, ("log_input", "full", "eps")),
    (nn.KLDivLoss, functional.kl_div, ("log_target",)),
    (nn.BCELoss, functional.binary_cross_entropy, ("weight",)),
    (nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
)
"""Modules and functions of outputs and targets of one shape, with the options that may be set.
Their mean is over all elements."""

_BY_CLASS = (
    (nn.CrossEntropyLoss, functional.cross_entropy, ("weight", "ignore_index", "label_smoothing")),
    (nn.NLLLoss, functional.nll_loss, ("weight", "ignore_index")),
)
"""Those of outputs (samples, classes, ...). Their mean is over the valid targets."""

_BY_SAMPLE = (
    (nn.MultiMarginLoss, functional.multi_margin_loss, ("p", "margin", "weight")),
    (nn.MultiLabelMarginLoss, functional.multilabel_margin_loss, ()),
    (nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss, ("weight",)),
)
"""Those of outputs (samples, classes). Their mean is over the samples."""

_ALL: Sequence[tuple[type[nn.Module], Function, tuple[str, ...]]] = (
    *_ELEMENTWISE,
    *_BY_CLASS,
    *_BY_SAMPLE,
)
_OPTIONS = MappingProxyType({function: options for _, function, options in _ALL})
_MODULES = MappingProxyType({module: function for module, function, _ in _ALL})
_OF_ELEMENTS, _OF_CLASSES, _OF_SAMPLES = (
    frozenset(function for _, function, _ in found)
    for found in (_ELEMENTWISE, _BY_CLASS, _BY_SAMPLE)
)

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class KnownLoss:
    """A loss whose sum and weight are known exactly."""

    function: Any
    """The function of torch, or the class `CrossEntropy`."""
    summed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Returns the sum of the losses of a part of a batch."""
    options: Mapping[str, Any]
    """The options of the function that determine the weight, `reduction` among them."""

    def weight(self, targets: torch.Tensor) -> torch.Tensor | float:
        """Returns the weight of targets, by which the sum of their losses is divided, as a number
        or as a tensor that a graph can compute.

        The weights of the parts of a batch add up to the weight of the batch.
        """
        reduction = self.options.get("reduction", "mean")
        if reduction == "sum":
            raise ValueError("a sum has no weight")
        is_by_class = self.function in _OF_CLASSES or self.function is CrossEntropy
        if is_by_class and not targets.is_floating_point():
            valid = targets != self.options.get("ignore_index", IGNORED)
            weight = self.options.get("weight")
            if weight is None:
                return cast(torch.Tensor, valid.sum())
            # class 0 for targets that do not count, also in a traced graph
            weights = weight.detach().double()[targets.where(valid, 0).long()] * valid
            return cast(torch.Tensor, weights.sum())
        if reduction == "batchmean" or self.function is functional.multilabel_margin_loss:
            return float(len(targets))
        if self.function is functional.multilabel_soft_margin_loss:
            return targets.numel() / max(targets.shape[-1], 1)
        if is_by_class:  # probabilities of classes
            return targets.numel() / max(targets.shape[1], 1)
        return float(targets.numel())

    @property
    def is_sum(self) -> bool:
        """True if the loss of a batch is a sum, so that nothing divides it."""
        return bool(self.options.get("reduction") == "sum")

    def sum_of(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of a part of a batch, in float32 or float64."""
        return self.summed(widened(output), widened(targets))

    def check(self, output: Any, targets: torch.Tensor, *, cut: int) -> None:
        """Raises `ValueError` if the sum of parts would differ from the sum of the batch.

        `cut`: the number of dimensions of outputs and targets that are cut into parts.
        """
        name = getattr(self.function, "__name__", "loss")
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"loss: {name} needs one tensor, but the model returned {type(output).__name__}; "
                "pass a function of this output that returns (sum, weight)"
            )
        if self.function in _OF_ELEMENTS and output.shape != targets.shape:
            raise ValueError(
                f"loss: {name} needs outputs and targets of one shape, got {tuple(output.shape)} "
                f"and {tuple(targets.shape)}, which it would broadcast over samples"
            )
        is_classified = self.function in _OF_CLASSES or self.function in _OF_SAMPLES
        if is_classified and output.dim() < 2:
            raise ValueError(
                f"loss: {name} needs outputs (samples, classes, ...), got {tuple(output.shape)}"
            )
        divides_classes = self.function in _OF_SAMPLES or targets.is_floating_point()
        if cut > 1 and is_classified and divides_classes:
            raise ValueError(
                f"loss: cp divides the second dimension of the targets, but {name} needs it whole; "
                "cp = 1 works"
            )
        if self.function in _OF_ELEMENTS:
            for option in ("weight", "pos_weight"):
                self._check_factor(option, output, cut)

    def _check_factor(self, option: str, output: torch.Tensor, cut: int) -> None:
        factor = self.options.get(option)
        if factor is None:
            return
        aligned = factor.dim() - output.dim() + cut
        if any(size != 1 for size in factor.shape[: max(aligned, 0)]):
            raise ValueError(
                f"loss: {option} {tuple(factor.shape)} has factors for the samples of one batch, "
                f"which a part of it cannot use; return (sum, weight) from a function with the "
                "factors among the targets"
            )


def known_loss(loss: Any) -> KnownLoss | None:
    """Returns what is known about a loss of torch, or `CrossEntropy`; None for any other loss.

    Known are the modules of `torch.nn`, the functions of `torch.nn.functional`, and these functions
    with keyword arguments (`functools.partial`). Raises `ValueError` for reductions other than a
    mean or a sum.
    """
    if isinstance(loss, nn.Module) and has_hooks(loss):
        return None  # hooks may change the result
    if type(loss) is CrossEntropy:
        return KnownLoss(function=CrossEntropy, summed=loss.total, options={})
    if type(loss) is partial and not loss.args:
        return known_call(loss.func, loss.keywords)
    function, options = _MODULES.get(type(loss)), dict[str, Any]()
    if function is not None:
        options = {name: getattr(loss, name) for name in (*_OPTIONS[function], "reduction")}
    return known_call(function or loss, options)


def known_call(function: Any, options: Mapping[str, Any]) -> KnownLoss | None:
    """Returns what is known about a function with keyword arguments; None for other functions."""
    try:
        names = _OPTIONS.get(function)
    except TypeError:  # the loss cannot be hashed
        names = None
    given = {name: value for name, value in options.items() if not _is_default(name, value)}
    if names is None or not {*given} <= {*names, "reduction"}:
        return None
    if any(isinstance(each, torch.Tensor) and each.requires_grad for each in given.values()):
        return None
    reduction = given.get("reduction", "mean")
    kinds = ("mean", "sum", "batchmean") if function is functional.kl_div else ("mean", "sum")
    if reduction not in kinds:
        raise ValueError(
            f"loss: expected a mean or a sum, got reduction = {reduction!r}; return (sum, weight) "
            "from a function instead"
        )
    summed = partial(function, **(given | {"reduction": "sum"}))
    return KnownLoss(function=function, summed=summed, options=given)


def _is_default(name: str, value: Any) -> bool:
    """Returns True for options without effect, which torch passes from function to function."""
    return value is None and name in ("weight", "pos_weight", "size_average", "reduce")


def widened(x: torch.Tensor) -> torch.Tensor:
    """Returns x in float32 if its type would round the sum of many losses, or overflow."""
    return x.float() if x.dtype in _NARROW else x
