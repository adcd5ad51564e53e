"""The mean of gradients, bitwise equal to the average of a reproducible communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mean_in_order(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns (((g0 + g1) + g2) + ...) / n. May overwrite the first gradient.

    16- and 8-bit floats are added in float32 and rounded once. The result has the type of the
    gradients. A NaN becomes the quiet NaN without sign and payload. A single gradient is returned
    unchanged.

    >>> mean_in_order([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]).tolist()
    [2.0, 3.5]
    """
    first = gradients[0]
    if len(gradients) == 1:
        return first
    total = first.float() if first.is_floating_point() and first.itemsize < 4 else first
    for gradient in gradients[1:]:
        # Converts the gradient, because torch cannot add 8-bit floats to other types.
        total.add_(gradient.to(total.dtype))
    parts = torch.view_as_real(total) if total.is_complex() else total
    parts.div_(len(gradients))
    # The sum of inf and -inf is NaN too. Then no element is NaN, and `masked_fill_` does nothing.
    if parts.sum().isnan():
        parts.masked_fill_(parts.isnan(), torch.nan)
    return total.to(first.dtype)
