"""The deep learning recommendation model, with tables and samples split across `dp`.

Naumov et al., "Deep learning recommendation model for personalization and recommendation systems",
2019: a bottom network maps the dense features to a vector, and an embedding table maps the ids of
each categorical feature to a vector. A top network maps the dot products of all pairs of vectors,
and the dense vector, to a logit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from unisono.parallel.divisible.interfaces import MicrobatchPart
from unisono.parallel.layers import draw_weights
from unisono.parallel.recommendation.embedding_tables import EmbeddingTables
from unisono.planner.recommendation import Dlrm, TablePlacement, TableShape

_BATCH = 4096


class DLRM(nn.Module):
    """Maps samples (batch, columns) of integers to the logits of a click (batch,).

    The first columns are counters; the model uses log(1 + count), with negative counts as 0. The
    other columns are the places for the ids of each table; -1 marks an empty place. So one tensor
    holds a batch.

    >>> from unisono.planner.recommendation import Dlrm, TableShape
    >>> tables = (TableShape(rows=50, ids=2), TableShape(rows=9))
    >>> shape = Dlrm(counters=1, width=4, tables=tables, bottom=(8,), top=(8,))
    >>> model = DLRM(shape, seed=0)
    >>> model(torch.tensor([[12, 40, -1, 3], [0, 7, 7, -1]])).shape
    torch.Size([2])
    >>> sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    True
    """

    def __init__(
        self,
        shape: Dlrm,
        *,
        seed: int = 0,
        placement: TablePlacement | str = "auto",
        samples: int = _BATCH,
    ) -> None:
        """`seed` determines the weights, which do not depend on the layout.

        `placement`: the ranks of the tables; or "auto" for the choice of the cost model; or one of
        `TABLE_KINDS` of the planner for all tables. `samples`: number of samples of a step on all
        ranks together, for the cost model. Raises `ValueError` for an interaction other than "dot".
        """
        super().__init__()
        if shape.interaction != "dot":
            raise ValueError(
                f"interaction: DLRM computes dot products; expected dot, got {shape.interaction!r}"
            )
        self.shape = shape
        self.bottom = _network(shape.bottom_widths, ends_with_relu=True)
        self.tables = EmbeddingTables(
            shape.tables, width=shape.width, placement=placement, samples=samples
        )
        self.top = _network(shape.top_widths, ends_with_relu=False)
        self._seed = seed
        self.init_weights()

    def init_weights(self) -> None:
        """Draws the weights again, from the seed."""
        draw_weights(self, self._seed)

    @property
    def placement(self) -> TablePlacement | None:
        """The ranks of the tables; None if the tables are not divided."""
        return self.tables.placement

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        counts, places = samples.tensor_split([self.shape.counters], dim=1)
        kind = self.tables.weights[0].dtype
        dense = self.bottom(counts.clamp(min=0).to(kind).log1p())
        vectors = torch.cat([dense.unsqueeze(1), self.tables(places)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        logits: torch.Tensor = self.top(torch.cat([dense, products[:, row, column]], dim=1))
        return logits.squeeze(1)

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank's exchanges of bags send on `dp`, from closed forms."""
        own = [replace(each, inputs=each.inputs[:, self.shape.counters :]) for each in parts]
        sent = self.tables.lookup_bytes(own)
        return {"dp": sent} if sent else {}


def _network(widths: Sequence[int], *, ends_with_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers if ends_with_relu else layers[:-1])


def dlrm_shape(module: nn.Module, *, ids: Sequence[int] | None = None) -> Dlrm:
    """Returns the sizes of a recommendation model, for `unisono.planner`.

    `ids`: largest number of ids of a sample in each table; by default one. The tables are the
    module's `nn.EmbeddingBag` or `nn.Embedding`. Its `nn.Linear` modules, in order, are a bottom
    network that ends with the width of the tables, and a top network that ends with one logit.
    Raises ValueError for other modules, and if the number of parameters is not that of these sizes
    with dot products as the interaction.

    >>> class Clicks(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 4) for rows in (50, 9))
    ...         self.bottom = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
    ...         self.top = nn.Sequential(nn.Linear(4 + 3, 6), nn.ReLU(), nn.Linear(6, 1))
    >>> shape = dlrm_shape(Clicks(), ids=(2, 1))
    >>> shape.counters, shape.width, shape.bottom, shape.top, shape.tables[0].ids
    (3, 4, (8,), (6,), 2)
    """
    if isinstance(module, DLRM):
        return module.shape
    modules = list(module.modules())
    tables = [each for each in modules if isinstance(each, nn.EmbeddingBag | nn.Embedding)]
    widths = {each.embedding_dim for each in tables}
    if len(widths) != 1:
        raise ValueError(
            f"expected embedding tables of one width, found {len(tables)} of widths "
            f"{sorted(widths)} in {type(module).__name__}"
        )
    width = widths.pop()
    linears = [each for each in modules if isinstance(each, nn.Linear)]
    bottom, top = _networks(linears, width)
    counts = ids or [1] * len(tables)
    if len(counts) != len(tables):
        raise ValueError(f"ids: expected a number for each of {len(tables)} tables, got {counts}")
    shape = Dlrm(
        counters=bottom[0],
        width=width,
        tables=tuple(
            TableShape(rows=table.num_embeddings, ids=count)
            for table, count in zip(tables, counts, strict=True)
        ),
        bottom=bottom[1:-1],
        top=top[1:-1],
    )
    counted = sum(parameter.numel() for parameter in module.parameters())
    if shape.top_widths[0] != top[0] or counted != shape.parameters:
        raise ValueError(
            f"the module has {counted} parameters and a top network of {top[0]} inputs, but dot "
            f"products of {shape.vectors} vectors make {shape.parameters} and "
            f"{shape.top_widths[0]}; state the sizes as recommendation.Dlrm(...)"
        )
    return shape


def _networks(linears: Sequence[nn.Linear], width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the widths of the bottom and the top network, from inputs to outputs."""
    chains: list[list[int]] = []
    for linear in linears:
        if chains and chains[-1][-1] == linear.in_features:
            chains[-1].append(linear.out_features)
        else:
            chains.append([linear.in_features, linear.out_features])
    if len(chains) != 2 or (chains[0][-1], chains[1][-1]) != (width, 1):
        sizes = [(each.in_features, each.out_features) for each in linears]
        raise ValueError(
            f"expected linear layers that end with the width {width}, then layers that end with "
            f"1, found {sizes}; state the sizes as recommendation.Dlrm(...)"
        )
    return tuple(chains[0]), tuple(chains[1])
