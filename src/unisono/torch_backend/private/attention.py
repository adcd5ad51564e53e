"""Torch's fused attention for the CPU, whose log-sum-exp only its operators return."""

from __future__ import annotations

from typing import Any

import torch

_of_torch: Any = torch.ops.aten
attention_on_cpu: Any = _of_torch._scaled_dot_product_flash_attention_for_cpu.default
"""Returns the result of attention and its log-sum-exp."""

attention_on_cpu_backward: Any = (
    _of_torch._scaled_dot_product_flash_attention_for_cpu_backward.default
)
"""Returns the gradients of queries, keys and values."""
