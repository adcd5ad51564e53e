"""Refusal of models whose result depends on the layout."""

from __future__ import annotations

from torch import nn

from unisono.parallel.layers import LayoutDropout
from unisono.torch_backend import drop_probability

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
