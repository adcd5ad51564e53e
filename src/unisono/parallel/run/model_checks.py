"""Refusal of models that no layout trains as one process does, and of a torch that is too old."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion

from unisono.errors import UnsupportedError
from unisono.parallel.layers import LayoutDropout
from unisono.planner import Layout
from unisono.torch_backend import drop_probability

_NEEDED = "2.13"


def check_torch(layout: Layout) -> None:
    """Raises `UnsupportedError` if a layout needs a newer torch.

    Older pipeline schedules run the passes of a stage in another way, and older versions of
    `fully_shard` do not sum the gradients of parameters that only some ranks have used.
    """
    if layout.pp > 1:
        need_torch(f"pp = {layout.pp}", "pp = 1")
    if layout.zero > 1:
        need_torch(f"zero = {layout.zero}", "zero = 1")


def need_torch(what: str, other: str) -> None:
    """Raises `UnsupportedError` that names `other` if torch is too old for `what`."""
    if TorchVersion(torch.__version__) < _NEEDED:
        raise UnsupportedError(
            f"{what} needs torch {_NEEDED} or newer, found torch {torch.__version__}: install it; "
            f"{other} works"
        )


def check_parameters(model: nn.Module) -> None:
    """Raises `ValueError` for parameters and buffers without a shape or without a dense array."""
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(values):
            raise ValueError(
                f"{name}: expected a parameter with a shape, got that of a lazy module; call the "
                "model once on inputs of a batch before parallelize"
            )
        if values.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense tensor, got the layout {values.layout}; "
                "values.to_dense() works"
            )


def check_loss_parameters(loss: object) -> None:
    """Raises `ValueError` for a loss with parameters of its own, which no rank would sum."""
    module = getattr(loss, "__self__", loss)  # of a bound method
    if not isinstance(module, nn.Module):
        return
    for name, each in module.named_parameters():
        if each.requires_grad:
            raise ValueError(
                f"loss: {type(module).__name__} has the trained parameter {name}, whose gradient "
                "would not be summed over the ranks; make it a parameter of the model, which "
                "returns what the loss needs, or freeze it (requires_grad_(False))"
            )


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
SCALED_BY_COUNTS = (
    "with scale_grad_by_freq divides gradients by the counts of rows in one rank's microbatch, so "
    "training would depend on the layout; expected scale_grad_by_freq = False; one rank with one "
    "microbatch works"
)


def sparse_gradients(zero: int) -> str:
    """Returns the fault of a lookup with sparse gradients, which have the rows of one pass. Without
    ZeRO-2 and ZeRO-3, they are added to whole gradients."""
    return (
        f"with sparse = True has gradients that zero = {zero} cannot divide; expected sparse = "
        "False; zero = 1 works"
    )


def check_modules(model: nn.Module, *, parts: int, zero: int, tp: int = 1) -> None:
    """Raises `ValueError` for modules whose training on `parts` parts of a batch, or on `tp` ranks
    with the same samples, differs from that of one process."""
    for name, module in model.named_modules():
        of_tp = _faults_of_tp(module) if tp > 1 else ()
        for fault in (*_faults_of_parts(module, parts, zero), *of_tp):
            what = type(module).__name__ + fault
            raise ValueError(f"{name}: {what}" if name else what)


def _faults_of_parts(module: nn.Module, parts: int, zero: int) -> Iterator[str]:
    if parts > 1 and module.training and isinstance(module, _BATCH_NORMS):
        yield (
            " averages over the samples of one rank and one microbatch, so training would depend "
            "on the layout; expected GroupNorm or LayerNorm, or a batch norm in eval mode"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None and (parts > 1 or zero >= 2):
            yield (
                f" with max_norm = {module.max_norm} changes the rows that one rank and one "
                "microbatch look up, so training would depend on the layout; expected max_norm = "
                "None, and rows that the program clips between steps; one rank with one microbatch "
                "works"
            )
        if module.scale_grad_by_freq and parts > 1:
            yield f" {SCALED_BY_COUNTS}"
        if module.sparse and zero >= 2:
            yield f" {sparse_gradients(zero)}"


def _faults_of_tp(module: nn.Module) -> Iterator[str]:
    """Yields a fault of a module that draws random numbers from the generator of each rank.

    `LayoutDropout` draws the same masks on all ranks. A number of another module that is not
    torch's may be a probability of dropout, which its forward pass gives to a function.
    """
    recurrent = isinstance(module, nn.MultiheadAttention | nn.RNNBase)
    rate: Any = module.dropout if recurrent else drop_probability(module)
    if isinstance(module, nn.RReLU) or rate > 0:
        yield (
            " draws another mask on each rank of tp, so the weights of these ranks would differ; "
            "expected parallel.layers.LayoutDropout or a probability of 0; tp = 1 works"
        )
    is_known = isinstance(module, LayoutDropout) or type(module).__module__.startswith("torch.")
    for name, value in vars(module).items() if module.training and not is_known else ():
        if "drop" in name and isinstance(value, float) and value > 0:
            yield (
                f".{name} is a probability of dropout, whose masks would differ between the ranks "
                "of tp; expected a probability of 0; tp = 1 works"
            )
