"""Models that are no sequence of modules, for pipelines that are cut from traced graphs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        changed = self.out(found)
        changed.mul_(0.5)  # in place
        return functional.relu_(x + changed)


class TracedDecoder(nn.Module):
    """A decoder with a connection over all blocks, a tied head, a shared block, and a buffer."""

    def __init__(self, vocab: int, positions: int, width: int = 12, blocks: int = 5) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.middle = nn.Bilinear(width, width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("visible", torch.ones(positions, positions).tril().bool())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(tokens)
        mask = self.visible[: tokens.shape[1], : tokens.shape[1]]
        for block in [*self.blocks, self.blocks[0]]:  # the first block runs twice
            x = block(x, mask)
        known = (tokens > 2).unsqueeze(-1)  # a value without a gradient
        x = torch.where(known, self.middle(x, first), x + first)
        return self.head(x)


class TracedLookups(nn.Module):
    """A model that looks up its tokens at both ends, with buffers and constants of all kinds."""

    def __init__(self, vocab: int, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.head = nn.Linear(width, vocab)
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.register_buffer("same_shift", self.shift)
        self.register_buffer("unsaved", torch.linspace(1, 2, width), persistent=False)
        self.register_buffer("unused", torch.ones(3))
        self.constant = torch.arange(width) / 100

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(tokens)
        for number, layer in enumerate(self.layers):
            shift = self.same_shift if number % 2 else self.shift
            x = torch.tanh(layer(x)) * self.unsaved + shift + self.constant + torch.tensor([0.5])
        return self.head(x + self.last(tokens))
