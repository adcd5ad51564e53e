"""Models whose repeated blocks are inside of other modules, as in published decoders."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Mixer(nn.Module):
    """Four matrices of equal shape, of which none is a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    """Attention and a network, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(width), Mixer(width)
        self.norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.network(self.norm(x))


class Stack(nn.Module):
    """An embedding, blocks and a norm."""

    def __init__(self, width: int, blocks: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class NestedDecoder(nn.Module):
    """A stack of blocks as the attribute `model`, and a head."""

    def __init__(
        self, *, width: int = 24, blocks: int = 12, vocab: int = 11, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.model = Stack(width, blocks, vocab)
        self.head = nn.Linear(width, vocab, bias=False)
        if is_tied:
            self.head.weight = self.model.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(tokens))


class Wrapper(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)
