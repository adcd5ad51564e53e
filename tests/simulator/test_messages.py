"""Messages between computations: who waits for whom, and how messages share a link."""

from __future__ import annotations

import json

import pytest

from unisono import simulate, topology
from unisono.errors import UnsupportedError
from unisono.simulator import Compute, Conditions, Message, Order, to_chrome_trace

NET = topology.parse("ring:3,bandwidth=1GB,latency=1ms")


def _times(
    jobs: list[Compute | Message], order: Order = Order.NONE
) -> dict[str, tuple[float, float]]:
    result = simulate(jobs, NET, conditions=Conditions(order=order))
    return {job.name: (job.begun_s, job.ended_s) for job in result.jobs}


def test_the_receiver_waits_and_the_sender_computes_on() -> None:
    found = _times(
        [
            Compute(name="first", seconds=2, ranks=(0,)),
            Message(name="sent", src=0, dst=1, nbytes=1e9, after=("first",)),
            Compute(name="next", seconds=1, ranks=(0,), after=("first",)),
            Compute(name="there", seconds=1, ranks=(1,), after=("sent",)),
            Compute(name="later", seconds=1, ranks=(0,), after=("sent",)),
        ]
    )
    assert found["first"] == (0, 2)
    assert found["sent"] == pytest.approx((2, 3.001))  # 1 GB at 1 GB/s, and the latency
    assert found["next"] == pytest.approx((2, 3))
    assert found["there"] == found["later"] == pytest.approx((3.001, 4.001))


def test_messages_of_a_stream_leave_in_order_and_others_share_the_link() -> None:
    jobs: list[Compute | Message] = [Message(name=name, src=0, dst=1, nbytes=1e9) for name in "ab"]
    assert _times(jobs) == {name: pytest.approx((0, 2.001)) for name in "ab"}
    in_order = _times(jobs, Order.STREAMS)
    assert in_order == {"a": pytest.approx((0, 1.001)), "b": pytest.approx((1, 2.001))}


def test_a_value_without_bytes_takes_no_time_and_orders_the_ranks() -> None:
    found = _times(
        [
            Compute(name="first", seconds=2, ranks=(0,)),
            Message(name="value", src=0, dst=1, nbytes=0, after=("first",)),
            Compute(name="there", seconds=1, ranks=(1,), after=("value",)),
        ],
        Order.STREAMS,
    )
    assert found["there"] == (2, 3)


def test_the_trace_names_computations_and_messages() -> None:
    jobs = [
        Compute(name="first", seconds=2, ranks=(0,)),
        Message(name="sent", src=0, dst=1, nbytes=1e9, after=("first",)),
    ]
    events = json.loads(to_chrome_trace(simulate(jobs, NET)))["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(slices) == {"first", "sent"}
    assert (slices["first"]["ts"], slices["first"]["dur"]) == (0, 2e6)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="needs two different ranks, got 1 twice"):
        Message(src=1, dst=1, nbytes=1)
    with pytest.raises(ValueError, match="must be at least 0 and finite, got -1"):
        Message(src=0, dst=1, nbytes=-1)
    with pytest.raises(UnsupportedError, match="needs ranks 0 to 3, but ring:3 has 3 ranks"):
        simulate([Message(src=0, dst=3, nbytes=1)], NET)
