"""Parameter counts of Hugging Face configurations, and configurations that are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono import planner
from unisono.planner.inputs.model_types import MODEL_TYPES

COUNTS = [
    json.loads(line)
    for line in Path(__file__).with_name("hugging_face_counts.jsonl").read_text().splitlines()
]
"""Models with their parameters in the package transformers (`count_hugging_face.py`)."""
NAMED: dict[str, dict[str, object]] = {each["name"]: each["config"] for each in COUNTS}
FIRST = {each["config"]["model_type"]: each["config"] for each in reversed(COUNTS)}
"""The first configuration of each type in `COUNTS`."""


@pytest.mark.parametrize("entry", COUNTS, ids=[each["name"] for each in COUNTS])
def test_parameters(entry: dict[str, Any]) -> None:
    """Tests the counts of transformers, in which a few models have scalars and biases of routers
    that the shape leaves out, and the printed sizes of the models of other code.
    """
    found = planner.from_hugging_face(entry["config"]).parameters
    assert found == pytest.approx(entry["parameters"], rel=0.01 if "card" in entry else 2e-6)


def test_every_type_is_counted_and_documented() -> None:
    assert set(MODEL_TYPES) <= set(FIRST)
    page = Path(__file__).parents[2] / "docs" / "planner.md"
    assert ", ".join(sorted(MODEL_TYPES)) in " ".join(page.read_text(encoding="utf-8").split())


# The same source. The card of DeepSeek-V3 says 671 billion, without its second prediction head.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek-v3", 671_026_404_352),
        ("gpt-oss-120b", 116_829_156_672),
        ("gpt2-1.5b", 1_557_611_200),
        ("mixtral-8x22b", 140_630_071_296),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("kimi-k2", 1_026_408_209_408),
        ("gemma3-27b", 27_009_346_304),
    ],
)
def test_exact_parameters_of_presets(name: str, parameters: int) -> None:
    assert planner.load_model(name).parameters == parameters


# Sizes of the models' cards, in billions.
@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("DBRX", 36),
        ("Qwen1.5 MoE A2.7B", 2.7),
        ("Llama 4 Scout", 17),
        ("Llama 4 Maverick", 17),
        ("Mixtral 8x22B", 39),
        ("Kimi K2", 32),
        ("DeepSeek-V2", 21),
        ("GLM-4.5", 32),
        ("ERNIE 4.5 300B A47B", 47),
        ("Hunyuan A13B", 13),
        ("MiniMax Text 01", 45.9),
        ("Phi-3.5 MoE", 6.6),
    ],
)
def test_active_parameters(name: str, active: float) -> None:
    found = planner.from_hugging_face(NAMED[name]).active_parameters / 1e9
    assert found == pytest.approx(active, rel=0.06)


# Layers and positions that transformers gives each model's attention (`layer_types`).
@pytest.mark.parametrize(
    ("name", "window", "local"),
    [
        ("Gemma 2 27B", 4096, 23),
        ("Gemma 3 27B", 1024, 52),
        ("gpt-oss 120B", 128, 18),
        ("Mistral 7B", 4096, 32),
        ("Command R7B", 4096, 24),
        ("OLMo 3 7B", 4096, 24),
        ("EXAONE 4.0 32B", 4096, 48),
        ("Llama 4 Maverick", 8192, 36),
        ("GPT-Neo 2.7B", 256, 16),
        ("Qwen2.5 72B", 0, 0),
        ("dots.llm1", 0, 0),
        ("Mixtral 8x22B", 0, 0),
        ("Qwen3-Next 80B A3B", 256, 36),
    ],
)
def test_attention_windows(name: str, window: int, local: int) -> None:
    found = planner.from_hugging_face(NAMED[name])
    assert (found.window, found.local_layers) == (window, local)


def test_stated_kinds_of_layers_replace_the_pattern_of_the_type() -> None:
    kinds = ["full_attention"] * 20 + ["sliding_attention"] * 4
    config = NAMED["gpt-oss 20B"] | {"layer_types": kinds, "sliding_window": 64}
    found = planner.from_hugging_face(config)
    assert (found.window, found.local_layers) == (64, 4)
    pattern = NAMED["EXAONE 4.0 32B"] | {"sliding_window_pattern": "LLLG"}
    assert planner.from_hugging_face(pattern) == planner.from_hugging_face(NAMED["EXAONE 4.0 32B"])


def test_a_window_costs_the_pairs_inside_it() -> None:
    """Compares the FLOPs of attention with the pairs of positions, counted one by one."""
    seq, model = 300, planner.from_hugging_face(NAMED["gpt-oss 20B"])
    causal = np.tril(np.ones((seq, seq), dtype=bool))
    local = causal & ~np.tril(causal, -model.window)
    share = (causal.sum() + local.sum()) / (2 * causal.sum())
    assert model.attended_share(seq) == pytest.approx(share, rel=0.01)
    blocks = replace(model, blocked_window=True)
    same = np.kron(np.eye(3, dtype=bool), np.ones((128, 128), dtype=bool))[:seq, :seq]
    share = (causal.sum() + (causal & same).sum()) / (2 * causal.sum())
    assert blocks.attended_share(seq) == pytest.approx(share, rel=0.05)
    whole = replace(model, window=0, local_layers=0)
    flops = [planner.forward_flops(each, seq=seq, batch=1)[1] for each in (model, whole)]
    assert flops[0] == pytest.approx(flops[1] * model.attended_share(seq))


def test_windows_shorten_attention_only() -> None:
    job = planner.Workload(seq=32768, global_batch=8, micro_batch=1, recompute="full")
    local = planner.load_model("gpt-oss-20b")
    times = [
        planner.predict(model, "h100:8", "dp=8,ep=8,zero=1", job).time
        for model in (local, replace(local, window=0, local_layers=0))
    ]
    assert times[0]["attention"] == pytest.approx(0.504 * times[1]["attention"], rel=0.01)
    assert times[0]["matmul"] == pytest.approx(times[1]["matmul"])


def test_mtp_layers_are_parameters_and_work() -> None:
    """Tests DeepSeek-V3's second prediction head: 11.5 billion parameters beside 671 (its README),
    a layer with experts, a projection of two streams to one, and the output projection again.
    """
    one = planner.from_hugging_face(NAMED["DeepSeek-V3"])
    none = replace(one, mtp_layers=0)
    layer = none.shared_layer_parameters + 256 * none.expert_parameters
    assert one.parameters - none.parameters == layer + 2 * 7168**2 + 3 * 7168
    assert one.parameters - none.parameters == pytest.approx(11.5e9, rel=0.02)
    flops = [planner.forward_flops(each, seq=4096, batch=1) for each in (one, none)]
    more = 2 * 4096 * (one.active_parameters - none.active_parameters - 3 * 7168 - 2 * 7168 - 2048)
    assert flops[0][0] - flops[1][0] == pytest.approx(more, rel=1e-4)
    assert flops[0][2] == 2 * flops[1][2]
    job = planner.Workload(seq=4096, global_batch=64, micro_batch=1, recompute="full")
    steps = [planner.predict(each, "h100:64", "dp=8,pp=8,ep=8,zero=1", job) for each in (one, none)]
    assert steps[0].time["output"] > 2 * steps[1].time["output"]
    assert steps[0].memory["weights"][-1] > 1.1 * steps[1].memory["weights"][-1]
    assert steps[0].memory["weights"][1] == steps[1].memory["weights"][1]


def test_approximations_widen_the_interval() -> None:
    model = planner.load_model("qwen3-next-80b-a3b")
    exact = replace(model, approximations=())
    job = planner.Workload(seq=4096, global_batch=64, micro_batch=1, recompute="full")
    steps = [planner.predict(each, "h100:32", "dp=32,ep=32,zero=1", job) for each in (model, exact)]
    assert steps[0].step_s == steps[1].step_s
    assert steps[0].deviation == pytest.approx(np.hypot(steps[1].deviation, 0.1), rel=1e-6)
    assert "wider, since linear attention counts as 256 positions" in steps[0].interval_text()


def test_dense_layers_at_other_places() -> None:
    """Tests layers with experts after every dense layer (Llama 4 Maverick), and uneven places."""
    maverick = planner.from_hugging_face(NAMED["Llama 4 Maverick"])
    assert maverick.spread_dense and maverick.dense_layers == 24 and not maverick.approximations
    layout, job = planner.Layout(pp=4, dp=2), planner.Workload(seq=512, global_batch=8)
    memory = planner.predict(maverick, "b200:8", layout, job).memory["weights"]
    assert memory[1] == memory[2]
    uneven = planner.from_hugging_face(_QWEN3 | {"mlp_only_layers": [1]})
    assert uneven.dense_layers == 1 and "evenly spread" in uneven.approximations[0]


def test_the_decoder_of_a_model_with_other_parts() -> None:
    decoder = NAMED["Gemma 3 27B"]
    config = {"model_type": "gemma3", "text_config": without(decoder, "model_type")}
    found = planner.from_hugging_face({**config, "vision_config": {"hidden_size": 1152}})
    assert found.approximations == ("parts beside the decoder are left out",)
    assert replace(found, approximations=()) == planner.load_model("gemma3-27b")
    flat = NAMED["Qwen2 7B"] | {"model_type": "qwen2_vl", "vision_config": {"depth": 32}}
    assert planner.from_hugging_face(flat).approximations == found.approximations


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("llama-3-70b", "llama3-70b"),
        ("Llama 3 70B", "llama3-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("google/gemma-3-27b-it", "gemma3-27b"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("GPT-3-175B", "gpt3-175b"),
    ],
)
def test_names_without_punctuation(name: str, same: str) -> None:
    assert planner.load_model(name) == planner.PRESETS[same]


def test_a_point_in_a_name_counts() -> None:
    with pytest.raises(ValueError, match="no model is named 'gpt3-17b'; near: gpt3-175b, gpt3-1"):
        planner.load_model("gpt3-17b")


LLAMA: dict[str, object] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}
STATED: dict[str, object] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False}
STATED |= {"mlp_bias": False, "tie_word_embeddings": False}


@pytest.mark.parametrize("start", [{"model_type": "llama"}, STATED, {**STATED, "model_type": "x"}])
def test_configurations_of_a_llama(start: dict[str, object]) -> None:
    assert planner.from_hugging_face(LLAMA | start) == planner.load_model("llama3-8b")


_QWEN3, _SHARED = FIRST["qwen3_moe"] | {"mlp_only_layers": []}, FIRST["qwen2_moe"]
_OPT, _LATENT = FIRST["opt"], FIRST["deepseek_v2"]


def without(config: dict[str, object], key: str) -> dict[str, object]:
    """Returns a configuration without one of its keys."""
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LLAMA, "the configuration has no model_type"),
        (LLAMA | {"model_type": "x"}, "model_type x is not known"),
        (LLAMA | {"model_type": "x"}, "state attention_bias, hidden_act, mlp_bias"),
        (LLAMA | STATED | {"hidden_act": "gelu"}, "hidden_act = silu, not 'gelu'"),
        (LLAMA | STATED | {"num_experts": 8}, "state no num_experts"),
        ({"model_type": "t5"}, "t5 cannot be expressed: it has an encoder beside the decoder"),
        ({"model_type": "mamba"}, "mamba cannot be expressed: it has state-space layers"),
        ({"model_type": "bert"}, "an encoder without a causal mask; state the planner.Transformer"),
        ({"model_type": "jamba"}, "jamba cannot be expressed: it has state-space layers; state"),
        ({"model_type": "llava", "text_config": {}}, "model_type llava is not known"),
        ({"model_type": "llama4", "text_config": {}}, "has no num_key_value_heads"),
        ({"model_type": ["llama"]}, "model_type must be a text"),
        ([], "a configuration is a JSON object, not list"),
        ({"model_type": "llama"}, "no hidden_size or n_embd or n_embed or d_model"),
        (without(LLAMA | {"model_type": "llama"}, "intermediate_size"), "no intermediate_size"),
        (without(_LATENT, "kv_lora_rank"), "the configuration has no kv_lora_rank"),
        (without(_LATENT, "q_lora_rank"), "the configuration has no q_lora_rank"),
        (without(_QWEN3, "num_experts"), "has no num_experts or num_local_experts"),
        (without(_OPT, "ffn_dim"), "the configuration has no ffn_dim"),
        (LLAMA | {"model_type": "gemma2"}, "the configuration has no head_dim"),
        (LLAMA | {"model_type": "llama", "hidden_size": 4096.5}, "must be a whole number"),
        (LLAMA | {"model_type": "llama", "mlp_bias": "no"}, "mlp_bias must be True or False"),
        (_SHARED | {"shared_expert_intermediate_size": 1500}, "no multiple of an expert's"),
        (_OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512 cannot be expressed"),
        (_OPT | {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        (_LATENT | {"v_head_dim": 64}, "v_head_dim = 64 unlike qk_nope_head_dim"),
        (_QWEN3 | {"layer_types": ["linear_attention"]}, "linear_attention in layer_types"),
        (_QWEN3 | {"layer_types": ["mamba"]}, "mamba in layer_types cannot be expressed"),
        (_SHARED | {"moe_intermediate_size": [1, 2]}, "moe_intermediate_size must be a whole"),
    ],
)
def test_refused_configurations(config: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        planner.from_hugging_face(config)
    assert "\n" not in str(caught.value)


def test_configuration_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    assert planner.load_model(path) == planner.load_model("llama3-8b")
    path.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"config.json: the configuration has no hidden_size"):
        planner.load_model(path)
