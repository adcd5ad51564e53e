"""Algorithms are correct for any partition of the ranks into hosts, with minimal traffic."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_layouts import layouts, regular
from unisono.algorithms import build, cost, find, measure, names
from unisono.algorithms.host_layout import FEW_HOSTS, HostLayout, Hosts
from unisono.errors import UnsupportedError
from unisono.execution import reference
from unisono.schedule import check, folds_in_rank_order, lower
from unisono.selection.host_traffic import HostTraffic, traffic
from unisono.types import DType, Op, ReduceOp

from .test_algorithms import agrees
from .test_execution import LENGTH, expected, inputs_of

FAMILIES = [(op, name) for op in Op for name in names(op) if find(op, name).for_hosts]
WRITTEN = [
    *FAMILIES,
    (Op.ALL_REDUCE, "by_host:ring"),
    (Op.ALL_REDUCE, "by_host:one_shot,inside=ring"),
    (Op.ALL_REDUCE, "by_host:channels=2"),
    (Op.ALL_REDUCE, "leaders:recursive_doubling"),
    (Op.ALL_REDUCE, "leaders:ring,inside=binomial_tree"),
    (Op.ALL_REDUCE, "level0:mesh;level1:ring"),
    (Op.ALL_REDUCE, "level0:binomial_tree;level1:one_shot"),
    (Op.ALL_GATHER, "by_host:ring"),
    (Op.ALL_GATHER, "by_host:direct"),
    (Op.ALL_GATHER, "leaders:bruck"),
    (Op.REDUCE_SCATTER, "by_host:ring"),
    (Op.REDUCE_SCATTER, "leaders:bruck"),
    (Op.ALL_TO_ALL, "leaders:bruck"),
    (Op.BROADCAST, "leaders:binomial_tree"),
    (Op.REDUCE, "leaders:binomial_tree"),
    (Op.GATHER, "leaders:binomial_tree"),
    (Op.SCATTER, "leaders:binomial_tree"),
]


def total(hosts: Hosts) -> int:
    return sum(map(len, hosts))


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_algorithms_on_any_hosts_are_correct_and_within_their_cost(data: st.DataObject) -> None:
    hosts = data.draw(layouts())
    op, name = data.draw(st.sampled_from(WRITTEN))
    ranks = total(hosts)
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)), hosts=hosts)
    check(schedule)
    real, stated = measure(schedule), cost(op, name, ranks=ranks, hosts=hosts)
    assert real.rounds == schedule.num_rounds or name.startswith("level0"), "no round is empty"
    assert real.rounds <= stated.rounds
    assert agrees(schedule, replace(stated, rounds=real.rounds), exact=False)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_algorithms_on_hosts_compute_the_same_as_numpy(data: st.DataObject) -> None:
    hosts = data.draw(layouts())
    op, name = data.draw(st.sampled_from(WRITTEN))
    ranks = total(hosts)
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)), hosts=hosts)
    inputs = inputs_of(schedule)
    outputs = [
        [np.zeros(LENGTH, np.int64) for _ in range(schedule.collective.output_pieces(rank))]
        for rank in range(ranks)
    ]
    reference.run(
        lower(schedule),
        [[piece.copy().view(np.uint8) for piece in pieces] for pieces in inputs],
        [[piece.view(np.uint8) for piece in pieces] for pieces in outputs],
        DType.INT64,
        ReduceOp.SUM,
        block_bytes=64,
    )
    for rank in range(ranks):
        for piece, want in enumerate(expected(schedule, inputs, rank)):
            assert outputs[rank][piece].tolist() == want.tolist(), f"rank {rank}, piece {piece}"


# ---- traffic between hosts


@given(layouts(), st.data())
@settings(max_examples=50, deadline=None)
def test_long_messages_send_the_minimum_between_hosts(hosts: Hosts, data: st.DataObject) -> None:
    ranks, root = total(hosts), data.draw(st.integers(0, total(hosts) - 1))
    layout = HostLayout.of(ranks, hosts)
    count, sizes = len(layout.hosts), layout.sizes

    def found(op: Op, name: str = "by_host") -> HostTraffic:
        return traffic(build(op, name, ranks=ranks, root=root, hosts=hosts), hosts)

    shard = Fraction(2 * (count - 1), count)
    for name in ("by_host", "by_host:ring", "by_host:halving_doubling"):
        each = found(Op.ALL_REDUCE, name)
        if name != "by_host:halving_doubling" or count & (count - 1) == 0:
            assert set(each.sent) == set(each.received) == {shard}
    foreign = tuple(Fraction(ranks - size, ranks) for size in sizes)
    copies = tuple(Fraction((count - 1) * size, ranks) for size in sizes)
    assert found(Op.ALL_GATHER).received == found(Op.REDUCE_SCATTER).sent == foreign
    assert found(Op.ALL_GATHER).busiest <= max(foreign), "no layout makes a host a bottleneck"
    assert found(Op.REDUCE_SCATTER).busiest <= max(foreign)
    direct = found(Op.ALL_GATHER, "by_host:direct")
    assert (direct.sent, direct.received) == (copies, foreign)
    spread = found(Op.BROADCAST)
    root_host = layout.root_host(root)
    assert spread.received == tuple(Fraction(count > 1 and h != root_host) for h in range(count))
    assert max(spread.sent) <= 1
    back = found(Op.REDUCE)
    assert (back.sent, back.received) == (spread.received, spread.sent)
    pairs = tuple(Fraction(size * (ranks - size), ranks) for size in sizes)
    for name in ("direct", "by_host", "leaders"):
        assert found(Op.ALL_TO_ALL, name).sent == found(Op.ALL_TO_ALL, name).received == pairs
    into_root = Fraction(ranks - sizes[root_host], ranks)
    for name in ("direct", "leaders"):
        assert found(Op.GATHER, name).received[root_host] == into_root
        assert found(Op.SCATTER, name).sent[root_host] == into_root


@given(layouts(), st.data())
@settings(max_examples=50, deadline=None)
def test_short_messages_need_one_round_between_hosts(hosts: Hosts, data: st.DataObject) -> None:
    ranks, root = total(hosts), data.draw(st.integers(0, total(hosts) - 1))
    once = int(len(hosts) > 1)
    for op, name in FAMILIES:
        crossing = traffic(build(op, name, ranks=ranks, root=root, hosts=hosts), hosts)
        if name == "leaders" or op.scans or (op, name) == (Op.ALL_TO_ALL, "by_host"):
            assert crossing.rounds == (once if ranks > 1 else 0), (op, name)
            assert crossing.host_messages <= 2 * max(len(hosts) - 1, 0) or op.scans


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_a_chain_scan_sends_between_hosts_once_for_each_change_of_host(hosts: Hosts) -> None:
    """Tests that a host receives one message for each of its ranks whose predecessor is on another
    host. This is the minimum, since such a rank needs new data.
    """
    ranks = total(hosts)
    host_of = HostLayout.of(ranks, hosts).host_of
    found = traffic(build("scan", "chain", ranks=ranks), hosts)
    for host in range(len(hosts)):
        changes = sum(
            host_of[r] != host_of[r + 1] and host_of[r + 1] == host for r in range(ranks - 1)
        )
        assert found.received[host] == changes


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_all_ranks_of_a_host_share_its_work(hosts: Hosts) -> None:
    """Tests that each rank of a host processes some of the columns into which the data are divided,
    and at most twice the host's mean number of columns per rank.
    """
    ranks = total(hosts)
    layout = HostLayout.of(ranks, hosts)
    columns = layout.columns
    assert max(layout.sizes) <= columns <= 2 * max(layout.sizes)
    for host, size in enumerate(layout.sizes):
        worked = layout.worked(host, columns)
        assert sorted(c for of_one in worked for c in of_one) == list(range(columns))
        assert max(map(len, worked)) * size <= 2 * columns
        assert min(map(len, worked)) >= 1


# ---- many hosts, many ranks


@pytest.mark.parametrize("op", [op for op, name in FAMILIES if name == "leaders"])
def test_many_hosts_need_a_logarithmic_number_of_rounds(op: Op) -> None:
    count = FEW_HOSTS + 8
    hosts = regular(count, 2)
    schedule = build(op, "leaders", ranks=2 * count, hosts=hosts)
    assert traffic(schedule, hosts).rounds == 4
    check(schedule)


@pytest.mark.parametrize(("op", "name"), FAMILIES)
def test_schedules_of_64_ranks_on_8_hosts_are_correct(op: Op, name: str) -> None:
    check(build(op, name, ranks=64, hosts=regular(8, 8)))


# ---- levels that match the hosts


@given(st.integers(1, 4), st.integers(2, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_two_levels_match_the_hosts(each: int, count: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(each * count)))
    hosts = tuple(tuple(order[h * each : (h + 1) * each]) for h in range(count))
    op = data.draw(st.sampled_from([op for op in Op if "hierarchical" in names(op)]))
    level1 = "ring" if op in (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER) else "mesh"
    root = data.draw(st.integers(0, each * count - 1))
    name = f"level0:mesh;level1:{level1}"
    schedule = build(op, name, ranks=each * count, root=root, hosts=hosts)
    check(schedule)
    assert agrees(schedule, cost(op, name, ranks=each * count, hosts=hosts), exact=False)
    layout = HostLayout.of(each * count, hosts)
    crossing = [t for t in schedule.transfers if layout.host_of[t.src] != layout.host_of[t.dst]]
    places = {rank: host.index(rank) for host in layout.hosts for rank in host}
    assert all(places[t.src] == places[t.dst] for t in crossing), "counterparts alone"
    if op is Op.ALL_REDUCE:
        assert traffic(schedule, hosts).busiest == Fraction(2 * (count - 1), count)


def test_uneven_hosts_are_rejected_with_alternatives() -> None:
    with pytest.raises(UnsupportedError, match=r"2, 1 ranks.*by_host or leaders"):
        build("all_gather", "level0:mesh;level1:ring", ranks=3, hosts=((0, 1), (2,)))
    with pytest.raises(UnsupportedError, match="ring"):
        build("all_gather", "by_host:tree", ranks=3)


@pytest.mark.parametrize("hosts", [((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2), ()), ((0, 1, 3),)])
def test_hosts_that_are_not_a_partition_are_rejected(hosts: Hosts) -> None:
    with pytest.raises(UnsupportedError, match="each of the ranks 0 to 2 on one host"):
        build("all_reduce", "by_host", ranks=3, hosts=hosts)


# ---- rounding


def wild(
    rng: np.random.Generator, ranks: int
) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Returns contributions whose rounded sum depends on the order of the additions."""
    scales = 10.0 ** rng.integers(-9, 9, (ranks, 1))
    return list((rng.standard_normal((ranks, 40)) * scales).astype(np.float32))


@given(layouts(), st.data())
@settings(max_examples=40, deadline=None)
def test_folds_in_rank_order_have_the_same_bits_on_any_hosts(
    hosts: Hosts, data: st.DataObject
) -> None:
    ranks = total(hosts)
    schedule = build("all_reduce", "rank_order", ranks=ranks, hosts=hosts)
    assert folds_in_rank_order(schedule)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    inputs = wild(rng, ranks)
    outputs = [np.zeros(40, np.float32) for _ in range(ranks)]
    reference.run(
        lower(schedule),
        [[x.copy().view(np.uint8)] for x in inputs],
        [[x.view(np.uint8)] for x in outputs],
        DType.FLOAT32,
        ReduceOp.SUM,
        block_bytes=64,
    )
    want = inputs[0].copy()
    for x in inputs[1:]:
        want += x
    for got in outputs:
        assert got.tobytes() == want.tobytes()


@given(layouts(), st.sampled_from(["by_host", "by_host:one_shot", "leaders", "by_host:ring"]))
@settings(max_examples=40, deadline=None)
def test_all_ranks_get_the_same_bits(hosts: Hosts, name: str) -> None:
    ranks = total(hosts)
    rng = np.random.default_rng(3)
    inputs = wild(rng, ranks)
    outputs = [np.zeros(40, np.float32) for _ in range(ranks)]
    reference.run(
        lower(build("all_reduce", name, ranks=ranks, hosts=hosts)),
        [[x.copy().view(np.uint8)] for x in inputs],
        [[x.view(np.uint8)] for x in outputs],
        DType.FLOAT32,
        ReduceOp.SUM,
        block_bytes=64,
    )
    assert len({got.tobytes() for got in outputs}) == 1
