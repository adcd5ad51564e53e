"""FLOPs, bytes and kept values of recommendation models, compared with torch's own counts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from unisono.parallel import DLRM  # noqa: E402
from unisono.planner.recommendation import Dlrm, TableShape, place_tables  # noqa: E402
from unisono.planner.recommendation.dlrm_operators import (  # noqa: E402
    activation_values,
    distinct_ids,
    lookup_bytes,
    products,
)

pytestmark = pytest.mark.torch
SAMPLES = 16
DOT = Dlrm(
    counters=5,
    width=8,
    tables=(TableShape(rows=50, ids=3), TableShape(rows=7), TableShape(rows=90, ids=2)),
    bottom=(24, 12),
    top=(40, 20),
)
CROSS = Dlrm(
    counters=5,
    width=8,
    tables=DOT.tables,
    bottom=(24, 12),
    top=(40, 20),
    interaction="cross",
    cross_layers=3,
    cross_rank=6,
)


class Crossed(nn.Module):
    """The dense part of a model with a cross network, from the formulas of the paper."""

    def __init__(self, shape: Dlrm) -> None:
        super().__init__()
        inputs = shape.vectors * shape.width
        self.downs = nn.ModuleList(
            nn.Linear(inputs, shape.cross_rank, bias=False) for _ in range(shape.cross_layers)
        )
        self.ups = nn.ModuleList(
            nn.Linear(shape.cross_rank, inputs) for _ in range(shape.cross_layers)
        )
        self.bottom = _network(shape.bottom_widths, last=True)
        self.top = _network(shape.top_widths, last=False)

    def forward(self, counts: Any, sums: Any) -> Any:
        first = torch.cat([self.bottom(counts).unsqueeze(1), sums], dim=1).flatten(1)
        x = first
        for down, up in zip(self.downs, self.ups, strict=True):
            x = first * up(down(x)) + x
        return self.top(x)


def _network(widths: tuple[int, ...], *, last: bool) -> nn.Sequential:
    found: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        found += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*(found if last else found[:-1]))


def run(shape: Dlrm) -> Any:
    """Returns the sum of the logits of full bags."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 9, (SAMPLES, shape.counters), generator=generator)
    if shape.interaction == "cross":
        sums = torch.rand(SAMPLES, len(shape.tables), shape.width, requires_grad=True)
        return Crossed(shape)(counts.float(), sums).sum()
    ids = [
        torch.randint(0, table.rows, (SAMPLES, table.ids), generator=generator)
        for table in shape.tables
    ]
    return DLRM(shape)(torch.cat([counts, *ids], dim=1)).sum()


@pytest.mark.parametrize("shape", [DOT, CROSS], ids=["dot", "cross"])
def test_flops_are_those_that_torch_counts(shape: Dlrm) -> None:
    with FlopCounterMode(display=False) as forward:
        loss = run(shape)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    found = list(products(shape, SAMPLES))
    assert sum(each.flops for each in found) == forward.get_total_flops()
    assert sum(each.backward_flops for each in found) == backward.get_total_flops()


def test_parameters_are_those_of_the_modules() -> None:
    model = DLRM(DOT)
    assert sum(p.numel() for p in model.parameters()) == DOT.parameters
    tables = sum(p.numel() for p in model.tables.parameters())
    assert (tables, DOT.parameters - tables) == (DOT.table_parameters, DOT.dense_parameters)
    dense = sum(p.numel() for p in Crossed(CROSS).parameters())
    assert dense == CROSS.dense_parameters


class ProductBytes(TorchDispatchMode):
    """Counts the elements that matrix products read and write, and the bytes of look-ups."""

    values, looked_up = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.__name__
        if name.startswith(("mm.", "bmm.", "addmm.")):
            bias = name.startswith("addmm.")
            self.values += sum(x.numel() for x in args[bias : bias + 2]) + found.numel()
        elif "embedding_bag" in name:
            weight, ids, offsets = args[:3]
            rows = len(ids) * weight.shape[1]
            self.looked_up += 8 * (len(ids) + len(offsets)) + 4 * (rows + found[0].numel())
        return found


@pytest.mark.parametrize("shape", [DOT, CROSS], ids=["dot", "cross"])
def test_bytes_are_those_of_the_operators_arrays(shape: Dlrm) -> None:
    with ProductBytes() as counted, torch.no_grad():
        run(shape)
    values = 0.0
    for each in products(shape, SAMPLES):
        sides = each.rows * each.inner + each.inner * each.columns + each.rows * each.columns
        values += sides * each.copies
    assert values == counted.values
    if shape.interaction == "dot":
        one = place_tables(shape.tables, width=shape.width, ranks=1, samples=SAMPLES)
        sizes = {"samples": SAMPLES, "value_bytes": 4, "update": "rows"}
        assert lookup_bytes(shape, one, 0, **sizes)[0] == counted.looked_up  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["table", "row", "column", "replicated"])
def test_a_division_of_tables_reads_each_row_once_for_each_id(kind: str) -> None:
    """Tests that the ranks together read as many bytes of rows as one rank that has all tables."""
    ranks = 3
    placed = place_tables(DOT.tables, width=8, ranks=ranks, samples=99, kind=kind)
    rows = 4 * 8 * SAMPLES * ranks * DOT.ids
    found = 0.0
    for rank in range(ranks):
        sizes = {"samples": SAMPLES, "value_bytes": 0, "update": "rows"}
        found += lookup_bytes(DOT, placed, rank, **sizes)[0]  # type: ignore[arg-type]
    pieces = [(piece, rank) for rank in range(ranks) for piece in placed.pieces(rank)]
    numbers = 0.0
    for piece, _ in pieces:
        held = DOT.tables[piece.table]
        numbers += 8 * SAMPLES * ranks * (1 + held.ids * piece.sizes[0] / held.rows)
    if kind == "replicated":
        numbers = sum(8 * SAMPLES * ranks * (1 + table.ids) for table in DOT.tables)
    assert found == pytest.approx(rows + numbers)


def kept_values(model: DLRM, samples: Any) -> int:
    """Returns the float values that autograd keeps for backward, without parameters."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    held: list[Any] = []  # keeps the arrays, so that no two have the same address

    def pack(x: Any) -> Any:
        held.append(x)
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(samples)
    return sum(kept.values())


def test_kept_values_are_those_of_autograd() -> None:
    samples = torch.zeros(SAMPLES, DOT.columns, dtype=torch.int64)
    assert kept_values(DLRM(DOT), samples) == activation_values(DOT) * SAMPLES


def test_distinct_ids_are_the_mean_of_draws() -> None:
    def drawn() -> Iterator[int]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(400):
            yield len(torch.randint(0, 30, (50,), generator=generator).unique())

    assert distinct_ids(30, 50) == pytest.approx(sum(drawn()) / 400, rel=0.01)
    assert distinct_ids(10**8, 1000) == pytest.approx(1000, rel=1e-4)
