"""The styles of models that state them, as those of transformers do, and of a few others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn


def _block(name: str, outputs: str, inputs: str, fused: str = "") -> dict[str, str]:
    """Returns the styles of a repeated block: of layers that divide their outputs, of layers that
    divide their inputs, and of fused queries, keys and values."""
    kinds = {"colwise": outputs, "rowwise": inputs, "qkv_colwise": fused}
    return {f"{name}.{each}": style for style, found in kinds.items() for each in found.split()}


def _attention(name: str, layers: str = "q_proj k_proj v_proj") -> str:
    return " ".join(f"{name}.{each}" for each in layers.split())


_GPT2 = _block("h.*", "mlp.c_fc", "attn.c_proj mlp.c_proj", fused="attn.c_attn")
_GPT_NEO = _block(
    "h.*", f"{_attention('attn.attention')} mlp.c_fc", "attn.attention.out_proj mlp.c_proj"
)
_BERT = _block(
    "encoder.layer.*",
    f"{_attention('attention.self', 'query key value')} intermediate.dense",
    "attention.output.dense output.dense",
)
_DISTILBERT = _block(
    "transformer.layer.*",
    f"{_attention('attention', 'q_lin k_lin v_lin')} ffn.lin1",
    "attention.out_lin ffn.lin2",
)
_MODERNBERT = _block("layers.*", "", "attn.Wo mlp.Wo", fused="attn.Wqkv") | {
    "layers.*.mlp.Wi": "packed_colwise"
}
_VIT = _block("layers.*", f"{_attention('attention')} mlp.fc1", "attention.o_proj mlp.fc2")
_OLD_VIT = _block(  # before version 5 of transformers
    "encoder.layer.*",
    f"{_attention('attention.attention', 'query key value')} intermediate.dense",
    "attention.output.dense output.dense",
)
_DINO = _block("encoder.layer.*", f"{_attention('attention')} mlp.fc1", "attention.o_proj mlp.fc2")
_DECODER = _block("layers.*", f"{_attention('self_attn')} fc1", "self_attn.out_proj fc2")
_CROSS = _block("decoder.layers.*", _attention("encoder_attn"), "encoder_attn.out_proj")


def _inside(name: str, styles: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{pattern}": style for pattern, style in styles.items()}


_TRANSLATOR = _inside("encoder", _DECODER) | _inside("decoder", _DECODER) | _CROSS
_FORMS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("GPT2", _GPT2),
    ("GPTNeo", _GPT_NEO),
    ("Bert Roberta XLMRoberta Camembert Electra RoFormer", _BERT),
    ("DistilBert", _DISTILBERT),
    ("ModernBert", _MODERNBERT),
    ("ViT", _VIT | _OLD_VIT),
    ("DeiT", _VIT),
    ("Dinov2", _DINO),
    ("OPT", _inside("decoder", _DECODER)),
    ("BioGpt", _DECODER),
    ("Bart MBart Marian Pegasus", _TRANSLATOR),
)
BY_CLASS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {f"{name}Model": styles for names, styles in _FORMS for name in names.split()}
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
