"""Dropout in a traced graph, which was traced in training mode."""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten
_ARGUMENTS = {
    **dict.fromkeys(
        (
            _aten.dropout.default,
            _aten.dropout_.default,
            _aten.native_dropout.default,
            _aten.alpha_dropout.default,
            _aten.alpha_dropout_.default,
            _aten.feature_dropout.default,
            _aten.feature_dropout_.default,
            _aten.feature_alpha_dropout.default,
            _aten.feature_alpha_dropout_.default,
        ),
        ("train", 2, False),
    ),
    _aten.scaled_dot_product_attention.default: ("dropout_p", 4, 0.0),
}
"""By operation: the name and the place of the argument that turns dropout off, and its value."""


def leave_out_dropout(node: fx.Node) -> None:
    """Makes an operation of a graph compute what it computes in eval mode.

    Raises `ValueError` for other operations that draw random numbers.
    """
    if node.op != "call_function":
        return
    if node.target in _ARGUMENTS:
        name, place, value = _ARGUMENTS[node.target]
        if len(node.args) > place:
            node.update_arg(place, value)
        elif name in node.kwargs or name == "train":
            node.update_kwarg(name, value)
    elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise ValueError(
            f"evaluate: the traced model draws random numbers with {node.target}, and a graph does "
            "not know whether it draws them in eval mode; expected nn.Dropout or functional."
            "dropout; pp = 1 works"
        )
