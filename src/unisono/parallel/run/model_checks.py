"""Refusal of models that no layout trains as one process does, and of a torch that is too old."""

from __future__ import annotations

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


def check_means(model: nn.Module, *, parts: int) -> None:
    """Raises `ValueError` for batch norms in training mode, whose statistics differ between one
    process and `parts` parts of a batch.
    """
    for name, module in model.named_modules():
        if parts > 1 and module.training and isinstance(module, _BATCH_NORMS):
            raise ValueError(
                f"{name}: {type(module).__name__} averages over the samples of one rank and one "
                "microbatch, so training would depend on the layout; expected GroupNorm or "
                "LayerNorm, or a batch norm in eval mode"
            )


def check_dropout(model: nn.Module, *, tp: int) -> None:
    """Raises `ValueError` for modules that draw random numbers from the generator of each rank, if
    `tp` ranks compute them for the same samples.
    """
    for name, module in model.named_modules():
        if tp > 1 and _draws(module):
            raise ValueError(
                f"{name}: {type(module).__name__} draws another mask on each rank of tp, so the "
                "weights of these ranks would differ; expected parallel.layers.LayoutDropout or "
                "a probability of 0; tp = 1 works"
            )
        name_of_rate = _own_rate(module) if tp > 1 and module.training else None
        if name_of_rate is not None:
            raise ValueError(
                f"{name or 'the model'}: {type(module).__name__}.{name_of_rate} is a probability "
                "of dropout, whose masks would differ between the ranks of tp; expected a "
                "probability of 0; tp = 1 works"
            )


def _own_rate(module: nn.Module) -> str | None:
    """Returns the name of a number of a module that is a probability of dropout, which its forward
    pass may give to a function; None without one. Modules of torch are checked by their types, and
    `LayoutDropout` draws the same masks on all ranks."""
    if isinstance(module, LayoutDropout) or type(module).__module__.startswith("torch."):
        return None
    rates = (
        name
        for name, value in vars(module).items()
        if "drop" in name and isinstance(value, float) and value > 0
    )
    return next(rates, None)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, nn.RReLU) or drop_probability(module) > 0


def check_lookups(model: nn.Module, *, parts: int, zero: int) -> None:
    """Raises `ValueError` for tables whose lookups of `parts` parts of a batch differ from one
    lookup of the whole batch.

    `max_norm` changes the rows that a pass looks up, and `scale_grad_by_freq` divides gradients by
    the number of times that a row occurs in a pass. Sparse gradients have the rows of one pass;
    without ZeRO-2 and ZeRO-3 they are added to whole gradients.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        what = f"{name}: {type(module).__name__}" if name else type(module).__name__
        if module.max_norm is not None and (parts > 1 or zero >= 2):
            raise ValueError(
                f"{what} with max_norm = {module.max_norm} changes the rows that one rank and one "
                "microbatch look up, so training would depend on the layout; expected max_norm = "
                "None, and rows that the program clips between steps; one rank with one microbatch "
                "works"
            )
        if module.scale_grad_by_freq and parts > 1:
            raise ValueError(
                f"{what} with scale_grad_by_freq divides gradients by the counts of rows in one "
                "rank's microbatch, so training would depend on the layout; expected "
                "scale_grad_by_freq = False; one rank with one microbatch works"
            )
        if module.sparse and zero >= 2:
            raise ValueError(
                f"{what} with sparse = True has gradients that zero = {zero} cannot divide; "
                "expected sparse = False; zero = 1 works"
            )
