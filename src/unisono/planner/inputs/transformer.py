"""The shape of a transformer model, and its exact parameter counts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from unisono.planner.inputs.whole_numbers import switch, whole_number

_OF_EXPERTS = (
    *("top_k", "expert_ffn", "expert_vectors", "shared_experts", "dense_layers"),
    *("expert_groups", "token_groups", "spread_dense"),
)
_OF_LATENT = ("query_rank", "rope_dim")
APPROXIMATION_DEVIATION = 0.1
"""Standard deviation that an approximation of a model adds to the logarithm of the step time. It is
a choice, not a fit: no published run has such a model."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a decoder: GPT, Llama, grouped-query or latent attention, mixture of experts.

    A model without gates (`gated=False`) is a GPT: its linear layers have biases, its norms have
    two vectors, and its training uses dropout. A gated model is a Llama: no biases, norms of one
    vector. `layer_vectors`, `expert_vectors` and `outer_vectors` state the biases and norms of
    other models.

    Raises ValueError for sizes that do not fit together.

    >>> gpt = Transformer(layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152,
    ...                   vocab=51200)
    >>> round(gpt.parameters / 1e9, 1)
    174.6
    """

    layers: int
    """Number of transformer layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Number of attention heads."""
    kv_heads: int = 0
    """Number of key and value heads. 0: as many as `heads`."""
    head_dim: int = 0
    """Width of one head. 0: `hidden / heads`."""
    ffn: int = 0
    """Inner width of the dense feed-forward network. 0: 4 x `hidden`."""
    gated: bool = False
    """True if the feed-forward network has a gate (SwiGLU), and so three matrices instead of
    two."""
    vocab: int
    """Number of rows of the embedding."""
    experts: int = 0
    """Number of routed experts in a layer. 0: dense layers."""
    top_k: int = 0
    """Number of experts for each token."""
    expert_ffn: int = 0
    """Inner width of one expert."""
    expert_groups: int = 0
    """Number of groups of experts, if the router limits a token to some groups. 0: no limit."""
    token_groups: int = 0
    """Number of groups that the experts of one token are from, if there are groups."""
    tied: bool = True
    """True if the output projection is the embedding's matrix."""
    shared_experts: int = 0
    """Number of experts of width `expert_ffn` that see every token."""
    dense_layers: int = 0
    """Number of first layers without experts, in a mixture of experts."""
    positions: int = 0
    """Number of learned positions. 0: none, or rotary positions."""
    query_rank: int = 0
    """Latent attention (MLA): width of the compressed query. 0: not compressed."""
    kv_rank: int = 0
    """Latent attention (MLA): width of the compressed key and value. 0: no latent attention."""
    rope_dim: int = 0
    """Latent attention (MLA): width of a head's rotary part, in addition to `head_dim`."""
    layer_vectors: int | None = None
    """Elements of the biases and norms of one layer. None: those of a GPT or a Llama."""
    expert_vectors: int = 0
    """Elements of the biases of one routed expert."""
    outer_vectors: int | None = None
    """Elements of the norms and biases outside of the layers. None: those of the last norm."""
    spread_dense: bool = False
    """The dense layers of a mixture of experts are spread evenly, not the first layers."""
    window: int = 0
    """Number of positions that a query of a local layer sees. 0: no layer is local."""
    local_layers: int = 0
    """Number of layers whose attention sees only `window` positions, spread evenly."""
    blocked_window: bool = False
    """A query sees the positions of its own block of `window` positions (Llama 4), instead
    of the last `window` positions."""
    gate_width: int = 0
    """Outputs of further projections of the residual stream in attention, such as gates: the mean
    over the layers."""
    mtp_layers: int = 0
    """Number of layers after the last one that predict further tokens (MTP). Each has a projection
    of 2 x `hidden` to `hidden`, and uses the output projection again."""
    approximations: tuple[str, ...] = ()
    """Parts of the model that the shape describes only roughly. Each widens the intervals of
    predictions by `APPROXIMATION_DEVIATION`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                object.__setattr__(self, field.name, switch(field.name, value))
            elif field.name == "approximations":
                object.__setattr__(self, field.name, tuple(value))
            elif value is not None or field.type == "int":
                object.__setattr__(self, field.name, whole_number(field.name, value, least=0))
        for name in ("layers", "hidden", "heads", "vocab"):
            whole_number(name, getattr(self, name))
        if not self.head_dim and self.hidden % self.heads:
            near = max(d for d in range(1, self.heads + 1) if self.hidden % d == 0)
            raise ValueError(
                f"heads must divide hidden: {self.heads} does not divide {self.hidden}; {near} "
                "does, or state head_dim"
            )
        derived = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self.hidden // self.heads,
            "ffn": self.ffn or 4 * self.hidden,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.heads % self.kv_heads:
            near = max(k for k in range(1, self.kv_heads + 1) if self.heads % k == 0)
            raise ValueError(
                f"kv_heads must divide heads: {self.kv_heads} does not divide {self.heads}; "
                f"{near} does"
            )
        if self.kv_rank and self.kv_heads != self.heads:
            raise ValueError(
                f"latent attention has keys of all heads: kv_heads must be {self.heads}, not "
                f"{self.kv_heads}"
            )
        self._refuse_parts("kv_rank", "latent attention (kv_rank)", _OF_LATENT)
        self._refuse_parts("experts", "experts", _OF_EXPERTS)
        self._refuse_parts("window", "a window", ("local_layers", "blocked_window"))
        if self.local_layers > self.layers:
            raise ValueError(
                f"local_layers must be at most the {self.layers} layers, not {self.local_layers}"
            )
        if not self.experts:
            return
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k must be between 1 and the {self.experts} experts, not {self.top_k}"
            )
        if self.expert_ffn < 1:
            raise ValueError(
                f"a model with {self.experts} experts needs expert_ffn, the inner width of an "
                "expert"
            )
        if self.expert_groups and not 1 <= self.token_groups <= self.expert_groups:
            raise ValueError(
                f"token_groups must be between 1 and the {self.expert_groups} groups of experts, "
                f"not {self.token_groups}"
            )
        if self.dense_layers > self.layers:
            raise ValueError(
                f"dense_layers must be at most the {self.layers} layers, not {self.dense_layers}"
            )

    def _refuse_parts(self, name: str, what: str, parts: tuple[str, ...]) -> None:
        """Raises ValueError for sizes of a part that the model does not have."""
        for part in parts:
            if getattr(self, part) and not getattr(self, name):
                raise ValueError(
                    f"{part} = {getattr(self, part)} needs a model with {what}; {part} = 0 works"
                )

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_dim + self.rope_dim)

    @property
    def key_value_width(self) -> int:
        """Width of the keys and the values of all heads together, as attention reads them."""
        if self.kv_rank:
            return self.heads * (2 * self.head_dim + self.rope_dim)
        return 2 * self.kv_heads * self.head_dim

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def dense_among(self, first: int) -> int:
        """Returns the number of dense layers among the first layers.

        >>> sizes = {"hidden": 8, "heads": 2, "vocab": 9, "experts": 4, "top_k": 1, "expert_ffn": 8}
        >>> maverick = Transformer(layers=8, dense_layers=4, spread_dense=True, **sizes)
        >>> [maverick.dense_among(first) for first in (1, 2, 3, 8)]
        [1, 1, 2, 4]
        """
        if not self.experts:
            return first
        if self.spread_dense:
            return -(-first * self.dense_layers // self.layers)
        return min(first, self.dense_layers)

    def attended_share(self, seq: int) -> float:
        """Returns the pairs of positions that causal attention computes, as a share of those
        without windows: the mean over the layers.

        >>> gpt = Transformer(layers=4, hidden=8, heads=2, vocab=9, window=64, local_layers=2)
        >>> gpt.attended_share(64), gpt.attended_share(128)
        (1.0, 0.875)
        """
        part = min(self.window / seq, 1.0)
        local = part if self.blocked_window else 1 - (1 - part) ** 2
        return 1 - self.local_layers / self.layers * (1 - local)

    @property
    def matrices(self) -> int:
        """Number of matrices of a feed-forward network: 3 with a gate, else 2."""
        return 3 if self.gated else 2

    @cached_property
    def attention_weights(self) -> int:
        """Elements of the weight matrices of one attention block, without biases."""
        h, out = self.hidden, (self.heads * self.head_dim + self.gate_width) * self.hidden
        if not self.kv_rank:
            return h * (self.query_width + self.key_value_width) + out
        query = (
            h * self.query_rank + self.query_rank * self.query_width
            if self.query_rank
            else h * self.query_width
        )
        keys = h * (self.kv_rank + self.rope_dim) + self.kv_rank * 2 * self.heads * self.head_dim
        return query + keys + out

    @cached_property
    def ffn_weights(self) -> int:
        """Elements of the weight matrices of one dense feed-forward network."""
        return self.matrices * self.hidden * self.ffn

    @cached_property
    def expert_weights(self) -> int:
        """Elements of the weight matrices of one expert."""
        return self.matrices * self.hidden * self.expert_ffn

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return self.expert_weights + self.expert_vectors

    @cached_property
    def vector_parameters(self) -> int:
        """Elements of the biases and norms of one layer, without biases of a feed-forward network
        that `layer_vectors` does not state.
        """
        if self.layer_vectors is not None:
            return self.layer_vectors
        h = self.hidden
        if self.gated:
            return 2 * h + self.query_rank + self.kv_rank
        return 4 * h + self.query_width + self.key_value_width + h

    @cached_property
    def shared_layer_parameters(self) -> int:
        """Parameters of one layer with experts, without its routed experts."""
        return (
            self.attention_weights
            + self.vector_parameters
            + self.shared_experts * self.expert_weights
            + self.hidden * self.experts
        )

    @cached_property
    def dense_layer_parameters(self) -> int:
        """Parameters of one dense layer."""
        biases = 0 if self.gated or self.layer_vectors is not None else self.ffn + self.hidden
        return self.attention_weights + self.vector_parameters + self.ffn_weights + biases

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and of learned positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def output_parameters(self) -> int:
        """Parameters of the output projection, or 0 if it is tied to the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters, with biases, norms, positions, embedding and MTP layers."""
        return self._layers_parameters(self.experts) + self._outer_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses, with only `top_k` of the routed experts."""
        return self._layers_parameters(self.top_k) + self._outer_parameters

    @property
    def _outer_parameters(self) -> int:
        vectors = self.outer_vectors
        if vectors is None:
            vectors = self.hidden * (1 if self.gated else 2)
        return self.embedding_parameters + self.output_parameters + vectors

    def _layers_parameters(self, experts: int) -> int:
        moe = self.shared_layer_parameters + experts * self.expert_parameters
        dense = self.layers - self.moe_layers
        last = (moe if self.experts else self.dense_layer_parameters) + self.mtp_parameters
        found = self.moe_layers * moe + dense * self.dense_layer_parameters
        return found + self.mtp_layers * last

    @property
    def mtp_parameters(self) -> int:
        """Parameters that only an MTP layer has: a projection and three norms."""
        return 2 * self.hidden**2 + 3 * self.hidden
