"""Models of Hugging Face configurations (`config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.planner.inputs.model_types import (
    MODEL_TYPES,
    OTHER_LLAMA_KEYS,
    REFUSED_TYPES,
    STATED_KEYS,
    ModelType,
)
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.whole_numbers import switch, whole_number

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def from_hugging_face(config: Mapping[str, Any]) -> Transformer:
    """Returns the model of a Hugging Face configuration (the content of `config.json`).

    The model has exactly the parameters of the type's causal language model. Raises ValueError if a
    size is missing, if the type is not known, and for parts that `Transformer` cannot express. A
    configuration of no known type is accepted as a Llama if it has all of `STATED_KEYS`, and no
    keys that a Llama does not have.

    >>> from_hugging_face({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                    "vocab_size": 50257, "n_positions": 1024}).parameters
    124439808
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a configuration is a JSON object, not {type(config).__name__}")
    name = _type_name(config)
    # DBRX and MPT state some sizes in inner objects.
    inner = [config.get(key) or {} for key in ("attn_config", "ffn_config")]
    keys = _Keys({key: value for each in (*inner, config) for key, value in each.items()}, name)
    style = _falcon(keys, MODEL_TYPES[name]) if name == "falcon" else MODEL_TYPES[name]
    keys.check(style.states)
    return _with_vectors(_sizes(keys, style), keys, style)


def _type_name(config: Mapping[str, Any]) -> str:
    """Returns the name of the type in `MODEL_TYPES`."""
    name = config.get("model_type")
    if not isinstance(name, str | None):
        raise ValueError(f"model_type must be a text, not {name!r}")
    if name and name in MODEL_TYPES:
        return name
    if name and name in REFUSED_TYPES:
        raise ValueError(f"model_type {name} cannot be expressed: it has {REFUSED_TYPES[name]}")
    if isinstance(config.get("text_config"), Mapping):
        raise ValueError(
            f"model_type {name} cannot be expressed: it has parts beside its decoder; give the "
            "object text_config alone, if its own model_type is known, such as gemma3_text"
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


class _Keys:
    """Reads a configuration that has several names for one size."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self.name = config, name

    def __call__(self, *names: str, default: int | None = None) -> int:
        """Returns the whole number of the first of these keys that is stated."""
        for name in names:
            value = self._config.get(name)
            if value is not None:
                return whole_number(name, value, least=0)
        if default is None:
            raise ValueError(f"the configuration has no {' or '.join(names)}")
        return default

    def get(self, name: str) -> Any:
        """Returns the value of a key, or None."""
        return self._config.get(name)

    def flag(self, choice: bool | str) -> bool:
        """Returns a choice of a `ModelType`."""
        if isinstance(choice, bool):
            return choice
        name = choice.lstrip("+!")
        value = self._config.get(name)
        if value is None:
            return choice.startswith("+")
        return switch(name, value) != choice.startswith("!")

    def refuse(self, what: str) -> ValueError:
        """Returns the error for a part that `Transformer` cannot express."""
        return ValueError(f"model_type {self.name}: {what} cannot be expressed")

    def check(self, states: tuple[str, ...]) -> None:
        """Raises ValueError for a missing key, and for keys that mean other parts."""
        for names in states:
            if not any(name in self._config for name in names.split("|")):
                raise ValueError(f"the configuration has no {names.replace('|', ' or ')}")
        for name, usual in _USUAL.items():
            value = self._config.get(name)
            if value is not None and value not in usual:
                raise self.refuse(f"{name} = {value}")
        if "linear_attention" in (self._config.get("layer_types") or ()):
            raise self.refuse("linear_attention in layer_types")


_USUAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "decoder_sparse_step": (1,),
    "do_layer_norm_before": (True,),
    "enable_bias": (True,),
    "interleave_moe_layer_step": (1,),
    "is_encoder_decoder": (False,),
    "layer_norm_elementwise_affine": (True,),
    "moe_layer_freq": (1,),
    "qk_layernorm": (False,),
    "qk_ln": (False,),
    "_remove_final_layer_norm": (False,),
}
"""Keys that change the layers, and the values with which they do not."""


def _sizes(keys: _Keys, style: ModelType) -> Transformer:
    hidden = keys("hidden_size", "n_embd", "n_embed", "d_model")
    heads = keys("num_attention_heads", "n_head", "n_heads")
    if keys.get("word_embed_proj_dim") not in (None, hidden):
        raise keys.refuse(f"word_embed_proj_dim = {keys.get('word_embed_proj_dim')}")
    if keys.name == "mpt" and not keys.flag("+alibi"):
        raise keys.refuse("attention without alibi")
    usual = keys("expansion_ratio", default=4) * hidden if style.wide_ffn else None
    inner = keys("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", default=usual)
    kv_rank = keys("kv_lora_rank", default=0)
    layers = keys("num_hidden_layers", "n_layer", "n_layers")
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=0 if kv_rank else _kv_heads(keys, heads),
        head_dim=keys("qk_nope_head_dim", "head_dim", default=0),
        ffn=keys("intermediate_size_mlp", default=inner),
        gated=style.gated,
        vocab=keys("vocab_size"),
        tied=keys.flag("+tie_word_embeddings" if style.tied else "tie_word_embeddings"),
        positions=keys(style.positions) + style.more_positions if style.positions else 0,
        **(_experts(keys, inner, layers) if keys(*_EXPERTS, default=0) else {}),
        **(_latent(keys, kv_rank) if kv_rank else {}),
    )


def _kv_heads(keys: _Keys, heads: int) -> int:
    if keys.name == "gpt_bigcode" or (
        keys.name == "falcon" and not keys.flag("new_decoder_architecture")
    ):
        return 1 if keys.flag("+multi_query") else heads
    if keys.name == "mpt" and keys.get("attn_type") == "multiquery_attention":
        return 1
    return keys("num_key_value_heads", "num_kv_heads", "kv_n_heads", default=heads)


def _latent(keys: _Keys, kv_rank: int) -> dict[str, int]:
    if keys("v_head_dim") != keys("qk_nope_head_dim"):
        raise keys.refuse(f"v_head_dim = {keys('v_head_dim')} unlike qk_nope_head_dim")
    if keys.flag("attention_bias"):
        raise keys.refuse("attention_bias = True with latent attention")
    return {
        "kv_rank": kv_rank,
        "query_rank": keys("q_lora_rank", default=0),
        "rope_dim": keys("qk_rope_head_dim"),
    }


def _experts(keys: _Keys, inner: int, layers: int) -> dict[str, int]:
    expert_ffn = keys("moe_intermediate_size", default=inner)
    shared, rest = divmod(keys("shared_expert_intermediate_size", default=0), expert_ffn or 1)
    if rest:
        raise keys.refuse("shared_expert_intermediate_size that is no multiple of an expert's")
    dense = keys.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise keys.refuse(f"mlp_only_layers = {dense}, which are not the first layers,")
    if keys.name == "llama4_text":
        if keys.get("moe_layers") not in (None, list(range(layers))):
            raise keys.refuse("moe_layers that are not all layers")
        shared = 1
    if shared and dense:
        raise keys.refuse("mlp_only_layers beside shared experts")
    return {
        "experts": keys(*_EXPERTS),
        "top_k": keys("num_experts_per_tok", "moe_top_k"),
        "expert_ffn": expert_ffn,
        "shared_experts": keys("n_shared_experts", default=shared),
        "dense_layers": keys("first_k_dense_replace", default=len(dense)),
        **_groups(keys),
    }


def _groups(keys: _Keys) -> dict[str, int]:
    groups = keys("n_group", default=0)
    if groups < 2:
        return {}
    return {"expert_groups": groups, "token_groups": keys("topk_group", default=groups)}


def _falcon(keys: _Keys, style: ModelType) -> ModelType:
    """Returns the norms of a Falcon: two, or one before both blocks in parallel."""
    usual = 2 if keys.flag("new_decoder_architecture") else 1
    if not keys.flag("+parallel_attn") and usual == 1:
        return style
    return replace(style, norms=keys("num_ln_in_parallel_attn", default=usual))


def _with_vectors(model: Transformer, keys: _Keys, style: ModelType) -> Transformer:
    """Returns the model with the numbers of its biases and norms, if they differ from a GPT's or a
    Llama's.
    """
    norm = model.hidden * (2 if keys.flag(style.centred) else 1)
    layer = style.norms * norm + model.query_rank + model.kv_rank
    layer += (model.query_width + model.key_value_width) * keys.flag(style.query_biases)
    layer += model.hidden * keys.flag(style.output_biases)
    layer += 2 * model.head_dim * keys.flag(style.head_norms)
    if style.wide_head_norms:
        layer += model.query_width + model.key_value_width // 2
    if keys.flag(style.ffn_biases):
        layer += (model.matrices - 1) * model.ffn + model.hidden
    expert = 0
    if keys.name == "gpt_oss":
        layer += model.heads + model.experts  # attention sinks, biases of the router
        expert = 2 * model.expert_ffn + model.hidden
    if keys.name == "qwen2_moe" and model.shared_experts:
        layer += model.hidden  # the gate of the shared experts
    outer = style.outer_norms * norm + model.vocab * style.output_projection_biases
    stated = replace(model, layer_vectors=layer, outer_vectors=outer, expert_vectors=expert)
    counts = [(each.dense_layer_parameters, each.parameters) for each in (model, stated)]
    return model if counts[0] == counts[1] else stated
