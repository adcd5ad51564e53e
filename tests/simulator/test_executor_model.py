"""Tests of simulated jobs in blocks against times that are derived by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import algorithms, simulate, topology
from unisono.algorithms.cost import whole_chunks
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.simulator import Blocks, Compute, Conditions, Endpoint, Job, Order, Result
from unisono.simulator.executor_model import HEADER_BYTES
from unisono.topology import Cable, LinkKind

RATE_BPS, LATENCY_S, UNIT = 1e9, 1e-3, 1e6
"""A block takes a millisecond, and half a millisecond on each of the two links of its path."""
UNIT_S = (UNIT + HEADER_BYTES) / RATE_BPS
HEAD_S = HEADER_BYTES / RATE_BPS


def run(schedule: Schedule, nbytes: float, blocks: Blocks, latency_s: float = LATENCY_S) -> Result:
    cable = Cable(bandwidth_Bps=RATE_BPS, latency_s=latency_s / 2, kind=LinkKind.OTHER)
    net = topology.star(schedule.collective.ranks, cable=cable)
    return simulate([Job(schedule=schedule, nbytes=nbytes, blocks=blocks)], net)


def two(op: str, name: str = "direct") -> Schedule:
    return algorithms.build(op, name, ranks=2)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_staging_buffer_is_reused_after_its_readers_acknowledge(depth: int) -> None:
    """Tests that a rank sends one block into each of its `depth` staging buffers without a wait,
    and that the next send waits for an acknowledgement.
    """
    blocks = Blocks(block_bytes=UNIT, lead=0, depth=depth)
    one = run(two("broadcast"), UNIT, blocks).time_s
    assert one == pytest.approx(UNIT_S + LATENCY_S)
    full = run(two("broadcast"), depth * UNIT, blocks).time_s
    assert full == pytest.approx(UNIT_S * depth + LATENCY_S)
    more = run(two("broadcast"), (depth + 1) * UNIT, blocks).time_s
    answered_s = (depth + 1) // 2 * UNIT_S + LATENCY_S + HEAD_S + LATENCY_S
    assert more == pytest.approx(max(depth * UNIT_S, answered_s) + UNIT_S + LATENCY_S, rel=1e-3)


def test_a_waiting_rank_sends_nothing() -> None:
    """Tests that a lead (the number of blocks by which the first round is ahead of the last) hides
    latency. Two rounds take equal times. Without a lead, the network is idle for two latencies in
    every block. With a lead of 1, it carries the next block meanwhile.
    """
    count = 8
    times = [
        run(two("all_reduce", "ring"), 2 * count * UNIT, Blocks(block_bytes=UNIT, lead=lead)).time_s
        for lead in (0, 1)
    ]
    assert times[0] == pytest.approx(count * 2 * (UNIT_S + LATENCY_S), rel=1e-3)
    assert times[1] < times[0] - (count - 2) * LATENCY_S


def test_trees_need_a_lead_of_their_height() -> None:
    """Tests that the rounds of a tree overlap only with a lead (the number of blocks by which the
    first round is ahead of the last). Without a lead, rank 2 forwards rank 3's data in the same
    step in which the data arrive.
    """
    tree = algorithms.build("all_reduce", "reduce_broadcast", ranks=4)
    times = [
        run(tree, 16 * UNIT, Blocks(block_bytes=UNIT, lead=lead, depth=8), 0.0).time_s / UNIT_S
        for lead in (0, 3)
    ]
    # Two rounds up take 1 unit each. The first round down takes 2, since two readers share the
    # root's link, and the second takes 1. The rounds do not overlap.
    assert times[0] == pytest.approx(16 * 5, rel=1e-3)
    assert 16 * 2 <= times[1] < 16 * 3


@pytest.mark.parametrize(
    ("name", "least", "most"), [("halving_doubling", 1.05, 1.5), ("ring", 1.0, 1.01)]
)
def test_exchanges_are_slower_if_ranks_start_at_different_times(
    name: str, least: float, most: float
) -> None:
    """Compares ranks that start at different times with ranks that start together. A ring is as
    late as its last rank. Halving-doubling overlaps its rounds only if all ranks start together,
    and does not recover from different start times.
    """
    job = Job(
        schedule=algorithms.build("all_reduce", name, ranks=8),
        nbytes=4 << 20,
        blocks=Blocks(block_bytes=90112),
    )
    cable = Cable(bandwidth_Bps=6e6, latency_s=30e-6, kind=LinkKind.OTHER)
    net = topology.star(8, cable=cable)
    late = {rank: Endpoint(enters_s=rank * 5 % 8 * 1e-3) for rank in range(8)}
    in_step = simulate([job], net).time_s
    out_of_step = simulate([job], net, conditions=Conditions(endpoints=late)).time_s
    assert least < out_of_step / in_step < most


@settings(max_examples=60)
@given(
    case=st.sampled_from(
        [(op, name) for op in ("all_reduce", "all_gather", "broadcast", "all_to_all")
         for name in algorithms.names(op) if name in ("ring", "direct", "halving_doubling",
         "reduce_broadcast", "binomial_tree", "pairwise", "bruck")]
    ),
    ranks=st.integers(2, 6),
    count=st.integers(1, 5),
    lead=st.integers(0, 4),
    depth=st.integers(1, 5),
)  # fmt: skip
def test_every_plan_ends_and_sends_the_bytes_of_its_schedule(
    case: tuple[str, str], ranks: int, count: int, lead: int, depth: int
) -> None:
    try:
        schedule = algorithms.build(*case, ranks=ranks)
    except UnsupportedError:
        return
    nbytes = 1e6
    columns = schedule.columns
    moved = columns.src != columns.dst
    chunks = np.zeros((ranks, ranks))
    np.add.at(chunks, (columns.src[moved], columns.dst[moved]), columns.count[moved])
    per_chunk = nbytes / whole_chunks(schedule.collective)
    result = run(schedule, nbytes, Blocks(block_bytes=per_chunk / count, lead=lead, depth=depth))
    steps = result.steps
    rows = steps.messages()
    carried, heads = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    np.add.at(carried, (steps.src[rows], steps.dst[rows]), steps.bytes[rows])
    np.add.at(heads, (steps.src[rows], steps.dst[rows]), HEADER_BYTES)
    assert np.isfinite(steps.arrived_s).all()
    # A slot that two rounds read is sent only once.
    assert (carried - heads <= chunks * per_chunk * (1 + 1e-9)).all()
    assert ((carried - heads > 0) == (chunks > 0)).all()


def test_a_job_in_blocks_runs_among_other_jobs() -> None:
    ring = algorithms.build("all_reduce", "ring", ranks=2)
    cable = Cable(bandwidth_Bps=RATE_BPS, latency_s=0.0, kind=LinkKind.OTHER)
    jobs = [
        Compute(name="forward", seconds=0.5, ranks=(0, 1, 2)),
        Job(
            name="first",
            schedule=ring,
            nbytes=UNIT,
            ranks=(2, 0),
            after=("forward",),
            blocks=Blocks(block_bytes=UNIT),
        ),
        Job(name="second", schedule=ring, nbytes=UNIT, ranks=(0, 2), after=("first",)),
    ]
    net = topology.star(3, cable=cable)
    _, first, second = simulate(jobs, net).jobs
    assert first.ended_s == pytest.approx(0.5 + UNIT_S, rel=1e-3)
    assert second.ended_s == pytest.approx(0.5 + 2 * UNIT_S, rel=1e-3)
    with pytest.raises(ValueError, match="has its own order"):
        simulate(jobs, net, conditions=Conditions(order=Order.STREAMS))


def test_invalid_blocks_are_refused() -> None:
    for wrong in ({"block_bytes": 0.0}, {"block_bytes": 1.0, "depth": 0}):
        with pytest.raises(ValueError, match="blocks"):
            Blocks(**wrong)  # type: ignore[arg-type]
