"""The shape of a torch module, derived from modules that were made from a known shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from unisono.parallel import model_shape  # noqa: E402
from unisono.planner import Transformer  # noqa: E402


class Attention(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.heads, shape.kv_heads
        self.head_dim, bias = shape.head_dim, not shape.gated
        self.queries = nn.Linear(shape.hidden, shape.query_width, bias=bias)
        self.keys_values = nn.Linear(shape.hidden, shape.key_value_width, bias=bias)
        self.output = nn.Linear(shape.query_width, shape.hidden, bias=bias)

    def forward(self, x):  # type: ignore[no-untyped-def]
        batch, length, _ = x.shape
        queries = self.queries(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        both = self.keys_values(x).view(batch, length, 2, self.num_kv_heads, -1)
        repeats = self.num_heads // self.num_kv_heads
        keys, values = both.permute(2, 0, 3, 1, 4).repeat_interleave(repeats, 2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gated = shape.gated
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.norms = nn.ModuleList(norm(shape.hidden) for _ in range(2))
        self.attention = Attention(shape)
        inner = shape.ffn * (2 if shape.gated else 1)
        self.into = nn.Linear(shape.hidden, inner, bias=not shape.gated)
        self.out = nn.Linear(shape.ffn, shape.hidden, bias=not shape.gated)

    def forward(self, x):  # type: ignore[no-untyped-def]
        x = x + self.attention(self.norms[0](x))
        y = self.into(self.norms[1](x))
        if self.gated:
            gate, y = y.chunk(2, -1)
            return x + self.out(functional.silu(gate) * y)
        return x + self.out(functional.gelu(y))


class Decoder(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        if shape.positions:
            self.places = nn.Embedding(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):  # type: ignore[no-untyped-def]
        x = self.embedding(tokens)
        if hasattr(self, "places"):
            x = x + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


SHAPES = [
    Transformer(layers=4, hidden=64, heads=8, vocab=300, positions=128),
    Transformer(
        layers=2, hidden=96, heads=6, kv_heads=2, ffn=160, gated=True, vocab=512, tied=False
    ),
    Transformer(layers=3, hidden=48, heads=4, head_dim=24, gated=True, ffn=144, vocab=100),
    Transformer(layers=1, hidden=32, heads=2, vocab=1000, ffn=96, gated=True, tied=False),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_is_found_again(shape: Transformer) -> None:
    assert model_shape(Decoder(shape)) == shape


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_our_own_model(shape: Transformer) -> None:
    layers = pytest.importorskip("unisono.parallel.layers")
    found = model_shape(layers.TransformerModel(shape), seq=64)
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocab", "tied"):
        assert getattr(found, name) == getattr(shape, name), name


def test_biases_that_are_not_built() -> None:
    layers = pytest.importorskip("unisono.parallel.layers")
    for stated in ({"layer_vectors": 0}, {"outer_vectors": 0}):
        with pytest.raises(ValueError, match="only the biases and norms of a GPT or a Llama"):
            layers.TransformerModel(replace(SHAPES[0], **stated))


def test_no_memory_is_used() -> None:
    """Tests that the shape of a model with 7 billion parameters can be derived on the meta device,
    whose tensors have no memory.
    """
    shape = Transformer(
        layers=32, hidden=4096, heads=32, ffn=11008, gated=True, vocab=32000, tied=False
    )
    with torch.device("meta"):
        module = Decoder(shape)
    assert model_shape(module) == shape


def test_refusals() -> None:
    module = Decoder(SHAPES[0])
    for layer in module.layers:
        del layer.attention.num_heads
        layer.attention.forward = lambda x: x
    with pytest.raises(ValueError, match="no module names its heads"):
        model_shape(module)
    with pytest.raises(ValueError, match="FLOPs of forward, but the shape"):
        model_shape(module, heads=8)  # the attention of this module computes nothing
    with pytest.raises(ValueError, match="expected a transformer"):
        model_shape(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="does not run on 500 tokens on the meta device"):
        model_shape(Headless(SHAPES[0]), seq=500)
    with pytest.raises(ValueError, match="expected logits of shape"):
        model_shape(Headless(SHAPES[1]))


class Headless(Decoder):
    def forward(self, tokens):  # type: ignore[no-untyped-def]
        if hasattr(self, "places"):
            raise RuntimeError("this one fails")
        return super().forward(tokens)["logits"][0]
