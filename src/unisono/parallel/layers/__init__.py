"""Modules that compute the same result in one process and divided over the ranks of a mesh.

`TransformerModel` is a whole decoder; `CrossEntropy` is its loss. `LinearPair` divides two linear
layers in any `nn.Sequential`.
"""

from unisono.parallel.layers.attention import SelfAttention
from unisono.parallel.layers.cross_entropy import IGNORED, CrossEntropy
from unisono.parallel.layers.expert_exchange import ExpertExchange, expert_overhead_bytes
from unisono.parallel.layers.feature_norm import FeatureNorm
from unisono.parallel.layers.feed_forward import FeedForward
from unisono.parallel.layers.layout_dropout import BatchPlace, LayoutDropout
from unisono.parallel.layers.linear_pair import (
    LinearPair,
    pair_linears,
    undivided_linear,
)
from unisono.parallel.layers.mixture_of_experts import Experts, MixtureOfExperts
from unisono.parallel.layers.per_position import (
    has_forward_of,
    is_elementwise,
    is_per_position,
)
from unisono.parallel.layers.transformer_model import (
    DecoderLayer,
    LogitHead,
    TokenEmbedding,
    TransformerModel,
    draw_weights,
)

__all__ = [
    "IGNORED",
    "BatchPlace",
    "CrossEntropy",
    "DecoderLayer",
    "ExpertExchange",
    "Experts",
    "FeatureNorm",
    "FeedForward",
    "LayoutDropout",
    "LinearPair",
    "LogitHead",
    "MixtureOfExperts",
    "SelfAttention",
    "TokenEmbedding",
    "TransformerModel",
    "draw_weights",
    "expert_overhead_bytes",
    "has_forward_of",
    "is_elementwise",
    "is_per_position",
    "pair_linears",
    "undivided_linear",
]
