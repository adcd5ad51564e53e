"""Refusal of models and losses whose result depends on the layout."""

from __future__ import annotations

from typing import Any

from torch import nn

from unisono.parallel.layers import IGNORED

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_means(model: nn.Module, loss: Any, *, parts: int) -> None:
    """Raises `ValueError` for means that differ between one process and `parts` parts of a batch.

    These are the statistics of batch norms in training mode, and losses other than a mean over all
    valid targets with equal weights.
    """
    for name, module in model.named_modules():
        if parts > 1 and module.training and isinstance(module, _BATCH_NORMS):
            raise ValueError(
                f"{name}: {type(module).__name__} averages over the samples of one rank and one "
                "microbatch, so training would depend on the layout; expected GroupNorm or "
                "LayerNorm, or a batch norm in eval mode"
            )
    for attribute, expected in (("reduction", "mean"), ("weight", None), ("ignore_index", IGNORED)):
        found = getattr(loss, attribute, expected)
        if isinstance(loss, nn.Module) and not (found is expected or found == expected):
            raise ValueError(
                f"loss: expected a mean over all valid targets, with {attribute} = {expected!r}, "
                f"got {attribute} = {'a tensor' if attribute == 'weight' else repr(found)}"
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


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)
