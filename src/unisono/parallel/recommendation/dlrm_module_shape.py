"""The sizes of a torch module that is a recommendation model, for the planner."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unisono.parallel.recommendation.dlrm_model import DLRM
from unisono.planner.recommendation import Dlrm, TableShape


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
