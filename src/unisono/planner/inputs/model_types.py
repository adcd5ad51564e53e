"""Hugging Face model types: what each implies beside its configuration's sizes.

The parts and the values of missing keys are those of the package transformers 5.24, and of the code
beside the configuration for types that the package does not have. Tests repeat the package's counts
of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.planner.inputs.config_keys import ConfigKeys
from unisono.planner.inputs.transformer import Transformer

_Choice = bool | str
"""True, False, or the name of a key that decides (`ConfigKeys.flag`)."""


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """The parts of a type's layers that its configuration does not state. The defaults are those of
    a Llama without biases.
    """

    gated: bool = True
    norms: int | Callable[[ConfigKeys], int] = 2
    """Norm layers in a layer."""
    outer_norms: int = 1
    """Norm layers outside of the layers."""
    centred: _Choice = False
    """True if a norm has two vectors, a scale and a shift."""
    query_biases: _Choice = False
    """True if queries, keys and values have biases."""
    output_biases: _Choice = False
    """True if the output of attention has biases."""
    ffn_biases: _Choice = False
    head_norms: _Choice = False
    """The queries and keys of each head have a norm, the same for all heads."""
    wide_head_norms: _Choice = False
    """True if the queries of all heads together have a norm, and the keys too."""
    output_projection_biases: _Choice = False
    more_vectors: Callable[[Transformer], int] | None = None
    """Further elements of vectors in a layer."""
    positions: str = ""
    """Key with the number of learned positions."""
    more_positions: int = 0
    """Learned positions in addition to the key's."""
    kv_heads: Callable[[ConfigKeys, int], int] | None = None
    """Key-value heads of a number of heads, if the usual keys do not state them."""
    full_every: int | None = None
    """Attention windows: every n-th layer sees all positions. 0: no layer does. None: the type has
    no windows."""
    linear: Callable[[ConfigKeys, Transformer], tuple[int, int]] | None = None
    """Elements of the matrices of a layer of linear attention, and of the gates of a layer of usual
    attention."""
    wide_ffn: bool = False
    """True if a missing inner width of the feed-forward network means 4 x hidden."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of missing keys."""
    states: tuple[str, ...] = ()
    """Keys, or names of one key divided by "|", that the configuration must have, since a missing
    one has a default of its own in transformers that fits one size of the model only."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the layers, and the values with which they do not."""


def _falcon_norms(keys: ConfigKeys) -> int:
    is_new = keys.flag("new_decoder_architecture")
    if not is_new and not keys.flag("parallel_attn"):
        return 2
    return keys("num_ln_in_parallel_attn", default=2 if is_new else 1)


def _falcon_heads(keys: ConfigKeys, heads: int) -> int:
    if keys.flag("new_decoder_architecture"):
        return keys("num_kv_heads", default=heads)
    return _multi_query(keys, heads)


def _multi_query(keys: ConfigKeys, heads: int) -> int:
    return 1 if keys.flag("multi_query") else heads


def _mpt_heads(keys: ConfigKeys, heads: int) -> int:
    if keys.get("attn_type") == "multiquery_attention":
        return 1
    return keys("kv_n_heads", default=heads)


def _gated_deltas(keys: ConfigKeys, model: Transformer) -> tuple[int, int]:
    """Returns the sizes of Qwen3-Next's layers of gated delta nets, and of its output gates."""
    key_heads, value_heads = keys("linear_num_key_heads"), keys("linear_num_value_heads")
    wide = value_heads * keys("linear_value_head_dim")
    queries = 2 * key_heads * keys("linear_key_head_dim")
    inputs = queries + 2 * wide + 2 * value_heads
    convolution = keys("linear_conv_kernel_dim") * (queries + wide)
    return model.hidden * (inputs + wide) + convolution, model.hidden * model.query_width


def _lightning(keys: ConfigKeys, model: Transformer) -> tuple[int, int]:
    """Returns the sizes of MiniMax's layers of lightning attention: five matrices."""
    return 5 * model.hidden * model.query_width, 0


_LLAMA = ModelType(
    query_biases="attention_bias", output_biases="attention_bias", ffn_biases="mlp_bias"
)
_KEY_HEADS = ("num_key_value_heads",)
_HEADS = (*_KEY_HEADS, "head_dim")
_TIED = {"tie_word_embeddings": True}
_UNUSED_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_PLAIN = ModelType(states=_KEY_HEADS)
_ROUTED = ("num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
_DEEPSEEK = ModelType(
    query_biases="attention_bias",
    output_biases="attention_bias",
    states=(*_LATENT, "v_head_dim", "n_routed_experts", "n_shared_experts", *_ROUTED),
)
_GPT = ModelType(
    gated=False,
    wide_ffn=True,
    centred=True,
    query_biases=True,
    output_biases=True,
    ffn_biases=True,
    defaults=_TIED,
)
_GEMMA = replace(_LLAMA, ffn_biases=False, defaults=_TIED, states=_HEADS)
_GEMMA3_SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_QWEN2 = replace(_PLAIN, query_biases=True, full_every=0, defaults=_UNUSED_WINDOW)
_QWEN3 = replace(
    _LLAMA,
    ffn_biases=False,
    head_norms=True,
    full_every=0,
    defaults=_UNUSED_WINDOW,
    states=_HEADS,
)
_DELTA = replace(
    _QWEN3,
    linear=_gated_deltas,
    full_every=4,
    defaults={},
    states=(*_HEADS, "linear_num_value_heads"),
)
_DELTA_EXPERTS = replace(
    _DELTA,
    more_vectors=lambda model: model.hidden,  # the gate of the shared expert
    states=(*_DELTA.states, "num_experts", "moe_intermediate_size"),
)
_ONE_NORM = replace(_GPT, norms=1, output_projection_biases=True, defaults={})
_COHERE = replace(_LLAMA, norms=1, ffn_biases=False, wide_head_norms="use_qk_norm", defaults=_TIED)
_EXPERTS = replace(_PLAIN, states=(*_KEY_HEADS, "num_local_experts"))
_GRANITE_EXPERTS = replace(_LLAMA, ffn_biases=False, states=("num_local_experts",))
_BIASED = {"query_biases": "use_bias", "output_biases": "use_bias", "ffn_biases": "use_bias"}
_ERNIE = ModelType(**_BIASED, defaults=_TIED, states=_KEY_HEADS)  # type: ignore[arg-type]
_PATTERN = {"sliding_window": 4096}

MODEL_TYPES: Mapping[str, ModelType] = {
    "apertus": replace(_LLAMA, gated=False, ffn_biases=False, head_norms=True),
    "arcee": replace(_LLAMA, gated=False),
    "bloom": replace(_GPT, outer_norms=2),
    "chatglm": ModelType(query_biases="add_qkv_bias", states=("multi_query_group_num",)),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, wide_head_norms=False, full_every=4, defaults={**_TIED, **_PATTERN}
    ),
    "dbrx": ModelType(states=("kv_n_heads", "moe_num_experts")),
    "deepseek": ModelType(states=(*_KEY_HEADS, "n_routed_experts", "n_shared_experts", *_ROUTED)),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": replace(_QWEN3, defaults={}, states=(*_KEY_HEADS, "n_routed_experts", *_ROUTED)),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        output_projection_biases="use_bias",
        more_vectors=lambda model: model.experts,
        states=(*_KEY_HEADS, "moe_num_experts", "moe_k", "moe_layer_start_index"),
    ),
    "exaone4": replace(_QWEN3, full_every=4, defaults=_PATTERN, states=_KEY_HEADS),
    "falcon": replace(
        _GPT,
        norms=_falcon_norms,
        kv_heads=_falcon_heads,
        query_biases="bias",
        output_biases="bias",
        ffn_biases="bias",
        defaults={**_TIED, "multi_query": True, "parallel_attn": True},
    ),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, full_every=2, defaults={**_TIED, **_PATTERN}),
    "gemma3_text": replace(
        _GEMMA,
        norms=4,
        head_norms=True,
        full_every=6,
        defaults={**_TIED, **_PATTERN, **_GEMMA3_SIZES, "vocab_size": 262208},
        states=(),
    ),
    "glm": replace(
        _PLAIN,
        query_biases="attention_bias",
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "glm4": replace(
        _PLAIN,
        norms=4,
        query_biases="attention_bias",
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "glm4_moe": replace(
        _PLAIN,
        query_biases="attention_bias",
        head_norms="use_qk_norm",
        states=(*_HEADS, "n_routed_experts", "n_shared_experts", *_ROUTED),
    ),
    "gpt2": replace(_GPT, positions="n_positions"),
    "gpt_bigcode": replace(
        _GPT,
        positions="n_positions",
        kv_heads=_multi_query,
        defaults={**_TIED, "multi_query": True},
    ),
    "gpt_neo": replace(
        _GPT,
        query_biases=False,
        positions="max_position_embeddings",
        full_every=2,
        defaults={**_TIED, "window_size": 256},
    ),
    "gpt_neox": replace(
        _GPT,
        wide_ffn=False,
        query_biases="attention_bias",
        output_biases="attention_bias",
        defaults={"attention_bias": True},
    ),
    "gpt_oss": ModelType(
        query_biases="attention_bias",
        output_biases="attention_bias",
        more_vectors=lambda model: model.heads + model.experts,  # sinks, biases of the router
        full_every=2,
        defaults={"attention_bias": True, "sliding_window": 128, "expert_biases": True},
        states=(*_HEADS, "num_local_experts"),
    ),
    "gptj": replace(_ONE_NORM, query_biases=False, output_biases=False),
    "granite": _LLAMA,
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoeshared": replace(
        _GRANITE_EXPERTS, states=("num_local_experts", "shared_intermediate_size")
    ),
    "grok-1": replace(_PLAIN, norms=4, defaults=_TIED, states=(*_KEY_HEADS, "num_experts")),
    "hunyuan_v1_dense": replace(_LLAMA, ffn_biases=False, head_norms=True),
    "hunyuan_v1_moe": replace(
        _LLAMA,
        ffn_biases=False,
        head_norms=True,
        defaults={"num_shared_expert": 1},
        states=("num_experts", "moe_topk"),
    ),
    "internlm2": replace(_PLAIN, query_biases="bias", output_biases="bias"),
    "internlm3": replace(
        _PLAIN, query_biases="qkv_bias", output_biases="bias", ffn_biases="bias", states=_HEADS
    ),
    "llama": _LLAMA,
    "llama4_text": replace(
        _LLAMA,
        ffn_biases=False,
        full_every=4,
        defaults={"attention_chunk_size": 8192, "n_shared_experts": 1},
        states=(*_HEADS, "num_local_experts"),
    ),
    "minicpm": replace(_LLAMA, defaults=_TIED),
    "minicpm3": replace(_LLAMA, defaults=_TIED, states=_LATENT),
    "minimax": replace(_EXPERTS, linear=_lightning, full_every=2, states=("num_local_experts",)),
    "minimax_m2": replace(_EXPERTS, wide_head_norms=True),
    "ministral": replace(_PLAIN, full_every=0, defaults=_PATTERN),
    "mistral": replace(_PLAIN, full_every=0, defaults=_PATTERN),
    "mixtral": replace(_EXPERTS, full_every=0),
    "mpt": replace(
        _GPT,
        centred="!no_bias",
        query_biases="!no_bias",
        output_biases="!no_bias",
        ffn_biases="!no_bias",
        wide_head_norms="qk_ln",
        kv_heads=_mpt_heads,
        defaults={**_TIED, "no_bias": True},
        usual={"alibi": True},
    ),
    "nemotron": replace(_LLAMA, gated=False, centred=True),
    "olmo": replace(_LLAMA, norms=0, outer_norms=0, ffn_biases=False),
    "olmo2": replace(_LLAMA, ffn_biases=False, wide_head_norms=True),
    "olmo3": replace(
        _LLAMA, ffn_biases=False, wide_head_norms=True, full_every=4, defaults=_PATTERN
    ),
    "olmoe": replace(_LLAMA, ffn_biases=False, wide_head_norms=True, states=("num_experts",)),
    "opt": replace(
        _GPT, positions="max_position_embeddings", more_positions=2, states=("ffn_dim",)
    ),
    "phi": replace(_ONE_NORM, wide_ffn=False, head_norms="qk_layernorm"),
    "phi3": ModelType(full_every=0),
    "phimoe": replace(
        _EXPERTS,
        centred=True,
        query_biases="attention_bias",
        output_biases="attention_bias",
        output_projection_biases="lm_head_bias",
        full_every=0,
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2,
        query_biases="qkv_bias",
        more_vectors=lambda model: model.hidden,  # the gate of the shared experts
        defaults={**_UNUSED_WINDOW, "qkv_bias": True},
        states=(
            *(*_KEY_HEADS, "num_experts", "moe_intermediate_size"),
            "shared_expert_intermediate_size",
        ),
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3, states=(*_HEADS, "num_experts|num_local_experts", "moe_intermediate_size")
    ),
    "qwen3_5_moe_text": replace(_DELTA_EXPERTS, defaults={"intermediate_size": 0}),
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA_EXPERTS,
    "seed_oss": replace(
        _LLAMA, output_biases="attention_out_bias", defaults={"attention_bias": True}, states=_HEADS
    ),
    "smollm3": replace(_LLAMA, full_every=0, defaults={**_TIED, **_UNUSED_WINDOW}),
    "stablelm": replace(
        _PLAIN,
        norms=lambda keys: 1 if keys.flag("use_parallel_residual") else 2,
        centred=True,
        query_biases="use_qkv_bias",
        wide_head_norms="qk_layernorm",
    ),
    "starcoder2": replace(
        _GPT,
        **_BIASED,  # type: ignore[arg-type]
        wide_ffn=False,
        full_every=0,
        defaults={**_TIED, "use_bias": True},
        states=_KEY_HEADS,
    ),
}
