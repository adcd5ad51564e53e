"""Embedding tables that sum the vectors of bags, and are split across the ranks of `dp`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.parallel.divisible.interfaces import MicrobatchPart
from unisono.parallel.divisible.parameter_block import keep
from unisono.parallel.recommendation.divided_lookup import (
    NO_ID,
    Bags,
    DividedLookup,
    piece_bags,
    sum_bags,
)
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner.recommendation import (
    TablePiece,
    TablePlacement,
    TableShape,
    pass_bytes,
    place_tables,
    rank_loads,
)


class EmbeddingTables(nn.Module):
    """Maps the ids of each feature to the sum of their vectors: (samples, tables, width).

    The input (samples, places) has `ids` places for each table; -1 marks an empty place.
    """

    def __init__(
        self,
        tables: Sequence[TableShape],
        *,
        width: int,
        placement: TablePlacement | str = "auto",
        samples: int,
    ) -> None:
        """`placement`: the ranks of the tables, or a kind that `place_tables` takes.

        `samples`: number of samples of a step on all ranks together, for the choice of ranks.
        """
        super().__init__()
        self.shapes, self.width = tuple(tables), width
        self.weights = nn.ParameterList(torch.empty(table.rows, width) for table in tables)
        self.placement: TablePlacement | None = None
        """The ranks of the tables; None if the tables are not divided."""
        self._wanted, self._samples = placement, samples
        self._lookup: DividedLookup | None = None
        self._rank, self._item_bytes = 0, 0

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's parts of the tables.

        Raises `ValueError` for a layout with axes other than `dp`, and for ZeRO-2 and ZeRO-3 if
        tables are divided.
        """
        _check_axes(mesh)
        group = mesh.group("dp")
        if group is None:
            return
        ranks = mesh.ranks("dp")
        self._rank = ranks.index(mesh.rank)
        placement = self._placed(len(ranks))
        if placement.is_divided and mesh.layout.zero >= 2:
            raise ValueError(
                f"zero = {mesh.layout.zero} does not divide embedding tables that are placed on "
                "ranks; zero = 1 works, and so does the placement replicated"
            )
        self.placement, self._lookup = placement, DividedLookup(placement, group)
        held = {piece.table: piece for piece in placement.pieces(self._rank)}
        for number, table in enumerate(placement.tables):
            if table.kind != "replicated":
                piece = held.get(number)
                keep(
                    self.weights,
                    str(number),
                    start=piece.start if piece else (0, 0),
                    sizes=piece.sizes if piece else (0, self.width),
                    copies="own",  # a piece's rank computes the whole gradient
                )

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        bags, weights = self._bags(places), list(self.weights)
        self._item_bytes = weights[0].element_size()  # a pass may use weights of another type
        if self._lookup is None:
            sums = [sum_bags(*pair) for pair in zip(weights, bags, strict=True)]
        else:
            sums = self._lookup(weights, bags)
        return torch.stack(sums, dim=1)

    def lookup_bytes(self, parts: Sequence[MicrobatchPart]) -> float:
        """Returns the bytes that this rank sends on `dp` in all passes of a step."""
        placement = self.placement
        if placement is None:
            return 0.0
        found = 0.0
        for part in parts:
            bags = self._bags(part.inputs)

            def ids(piece: TablePiece, bags: Sequence[Bags] = bags) -> int:
                return len(piece_bags(piece, bags).ids)

            # a rank without samples looks up one sample, which does not count
            even, extra = divmod(max(part.whole_samples, placement.ranks), placement.ranks)
            found += pass_bytes(
                placement,
                self._rank,
                samples=[even + (rank < extra) for rank in range(placement.ranks)],
                ids=ids,
                item_bytes=self._item_bytes or self.weights[0].element_size(),
            )
        return found

    def loads(self) -> tuple[float, ...]:
        """Returns the bytes that each rank sends and receives for its pieces in a step."""
        if self.placement is None:
            return (0.0,)
        item_bytes = self.weights[0].element_size()
        return rank_loads(self.placement, samples=self._samples, item_bytes=item_bytes)

    def _placed(self, ranks: int) -> TablePlacement:
        wanted = self._wanted
        if isinstance(wanted, str):
            return place_tables(
                self.shapes,
                width=self.width,
                ranks=ranks,
                samples=self._samples,
                kind=wanted,
                item_bytes=self.weights[0].element_size(),
            )
        shapes = tuple(table.shape for table in wanted.tables)
        if (shapes, wanted.width, wanted.ranks) != (self.shapes, self.width, ranks):
            raise ValueError(
                f"placement: expected one of these {len(self.shapes)} tables of width {self.width} "
                f"on {ranks} ranks, got one of {len(shapes)} tables of width {wanted.width} on "
                f"{wanted.ranks} ranks"
            )
        return wanted

    def _bags(self, places: torch.Tensor) -> list[Bags]:
        """Returns the bags of each table. Raises `ValueError` for an id that is not a row."""
        cuts = torch.split(places, [table.ids for table in self.shapes], dim=1)
        for number, (table, cut) in enumerate(zip(self.shapes, cuts, strict=True)):
            if cut.numel() and not NO_ID <= int(cut.min()) <= int(cut.max()) < table.rows:
                raise ValueError(
                    f"table {number}: expected ids from 0 to {table.rows - 1}, or {NO_ID} for "
                    f"none, got {int(cut.min())} to {int(cut.max())}"
                )
        return [Bags.of_places(cut) for cut in cuts]


def _check_axes(mesh: TrainingMesh) -> None:
    """Raises `ValueError` if the layout has other axes than `dp`, which cannot split tables."""
    layout = mesh.layout
    if layout.tp > 1 or layout.pp > 1 or layout.cp > 1 or layout.ep > 1:
        raise ValueError(
            "embedding tables and samples are divided over dp alone, not over tp x pp x cp = "
            f"{layout.tp} x {layout.pp} x {layout.cp} with ep = {layout.ep}; "
            f"dp = {layout.devices} works"
        )
