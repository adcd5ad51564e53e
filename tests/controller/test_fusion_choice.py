"""The fit of a link's cost to the times of buckets, the best buckets under all rules of fusion, and
the passes of a trial. A pass runs each tensor once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ledger import Ledger, SimulatedTransfer, Submission
from controller.measured_program import all_cuts, cut, gradient
from unisono.controller.fusion.buckets import Bucket, buckets_of, kind_of
from unisono.controller.fusion.cost_fit import fit_cost
from unisono.controller.fusion.fusion_choice import (
    best_buckets,
    predicted_s,
    probe_buckets,
)
from unisono.controller.fusion.fusion_times import LinkCost, best_ends, finish_s
from unisono.controller.fusion.fusion_trial import Trial, sampled
from unisono.controller.fusion.trial_plan import TrialPlan
from unisono.controller.handle import Handle
from unisono.controller.join import JoinedTensors
from unisono.controller.request import Request
from unisono.types import DType

# ---- the fit


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6), st.integers(0, 2**32))
def test_fit_finds_the_cost_in_spite_of_outliers(
    latency_s: float, s_per_byte: float, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    at = latency_s / s_per_byte  # the size at which latency and transfer take the same time
    sizes = at * np.array([0.05, 0.1, 0.2, 0.5, 1, 1, 2, 4, 8, 8, 16])
    times = (latency_s + s_per_byte * sizes) * chance.uniform(0.99, 1.01, len(sizes))
    times[chance.integers(len(sizes))] *= 20
    found = fit_cost(sizes, times)
    assert found is not None
    assert found.cost.latency_s == pytest.approx(latency_s, rel=0.1)
    assert found.cost.s_per_byte == pytest.approx(s_per_byte, rel=0.1)
    assert found.residual < 0.05


def test_fit_knows_no_negative_cost() -> None:
    falling = fit_cost([1e3, 1e4, 1e5], [3e-5, 2e-5, 1e-5])
    assert falling is not None and falling.cost == LinkCost(latency_s=2e-5, s_per_byte=0.0)
    steep = fit_cost([1e3, 1e4, 1e5], [1e-9, 2e-5, 4e-4])
    assert steep is not None and steep.cost.latency_s == 0.0 and steep.cost.s_per_byte > 0


@pytest.mark.parametrize(
    ("sizes", "times"), [([], []), ([1e3], [1e-5]), ([1e3, 1e3], [1e-5, 1e-5]), ([1, 9], [0.0, 1])]
)
def test_fit_refuses_what_tells_nothing(sizes: list[float], times: list[float]) -> None:
    assert fit_cost(sizes, times) is None


# ---- the buckets


@st.composite
def plans(draw: st.DrawFn) -> tuple[Bucket, ...]:
    """Draws tensors of several types, phases, priorities and groups. Returns fused buckets."""
    count = draw(st.integers(1, 12))
    groups = [("g0", "g1"), ("g2", "g3", "g4")]
    requests = []
    for i in range(count):
        requests.append(
            gradient(
                f"t{i}",
                draw(st.integers(0, 300)),
                dtype=draw(st.sampled_from([DType.FLOAT32, DType.FLOAT64])),
                op=draw(st.sampled_from(["sum", "max"])),
                operation=draw(st.sampled_from(["all_reduce", "all_reduce", "broadcast"])),
                phase=draw(st.integers(0, 2)),
                priority=draw(st.integers(0, 1)),
            )
        )
    for group in draw(st.sets(st.sampled_from(groups))):
        requests += [gradient(name, 70, group=group) for name in group]
    return buckets_of(draw(st.permutations(requests)), draw(st.sampled_from([0, 500, 1 << 20])))


@given(plans(), st.data())
def test_best_and_probe_buckets_obey_the_rules_of_fusion(
    plan: tuple[Bucket, ...], data: st.DataObject
) -> None:
    requests = [request for bucket in plan for request in bucket.requests]
    ready_s = {each.name: data.draw(st.floats(0, 10)) for each in requests}
    cost = LinkCost(latency_s=data.draw(st.floats(0, 3)), s_per_byte=data.draw(st.floats(0, 0.1)))
    most_bytes = data.draw(st.sampled_from([200, 1 << 20]))
    best = best_buckets(plan, ready_s, cost, most_bytes)
    for found in (best, probe_buckets(plan)):
        _require_rules(found, requests)
    for bucket in best:
        assert bucket.nbytes <= most_bytes or len(bucket.requests) == 1 or bucket.requests[0].group
    orders = [(each.phase, -each.priority) for bucket in best for each in bucket.requests]
    assert orders == sorted(orders) or any(each.group for each in requests)


def _require_rules(found: tuple[Bucket, ...], requests: list[Request]) -> None:
    together = [request for bucket in found for request in bucket.requests]
    assert sorted(together, key=lambda each: each.name) == sorted(requests, key=lambda e: e.name)
    for bucket in found:
        assert bucket.requests and len({kind_of(each) for each in bucket.requests}) == 1
        assert len(bucket.requests) == 1 or all(each.fuses for each in bucket.requests)
    for name, group in {(each.name, each.group) for each in requests if each.group}:
        assert [b.names for b in found if name in b.names] == [
            b.names for b in found if group[0] in b.names
        ]


@given(
    st.lists(st.tuples(st.integers(1, 900), st.floats(0, 2)), min_size=1, max_size=7),
    st.floats(0, 3),
    st.floats(0, 0.01),
)
def test_best_buckets_finish_first_of_all_in_order(
    tensors: list[tuple[int, float]], latency_s: float, s_per_byte: float
) -> None:
    requests = [gradient(f"t{i}", count) for i, (count, _) in enumerate(tensors)]
    ready_s = {f"t{i}": sum(gap for _, gap in tensors[: i + 1]) for i in range(len(tensors))}
    cost = LinkCost(latency_s=latency_s, s_per_byte=s_per_byte)
    least_s = min(predicted_s(each, ready_s, cost) for each in all_cuts(requests))
    best = best_buckets((Bucket(tuple(requests)),), ready_s, cost)
    assert predicted_s(best, ready_s, cost) == pytest.approx(least_s)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.floats(0, 3))
def test_limits_of_buckets_are_kept(kinds: list[int], latency_s: float) -> None:
    count = len(kinds)
    ready = [float(i) for i in range(count)]
    sizes = [1.0 + i % 3 for i in range(count)]
    others = [[i for i in range(j) if kinds[i] != kinds[j]] for j in range(count)]
    firsts = np.maximum.accumulate([max(each, default=-1) + 1 for each in others]).tolist()
    cost = LinkCost(latency_s=latency_s, s_per_byte=0.3)
    found = best_ends(ready, sizes, cost, firsts=firsts)
    requests = [gradient(f"t{i}") for i in range(count)]
    allowed = [
        ends
        for each in all_cuts(requests)
        if (ends := tuple(np.cumsum([len(b.requests) for b in each]).tolist()))
        and all(b >= firsts[e - 1] for b, e in zip((0, *ends[:-1]), ends, strict=True))
    ]
    assert found in allowed
    least = min(finish_s(ready, sizes, ends, cost) for ends in allowed)
    assert finish_s(ready, sizes, found, cost) == pytest.approx(least)


@pytest.mark.parametrize("count", [2, 3, 10, 200])
@pytest.mark.parametrize("ends", ["whole", "alone"])
def test_probe_gives_sizes_that_a_fit_can_use(count: int, ends: str) -> None:
    requests = [gradient(f"t{i}", 25) for i in range(count)]
    own = cut(requests, (count,) if ends == "whole" else range(1, count + 1))
    sizes = [float(each.nbytes) for each in (*own, *probe_buckets(own))]
    cost = LinkCost(latency_s=3.0, s_per_byte=0.5)
    found = fit_cost(sizes, [cost.time_s(size) for size in sizes])
    assert found is not None and found.cost.latency_s == pytest.approx(3.0)


def test_probe_of_equal_tensors_doubles() -> None:
    requests = [gradient(f"t{i}", 25) for i in range(63)]
    found = [len(bucket.requests) for bucket in probe_buckets((Bucket(tuple(requests)),))]
    assert found == [1, 2, 4, 8, 16, 32]


@given(st.integers(1, 10**6))
def test_samples_are_few_and_spread(count: int) -> None:
    found = sampled(count)
    assert len(found) == min(count, len(found)) <= 256 and found[0] == 0 and found[-1] < count
    assert found.step * 256 >= count or found.step == 1


# ---- the passes of a trial


class _Ticks:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def _trial_plan(order: tuple[int, ...], ticks: _Ticks) -> tuple[TrialPlan, SimulatedTransfer]:
    requests = [gradient(name, 10) for name in "abc"]
    transfer = SimulatedTransfer(0, Ledger(1), ticks)
    own, other = cut(requests, (3,)), cut(requests, (1, 3))
    trial = Trial(other, order, True)
    stand_in = JoinedTensors().stand_in
    return TrialPlan(1, own, transfer, lambda flight: None, stand_in, trial, ticks), transfer


def _add(plan: TrialPlan, transfer: SimulatedTransfer, name: str, number: int) -> None:
    handle = Handle(None, plan.tensors[name].request, np.empty(10, np.float32))
    transfer.know(handle.array, Submission(name, number))
    plan.add(plan.tensors[name], handle)


def test_trial_measures_what_happened() -> None:
    ticks = _Ticks()
    plan, transfer = _trial_plan((0, 1, 0, 0), ticks)
    for number in range(4):
        for i, name in enumerate("abc"):
            ticks.now_ns = 100_000 * number + 10_000 * i
            _add(plan, transfer, name, number)
    assert plan.finished and plan.stopped and plan.launched == 5
    times = plan.times()
    assert times.step_ns == (100_000,) * 3
    assert times.ready_ns == (0, 10_000, 20_000)
    # The simulated link takes 20 ns, plus 10 ns for each element.
    assert times.bucket_ns == ((320,), (120, 220), (320,))


def test_tensor_that_is_a_pass_ahead_enters_the_buckets_of_that_pass() -> None:
    ticks = _Ticks()
    plan, transfer = _trial_plan((1, 0, 1, 0), ticks)
    for name, number in [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("b", 1)]:
        ticks.now_ns += 1000
        _add(plan, transfer, name, number)
    ran = [part.names for part in transfer.ledger.finished]
    assert ran == [("a",), ("b", "c"), ("a", "b", "c")]
    assert plan.launched == 3 and not plan.finished
    assert plan.unlaunched() == []
    for name, number in [("b", 2), ("a", 2), ("c", 2), ("a", 3), ("b", 3), ("c", 3)]:
        ticks.now_ns += 1000
        _add(plan, transfer, name, number)
    # The time of pass 0 ends when the first tensor of pass 1, "a", is submitted, even if pass 0 has
    # not ended by then.
    assert plan.finished and plan.times().step_ns == (1000, 5000, 3000)


def test_void_buckets_go_through_the_passes() -> None:
    ticks = _Ticks()
    plan, transfer = _trial_plan((1, 0, 1, 0), ticks)
    _add(plan, transfer, "a", 0)
    _add(plan, transfer, "c", 0)
    plan.stopped = True
    plan.void_up_to(4)
    assert plan.launched == 4 and not plan.finished
    assert [handle.name for handle in plan.unlaunched()] == ["c"]
    plan.void_up_to(6)
    assert plan.finished
