"""Blocks as programs write them: loops with early exits, einsum, adapters, autoencoders."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from random_models.block import Block, block


class EarlyExit(nn.Module):
    """Calls layers in a loop, each for the rows that are still small, and stops without any."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            goes_on = x.detach().abs().amax(dim=-1, keepdim=True) < 1
            if not bool(goes_on.any()):
                break
            x = torch.where(goes_on, x + torch.tanh(layer(x)), x)
        return x


class Einsum(nn.Module):
    """A product of three dimensions, written with einsum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, width, width).normal_(std=0.4))

    def forward(self, x):
        return torch.einsum("...i,hij->...hj", x, self.weight).mean(dim=-2)


class Frequencies(nn.Module):
    """Multiplies the features' frequencies by complex factors made of two real parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        count = width // 2 + 1
        self.real = nn.Parameter(torch.ones(count))
        self.imaginary = nn.Parameter(torch.full((count,), 0.1))

    def forward(self, x):
        factors = torch.complex(self.real, self.imaginary)
        return torch.fft.irfft(torch.fft.rfft(x) * factors, n=x.shape[-1])


class Adapter(nn.Module):
    """A frozen linear layer with a product of two small matrices that are trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Autoencoder(nn.Module):
    """Decodes with the transposed matrix of the encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, 3)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return functional.linear(torch.relu(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Symmetric(nn.Module):
    """A parametrization: the matrix of a layer is symmetric."""

    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Gated(nn.Module):
    """Mixes its input with a module's result by a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return gate * self.inner(x) + (1 - gate) * x


class SharedNorm(nn.Module):
    """Uses one norm in front of each of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


class RecomputedPair(nn.Module):
    """Recomputes a function of two tensors that calls two modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        def inner(a, b):
            return self.first(a) * torch.sigmoid(self.second(b))

        return checkpoint(inner, x, x * 0.5, use_reentrant=False)


class Flattened(nn.Module):
    """Flattens a sample by a view with a size of -1."""

    def forward(self, x):
        return x.reshape(x.shape[0], -1).view(x.shape)


class LastState(nn.Module):
    """Adds the last state of a recurrent network to all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.GRU(width, width, batch_first=True, bidirectional=True)

    def forward(self, x):
        _, state = self.inner(x)
        return x + state.mean(dim=0).unsqueeze(1)


class GroupedConvolution(nn.Module):
    """A convolution in two groups if the width is even, without bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        groups = 2 - width % 2
        self.inner = nn.Conv1d(2 * width, width, 3, padding=1, groups=groups, bias=False)

    def forward(self, x):
        both = torch.cat([x, -x], dim=-1)
        return self.inner(both.transpose(1, 2)).transpose(1, 2)


class Nested(nn.Module):
    """Returns a dictionary with a tuple in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return {"pair": (x, self.inner(x)), "scale": 0.5}


class Unnested(nn.Module):
    """Adds the tensors of `Nested`."""

    def forward(self, found):
        first, second = found["pair"]
        return first * found["scale"] + second


class Scaled(nn.Module):
    """A frozen first half and a trained second half of one vector of factors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.fixed = nn.Parameter(torch.full((half,), 0.7), requires_grad=False)
        self.free = nn.Parameter(torch.ones(width - half))

    def forward(self, x):
        return x * torch.cat([self.fixed, self.free])


def _symmetric(width: int) -> nn.Module:
    made = nn.Linear(width, width)
    parametrize.register_parametrization(made, "weight", Symmetric())
    return made


def _encoder(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        width, 1, 2 * width, dropout=0.0, batch_first=True, norm_first=True, bias=False
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


WRITTEN_BLOCKS: dict[str, Block] = {
    "early_exit": block(EarlyExit),
    "einsum": block(Einsum),
    "frequencies": block(Frequencies),
    "adapter": block(Adapter),
    "autoencoder": block(Autoencoder),
    "symmetric": block(_symmetric),
    "gated": block(Gated),
    "shared_norm": block(SharedNorm),
    "checkpoint_pair": block(RecomputedPair),
    "flattened": block(lambda _: Flattened()),
    "last_state": block(LastState, needs_positions=True),
    "grouped_conv": block(GroupedConvolution, needs_positions=True),
    "nested_results": block(Nested, lambda _: Unnested()),
    "half_frozen": block(Scaled),
    "encoder": block(_encoder, needs_positions=True),
}
