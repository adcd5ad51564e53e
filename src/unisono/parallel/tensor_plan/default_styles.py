"""The styles of models that state them, as those of transformers do, and of a few others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

_GPT2 = {
    "h.*.attn.c_attn": "qkv_colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_VIT = {
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": "colwise",
    "layers.*.attention.o_proj": "rowwise",
    "layers.*.mlp.fc1": "colwise",
    "layers.*.mlp.fc2": "rowwise",
}
_OLD_VIT = {  # before version 5 of transformers
    "encoder.layer.*.attention.attention.query": "colwise",
    "encoder.layer.*.attention.attention.key": "colwise",
    "encoder.layer.*.attention.attention.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
BY_CLASS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"GPT2Model": _GPT2, "BertModel": _BERT, "ViTModel": _VIT | _OLD_VIT}
)
"""The styles of models that state none, by the name of the model's class."""


def default_styles(model: nn.Module) -> dict[str, str]:
    """Returns the styles of a model by patterns of module names: those of `_tp_plan`, which models
    of transformers have, or those that are known for a class. Empty if neither is known.

    A module inside `model` may state the styles, with names relative to itself.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        stated = getattr(module, "_tp_plan", None)
        if not isinstance(stated, Mapping) or not stated:
            stated = BY_CLASS.get(type(module).__name__, {})
        for pattern, style in stated.items():
            found.setdefault(f"{name}.{pattern}" if name else pattern, style)
    return found
