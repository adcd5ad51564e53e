"""Rotary positions of `TransformerModel`, by rotations of complex numbers, and Llama's logits."""

from __future__ import annotations

import pytest
import torch

from unisono.parallel import TransformerModel
from unisono.parallel.layers.attention import rotated
from unisono.planner import Transformer

pytestmark = pytest.mark.torch
SIZES = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 20,
         "vocab": 11, "gated": True, "tied": False}  # fmt: skip


def turned(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Multiplies each pair of features, as a complex number, by a power of one."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    rates = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=x.dtype)
    found = pairs * torch.polar(torch.ones_like(rates), rates * positions.to(x.dtype)[:, None])
    return torch.cat([found.real, found.imag], dim=-1)


def test_rotations_are_those_of_complex_numbers():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 6).double(), torch.randn(2, 2, 5, 6).double()
    positions = torch.tensor([0, 1, 2, 9, 10])
    for base in (10.0, 10000.0):
        for x, found in zip((query, key), rotated((query, key), positions, base=base), strict=True):
            # the rates are those of float32, as in transformers
            torch.testing.assert_close(found, turned(x, positions, base), rtol=0, atol=1e-5)


def test_logits_depend_on_distances_only():
    """Moving a text by some places changes nothing but what came before it."""
    torch.manual_seed(0)
    model = TransformerModel(Transformer(**SIZES), rotary_base=100.0).double()
    query, key = torch.randn(1, 1, 1, 6).double(), torch.randn(1, 1, 1, 6).double()
    products = []
    for first in (0, 7):
        (q,) = rotated((query,), torch.tensor([first + 3]), base=100.0)
        (k,) = rotated((key,), torch.tensor([first]), base=100.0)
        products.append(float((q * k).sum()))
    assert products[0] == pytest.approx(products[1], rel=1e-5)
    tokens = torch.randint(0, 11, (1, 6))
    plain = TransformerModel(Transformer(**SIZES)).double()
    assert not torch.allclose(model(tokens), plain(tokens))  # positions have an effect
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])
    torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({}, {"rotary_base": 0.0}, "rotary_base: expected a number above 0, got 0.0"),
        ({}, {"norm_epsilon": -1.0}, "norm_epsilon: expected a number above 0, got -1.0"),
        ({"positions": 8}, {"rotary_base": 9.0}, "without learned positions, got 8; positions = 0"),
        ({"head_dim": 5}, {"rotary_base": 9.0}, "expected an even head_dim, got 5; 6 works"),
    ],
)
def test_wrong_options_are_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        TransformerModel(Transformer(**(SIZES | shape)), **options)


def llama_weights(model: TransformerModel, weights: dict[str, torch.Tensor]) -> None:
    """Copies a Llama's weights into a `TransformerModel`."""
    names = {
        "attention_norm": "input_layernorm",
        "network_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "network.up": "mlp.up_proj",
        "network.gate": "mlp.gate_proj",
        "network.down": "mlp.down_proj",
    }
    others = {
        "embedding.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.projection.weight": "lm_head.weight",
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer, _, rest = name.partition(".")
            if name == "embedding.position":
                continue
            if name in others:
                found = others[name]
            else:
                inner, _, kind = rest.rpartition(".")
                found = f"model.layers.{layer.removeprefix('layer')}.{names[inner]}.{kind}"
            parameter.copy_(weights[found])


@pytest.mark.optional
def test_logits_are_those_of_a_llama_of_transformers():
    transformers = pytest.importorskip("transformers")
    from parallel.worlds.test_transformers_plans import in_float64

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=20, num_hidden_layers=2, vocab_size=11, head_dim=6,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).double()
    model = TransformerModel(
        Transformer(**SIZES), rotary_base=500.0, norm_epsilon=1e-4
    ).double()  # fmt: skip
    llama_weights(model, llama.state_dict())
    tokens = torch.randint(0, 11, (3, 16))
    with torch.no_grad(), in_float64():
        expected = llama(tokens).logits
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)
