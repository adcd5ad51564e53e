"""Exchanges of tensor parallelism, with tensors that are divided by positions.

The ranks of `tp` that exchange a tensor have the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from unisono.parallel.positions.function_call import FunctionCall, Rule


def _of_elements(call: FunctionCall) -> Any:
    """Sums a tensor, or its gradient, over the ranks."""
    return call.like_first()


def _along(call: FunctionCall) -> Any:
    """Joins the parts of the ranks along a dimension, or keeps one of them."""
    call.require_other(call.option("dim", 2), "divides positions over the ranks of tp, too")
    return call.like_first()


def _size(call: FunctionCall) -> Any:
    return call.run()


EXCHANGE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("copy_to_all", "sum_of_all"), _of_elements),
        **dict.fromkeys(("gather_copies", "keep_part"), _along),
        "size_on_rank": _size,
    }
)
"""The rule of each exchange, by its name."""
