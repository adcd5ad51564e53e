"""Modules of torch whose result at a position needs their input at this position alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.utils import parametrize

ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.Identity, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
"""Modules that compute each element separately."""
_RANDOM = (nn.Dropout, nn.AlphaDropout, nn.RReLU)
_OF_FEATURES = (nn.Linear, nn.Bilinear, nn.Embedding)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_ALONG = (nn.Softmax, nn.LogSoftmax, nn.GLU)


def is_elementwise(module: nn.Module) -> bool:
    """Returns True for a module of torch that computes each element separately.

    >>> class Sorted(nn.Identity):
    ...     def forward(self, x):
    ...         return x.sort().values
    >>> is_elementwise(nn.ReLU()), is_elementwise(Sorted())
    (True, False)
    """
    return has_forward_of(module, ELEMENTWISE)


def is_per_position(module: nn.Module) -> bool:
    """Returns True for a module of torch that treats each vector of activations (samples,
    positions, ..., width) alone.

    >>> is_per_position(nn.LayerNorm(8)), is_per_position(nn.LayerNorm((4, 8)))
    (True, False)
    """
    if has_forward_of(module, _NORMS):
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    if has_forward_of(module, _ALONG):
        return bool(module.dim == -1)
    if has_forward_of(module, (nn.PReLU,)):
        return bool(module.num_parameters == 1)  # otherwise one for each index of dimension 1
    return is_elementwise(module) or has_forward_of(module, (*_OF_FEATURES, *_RANDOM))


def has_forward_of(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Returns True if calls of a module run the `forward` of one of the classes, unchanged.

    A subclass may have a forward of its own, and so may an instance. A module with
    parametrizations counts as its former class: they change weights only.
    """
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = parametrize.type_before_parametrizations(module)
    is_called = kind.__call__ is nn.Module.__call__ and "forward" not in vars(module)
    return is_called and any(
        isinstance(module, each) and kind.forward is each.forward for each in kinds
    )
