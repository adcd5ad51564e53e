"""Blocks of torch's own layers and of the layers that layouts can divide."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from random_models.block import Block, block
from unisono.parallel.layers import (
    FeatureNorm,
    FeedForward,
    LayoutDropout,
    MixtureOfExperts,
    SelfAttention,
)
from unisono.planner import Transformer


class Residual(nn.Module):
    """Adds the input to what a module makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class OverPositions(nn.Module):
    """Applies a module to (samples, width, positions)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """Returns the outputs of a recurrent network, without its state."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class TorchAttention(nn.Module):
    """torch's attention of a sequence over itself, with a residual sum."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 1, dropout=drop, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


class FunctionalDropout(nn.Module):
    """Draws a mask in forward, without a dropout module."""

    def forward(self, x):
        return functional.dropout(x, 0.3, self.training)


class SelfBilinear(nn.Module):
    """A bilinear product of the input with itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Bilinear(width, width, width)

    def forward(self, x):
        return self.inner(x, x)


class BagSum(nn.Module):
    """Adds rows of a table, chosen by the signs of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(2 * width, width, mode="sum")
        self.width = width

    def forward(self, x):
        ids = torch.arange(self.width) * 2 + (x.detach() > 0)
        return x + self.table(ids.flatten(0, -2)).view_as(x)


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width)
    )


def _shape(width: int, **changes: object) -> Transformer:
    sizes = {"layers": 1, "hidden": width, "heads": 2 - width % 2, "ffn": 7, "vocab": 5}
    return Transformer(**(sizes | changes))


def _experts(width: int) -> nn.Module:
    shape = _shape(width, experts=4, top_k=2, expert_ffn=5, tied=False)
    made = MixtureOfExperts(shape)
    for each in made.parameters():
        nn.init.normal_(each, std=0.3)
    return Residual(made)


def _frozen_norm(width: int) -> nn.Module:
    norm = nn.BatchNorm1d(width)
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    return OverPositions(norm.eval())


def _attention(width: int) -> nn.Module:
    return Residual(SelfAttention(_shape(width)))


PLAIN_BLOCKS: dict[str, Block] = {
    "linear": block(lambda w: nn.Linear(w, w)),
    "linear_pair": block(
        lambda w: nn.Linear(w, 2 * w + 1), lambda _: nn.GELU(), lambda w: nn.Linear(2 * w + 1, w)
    ),
    "mlp": block(_mlp),
    "residual_mlp": block(lambda w: Residual(_mlp(w))),
    "no_bias": block(lambda w: nn.Linear(w, w, bias=False)),
    "tanh": block(lambda _: nn.Tanh()),
    "prelu": block(lambda _: nn.PReLU()),
    "layer_norm": block(nn.LayerNorm),
    "plain_norm": block(lambda w: nn.LayerNorm(w, elementwise_affine=False)),
    "rms_norm": block(nn.RMSNorm),
    "group_norm": block(lambda w: OverPositions(nn.GroupNorm(1, w)), needs_positions=True),
    "instance_norm": block(
        lambda w: OverPositions(nn.InstanceNorm1d(w, affine=True)), needs_positions=True
    ),
    "tracking_instance_norm": block(
        lambda w: OverPositions(nn.InstanceNorm1d(w, track_running_stats=True)),
        needs_positions=True,
    ),
    "batch_norm": block(lambda w: OverPositions(nn.BatchNorm1d(w)), needs_positions=True),
    "frozen_batch_norm": block(_frozen_norm, needs_positions=True),
    "conv": block(lambda w: OverPositions(nn.Conv1d(w, w, 3, padding=1)), needs_positions=True),
    "depthwise": block(
        lambda w: OverPositions(nn.Conv1d(w, w, 3, padding=1, groups=w)), needs_positions=True
    ),
    "gru": block(lambda w: Recurrent(nn.GRU(w, w, batch_first=True)), needs_positions=True),
    "lstm": block(
        lambda w: Recurrent(nn.LSTM(w, w, num_layers=2, batch_first=True)), needs_positions=True
    ),
    "torch_attention": block(TorchAttention, needs_positions=True),
    "encoder_layer": block(
        lambda w: nn.TransformerEncoderLayer(w, 1, 2 * w, dropout=0.0, batch_first=True),
        needs_positions=True,
    ),
    "attention": block(_attention, needs_positions=True),
    "feed_forward": block(lambda w: Residual(FeedForward(_shape(w)))),
    "experts": block(_experts, needs_positions=True),
    "feature_norm": block(lambda w: FeatureNorm(w, is_centred=True)),
    "layout_dropout": block(
        lambda w: LayoutDropout(0.3, seed=3, site="random", width=w), needs_positions=True
    ),
    "no_dropout": block(lambda _: nn.Dropout(0.0)),
    "dropout": block(lambda _: nn.Dropout(0.3), is_random=True),
    "dropout_in_place": block(lambda _: nn.Dropout(0.3, inplace=True), is_random=True),
    "functional_dropout": block(lambda _: FunctionalDropout(), is_random=True),
    "rrelu": block(lambda _: nn.RReLU(), is_random=True),
    "dropping_attention": block(
        lambda w: TorchAttention(w, 0.2), needs_positions=True, is_random=True
    ),
    "embedding_bag": block(BagSum),
    "bilinear": block(SelfBilinear),
}
