"""Properties that a Hugging Face `model_type` implies: gates, biases, norms, missing keys.

The defaults are those of the package transformers 5.24, whose parameter counts the tests repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_Choice = bool | str
"""True, False, or the name of a key that decides, and False if the key is missing. "+" before the
name: True if the key is missing. "!": the opposite of the key, and False if the key is missing."""


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """The parts of a type's layers that its configuration does not state. The defaults are those of
    a Llama without biases.
    """

    gated: bool = True
    tied: bool = False
    """Value of `tie_word_embeddings` if the key is missing."""
    norms: int = 2
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
    """True if the queries and keys of each head have a norm."""
    wide_head_norms: bool = False
    """True if the queries of all heads together have a norm, and the keys too."""
    output_projection_biases: bool = False
    positions: str = ""
    """Key with the number of learned positions."""
    more_positions: int = 0
    """Learned positions in addition to the key's."""
    states: tuple[str, ...] = ()
    """Keys, or names of one key divided by "|", that the configuration must have, since a missing
    one has a default of its own in transformers."""
    wide_ffn: bool = False
    """True if a missing inner width of the feed-forward network means 4 x hidden."""


_LLAMA = ModelType(
    query_biases="attention_bias", output_biases="attention_bias", ffn_biases="mlp_bias"
)
_PLAIN = ModelType(states=("num_key_value_heads",))
_DEEPSEEK = ModelType(
    states=(
        *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "first_k_dense_replace"),
    )
)
_GPT = ModelType(
    gated=False,
    wide_ffn=True,
    tied=True,
    centred=True,
    query_biases=True,
    output_biases=True,
    ffn_biases=True,
)
_GEMMA = replace(_LLAMA, tied=True, ffn_biases=False, states=("num_key_value_heads", "head_dim"))
_QWEN3 = replace(
    _LLAMA, ffn_biases=False, head_norms=True, states=("num_key_value_heads", "head_dim")
)
_ONE_NORM = replace(_GPT, tied=False, norms=1, output_projection_biases=True)

MODEL_TYPES: Mapping[str, ModelType] = {
    "bloom": replace(_GPT, outer_norms=2),
    "dbrx": ModelType(states=("kv_n_heads", "moe_num_experts")),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "falcon": replace(_GPT, query_biases="bias", output_biases="bias", ffn_biases="bias"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, head_norms=True),
    "gpt2": replace(_GPT, positions="n_positions"),
    "gpt_bigcode": replace(_GPT, positions="n_positions"),
    "gpt_neox": replace(
        _GPT,
        tied=False,
        wide_ffn=False,
        query_biases="+attention_bias",
        output_biases="+attention_bias",
    ),
    "gpt_oss": ModelType(
        query_biases="+attention_bias",
        output_biases="+attention_bias",
        states=("num_key_value_heads", "head_dim", "num_local_experts"),
    ),
    "gptj": replace(_ONE_NORM, query_biases=False, output_biases=False),
    "granite": _LLAMA,
    "llama": _LLAMA,
    "llama4_text": replace(
        _LLAMA,
        ffn_biases=False,
        states=("num_key_value_heads", "head_dim", "num_local_experts"),
    ),
    "mistral": _PLAIN,
    "mixtral": replace(_PLAIN, states=(*_PLAIN.states, "num_local_experts")),
    "mpt": replace(
        _GPT,
        centred="!no_bias",
        query_biases="!no_bias",
        output_biases="!no_bias",
        ffn_biases="!no_bias",
    ),
    "nemotron": replace(_LLAMA, gated=False, centred=True),
    "olmo": replace(_LLAMA, norms=0, outer_norms=0, ffn_biases=False),
    "olmo2": replace(_LLAMA, ffn_biases=False, wide_head_norms=True),
    "opt": replace(
        _GPT, positions="max_position_embeddings", more_positions=2, states=("ffn_dim",)
    ),
    "phi": replace(_ONE_NORM, wide_ffn=False),
    "phi3": ModelType(),
    "qwen2": replace(_PLAIN, query_biases=True),
    "qwen2_moe": replace(
        _PLAIN,
        query_biases="+qkv_bias",
        states=(
            *(*_PLAIN.states, "num_experts", "moe_intermediate_size"),
            "shared_expert_intermediate_size",
        ),
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3,
        states=(*_QWEN3.states, "num_experts|num_local_experts", "moe_intermediate_size"),
    ),
    "starcoder2": replace(
        _GPT,
        query_biases="+use_bias",
        output_biases="+use_bias",
        ffn_biases="+use_bias",
        wide_ffn=False,
        states=("num_key_value_heads",),
    ),
}

REFUSED_TYPES: Mapping[str, str] = {
    "bart": "an encoder beside the decoder",
    "bert": "an encoder without a causal mask",
    "jamba": "state-space layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "qwen3_next": "layers of linear attention",
    "rwkv": "recurrent layers",
    "t5": "an encoder beside the decoder",
}
"""Known types with parts that `Transformer` does not have."""

STATED_KEYS = (
    *("attention_bias", "hidden_act", "mlp_bias"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"),
)
"""Keys with which a configuration of no known type says that its layers are those of a Llama."""

OTHER_LLAMA_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("vocab_size", "head_dim", "model_type", "architectures", "auto_map", "_name_or_path"),
    *("torch_dtype", "dtype", "transformers_version", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "attention_dropout"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
)
"""Other keys of a Llama. A further key may mean layers of another kind."""
