"""Models in the manner of those of transformers, for plans of tensor parallelism."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCAB, POSITIONS, WIDTH, HEAD = 13, 6, 24, 4


class HeadNorm(nn.Module):
    """A norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HEAD) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (HEAD,), self.weight)


class GroupedAttention(nn.Module):
    """Attention with fewer heads of keys and values, as in Llama, and norms of heads, as in
    Qwen3."""

    def __init__(self, heads: int, key_heads: int, bias: bool) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = HEAD, heads // key_heads
        self.q_proj = nn.Linear(WIDTH, heads * HEAD, bias=bias)
        self.k_proj = nn.Linear(WIDTH, key_heads * HEAD, bias=bias)
        self.v_proj = nn.Linear(WIDTH, key_heads * HEAD, bias=bias)
        self.o_proj = nn.Linear(heads * HEAD, WIDTH, bias=bias)
        self.q_norm, self.k_norm = HeadNorm(), HeadNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        key, value = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GatedNetwork(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, inner, bias=False)
        self.up_proj = nn.Linear(WIDTH, inner, bias=False)
        self.down_proj = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedBlock(nn.Module):
    def __init__(self, heads: int, key_heads: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = GroupedAttention(heads, key_heads, bias)
        self.mlp = GatedNetwork(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GroupedDecoder(nn.Module):
    """A decoder that states its styles, as models of transformers do."""

    def __init__(
        self,
        *,
        heads: int = 4,
        key_heads: int = 2,
        inner: int = 14,
        bias: bool = True,
        tied: bool = True,
        layers: int = 2,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self._tp_plan = {
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.gate_proj": "colwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
            "lm_head": "colwise_gather_output",
        }
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(
            GroupedBlock(heads, key_heads, inner, bias) for _ in range(layers)
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Conv1D(nn.Module):
    """The linear layer of GPT-2, whose weight has the shape (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(size)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = WIDTH // HEAD, HEAD, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=2)
        shape = (*x.shape[:-1], self.num_heads, self.head_dim)
        query, key, value = (each.view(shape).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class FusedNetwork(nn.Module):
    """A gated network whose first two layers are fused, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * 10)
        self.down_proj = nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class FusedDecoder(nn.Module):
    """A decoder with fused layers, which states no styles."""

    styles = {  # noqa: RUF012
        "attn.c_attn": "qkv_colwise",
        "attn.c_proj": "rowwise",
        "mlp.gate_up_proj": "packed_colwise",
        "mlp.down_proj": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(WIDTH), "attn": FusedAttention(), "mlp": FusedNetwork()}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for layer in self.h:
            x = x + layer["attn"](layer["norm"](x))
            x = x + layer["mlp"](x)
        return self.head(x)
