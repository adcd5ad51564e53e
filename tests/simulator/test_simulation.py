"""Tests of the simulation engine: shared links, event order, several jobs, faults, errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import algorithms, simulate, topology
from unisono.errors import UnsupportedError
from unisono.native import Simulation
from unisono.schedule import Builder, Collective, Schedule
from unisono.simulator import Compute, Conditions, Endpoint, Job, Order, TaskKind, Traffic
from unisono.topology import Cable, LinkKind, Topology
from unisono.types import Op

RATE_BPS = 1e9
CABLE = Cable(bandwidth_Bps=RATE_BPS, latency_s=0.0, kind=LinkKind.OTHER)


def build(name: str, ranks: int, op: str = "all_reduce") -> Schedule:
    return algorithms.build(op, name, ranks=ranks)


# ---- max-min fairness


def fair_rates(capacity: list[float], paths: list[list[int]]) -> list[float]:
    """Returns max-min fair rates by progressive filling, the textbook algorithm."""
    room, rates = dict(enumerate(capacity)), [0.0] * len(paths)
    left = set(range(len(paths)))
    while left:
        users = {r: [p for p in left if r in paths[p]] for r in room}
        share, tight = min((room[r] / len(u), r) for r, u in users.items() if u)
        for path in users[tight]:
            rates[path] = share
            left.discard(path)
            for r in paths[path]:
                room[r] -= share
        del room[tight]
    return rates


def reference_times(
    capacity: list[float], paths: list[list[int]], sizes: list[float]
) -> list[float]:
    """Returns the end of each flow if all flows start at 0. The rates are computed again after each
    end.
    """
    now, rest, ends = 0.0, dict(enumerate(sizes)), [0.0] * len(paths)
    while rest:
        fair = fair_rates(capacity, [paths[p] for p in rest])
        rates = dict(zip(rest, fair, strict=True))
        step = min(rest[p] / rates[p] for p in rest)
        now += step
        rest = {p: left - rates[p] * step for p, left in rest.items()}
        for p in [p for p, left in rest.items() if left <= 1e-9 * sizes[p]]:
            ends[p] = now
            del rest[p]
    return ends


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_rates_are_always_max_min_fair(data: st.DataObject) -> None:
    resources = data.draw(st.integers(1, 6))
    capacity = data.draw(st.lists(st.integers(1, 9), min_size=resources, max_size=resources))
    one = st.lists(st.integers(0, resources - 1), min_size=1, max_size=resources, unique=True)
    paths = data.draw(st.lists(one, min_size=1, max_size=9))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(paths), max_size=len(paths)))
    count = len(paths)
    starts = np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int64)
    engine = Simulation(
        capacity=np.array(capacity, np.float64),
        path_values=np.concatenate(paths).astype(np.int32),
        path_starts=starts,
        weights=np.empty(0),
        server=np.full(count, -1, np.int32),
        busy_s=np.zeros(count),
        delay_s=np.zeros(count),
        tail_s=np.zeros(count),
        path=np.arange(count, dtype=np.int32),
        bytes=np.array(sizes, np.float64),
        needs=np.empty(0, np.int32),
        needs_starts=np.zeros(count + 1, np.int64),
        after=np.empty(0, np.int32),
        bins=0,
    )
    while engine.advance(1):
        pass
    found = engine.take()[1]
    expected = reference_times([float(c) for c in capacity], paths, [float(s) for s in sizes])
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_message_speeds_up_when_another_on_its_link_ends() -> None:
    net = topology.line(3, cable=CABLE)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=3, parts=4), "by hand")
    b.copy(0, 0, 2, count=4)
    b.copy(1, 4, 2, count=2)
    result = simulate(b.build(), net, 12e6)  # each chunk has 1 MB
    times = {(s.src, s.dst): s.arrived_s for s in map(result.steps.__getitem__, range(2))}
    assert times == pytest.approx({(1, 2): 4e-3, (0, 2): 6e-3})
    assert result.link_name(result.busiest_link) == "rank 1 -> rank 2"
    assert result.link_bytes.sum() == pytest.approx(4e6 + 6e6)


def test_messages_wait_for_values_not_for_rounds() -> None:
    """Tests that rank 2's message of round 1 does not wait for round 0, since it carries rank 2's
    own value.
    """
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=3), "by hand")
    b.copy(0, 0, 1)
    b.next_round()
    b.copy(2, 2, 0)
    b.copy(1, 0, 2)
    net = topology.mesh(3, cable=CABLE)
    begun = simulate(b.build(), net, 3e6).steps.begun_s
    assert sorted(begun.tolist()) == pytest.approx([0.0, 0.0, 1e-3])
    ordered = Conditions(order=Order.ROUNDS)
    b = Builder(Collective(op=Op.ALL_GATHER, ranks=3), "by hand")
    b.copy(0, 0, 1)
    b.next_round()
    b.copy(1, 1, 2)
    assert simulate(b.build(), net, 3e6).time_s == pytest.approx(1e-3)
    assert simulate(b.build(), net, 3e6, conditions=ordered).time_s == pytest.approx(2e-3)


def test_program_order_sends_one_message_at_a_time() -> None:
    net = topology.mesh(4, cable=CABLE)
    direct = build("direct", 4, "all_gather")
    assert simulate(direct, net, 4e6).time_s == pytest.approx(1e-3)
    found = simulate(direct, net, 4e6, conditions=Conditions(order=Order.PROGRAM))
    assert found.time_s == pytest.approx(3e-3)


def test_simulations_are_deterministic() -> None:
    net = topology.fat_tree(4)
    one, two = (simulate(build("swing", 16), net, 1e7) for _ in range(2))
    assert one.time_s == two.time_s
    assert np.array_equal(one.steps.arrived_s, two.steps.arrived_s)
    assert np.array_equal(one.link_bytes, two.link_bytes)


def test_link_bytes_equal_the_bytes_of_all_routes() -> None:
    """Tests that links carry the bytes of the routes of all messages, for any order of events."""
    net = topology.dragonfly(a=4, p=2, h=2)
    schedule = build("halving_doubling", net.num_ranks)
    result = simulate(schedule, net, 1e6, bins=50)
    c = schedule.columns
    links, starts = net.routes(c.src, c.dst)
    weights = np.repeat(c.count * 1e6 / schedule.collective.parts, np.diff(starts))
    expected = np.bincount(links, weights, minlength=len(net.links))
    assert result.link_bytes == pytest.approx(expected)
    assert result.usage is not None
    assert result.usage.link_bytes.sum(axis=1) == pytest.approx(expected, rel=1e-4)


# ---- several jobs and conditions


def test_jobs_share_the_network_and_wait_by_rank() -> None:
    ring = build("ring", 2)
    net = topology.star(4, cable=CABLE)
    compute = Compute(name="forward", seconds=5e-3, ranks=(0, 1, 2, 3))
    pairs = [
        Job(name=f"tensor{i}", schedule=ring, nbytes=1e6, ranks=(i, i + 2), after=("forward",))
        for i in (0, 1)
    ]
    last = Job(name="data", schedule=ring, nbytes=1e6, ranks=(0, 1), after=("tensor0", "tensor1"))
    found = {job.name: job for job in simulate([last, *pairs, compute], net).jobs}
    assert found["forward"].ended_s == pytest.approx(5e-3)
    assert found["tensor0"].begun_s == pytest.approx(5e-3)
    assert found["tensor1"].ended_s == pytest.approx(6e-3)
    assert found["data"].time_s == pytest.approx(1e-3)
    both = [Job(name=name, schedule=ring, nbytes=1e6, ranks=(0, 1)) for name in "ab"]
    assert simulate(both, net).time_s == pytest.approx(2e-3)


def test_a_straggler_delays_only_ranks_that_need_its_data() -> None:
    net = topology.ring(4, cable=CABLE)
    late = Conditions(endpoints={2: Endpoint(enters_s=1.0, slowdown=3.0)})
    result = simulate(build("ring", 4), net, 4e6, conditions=late)
    assert result.time_s > 1.0
    # Only messages with rank 2's data wait for rank 2. The first messages of other ranks do not
    # wait.
    assert result.steps.begun_s[result.steps.messages()].min() == 0.0
    slow = simulate([Compute(seconds=1.0, ranks=(0, 2), name="step")], net, conditions=late)
    assert slow.time_s == pytest.approx(4.0)


def test_degraded_and_failed_links_slow_a_ring() -> None:
    net = topology.ring(4, cable=CABLE)
    link = net.route(0, 1)[0]
    whole = simulate(build("ring", 4), net, 4e6).time_s
    slow = simulate(build("ring", 4), net, 4e6, conditions=Conditions(degraded={link: 0.5}))
    assert slow.time_s == pytest.approx(2 * whole)
    assert slow.busiest_link == link
    failed = simulate(build("ring", 4), net, 4e6, conditions=Conditions(failed=(link,)))
    assert failed.link_bytes[link] == 0
    assert failed.link_bytes.sum() == pytest.approx(
        (3 + 3) * 6e6
    )  # rank 0's messages take the longer path
    line = topology.line(3, cable=CABLE)
    cut = Conditions(failed=(line.route(0, 1)[0],))
    with pytest.raises(UnsupportedError, match="no path from node 0 to node 1"):
        simulate(build("direct", 3), line, 1e6, conditions=cut)


def test_other_traffic_takes_its_share() -> None:
    net = topology.line(2, cable=CABLE)
    job = build("direct", 2, "all_gather")
    alone = simulate(job, net, 2e6).time_s
    greedy = simulate(job, net, 2e6, conditions=Conditions(traffic=(Traffic(src=0, dst=1),)))
    assert greedy.time_s == pytest.approx(2 * alone)
    slow = Conditions(traffic=(Traffic(src=0, dst=1, rate_Bps=RATE_BPS / 4),))
    shared = simulate(job, net, 2e6, conditions=slow)
    assert shared.time_s == pytest.approx(alone / 0.75)
    assert shared.link_bytes[net.route(0, 1)[0]] == pytest.approx(RATE_BPS * shared.time_s)


def test_endpoints_take_time() -> None:
    net = topology.mesh(4, cable=Cable(bandwidth_Bps=1e15, latency_s=0.0, kind=LinkKind.OTHER))

    def time_s(endpoint: Endpoint) -> float:
        conditions = Conditions(endpoint=endpoint)
        return simulate(build("direct", 4, "all_gather"), net, 4e6, conditions=conditions).time_s

    assert time_s(Endpoint(overhead_s=1e-3)) == pytest.approx(1e-3, rel=1e-5)
    assert time_s(Endpoint(busy_s=1e-3)) == pytest.approx(3e-3, rel=1e-5)
    assert time_s(Endpoint(send_Bps=1e9)) == pytest.approx(3e-3, rel=1e-5)
    assert time_s(Endpoint(receive_Bps=1e9)) == pytest.approx(3e-3, rel=1e-5)


def test_spreading_over_paths_avoids_collisions() -> None:
    net = topology.fat_tree(4, cable=CABLE)
    exchange = build("pairwise", 16, "all_to_all")
    flows = simulate(exchange, net, 16e6).time_s
    spread = simulate(exchange, net, 16e6, conditions=Conditions(paths=64)).time_s
    assert spread < flows
    assert spread < 1.3 * 15e6 / RATE_BPS


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "broadcast", "reduce"])
def test_switches_copy_and_reduce(op: str) -> None:
    node = topology.star(8, cable=CABLE, reduces=True)
    conditions = Conditions(in_network=True, endpoint=Endpoint(reduce_Bps=1e3))
    result = simulate(build("direct", 8, op), node, 8e6, conditions=conditions)
    expected = {"all_gather": 7e-3, "reduce_scatter": 7e-3, "broadcast": 8e-3, "reduce": 8e-3}
    assert result.time_s == pytest.approx(expected[op])


def test_the_critical_path_explains_the_time() -> None:
    result = simulate(build("ring", 5), topology.ring(5), 1e6)
    path = result.critical_path()
    assert len(path) == 8 and all(step.kind is TaskKind.MESSAGE for step in path)
    assert path[0].begun_s == 0 and path[-1].arrived_s == result.time_s
    assert all(a.arrived_s == b.begun_s and a.dst == b.src for a, b in pairwise(path))


def refuse(what: object, net: Topology, match: str, **options: object) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(what, net, **options)  # type: ignore[arg-type]


def test_refusals() -> None:
    net, ring = topology.ring(4), build("ring", 8)
    refuse(ring, net, "ranks 0 to 7, but ring:4 has 4", nbytes=1e6)
    refuse(ring, net, "needs nbytes")
    refuse([Job(schedule=ring, nbytes=1)], net, "jobs have their own", nbytes=1)
    refuse([], net, "at least one job")
    for what, where, message in (
        (ring, "ring:8", "expected a topology"),
        ("ring", net, "expected a schedule"),
    ):
        with pytest.raises(TypeError, match=message):
            simulate(what, where, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a number of bytes, got '64M'"):
        simulate(build("ring", 4), net, "64M")  # type: ignore[arg-type]
    a, b = (Compute(name=x, seconds=1, ranks=(0,), after=(y,)) for x, y in ("ab", "ba"))
    refuse([a, b], net, "wait for each other")
    refuse([a], net, "no job has this name")
    refuse([Compute(name="a", seconds=1, ranks=(0,))] * 2, net, "two jobs")
    refuse(
        build("ring", 4),
        net,
        "link 99 does not exist",
        nbytes=1,
        conditions=Conditions(failed=(99,)),
    )
    with pytest.raises(ValueError, match="send_Bps must be positive"):
        Endpoint(send_Bps=0)
    with pytest.raises(ValueError, match="list a link without bandwidth in failed"):
        Conditions(degraded={0: 0.0})


def test_empty_operations_take_no_time() -> None:
    assert simulate(build("ring", 1), topology.ring(2), 1e6).time_s == 0
    assert simulate(build("ring", 4), topology.ring(4, cable=CABLE), 0).time_s == 0


def test_streams_deliver_messages_in_order() -> None:
    net = topology.star(2).with_links(bandwidth_Bps=1e9, latency_s=0.0)
    send = algorithms.build("broadcast", "direct", ranks=2)
    jobs = [Job(name=f"{i}", schedule=send, nbytes=1e6, first_round=i) for i in range(3)]
    shared = simulate(jobs, net)
    assert [job.ended_s for job in shared.jobs] == pytest.approx([3e-3] * 3)
    streams = Conditions(order=Order.STREAMS)
    ordered = simulate(jobs[::-1], net, conditions=streams)
    assert {job.name: job.ended_s for job in ordered.jobs} == pytest.approx(
        {"0": 1e-3, "1": 2e-3, "2": 3e-3}
    )


def test_streams_that_wait_for_each_other_are_refused() -> None:
    ring = algorithms.build("all_reduce", "ring", ranks=2)
    jobs = [
        Job(name="one", schedule=ring, nbytes=1e6),
        Job(name="two", schedule=ring, nbytes=1e6, after=("one",)),
    ]
    streams = Conditions(order=Order.STREAMS)
    with pytest.raises(ValueError, match="needs a later first_round"):
        simulate(jobs, topology.star(2), conditions=streams)
    later = [jobs[0], replace(jobs[1], first_round=2)]
    assert simulate(later, topology.star(2), conditions=streams).time_s > 0
