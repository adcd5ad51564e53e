"""Hugging Face model types with other names, those that are refused, and unknown ones."""

from __future__ import annotations

from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    "baichuan": "llama",
    "exaone": "llama",
    "gemma3": "gemma3_text",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "kimi_k2": "deepseek_v3",
    "llama4": "llama4_text",
    "mimo": "qwen2",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "ministral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "stablelm_epoch": "stablelm",
    "Yi": "llama",
}
"""Types whose configurations are read as those of another type."""

_ENCODER = "an encoder without a causal mask"
_BOTH = "an encoder beside the decoder"
_STATES = "state-space layers"
_SPARSE = "sparse attention, whose positions an indexer chooses"
REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "deberta-v2", "modernbert"), _ENCODER),
    **dict.fromkeys(("bart", "t5", "mt5", "t5gemma", "whisper"), _BOTH),
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"), _STATES),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "zamba", "zamba2"), _STATES),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
    **dict.fromkeys(("kimi_linear", "lfm2", "olmo_hybrid"), "layers of linear attention"),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), "recurrent layers"),
    "deci": "layers of different sizes",
    "gemma3n": "an embedding in each layer",
    "nemotron-nas": "layers of different sizes",
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
