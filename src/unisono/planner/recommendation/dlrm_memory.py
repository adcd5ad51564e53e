"""Bytes on each device of a recommendation model: tables, dense states, activations, buffers."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.planner.memory.zero_states import state_bytes
from unisono.planner.recommendation.dlrm_operators import TABLE_BYTES
from unisono.planner.recommendation.dlrm_shape import Dlrm
from unisono.planner.recommendation.exchange_traffic import ID_BYTES
from unisono.planner.recommendation.table_placement import TablePlacement

TABLE_KINDS_OF_MEMORY = ("tables", "table gradients", "table optimizer")
_BAG_BYTES = 16
"""Bytes that the backward pass keeps for a bag: the position of its first id, and its length."""
_STATES = {"rows": 0, "dense": 8}
"""Bytes of optimizer states for each element of a table: none, or two moments of Adam."""


def device_memory(
    model: Dlrm,
    placement: TablePlacement,
    *,
    samples: float,
    value_bytes: float,
    precision: str,
    zero: int,
    update: str,
    fragmentation: float,
) -> Iterator[dict[str, float]]:
    """Yields the bytes of each device by kind.

    `samples`: samples of a microbatch on one device. `value_bytes`: bytes of an activation's
    element. `update`: one of `TABLE_UPDATES`.
    `fragmentation`: ratio of the memory that the allocator reserves to the live tensors.
    """
    dense = model.dense_parameters + placement.replicated_rows * model.width
    states = state_bytes(
        dense, zero=zero, shards=placement.ranks, precision=precision, gradient_bytes=4
    )
    kept = activation_values(model) * samples * value_bytes
    for rank in range(placement.ranks):
        found = dict(zip(states._fields, states, strict=True))
        rows, elements, columns = _own_sizes(placement, rank)
        found["tables"] = elements * TABLE_BYTES
        found["table gradients"] = elements * TABLE_BYTES if update == "dense" else 0.0
        found["table optimizer"] = elements * _STATES[update]
        if update == "rows":
            found["table optimizer"] += rows * TABLE_BYTES
        found["activations"] = kept + _bag_bytes(model, placement, rank, samples)
        sums = placement.ranks * columns if placement.ranks > 1 else 0
        found["exchange buffers"] = samples * (sums + len(model.tables) * model.width) * value_bytes
        # Tables and their states are allocated once.
        live = sum(found.values()) - found["tables"] - found["table optimizer"]
        found["fragmentation"] = live * (fragmentation - 1)
        yield found


def activation_values(model: Dlrm) -> int:
    """Returns the values that the dense part keeps for the backward pass of one sample.

    These are the inputs of all products: the dense features, the results of activations, the
    vectors, and the input of the top network. A cross layer keeps its input, and the inputs and
    the result of its last product.
    """
    vectors = model.vectors * model.width
    if model.interaction == "dot":
        between = vectors + model.top_widths[0]
    else:
        between = vectors + model.cross_layers * (2 * vectors + model.cross_rank)
    return model.counters + sum(model.bottom_widths[1:]) + between + sum(model.top_widths[1:-1])


def _own_sizes(placement: TablePlacement, rank: int) -> tuple[int, int, int]:
    """Returns the rows, elements and columns of a rank's parts of tables."""
    sizes = [piece.sizes for piece in placement.pieces(rank)]
    elements = sum(rows * columns for rows, columns in sizes)
    return sum(rows for rows, _ in sizes), elements, sum(columns for _, columns in sizes)


def _bag_bytes(model: Dlrm, placement: TablePlacement, rank: int, samples: float) -> float:
    """Returns the bytes of the ids that a rank keeps for the backward pass.

    For each id, backward also keeps the number of its bag.
    """
    found = 0.0
    for piece in placement.pieces(rank):
        ids = model.tables[piece.table].ids / (placement.ranks if piece.is_summed else 1)
        found += samples * placement.ranks * (2 * ID_BYTES * ids + _BAG_BYTES)
    for table in placement.tables:
        if table.kind == "replicated":
            found += samples * (2 * ID_BYTES * table.shape.ids + _BAG_BYTES)
    return found
