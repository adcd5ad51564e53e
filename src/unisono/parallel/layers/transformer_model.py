"""A transformer decoder that can be divided by every parallel strategy."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.context.zigzag import own_positions
from unisono.parallel.counter_random import CounterRandom
from unisono.parallel.divisible.exchanges import gather_copies
from unisono.parallel.divisible.interfaces import ALL_ACTIVATIONS, MicrobatchPart
from unisono.parallel.divisible.parameter_block import block_of
from unisono.parallel.layers.attention import SelfAttention
from unisono.parallel.layers.feature_norm import FeatureNorm
from unisono.parallel.layers.feed_forward import FeedForward
from unisono.parallel.layers.layout_dropout import LayoutDropout
from unisono.parallel.layers.mixture_of_experts import MixtureOfExperts
from unisono.parallel.layers.tensor_parallel import tensor_parallel
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Transformer

_WEIGHT_SCALE = 0.02
_RESIDUAL_SCALE = 0.5


class TokenEmbedding(nn.Module):
    """Maps tokens (batch, sequence) to vectors, and adds learned vectors of positions.

    Tensor parallelism divides the vocabulary, and some kinds also divide the width; parts may be
    uneven.
    """

    serves = ALL_ACTIVATIONS

    def __init__(self, shape: Transformer, *, dropout: LayoutDropout) -> None:
        """`dropout` applies to the sum of both vectors."""
        super().__init__()
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.position = nn.Parameter(torch.empty(max(shape.positions, 1), shape.hidden))
        self._has_positions = shape.positions > 0
        self.vocab, self.width = shape.vocab, shape.hidden
        self._first = 0
        self._mesh: TrainingMesh | None = None
        self._tensor = tensor_parallel()

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's block of the embedding table."""
        self._mesh, self._tensor = mesh, tensor_parallel(mesh)
        self._tensor.divide_table(self, "weight")
        self._first = block_of(self.weight).start[0]
        self._tensor.divide_between(self, "position")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            x = functional.embedding(tokens, self.weight)
        else:
            x = self._tensor.look_up(tokens, self.weight, first=self._first, width=self.width)
        if self._has_positions:
            x = x + self.position[self._positions(tokens.shape[1])]
        y: torch.Tensor = self.dropout(x)
        return y

    def _positions(self, length: int) -> torch.Tensor:
        """Returns the positions of this rank's tokens in the whole sequence."""
        mesh = self._mesh
        if mesh is None:
            return torch.arange(length)
        divided = mesh.layout.sequence_parallel
        return own_positions(mesh, length=length * mesh.layout.cp, is_divided=divided)

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` in a step; see `Exchanging`."""
        moved = (
            each.item_bytes * self._tensor.look_up_elements(each, self.vocab, self.width)
            for each in parts
        )
        return {"tp": sum(moved)}


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward network or experts, each with a norm and a residual sum.

    The norm comes first. Dropout applies to both results before the residual sums.
    """

    def __init__(
        self,
        shape: Transformer,
        *,
        attention: SelfAttention,
        network: nn.Module,
        dropouts: tuple[LayoutDropout, LayoutDropout],
        norm_epsilon: float | None = None,
    ) -> None:
        """`dropouts` apply to the results of attention and network, in this order.
        `norm_epsilon`: that of the norms; None: that of torch's norms by default."""
        super().__init__()
        self.attention_norm = _norm(shape, norm_epsilon)
        self.attention = attention
        self.network_norm = _norm(shape, norm_epsilon)
        self.network = network
        self.attention_dropout, self.network_dropout = dropouts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        y: torch.Tensor = x + self.network_dropout(self.network(self.network_norm(x)))
        return y


class LogitHead(nn.Module):
    """A norm, then the projection to logits.

    Tensor parallelism divides the vocabulary. If `keeps_parts` is True, the logits stay divided, as
    `CrossEntropy` expects; otherwise each rank gathers all logits.
    """

    serves = ALL_ACTIVATIONS

    def __init__(
        self,
        shape: Transformer,
        weight: nn.Parameter | None = None,
        *,
        norm_epsilon: float | None = None,
    ) -> None:
        """`weight`: the matrix of the embedding, for a projection that uses the same matrix; or
        None. `norm_epsilon`: see `DecoderLayer`."""
        super().__init__()
        self.norm = _norm(shape, norm_epsilon)
        self.vocab = shape.vocab
        self.projection = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if weight is not None:
            self.projection.weight = weight
        self.keeps_parts = False
        self._tensor = tensor_parallel()
        self._mesh: TrainingMesh | None = None

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's part of the vocabulary."""
        self._mesh, self._tensor = mesh, tensor_parallel(mesh)
        self._tensor.divide_first(self.projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (logits,) = self._tensor.first(self.norm(x), [self.projection])
        if self.keeps_parts or self._mesh is None:
            return logits
        return gather_copies(logits, self._mesh.group("tp"), dim=2, length=self.vocab)

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` in a step, with those of `CrossEntropy` if
        the logits stay divided; see `Exchanging`."""
        mesh = self._mesh
        if mesh is None or mesh.group("tp") is None:
            return {}
        sent = 0.0
        for each in parts:
            moved = self._tensor.first_elements(each, [self.projection])
            if self.keeps_parts:
                sent += self._tensor.sum_elements(each, 3) * each.wide_bytes
            else:
                longest = -(-self.vocab // mesh.layout.tp)
                moved += (mesh.layout.tp - 1) * longest * each.tokens
            sent += moved * each.item_bytes
        return {"tp": sent}


class TransformerModel(nn.Sequential):
    """A decoder of the shape of a `planner.Transformer`; maps tokens to logits.

    Tokens have the shape (batch, sequence), logits (batch, sequence, vocab). The children are
    "embedding", "layer0", "layer1", ..., "head"; a pipeline cuts the model between children. Latent
    attention (`kv_rank`), windows, MTP layers, and other biases and norms (`layer_vectors`) are not
    implemented. A Llama is a gated shape with `rotary_base` and `norm_epsilon`.

    >>> shape = Transformer(layers=2, hidden=16, heads=2, vocab=11, positions=8)
    >>> model = TransformerModel(shape, seed=0)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    >>> sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    True
    """

    def __init__(
        self,
        shape: Transformer,
        *,
        seed: int = 0,
        is_causal: bool = True,
        context: str = "ring",
        dropout: float = 0.0,
        capacity_factor: float | None = None,
        rotary_base: float | None = None,
        norm_epsilon: float | None = None,
    ) -> None:
        """`seed` determines the weights and the dropout masks, which do not depend on the layout.

        `context`: kind of the exchange of keys and values on `cp`: "ring", "ulysses" or
        "allgather". `dropout`: probability of dropout after the embedding, attention and
        feed-forward networks. `capacity_factor`: an expert takes at most this multiple of the mean
        number of tokens of a sequence; None: all tokens. `rotary_base`: base of the angles of
        rotary positions, such as 10000.0; None: no rotary positions. `norm_epsilon`: that of all
        norms; None: that of torch's norms by default. Raises `ValueError` for latent attention,
        stated biases and norms, and wrong numbers.
        """
        _require_built(shape)
        _require_numbers(shape, rotary_base, norm_epsilon)

        def drop(site: str) -> LayoutDropout:
            return LayoutDropout(dropout, seed=seed, site=f"dropout/{site}", width=shape.hidden)

        def layer(index: int) -> DecoderLayer:
            has_experts = shape.experts > 0 and index >= shape.dense_layers
            return DecoderLayer(
                shape,
                attention=SelfAttention(
                    shape, is_causal=is_causal, context=context, rotary_base=rotary_base
                ),
                network=MixtureOfExperts(shape, capacity_factor=capacity_factor)
                if has_experts
                else FeedForward(shape),
                dropouts=(drop(f"layer{index}/attention"), drop(f"layer{index}/network")),
                norm_epsilon=norm_epsilon,
            )

        embedding = TokenEmbedding(shape, dropout=drop("embedding"))
        layers = [(f"layer{index}", layer(index)) for index in range(shape.layers)]
        weight = embedding.weight if shape.tied else None
        head = LogitHead(shape, weight, norm_epsilon=norm_epsilon)
        super().__init__(OrderedDict([("embedding", embedding), *layers, ("head", head)]))
        self.shape, self._seed = shape, seed
        self.init_weights()

    def init_weights(self) -> None:
        """Draws the weights again, from the seed."""
        draw_weights(self, self._seed)


def _require_built(shape: Transformer) -> None:
    """Raises ValueError for parts that only the planner knows."""
    if shape.kv_rank:
        raise ValueError(f"kv_rank: latent attention is not built; expected 0, got {shape.kv_rank}")
    for name in ("window", "gate_width", "mtp_layers", "spread_dense"):
        if getattr(shape, name):
            raise ValueError(f"{name}: not built; expected 0, got {getattr(shape, name)}")
    stated = {
        "layer_vectors": shape.layer_vectors,
        "outer_vectors": shape.outer_vectors,
        "expert_vectors": shape.expert_vectors or None,
    }
    for name, elements in stated.items():
        if elements is not None:
            raise ValueError(
                f"{name}: only the biases and norms of a GPT or a Llama are built; expected none "
                f"stated, got {elements}"
            )


def _require_numbers(
    shape: Transformer, rotary_base: float | None, norm_epsilon: float | None
) -> None:
    for name, value in (("rotary_base", rotary_base), ("norm_epsilon", norm_epsilon)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    if rotary_base is not None and shape.positions:
        raise ValueError(
            f"rotary_base: expected a shape without learned positions, got {shape.positions}; "
            "positions = 0 works"
        )


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Draws all parameters from their names and the seed alone.

    Matrices have normally distributed elements. Norms are near but not equal to 1, and biases near
    but not equal to 0, so that every gradient has an effect in tests.
    """
    random = CounterRandom(seed)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # it has no memory for values
            continue
        values = random.normal(name, parameter.shape) * _WEIGHT_SCALE
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            values += 1
        elif parameter.dim() > 1 and not name.startswith("embedding"):
            values *= _RESIDUAL_SCALE / _WEIGHT_SCALE * parameter.shape[-1] ** -0.5
        parameter.copy_(values)


def _norm(shape: Transformer, epsilon: float | None) -> nn.Module:
    return FeatureNorm(shape.hidden, is_centred=not shape.gated, epsilon=epsilon)
