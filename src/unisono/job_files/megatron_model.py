"""The model that flags of Megatron-LM describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.job_files.arithmetic import flags_of_layers
from unisono.planner import Transformer, load_model

_SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("ffn_hidden_size", "max_position_embeddings", "vocab_size", "padded_vocab_size"),
    *("make_vocab_size_divisible_by", "num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("mtp_num_layers",),
)
_SWITCHES = (
    *("swiglu", "group_query_attention", "untie_embeddings_and_output_weights", "qk_layernorm"),
    *("disable_bias_linear", "add_qkv_bias", "multi_latent_attention", "quick_geglu", "geglu"),
)
MODEL_FLAGS = (
    *(*_SIZES, *_SWITCHES, "position_embedding_type", "normalization", "moe_layer_freq"),
    *("window_size", "window_attn_skip_freq"),
)
"""Flags that describe the model."""
OTHER_MODELS = (
    *("hybrid_", "mamba_", "is_hybrid", "encoder_", "language_model_type", "vision_model_type"),
    *("model_provider", "experimental_attention", "linear_attention", "bert_"),
)
"""Flags, or their beginnings, of models that are no decoders of equal layers."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_VOCABULARIES = {"gpt2": 50257, "llama2": 32000, "llama3": 128256, "tiktoken": 131072}


class MegatronModel:
    """Reads a model from the values of flags, named without dashes. `missing` has the flags that
    are needed and not stated, and `notes` what was read as something similar.
    """

    def __init__(self, values: Mapping[str, str], *, tp: int) -> None:
        self._values, self._tp = values, tp
        self.notes: list[str] = []
        self.missing: list[str] = []

    def model(self) -> Transformer | None:
        """Returns the model; None if a size is missing."""
        self.missing = [f"--{n.replace('_', '-')}" for n in _NEEDED if n not in self._values]
        vocab = self._vocabulary()
        if vocab is None:
            self.missing.append("--vocab-size")
        if self.missing or vocab is None:
            return None
        hidden = self._count("hidden_size")
        gated = any(map(self._on, ("swiglu", "quick_geglu", "geglu")))
        usual = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
        positions = self._values.get("position_embedding_type", "learned_absolute")
        sizes: dict[str, Any] = {
            "layers": self._count("num_layers"),
            "hidden": hidden,
            "heads": self._count("num_attention_heads"),
            "head_dim": self._count("kv_channels"),
            "ffn": self._count("ffn_hidden_size") or usual,
            "gated": gated,
            "vocab": vocab,
            "tied": not self._on("untie_embeddings_and_output_weights"),
            "mtp_layers": self._count("mtp_num_layers"),
            **self._attention(),
            **self._experts(),
            **self._windows(),
        }
        if positions == "learned_absolute":
            sizes["positions"] = self._count("max_position_embeddings")
        return self._with_vectors(Transformer(**sizes))

    def _on(self, name: str) -> bool:
        return self._values.get(name, "false").lower() not in ("false", "0", "no")

    def _count(self, name: str) -> int:
        value = self._values.get(name, "0")
        if not value.isdecimal():
            raise ValueError(f"--{name.replace('_', '-')} must be a whole number, not {value!r}")
        return int(value)

    def _vocabulary(self) -> int | None:
        """Returns the number of rows of the embedding, which Megatron-LM pads."""
        stated = self._count("padded_vocab_size")
        if stated:
            return stated
        vocab = self._count("vocab_size")
        if not vocab:
            found = self._tokenizer()
            if found is None:
                return None
            name, vocab = found
            self.notes.append(f"the tokenizer {name} is read as a vocabulary of {vocab}")
        multiple = (self._count("make_vocab_size_divisible_by") or 128) * self._tp
        return -(-vocab // multiple) * multiple

    def _tokenizer(self) -> tuple[str, int] | None:
        """Returns the name and the vocabulary of a known tokenizer."""
        kind = self._values.get("tokenizer_type", "").lower()
        if not kind and "merge_file" in self._values:
            kind = "gpt2bpetokenizer"  # the default of Megatron-LM
        for name, size in _VOCABULARIES.items():
            if name in kind:
                return kind, size
        model = self._values.get("tokenizer_model", "")
        try:
            return model, load_model(model).vocab
        except ValueError:
            return None

    def _attention(self) -> dict[str, Any]:
        if self._on("multi_latent_attention"):
            width = self._count("qk_head_dim") or 128
            if (self._count("v_head_dim") or 128) != width:
                raise ValueError(
                    f"--v-head-dim {self._values['v_head_dim']} unlike --qk-head-dim {width} "
                    "cannot be expressed; state --model"
                )
            return {
                "head_dim": width,
                "kv_rank": self._count("kv_lora_rank") or 32,
                "query_rank": self._count("q_lora_rank"),
                "rope_dim": self._count("qk_pos_emb_head_dim") or 64,
            }
        groups = self._count("num_query_groups")
        return {"kv_heads": groups if self._on("group_query_attention") or groups else 0}

    def _windows(self) -> dict[str, Any]:
        """Returns the window and the number of layers with it: every n-th layer has none."""
        size = self._values.get("window_size", "").strip("()").split(",")[0]
        if not size.isdecimal() or size == "0":
            return {}
        layers, every = self._count("num_layers"), self._values.get("window_attn_skip_freq", "0")
        mixed = flags_of_layers(every)
        if mixed is not None:
            return {"window": int(size), "local_layers": sum(1 for each in mixed if each)}
        full = layers // int(every) if every.isdecimal() and every != "0" else 0
        return {"window": int(size), "local_layers": layers - full}

    def _experts(self) -> dict[str, Any]:
        experts = self._count("num_experts")
        if not experts:
            return {}
        width = self._count("moe_ffn_hidden_size") or self._count("ffn_hidden_size")
        if not width:
            raise ValueError("--num-experts needs --moe-ffn-hidden-size or --ffn-hidden-size")
        shared, rest = divmod(self._count("moe_shared_expert_intermediate_size"), width)
        if rest:
            raise ValueError(
                "--moe-shared-expert-intermediate-size that is no multiple of "
                f"--moe-ffn-hidden-size {width} cannot be expressed; state --model"
            )
        found = {
            "experts": experts,
            "top_k": self._count("moe_router_topk") or 2,
            "expert_ffn": width,
            "shared_experts": shared,
            **self._dense_layers(),
        }
        groups = self._count("moe_router_num_groups")
        if groups:
            found["expert_groups"] = groups
            found["token_groups"] = self._count("moe_router_group_topk") or groups
        return found

    def _dense_layers(self) -> dict[str, Any]:
        text, layers = self._values.get("moe_layer_freq", "1"), self._count("num_layers")
        if text.isdecimal():
            every = max(int(text), 1)
            return {"dense_layers": layers - -(-layers // every), "spread_dense": every > 1}
        mixed = flags_of_layers(text)
        if mixed is None or len(mixed) != layers:
            raise ValueError(
                f"--moe-layer-freq must be a number, or a list of {layers} layers such as "
                f"[0]*1+[1]*{layers - 1}, not {text!r}"
            )
        dense = layers - sum(1 for each in mixed if each)
        return {"dense_layers": dense, "spread_dense": any(mixed[:dense])}

    def _with_vectors(self, model: Transformer) -> Transformer:
        """Returns the model with the elements of its biases and norms."""
        norm = model.hidden * (1 if self._values.get("normalization") == "RMSNorm" else 2)
        layer = 2 * norm + model.query_rank + model.kv_rank
        biases = not self._on("disable_bias_linear")
        width = model.query_width + model.key_value_width
        expert = 0
        if biases:
            inner = (model.matrices - 1) * model.ffn + model.hidden
            layer += width + model.hidden + inner
            expert = (model.matrices - 1) * model.expert_ffn + model.hidden if model.experts else 0
        elif self._on("add_qkv_bias"):
            layer += width
        if self._on("qk_layernorm") and not model.kv_rank:
            layer += 2 * model.head_dim
        return replace(model, layer_vectors=layer, outer_vectors=norm, expert_vectors=expert)
