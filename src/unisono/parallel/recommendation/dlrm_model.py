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
from unisono.planner.recommendation import Dlrm, TablePlacement

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
