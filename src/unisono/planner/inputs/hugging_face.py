"""Models of Hugging Face configurations (`config.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.planner.inputs.config_keys import ConfigKeys
from unisono.planner.inputs.model_types import MODEL_TYPES, ModelType
from unisono.planner.inputs.other_model_types import (
    OTHER_LLAMA_KEYS,
    OTHER_NAMES,
    REFUSED_TYPES,
    STATED_KEYS,
)
from unisono.planner.inputs.transformer import Transformer

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("qk_nope_head_dim", "head_dim", "kv_channels"),
    "inner": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k"),
    "shared": (
        *("n_shared_experts", "num_shared_experts", "num_shared_expert"),
        "moe_num_shared_experts",
    ),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "window": ("sliding_window", "attention_chunk_size", "window_size"),
    "mtp": ("num_nextn_predict_layers",),
}
"""Names of each size in configurations."""
_USUAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "is_encoder_decoder": False,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}
"""Keys of all types that change the layers, and the values with which they do not."""
_FULL = ("full_attention", "attention")
_LOCAL = ("sliding_attention", "chunked_attention")
_LINEAR = "linear_attention"
_LINEAR_WINDOW = 256
"""Positions in attention that take about as many FLOPs as a layer of linear attention: those of its
own block, and as many again for a state of the size of a head."""


def from_hugging_face(config: Mapping[str, Any]) -> Transformer:
    """Returns the model of a Hugging Face configuration (the content of `config.json`).

    The model has the parameters of the type's causal language model, and the MTP layers that the
    configuration states. Of a model with other parts beside its decoder, the result is the decoder
    (`text_config`). `approximations` says which parts are described only roughly. Raises ValueError
    if a size is missing, if the type is not known, and for parts that `Transformer` cannot express.
    A configuration of no known type is accepted as a Llama if it has all of `STATED_KEYS`, and no
    keys that a Llama does not have.

    >>> from_hugging_face({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                    "vocab_size": 50257, "n_positions": 1024}).parameters
    124439808
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a configuration is a JSON object, not {type(config).__name__}")
    decoder, found = config.get("text_config"), config
    if isinstance(decoder, Mapping):
        found = {"model_type": config.get("model_type"), **decoder}
    name = _type_name(found)
    style = MODEL_TYPES[name]
    # DBRX and MPT state some sizes in inner objects.
    inner = [found.get(key) or {} for key in ("attn_config", "ffn_config")]
    merged = {key: value for each in (*inner, found) for key, value in each.items()}
    keys = ConfigKeys(merged, name, style.defaults)
    _check(keys, style)
    model = _with_linear_layers(_sizes(keys, style), keys, style)
    if found is not config or "vision_config" in config:
        model = _approximated(model, "parts beside the decoder are left out")
    return _with_vectors(model, keys, style)


def _type_name(config: Mapping[str, Any]) -> str:
    """Returns the name of the type in `MODEL_TYPES`."""
    name = config.get("model_type")
    if not isinstance(name, str | None):
        raise ValueError(f"model_type must be a text, not {name!r}")
    name = OTHER_NAMES.get(name or "", name)
    if name and name in MODEL_TYPES:
        return name
    if name and name in REFUSED_TYPES:
        raise ValueError(
            f"model_type {name} cannot be expressed: it has {REFUSED_TYPES[name]}; state the "
            "planner.Transformer(...) of a decoder with similar sizes"
        )
    start = f"model_type {name} is not known" if name else "the configuration has no model_type"
    start += f"; known: {', '.join(MODEL_TYPES)}; or, for the layers of a Llama, state"
    missing = [key for key in STATED_KEYS if key not in config]
    if missing:
        raise ValueError(f"{start} {', '.join(missing)}")
    if config["hidden_act"] != "silu":
        raise ValueError(f"{start} hidden_act = silu, not {config['hidden_act']!r}")
    unknown = sorted(set(config) - {*OTHER_LLAMA_KEYS, *STATED_KEYS})
    if unknown:
        raise ValueError(f"{start} no {', '.join(unknown)}")
    return "llama"


def _check(keys: ConfigKeys, style: ModelType) -> None:
    """Raises ValueError for a missing key, and for keys that mean other parts."""
    for names in style.states:
        if not any(name in keys for name in names.split("|")):
            raise ValueError(f"the configuration has no {names.replace('|', ' or ')}")
    for name, usual in {**_USUAL, **style.usual}.items():
        value = keys.get(name)
        if value is not None and value != usual:
            raise keys.refuse(f"{name} = {value}")


def _sizes(keys: ConfigKeys, style: ModelType) -> Transformer:
    hidden, heads = keys(*_NAMES["hidden"]), keys(*_NAMES["heads"])
    if keys.get("word_embed_proj_dim") not in (None, hidden):
        raise keys.refuse(f"word_embed_proj_dim = {keys.get('word_embed_proj_dim')}")
    usual = keys("expansion_ratio", default=4) * hidden if style.wide_ffn else None
    inner = keys(*_NAMES["inner"], default=usual)
    kv_rank = keys("kv_lora_rank", default=0)
    kv_heads = style.kv_heads(keys, heads) if style.kv_heads else None
    layers = keys(*_NAMES["layers"])
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=0 if kv_rank else kv_heads or keys(*_NAMES["kv_heads"], default=heads),
        head_dim=keys(*_NAMES["head_dim"], default=0),
        ffn=keys("intermediate_size_mlp", default=inner),
        gated=style.gated,
        vocab=keys(*_NAMES["vocab"]),
        tied=keys.flag("tie_word_embeddings"),
        positions=keys(style.positions) + style.more_positions if style.positions else 0,
        mtp_layers=keys(*_NAMES["mtp"], default=0),
        **(_experts(keys, inner, layers) if keys(*_NAMES["experts"], default=0) else {}),
        **(_latent(keys, hidden // heads, kv_rank) if kv_rank else {}),
        **_windows(keys, style, layers),
    )


def _latent(keys: ConfigKeys, usual: int, kv_rank: int) -> dict[str, Any]:
    if keys("v_head_dim", default=usual) != keys("qk_nope_head_dim"):
        raise keys.refuse(f"v_head_dim = {keys.get('v_head_dim')} unlike qk_nope_head_dim")
    return {
        "kv_rank": kv_rank,
        "query_rank": keys("q_lora_rank", default=0),
        "rope_dim": keys("qk_rope_head_dim"),
    }


def _experts(keys: ConfigKeys, inner: int, layers: int) -> dict[str, Any]:
    expert_ffn = keys("moe_intermediate_size", default=inner)
    shared, rest = divmod(keys(*_NAMES["shared_width"], default=0), expert_ffn or 1)
    if rest:
        raise keys.refuse("a width of the shared expert that is no multiple of an expert's")
    dense = [layer for layer in range(layers) if not _has_experts(keys, layer)]
    count, is_first = len(dense), dense == list(range(len(dense)))
    even = [layer for layer in range(layers) if -layer * count % layers < count]
    found: dict[str, Any] = {
        "experts": keys(*_NAMES["experts"]),
        "top_k": keys(*_NAMES["top_k"]),
        "expert_ffn": expert_ffn,
        "shared_experts": keys(*_NAMES["shared"], default=shared),
        "dense_layers": count,
        "spread_dense": not is_first,
    }
    if not is_first and even != dense:
        found["approximations"] = ("layers without experts count as evenly spread",)
    groups = keys("n_group", default=0)
    if groups > 1:
        found |= {"expert_groups": groups, "token_groups": keys("topk_group", default=groups)}
    return found


def _has_experts(keys: ConfigKeys, layer: int) -> bool:
    """Returns False for a dense layer of a mixture of experts."""
    stated = keys.get("moe_layers")
    if stated is not None:
        return layer in stated
    frequency = keys.get("moe_layer_freq")
    if isinstance(frequency, Sequence):  # one entry for each layer
        return bool(frequency[layer])
    first = keys("first_k_dense_replace", "moe_layer_start_index", default=0)
    last = keys.get("moe_layer_end_index")
    step = keys("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    return (
        layer >= first
        and (last in (None, -1) or layer <= last)
        and layer not in (keys.get("mlp_only_layers") or ())
        and (layer + 1) % max(step, 1) == 0
        and layer % (frequency or 1) == 0
    )


def _windows(keys: ConfigKeys, style: ModelType, layers: int) -> dict[str, Any]:
    """Returns the attention window, and the number of layers that have it."""
    window = keys(*_NAMES["window"], default=0)
    if style.full_every is None or style.linear or not window:
        return {}
    kinds = keys.get("layer_types")
    pattern = keys.get("sliding_window_pattern") or style.full_every
    if kinds is not None:
        local = _count(keys, kinds, _LOCAL)
    elif keys.get("use_sliding_window") is not None and not keys.flag("use_sliding_window"):
        local = 0
    elif isinstance(pattern, str):  # "LLLG": three local layers, one global layer
        local = sum(pattern[layer % len(pattern)] == "L" for layer in range(layers))
    elif pattern:
        local = layers - layers // pattern
    else:
        local = layers - min(keys("max_window_layers", default=0), layers)
    chunked = "attention_chunk_size" in style.defaults
    return {"window": window, "local_layers": local, "blocked_window": chunked} if local else {}


def _count(keys: ConfigKeys, kinds: Sequence[str], wanted: Sequence[str]) -> int:
    """Returns the number of layers of these kinds. Raises ValueError for unknown kinds."""
    unknown = sorted(set(kinds) - {*_FULL, *_LOCAL, _LINEAR})
    if unknown:
        raise keys.refuse(f"{unknown[0]} in layer_types")
    return sum(kind in wanted for kind in kinds)


def _with_linear_layers(model: Transformer, keys: ConfigKeys, style: ModelType) -> Transformer:
    """Returns the model with its layers of linear attention as layers of a window."""
    kinds = keys.get("layer_types")
    if kinds is None and isinstance(keys.get("attn_type_list"), list):
        kinds = [_FULL[0] if kind else _LINEAR for kind in keys.get("attn_type_list")]
    if not style.linear:
        if kinds is not None and _count(keys, kinds, (_LINEAR,)):
            raise keys.refuse("linear_attention in layer_types")
        return model
    every = keys("full_attention_interval", default=style.full_every)
    layers = model.layers
    linear = layers - layers // every if kinds is None else _count(keys, kinds, (_LINEAR,))
    weights, gates = style.linear(keys, model)
    more = linear * (weights - model.attention_weights) + (layers - linear) * gates
    found = replace(
        model,
        window=_LINEAR_WINDOW,
        local_layers=linear,
        gate_width=max(round(more / (layers * model.hidden)), 0),
    )
    return _approximated(found, f"linear attention counts as {_LINEAR_WINDOW} positions")


def _approximated(model: Transformer, what: str) -> Transformer:
    return replace(model, approximations=(*model.approximations, what))


def _with_vectors(model: Transformer, keys: ConfigKeys, style: ModelType) -> Transformer:
    """Returns the model with the numbers of its biases and norms, if they differ from a GPT's or a
    Llama's.
    """
    norms = style.norms if isinstance(style.norms, int) else style.norms(keys)
    norm = model.hidden * (2 if keys.flag(style.centred) else 1)
    layer = norms * norm + model.query_rank + model.kv_rank
    layer += (model.query_width + model.key_value_width) * keys.flag(style.query_biases)
    layer += model.hidden * keys.flag(style.output_biases)
    layer += 2 * model.head_dim * keys.flag(style.head_norms)
    layer += (model.query_width + model.key_value_width // 2) * keys.flag(style.wide_head_norms)
    if keys.flag(style.ffn_biases):
        layer += (model.matrices - 1) * model.ffn + model.hidden
    if style.more_vectors:
        layer += style.more_vectors(model)
    expert = (2 * model.expert_ffn + model.hidden) * keys.flag("expert_biases")
    outer = style.outer_norms * norm + model.vocab * keys.flag(style.output_projection_biases)
    stated = replace(model, layer_vectors=layer, outer_vectors=outer, expert_vectors=expert)
    counts = [(each.dense_layer_parameters, each.parameters) for each in (model, stated)]
    return model if counts[0] == counts[1] else stated
