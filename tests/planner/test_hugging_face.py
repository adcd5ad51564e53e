"""Parameter counts of Hugging Face configurations, and configurations that are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unisono import planner
from unisono.planner.inputs.model_types import MODEL_TYPES

# Counts of the parameters of the causal language models of the package transformers 5.24, on the
# meta device. Those of released models agree with the models' cards.
COUNTS: list[tuple[int, str]] = [
    (124_439_808, "gpt2 n_layer=12 n_embd=768 n_head=12 vocab_size=50257 n_positions=1024"),
    (
        15_517_456_384,  # StarCoder
        "gpt_bigcode n_embd=6144 n_head=48 n_layer=40 n_inner=24576 n_positions=8192 "
        "vocab_size=49152",
    ),
    (6_050_882_784, "gptj n_embd=4096 n_head=16 n_layer=28 vocab_size=50400"),
    (
        125_239_296,  # OPT 125M
        "opt hidden_size=768 ffn_dim=3072 num_attention_heads=12 num_hidden_layers=12 "
        "vocab_size=50272 max_position_embeddings=2048 word_embed_proj_dim=768",
    ),
    (
        174_604_468_224,  # OPT 175B
        "opt hidden_size=12288 ffn_dim=49152 num_attention_heads=96 num_hidden_layers=96 "
        "vocab_size=50272 max_position_embeddings=2048",
    ),
    (176_247_271_424, "bloom n_layer=70 hidden_size=14336 n_head=112 vocab_size=250880"),
    (
        20_554_567_680,  # GPT-NeoX 20B
        "gpt_neox hidden_size=6144 intermediate_size=24576 num_attention_heads=64 "
        "num_hidden_layers=44 vocab_size=50432 max_position_embeddings=2048 hidden_act=gelu_fast",
    ),
    (
        6_921_720_704,  # Falcon 7B
        "falcon hidden_size=4544 num_attention_heads=71 num_hidden_layers=32 multi_query=true "
        "vocab_size=65024",
    ),
    (
        41_303_293_952,  # Falcon 40B
        "falcon hidden_size=8192 num_attention_heads=128 num_hidden_layers=60 num_kv_heads=8 "
        "new_decoder_architecture=true vocab_size=65024 parallel_attn=true",
    ),
    (
        1_311_625_216,  # Falcon RW 1B
        "falcon hidden_size=2048 num_attention_heads=32 num_hidden_layers=24 multi_query=false "
        "vocab_size=50304 parallel_attn=false bias=true alibi=true",
    ),
    (
        10_836_484_096,  # Falcon 11B
        "falcon hidden_size=4096 num_attention_heads=32 num_hidden_layers=60 num_kv_heads=8 "
        "new_decoder_architecture=true vocab_size=65024 ffn_hidden_size=16384 "
        "num_ln_in_parallel_attn=1",
    ),
    (
        15_628_775_424,  # Nemotron-4 15B
        "nemotron hidden_size=6144 intermediate_size=24576 num_attention_heads=48 "
        "num_hidden_layers=32 num_key_value_heads=8 vocab_size=256000 hidden_act=relu2",
    ),
    (
        7_173_923_840,  # StarCoder2 7B
        "starcoder2 hidden_size=4608 intermediate_size=18432 num_attention_heads=36 "
        "num_hidden_layers=32 num_key_value_heads=4 vocab_size=49152",
    ),
    (
        8_537_680_896,
        "gemma head_dim=256 hidden_size=3072 intermediate_size=24576 num_attention_heads=16 "
        "num_hidden_layers=28 num_key_value_heads=16 vocab_size=256000",
    ),
    (
        9_241_705_984,
        "gemma2 head_dim=256 hidden_size=3584 intermediate_size=14336 num_attention_heads=16 "
        "num_hidden_layers=42 num_key_value_heads=8 vocab_size=256000",
    ),
    (
        999_885_952,
        "gemma3_text head_dim=256 hidden_size=1152 intermediate_size=6912 num_attention_heads=4 "
        "num_hidden_layers=26 num_key_value_heads=1 vocab_size=262144",
    ),
    (6_649_286_656, "mpt d_model=4096 n_heads=32 n_layers=32 expansion_ratio=4 vocab_size=50432"),
    (
        131_596_523_520,
        'dbrx d_model=6144 n_heads=48 n_layers=40 vocab_size=100352 attn_config={"kv_n_heads":8} '
        'ffn_config={"ffn_hidden_size":10752,"moe_num_experts":16,"moe_top_k":4}',
    ),
    (
        1_235_814_400,  # Llama 3.2 1B
        "llama head_dim=64 hidden_size=2048 intermediate_size=8192 num_attention_heads=32 "
        "num_hidden_layers=16 num_key_value_heads=8 tie_word_embeddings=true vocab_size=128256",
    ),
    (
        1_631_232,
        "llama hidden_size=256 intermediate_size=512 num_attention_heads=8 num_hidden_layers=2 "
        "num_key_value_heads=2 vocab_size=1000 attention_bias=true mlp_bias=true",
    ),
    (
        7_241_732_096,
        "mistral hidden_size=4096 intermediate_size=14336 num_attention_heads=32 "
        "num_hidden_layers=32 num_key_value_heads=8 vocab_size=32000",
    ),
    (
        46_702_792_704,
        "mixtral hidden_size=4096 intermediate_size=14336 num_attention_heads=32 "
        "num_hidden_layers=32 num_key_value_heads=8 vocab_size=32000 num_local_experts=8 "
        "num_experts_per_tok=2",
    ),
    (
        7_615_616_512,
        "qwen2 hidden_size=3584 intermediate_size=18944 num_attention_heads=28 "
        "num_hidden_layers=28 num_key_value_heads=4 vocab_size=152064",
    ),
    (
        14_315_784_192,  # Qwen1.5 MoE A2.7B
        "qwen2_moe hidden_size=2048 intermediate_size=5632 moe_intermediate_size=1408 "
        "shared_expert_intermediate_size=5632 num_attention_heads=16 num_experts=60 "
        "num_experts_per_tok=4 num_hidden_layers=24 num_key_value_heads=16 vocab_size=151936",
    ),
    (
        57_408_658_944,  # Qwen2 57B A14B
        "qwen2_moe hidden_size=3584 intermediate_size=18944 moe_intermediate_size=2560 "
        "shared_expert_intermediate_size=20480 num_attention_heads=28 num_experts=64 "
        "num_experts_per_tok=8 num_hidden_layers=28 num_key_value_heads=4 vocab_size=151936",
    ),
    (
        8_190_735_360,
        "qwen3 head_dim=128 hidden_size=4096 intermediate_size=12288 num_attention_heads=32 "
        "num_hidden_layers=36 num_key_value_heads=8 vocab_size=151936",
    ),
    (
        4_451_584,
        "qwen3_moe head_dim=128 hidden_size=256 intermediate_size=1024 moe_intermediate_size=64 "
        "num_attention_heads=4 num_experts=8 num_experts_per_tok=2 num_hidden_layers=4 "
        "num_key_value_heads=2 vocab_size=1000 mlp_only_layers=[0,1]",
    ),
    (
        15_706_484_224,  # DeepSeek-V2 Lite
        "deepseek_v2 first_k_dense_replace=1 hidden_size=2048 intermediate_size=10944 "
        "kv_lora_rank=512 moe_intermediate_size=1408 n_routed_experts=64 n_shared_experts=2 "
        "num_attention_heads=16 num_experts_per_tok=6 num_hidden_layers=27 q_lora_rank=null "
        "qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 vocab_size=102400",
    ),
    (
        671_026_404_352,  # DeepSeek-V3, without its second prediction head
        "deepseek_v3 first_k_dense_replace=3 hidden_size=7168 intermediate_size=18432 "
        "kv_lora_rank=512 moe_intermediate_size=2048 n_routed_experts=256 n_shared_experts=1 "
        "num_attention_heads=128 num_experts_per_tok=8 num_hidden_layers=61 q_lora_rank=1536 "
        "qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 vocab_size=129280",
    ),
    (
        20_914_757_184,
        "gpt_oss head_dim=64 hidden_size=2880 intermediate_size=2880 num_attention_heads=64 "
        "num_experts_per_tok=4 num_hidden_layers=24 num_key_value_heads=8 num_local_experts=32 "
        "vocab_size=201088",
    ),
    (
        107_769_861_120,  # Llama 4 Scout, without its vision tower
        "llama4_text head_dim=128 hidden_size=5120 intermediate_size=8192 "
        "intermediate_size_mlp=16384 num_attention_heads=40 num_key_value_heads=8 "
        "num_hidden_layers=48 num_experts_per_tok=1 num_local_experts=16 vocab_size=202048 "
        "interleave_moe_layer_step=1",
    ),
    (
        2_779_683_840,
        "phi hidden_size=2560 intermediate_size=10240 num_attention_heads=32 "
        "num_hidden_layers=32 vocab_size=51200",
    ),
    (
        3_821_079_552,
        "phi3 hidden_size=3072 intermediate_size=8192 num_attention_heads=32 "
        "num_hidden_layers=32 num_key_value_heads=32 vocab_size=32064",
    ),
    (
        6_888_095_744,
        "olmo hidden_size=4096 intermediate_size=11008 num_attention_heads=32 "
        "num_hidden_layers=32 vocab_size=50304",
    ),
    (
        7_298_617_344,
        "olmo2 hidden_size=4096 intermediate_size=11008 num_attention_heads=32 "
        "num_hidden_layers=32 vocab_size=100352",
    ),
    (
        8_170_848_256,
        "granite hidden_size=4096 intermediate_size=12800 num_attention_heads=32 "
        "num_key_value_heads=8 num_hidden_layers=40 vocab_size=49155 tie_word_embeddings=true",
    ),
]


def config_of(text: str) -> dict[str, object]:
    """Returns the configuration of a text "model_type key=value ..."."""
    name, *pairs = text.split()
    found: dict[str, object] = {"model_type": name}
    for pair in pairs:
        key, _, value = pair.partition("=")
        found[key] = value if value.isidentifier() and value not in _JSON else json.loads(value)
    return found


_JSON = ("true", "false", "null")
FIRST = {text.split()[0]: config_of(text) for _, text in reversed(COUNTS)}
"""The first configuration of each type in `COUNTS`."""


@pytest.mark.parametrize(("parameters", "text"), COUNTS, ids=[t.split()[0] for _, t in COUNTS])
def test_exact_parameters(parameters: int, text: str) -> None:
    assert planner.from_hugging_face(config_of(text)).parameters == parameters


def test_every_type_is_counted_and_documented() -> None:
    assert set(FIRST) == set(MODEL_TYPES)
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
    ],
)
def test_exact_parameters_of_presets(name: str, parameters: int) -> None:
    assert planner.load_model(name).parameters == parameters


# Sizes of the models' cards, in billions.
@pytest.mark.parametrize(
    ("name", "active"), [("dbrx", 36), ("qwen2_moe", 2.7), ("llama4_text", 17)]
)
def test_active_parameters(name: str, active: float) -> None:
    found = planner.from_hugging_face(FIRST[name]).active_parameters / 1e9
    assert found == pytest.approx(active, rel=0.02)


LLAMA: dict[str, object] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}
STATED: dict[str, object] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False}
STATED |= {"mlp_bias": False, "tie_word_embeddings": False}


@pytest.mark.parametrize("start", [{"model_type": "llama"}, STATED, {**STATED, "model_type": "x"}])
def test_configurations_of_a_llama(start: dict[str, object]) -> None:
    assert planner.from_hugging_face(LLAMA | start) == planner.load_model("llama3-8b")


_QWEN3, _SHARED = FIRST["qwen3_moe"] | {"mlp_only_layers": []}, FIRST["qwen2_moe"]
_OPT, _LATENT, _LLAMA4 = FIRST["opt"], FIRST["deepseek_v2"], FIRST["llama4_text"]


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
        ({"model_type": "qwen3_next"}, "qwen3_next cannot be expressed: it has layers of linear"),
        (
            {"model_type": "llama4", "text_config": {}},
            "model_type llama4 cannot be expressed: it has parts beside",
        ),
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
        (_QWEN3 | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 cannot be expressed"),
        (_QWEN3 | {"mlp_only_layers": [1]}, "mlp_only_layers = [1], which are not the first"),
        (_SHARED | {"mlp_only_layers": [0]}, "mlp_only_layers beside shared experts"),
        (_SHARED | {"shared_expert_intermediate_size": 1500}, "no multiple of an expert's"),
        (_LLAMA4 | {"interleave_moe_layer_step": 2}, "step = 2 cannot be"),
        (_LLAMA4 | {"moe_layers": [1, 3]}, "moe_layers that are not all layers"),
        (_OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512 cannot be expressed"),
        (_OPT | {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        (_LATENT | {"v_head_dim": 64}, "v_head_dim = 64 unlike qk_nope_head_dim"),
        (_LATENT | {"moe_layer_freq": 2}, "moe_layer_freq = 2 cannot be expressed"),
        (_QWEN3 | {"layer_types": ["linear_attention"]}, "linear_attention in layer_types"),
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
